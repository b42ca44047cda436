"""FL-GUARD's detection (Lin et al., arXiv 2403.04146): the gain on the first training batch, counted over rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Final, final

from lindt.errors import require
from lindt.protocols import Decision, Detection, DetectionState, Evidence
from lindt.registry import register

OF_500: Final = 50  # its c and NR for 500 rounds


@register(Detection)
@final
@dataclass(frozen=True)
class FlGuard:
    """NFL where the mean gain of the last `c` rounds is negative in more than `nr` rounds.

    The gain of a round is the median over its clients of the score of w on the client's first training batch less that
    of P_i. Before c rounds are known, the mean is over the known rounds. Only rounds with reports count.

    It never answers "helps": a gain above 0 is the absence of an alarm, not a test. It has no level, and an alarm is
    permanent. The answer is "too early" as long as no more than `nr` rounds are known.
    """

    c: int = 0  # rounds of the mean; 0: a tenth of the rounds, 50 where their number is not known
    nr: int = 0  # NR, the tolerated number of negative rounds; 0: a tenth of the rounds, 50 where it is not known

    reports = True

    def __post_init__(self) -> None:
        require(self.c >= 0, "c", self.c, "give a number of rounds, or 0 for a tenth of all rounds")
        require(self.nr >= 0, "nr", self.nr, "give a number of rounds, or 0 for a tenth of all rounds")

    def begin(self) -> DetectionState | None:
        return DetectionState()

    def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState | None:
        assert state is not None
        tenth = OF_500 if evidence.rounds is None else max(1, math.ceil(evidence.rounds / 10))
        c, nr = self.c or tenth, self.nr or tenth
        gains = [report.first_batch for report in evidence.reports.values() if report.first_batch is not None]
        if not gains:
            if evidence.round == evidence.rounds and not state.numbers:
                return DetectionState(Decision("undecided"))
            return state
        known, negative = state.numbers.get("known", 0.0) + 1, state.numbers.get("negative", 0.0)
        # The medians of the last c rounds, newest first: `last.0` is this round's.
        last = [
            median(gains),
            *(state.numbers[f"last.{k}"] for k in range(int(known) - 1) if f"last.{k}" in state.numbers),
        ]
        last = last[:c]
        mean = math.fsum(last) / len(last)
        negative += mean < 0
        verdict = Decision("too early" if known <= nr else "undecided", gain=mean, clients=len(gains))
        if state.verdict.state == "hurts" or negative > nr:
            since = state.verdict.since if state.verdict.state == "hurts" else evidence.round
            verdict = Decision("hurts", since, gain=mean, clients=len(gains))
        numbers = {"known": known, "negative": negative} | {f"last.{k}": value for k, value in enumerate(last)}
        return DetectionState(verdict, numbers=numbers)
