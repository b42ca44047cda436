"""The reading of a detector for a run; rules on the curve of Delta and on the curve of the updates' cosine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, final

from lindt.server.detection.divergence import Rule

MOMENTS: Final = {"1/8": 1 / 8, "1/4": 1 / 4, "1/2": 1 / 2, "the end": 1.0}  # shares of the rounds
PAPERS_EPSILON: Final = 0.1
PAPERS_PATIENCE: Final = 25 / 80  # the share of the rounds: more than 25 of 80
RECENT: Final = 0.1  # the share of the rounds over which the evidence of Delta and of the cosine is averaged


@final
@dataclass(frozen=True)
class Reading:
    """A detector's answers for a run. Evidence is higher for runs that seem more negative; None: not known yet."""

    alarm: int | None  # the first round of an alarm
    state: str  # at the end
    evidence: tuple[float | None, ...]  # at MOMENTS


def delta_reading(
    deltas: Sequence[float | None], epsilon: float = PAPERS_EPSILON, patience: float = PAPERS_PATIENCE
) -> Reading:
    """The paper's rule: Delta above epsilon in more than a share `patience` of the rounds."""
    rule = Rule(epsilon=epsilon, patience=math.floor(patience * len(deltas)))
    return _reading(rule.replay(deltas), tuple(_recent(deltas, end) for end in _ends(deltas)))


def low_cosine(cosines: Sequence[float | None], threshold: float) -> Reading:
    """The cosine below a threshold in more than 25 of 80 rounds: the paper's rule, on another statistic."""
    allowed, low, alarm = math.floor(PAPERS_PATIENCE * len(cosines)), 0, None
    for round, value in enumerate(cosines, 1):
        low += value is not None and value < threshold
        if alarm is None and low > allowed:
            alarm = round
    return _reading(alarm, _cosine_evidence(cosines))


def low_recent_cosine(cosines: Sequence[float | None], threshold: float) -> Reading:
    """The mean cosine over the last tenth of the rounds is below a threshold, once that many rounds are played."""
    for end in range(_window(cosines), len(cosines) + 1):
        mean = _recent(cosines, end)
        if mean is not None and mean < threshold:
            return _reading(end, _cosine_evidence(cosines))
    return _reading(None, _cosine_evidence(cosines))


def _cosine_evidence(cosines: Sequence[float | None]) -> tuple[float | None, ...]:
    """Minus the recent mean: a lower cosine is evidence of a negative run."""
    means = [_recent(cosines, end) for end in _ends(cosines)]
    return tuple(None if mean is None else -mean for mean in means)


def _reading(alarm: int | None, evidence: tuple[float | None, ...]) -> Reading:
    return Reading(alarm, "hurts" if alarm else "undecided", evidence)


def _ends(curve: Sequence[float | None]) -> list[int]:
    return [moment(share, len(curve)) for share in MOMENTS.values()]


def _window(curve: Sequence[float | None]) -> int:
    return max(round(RECENT * len(curve)), 1)


def _recent(curve: Sequence[float | None], end: int) -> float | None:
    """The mean over the last tenth of the rounds up to `end`; None where these rounds have no value."""
    known = [value for value in curve[max(end - _window(curve), 0) : end] if value is not None]
    return fmean(known) if known else None


def moment(share: float, rounds: int) -> int:
    """The round of a share of all rounds, 1 at least."""
    return max(math.floor(share * rounds), 1)
