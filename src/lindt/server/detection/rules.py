"""The paper's rule (Alg. 2, s8-s11): Delta above epsilon in more than r' rounds; and the label it is judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final, get_args

from lindt.errors import require
from lindt.protocols import Statistic

Counting = Literal["cumulative", "consecutive"]


@final
@dataclass(frozen=True)
class Rule:
    """`count > r'`: Delta above `epsilon` in more than `patience` rounds (Alg. 2, s8-s11)."""

    epsilon: float = 0.1
    patience: int = 250
    statistic: Statistic = "delta"
    counting: Counting = "cumulative"

    def __post_init__(self) -> None:
        require(self.epsilon > 0, "epsilon", self.epsilon, "the threshold of Delta must be above 0")
        choices = get_args(Statistic)
        require(self.statistic in choices, "statistic", self.statistic, f"choose among {sorted(choices)}")
        choices = get_args(Counting)
        require(self.counting in choices, "counting", self.counting, f"choose among {sorted(choices)}")
        require(self.patience >= 0, "patience", self.patience, "the number of rounds r' must be 0 or more")

    def count(self, count: int, value: float) -> int:
        """s8-s9: one more round above epsilon; with `consecutive` a round below starts anew."""
        if value > self.epsilon:
            return count + 1
        return count if self.counting == "cumulative" else 0

    def exceeded(self, count: int) -> bool:
        """s10: `count > r'`."""
        return count > self.patience


def is_negative(betas: Sequence[float], last: int = 10) -> bool:
    """The definition of NFL made operational: the mean gain beta of the last 10 scored rounds is below 0.

    The paper asks that no round R exists after which beta >= 0 for good; a run of finite length can only
    show its end. This is the label that every detector is judged by.
    """
    if last < 1:
        raise ValueError(f"last = {last}: take at least the last scored round")
    if len(betas) == 0:
        raise ValueError("is_negative needs at least one scored round")
    tail = betas[-last:]
    if any(beta is None or math.isnan(beta) for beta in tail):
        raise ValueError("betas: there is a round without a beta among them; leave it out")
    return bool(sum(tail) / len(tail) < 0)
