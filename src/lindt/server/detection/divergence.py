"""Weight divergence (Sec. 3.4, Eq. 5 to 7), the paper's rule on it (Alg. 2, s8-s11), and the label of NFL.

The clients' local optimums w_i lie around the new global optimum w. Their mean distance is the weight
divergence (Eq. 5); less the norm of the privacy noise it is Delta (Eq. 7), which falls to zero in a
federation that converges (Theorem 1). NFL is detected when Delta was above epsilon in more than r' rounds.

Limits: Delta has no absolute scale. It grows with the learning rate, the local epochs and P. With updates that are
clipped, or an aggregator that is not a mean, it does not fall to zero. See docs/choosing-epsilon.md.

Legend: K clients answering, P parameters, L of them in the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, final, get_args

from lindt.errors import require
from lindt.protocols import Detection, DetectionState, Divergence, Evidence, Statistic
from lindt.registry import register

if TYPE_CHECKING:  # imported where weights are tensors: a Flower server measures its own without torch
    from torch import Tensor

    from lindt.server.aggregation import ClippedUpdates

# A share of |a|^2 + |b|^2. Below it the expansion of |a - b|^2 loses digits, and |a - b|^2 is computed from a - b.
CANCELLED: Final = 0.1


def divergence(w_KP: Tensor, w_P: Tensor) -> float:
    """w_div (Eq. 5): the mean over K clients of ||w_i - w||. It is a plain mean with every aggregator."""
    far_K = distances(w_KP, w_P)
    return sum(far_K) / len(far_K)


def distances(w_KP: Tensor, w_P: Tensor) -> list[float]:
    """||w_i - w|| of each client, from differences, row by row: the definition that `Distances` computes in one pass.

    Summed in float64: a float32 sum over P = 10^8 is too small by a hundredth.
    """
    import torch

    buffer_P = torch.empty_like(w_P)
    lengths = (torch.linalg.vector_norm(torch.sub(w_i, w_P, out=buffer_P), dtype=torch.float64) for w_i in w_KP)
    return [float(length) for length in lengths]


def delta_of(w_KP: Tensor, w_P: Tensor, noise_P: Tensor) -> float:
    """Delta (Eq. 7): the weight divergence less the norm of the noise that the server added itself."""
    import torch

    return divergence(w_KP, w_P) - float(torch.linalg.vector_norm(noise_P, dtype=torch.float64))


def mean_cosine(updates_KL: Tensor) -> float | None:
    """The mean over pairs of clients of the cosine of their updates; None where fewer than two are not zero.

    A zero update has no direction and is left out, so that a client which returns w does not change the mean. It is
    computed from the sum of the unit vectors, whose square is K + 2 sum_{i<j} cos_ij: O(K L), not O(K^2 L).
    """
    import torch

    sum_L, directions = torch.zeros(updates_KL.shape[1], dtype=torch.float64), 0
    for update_L in updates_KL.cpu():
        length = float(torch.linalg.vector_norm(update_L, dtype=torch.float64))
        if length > 0:
            sum_L += update_L.double() / length
            directions += 1
    if directions < 2:
        return None
    return (float(sum_L @ sum_L) - directions) / (directions * (directions - 1))


@final
class Distances:
    """The distances of a round, each squared and summed over blocks of coordinates, in float64.

    A block is measured while its K rows are in the processor's cache, so that all distances read the K x P once. Of a
    block, |u_i - c|^2 comes from |u_i|^2 and u_i.c where no digits cancel, else from the differences.
    """

    def __init__(self, clients: int) -> None:
        import torch

        self._far_K, self._clean_K, self._spread_K = torch.zeros(3, clients, dtype=torch.float64)
        self._noise = 0.0

    def add(
        self,
        part: ClippedUpdates,
        clipped_KC: Tensor,
        *,
        aggregate_C: Tensor,
        step_C: Tensor,
        noise_C: Tensor,
        mean_C: Tensor,
    ) -> None:
        """Add a block of C coordinates.

        Args:
            part: The updates w_i - w^{r-1}, with the factors of clipping.
            clipped_KC: The updates after clipping.
            aggregate_C: The aggregate before noise.
            step_C: The step w^r - w^{r-1}: the aggregate and the noise.
            noise_C: The noise.
            mean_C: The plain mean of the clipped updates; `aggregate_C` itself under a mean.
        """
        rows, scales_K = _Rows(part.updates_KP, row_squares(part.updates_KP)), part.scales_K
        inner_K = rows.inner(aggregate_C)
        clean_K = rows.squares_from(aggregate_C, inner_K)
        noise = float(noise_C @ noise_C)
        self._noise += noise
        self._clean_K += clean_K
        self._far_K += rows.squares_from(step_C, rows.inner(step_C)) if noise else clean_K
        if scales_K is not None:
            shortened = _Rows(clipped_KC, rows.squares_K * scales_K.double().square())
            inner_K = (inner_K if mean_C is aggregate_C else rows.inner(mean_C)) * scales_K
            self._spread_K += shortened.squares_from(mean_C, inner_K)
        elif mean_C is aggregate_C:
            self._spread_K += clean_K
        else:
            self._spread_K += rows.squares_from(mean_C, rows.inner(mean_C))

    def divergence(self, clipped: float, cosine: float | None) -> Divergence:
        """The divergence of the round; `clipped` is the share of updates that clipping shortens."""
        far_K, clean_K, spread_K = (each_K.sqrt().tolist() for each_K in (self._far_K, self._clean_K, self._spread_K))
        return divergence_of(far_K, clean_K, spread_K, math.sqrt(self._noise), clipped, cosine)


@final
@dataclass(frozen=True)
class _Rows:
    """A block of K vectors, with the square of each."""

    values_KC: Tensor
    squares_K: Tensor

    def inner(self, centre_C: Tensor) -> Tensor:
        return (self.values_KC @ centre_C).double()

    def squares_from(self, centre_C: Tensor, inner_K: Tensor) -> Tensor:
        """|a_k - c|^2 of each row, given a_k.c."""
        longest_K = self.squares_K + float(centre_C @ centre_C)
        found_K = longest_K.sub(inner_K, alpha=2)
        exact = bool(found_K.sub(longest_K, alpha=CANCELLED).min() >= 0)  # false with NaN
        return found_K if exact else row_squares(self.values_KC - centre_C)


def row_squares(rows_KC: Tensor) -> Tensor:
    """|a_k|^2 of each row of a block. For the length of a block sums in float32 are precise enough."""
    import torch

    lengths_K: Tensor = torch.linalg.vector_norm(rows_KC, dim=1)
    return lengths_K.double().square()


def measure(
    clipped_KP: ClippedUpdates, step_P: Tensor, noise_P: Tensor, clipped: float, last_KL: Tensor | None = None
) -> Divergence:
    """The divergence of a round whose step is known; `last_KL` are the clipped updates of the last layer.

    `ClippedUpdates.step` measures while it joins the updates.
    """
    found = Distances(len(clipped_KP.updates_KP))
    for block in clipped_KP.blocks():
        part, clipped_KC = clipped_KP.part(block), clipped_KP.columns(block)
        step_C, noise_C = step_P[block], noise_P[block]
        found.add(
            part,
            clipped_KC,
            aggregate_C=step_C - noise_C,
            step_C=step_C,
            noise_C=noise_C,
            mean_C=clipped_KC.mean(0),
        )
    return found.divergence(clipped, None if last_KL is None else mean_cosine(last_KL))


def divergence_of(
    far_K: Sequence[float],
    clean_K: Sequence[float],
    spread_K: Sequence[float],
    noise_norm: float,
    clipped: float,
    cosine: float | None,
) -> Divergence:
    """The divergence from distances: of w_i from w, of w_i from w - noise, and of clipped updates from their mean."""
    w_div, clean, spread = (sum(each_K) / len(each_K) for each_K in (far_K, clean_K, spread_K))
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
        """s8-s9: the count after one more round. With `consecutive` a round below epsilon sets it to 0."""
        if value > self.epsilon:
            return count + 1
        return count if self.counting == "cumulative" else 0

    def exceeded(self, count: int) -> bool:
        """s10: `count > r'`."""
        return count > self.patience

    def replay(self, values: Iterable[float | None]) -> int | None:
        """The round in which this rule raises the alarm, from the statistic of each round; None if it never does.

        The value of a round without a valid update is None.
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
    """The paper's rule, with the epsilon and patience of `method.recovery`. Without on_detection there is no test.

    No data are held out, and clients report no gains.
    """

    reports = False

    def begin(self) -> DetectionState | None:
        return None

    def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState | None:
        return None


def is_negative(betas: Sequence[float], last: int = 10) -> bool:
    """Whether a run is negative: the mean gain beta of its last 10 scored rounds is below 0.

    The paper's definition is that no round R exists after which beta >= 0 for good; a run of finite length shows only
    its last rounds. This is the label that every detector is compared with.

    Args:
        betas: The mean gain of each scored round, as a fraction.
        last: The number of last rounds that count.

    Returns:
        Whether their mean is below 0.

    Raises:
        ValueError: There is no scored round, or a round that counts has no beta.

    Examples:
        >>> import lindt
        >>> lindt.is_negative([-0.3, -0.1, 0.2], last=2), lindt.is_negative([-0.3, -0.1, 0.2])
        (False, True)
    """
    if last < 1:
        raise ValueError(f"last = {last}: take at least the last scored round")
    if len(betas) == 0:
        raise ValueError("betas: it is empty; give at least one scored round")
    tail = betas[-last:]
    if any(beta is None or math.isnan(beta) for beta in tail):
        raise ValueError("betas: a round has no beta (None or NaN); leave this round out")
    return bool(sum(tail) / len(tail) < 0)
