"""What a detector says of a run, and the paper's rule over a curve of Delta."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, final

from lindt.server.detection.divergence import Rule

MOMENTS: Final = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "the end": 1.0}  # shares of the rounds
PAPERS_EPSILON: Final = 0.1
PAPERS_PATIENCE: Final = 25 / 80  # of the rounds: more than 25 of 80
RECENT: Final = 0.1  # of the rounds, over which the evidence of Delta is averaged


@final
@dataclass(frozen=True)
class Reading:
    """What a detector said of a run. The evidence grows with how negative the run seems; None: nothing known yet."""

    alarm: int | None  # the first round of an alarm
    state: str  # at the end
    evidence: tuple[float | None, ...]  # at MOMENTS


def delta_reading(
    deltas: Sequence[float | None], epsilon: float = PAPERS_EPSILON, patience: float = PAPERS_PATIENCE
) -> Reading:
    """The paper's rule: Delta above epsilon in more than a share `patience` of the rounds."""
    rule = Rule(epsilon=epsilon, patience=math.floor(patience * len(deltas)))
    count, alarm = 0, None
    for round, value in enumerate(deltas, 1):
        count = count if value is None else rule.count(count, value)
        if alarm is None and rule.exceeded(count):
            alarm = round
    return Reading(
        alarm, "hurts" if alarm else "undecided", tuple(_recent(deltas, share) for share in MOMENTS.values())
    )


def _recent(deltas: Sequence[float | None], share: float) -> float | None:
    end = moment(share, len(deltas))
    window = max(round(RECENT * len(deltas)), 1)
    known = [value for value in deltas[max(end - window, 0) : end] if value is not None]
    return fmean(known) if known else None


def moment(share: float, rounds: int) -> int:
    """The round of a share of all rounds, 1 at least."""
    return max(math.floor(share * rounds), 1)
