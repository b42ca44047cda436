"""Weight divergence (Sec. 3.4, Eq. 5 to 7), the paper's rule on it (Alg. 2, s8-s11), and the label it is judged by.

The clients' local optimums w_i lie around the new global optimum w. Their mean distance is the weight
divergence (Eq. 5); less the norm of the privacy noise it is Delta (Eq. 7), which falls to zero in a
federation that converges (Theorem 1). NFL is detected when Delta was above epsilon in more than r' rounds.

Limits: Delta is no absolute. It scales with the learning rate, the local epochs and P, and once clipping
binds or the aggregator is no mean it has no limit of zero. See docs/choosing-epsilon.md.

Legend: K clients answering, P parameters, L of them in the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, final, get_args

import torch
from torch import Tensor

from lindt.errors import require
from lindt.protocols import Detection, DetectionState, Divergence, Evidence, Statistic
from lindt.registry import register


def divergence(w_KP: Tensor, w_P: Tensor) -> float:
    """w_div (Eq. 5): the mean over K clients of ||w_i - w||; a plain mean whatever the aggregator."""
    far_K = distances(w_KP, w_P)
    return sum(far_K) / len(far_K)


def distances(w_KP: Tensor, w_P: Tensor) -> list[float]:
    """||w_i - w|| of each client. Row by row: the same numbers as one K x P difference, without its memory."""
    return [float(torch.linalg.vector_norm(w_i - w_P)) for w_i in w_KP]


def delta_of(w_KP: Tensor, w_P: Tensor, noise_P: Tensor) -> float:
    """Delta (Eq. 7): the weight divergence less the norm of the noise that the server added itself."""
    return divergence(w_KP, w_P) - float(torch.linalg.vector_norm(noise_P))


def mean_cosine(updates_KL: Tensor) -> float | None:
    """The mean over pairs of clients of the cosine of their updates; None where fewer than two are not zero.

    A zero update has no direction and is left out: a client that sends w back does not hide what the others do. From
    the sum of the unit vectors, whose square is K + 2 sum_{i<j} cos_ij: O(K L), not O(K^2 L).
    """
    sum_L, directions = torch.zeros(updates_KL.shape[1], dtype=torch.float64), 0
    for update_L in updates_KL.cpu():
        length = float(torch.linalg.vector_norm(update_L, dtype=torch.float64))
        if length > 0:
            sum_L += update_L.double() / length
            directions += 1
    if directions < 2:
        return None
    return (float(sum_L @ sum_L) - directions) / (directions * (directions - 1))


def measure(
    w_KP: Tensor,
    w_P: Tensor,
    noise_P: Tensor,
    clipped_KP: Tensor,
    clipped: float,
    last_KL: Tensor | None = None,
) -> Divergence:
    """The divergence of one round; `clipped_KP` are the updates after clipping, `last_KL` those of the last layer."""
    far_K, noise_norm = distances(w_KP, w_P), float(torch.linalg.vector_norm(noise_P))
    w_div = sum(far_K) / len(far_K)
    clean = divergence(w_KP, w_P - noise_P) if noise_norm else w_div
    spread = divergence(clipped_KP, clipped_KP.mean(0))
    cosine = None if last_KL is None else mean_cosine(last_KL)
    return Divergence(w_div, w_div - noise_norm, clean, spread, clipped, noise_norm, median(far_K) - noise_norm, cosine)


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

    def replay(self, values: Iterable[float | None]) -> int | None:
        """The round in which this rule flags a run, from its statistic in each round; None if it never does.

        A round without a valid update has no value: None in its place.
        """
        count = 0
        for round, value in enumerate(values, 1):
            count = count if value is None else self.count(count, value)
            if self.exceeded(count):
                return round
        return None


@register(Detection)
@final
@dataclass(frozen=True)
class Delta:
    """The paper's rule, by the epsilon and patience of `method.recovery`; without an on_detection there, no test.

    Nothing is held out, and clients report nothing.
    """

    reports = False

    def begin(self) -> DetectionState | None:
        return None

    def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState | None:
        return None


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
