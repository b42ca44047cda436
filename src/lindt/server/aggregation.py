"""How the server joins the clients' updates: means, trimmed mean, median, and the robust ones for hostile clients.

The robust ones look at the K x K distances between updates and never copy the K x P. None of them has a known L2
sensitivity, so none comes with a privacy guarantee. Which attack each withstands: docs/attacks.md.

Buffers are joined by `join_buffers`, which no hostile minority moves beyond the honest ones under a robust aggregator.

Legend: K clients, P parameters, F floats in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Final, final

import torch
from torch import Tensor

from lindt.errors import require
from lindt.protocols import Aggregator, Buffers
from lindt.registry import register, register_method

AT_A_TIME: Final = 2**20  # values that are sorted at a time: sorting holds 12 bytes for each beside the K x P
NARROWEST, BLOCK = 1024, 64  # coordinates


@register(Aggregator)
@final
@dataclass(frozen=True)
class Mean:
    """The plain average of Alg. 1: 1/K * sum of w_i, whatever the clients' sizes."""

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        return updates_KP.mean(0)

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip / active


@register(Aggregator)
@final
@dataclass(frozen=True)
class WeightedMean:
    """The original FedAvg: weighted by n_i, which is what each client says; more than `most` counts as `most`.

    Without that bound one client that claims enough decides alone.
    """

    most: int = 2**40

    def __post_init__(self) -> None:
        require(1 <= self.most <= 2**40, "most", self.most, "the largest n_i that counts in full, from 1 to 2**40")

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        weights_K = sizes_K.clamp(max=self.most).to(updates_KP.dtype)
        return (weights_K / weights_K.sum()) @ updates_KP

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip  # one client may hold all the weight


@register(Aggregator)
@final
@dataclass(frozen=True)
class TrimmedMean:
    """Yin et al. 2018: per coordinate, drop the largest and the smallest `share` of the K values, average the rest.

    On each side max(1, round(share * K)) values go, but never all of them: K = 1 or 2 keeps the middle.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        require(0 < self.share < 0.5, "share", self.share, "trim more than 0 and less than 0.5 on each side")

    def trimmed(self, active: int) -> int:
        return min(max(1, round(self.share * active)), (active - 1) // 2)

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        K, t = len(updates_KP), self.trimmed(len(updates_KP))
        return _by_coordinates(updates_KP, lambda ordered_KC: ordered_KC[t : K - t].mean(0))

    def sensitivity(self, clip: float, active: int) -> float:
        # Per coordinate the result is 1/(K - 2t)-Lipschitz in each single value: while one value moves, the
        # sorted list changes in one place at a time. Squares summed over coordinates: 2 S / (K - 2t).
        return 2 * clip / (active - 2 * self.trimmed(active))


@register(Aggregator)
@final
@dataclass(frozen=True)
class Median:
    """Yin et al. 2018: the median of each coordinate; the mean of the middle two for an even K."""

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        K = len(updates_KP)
        return _by_coordinates(updates_KP, lambda v_KC: torch.lerp(v_KC[(K - 1) // 2], v_KC[K // 2], 0.5))

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip if active % 2 else clip


def _by_coordinates(updates_KP: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
    """`join` of the K sorted values of each coordinate, some coordinates at a time: the same bits as all at once,
    without a second and a third K x P (the sorted values and where they came from, as whole numbers of 8 bytes)."""
    K, P = updates_KP.shape
    # Whole blocks and never a narrow rest: torch adds up the columns that do not fill its vector registers in
    # another order than the rest, and the last bits would differ.
    C = max(NARROWEST, AT_A_TIME // K // BLOCK * BLOCK)
    starts = [*range(0, max(P - C, 1), C), P]
    return torch.cat([join(updates_KP[:, start:stop].sort(dim=0).values) for start, stop in pairwise(starts)])


ROUNDING: Final = 1e-12  # of the largest squared distance: below it two updates are the same


def squared_distances(updates_KP: Tensor) -> Tensor:
    """K x K, in float64. Pair by pair: differences first, so that two near updates keep their digits."""
    K = len(updates_KP)
    found_KK = torch.zeros(K, K, dtype=torch.float64)
    for i, j in combinations(range(K), 2):
        far = torch.linalg.vector_norm(updates_KP[i] - updates_KP[j], dtype=torch.float64)
        found_KK[i, j] = found_KK[j, i] = far.square()
    return found_KK


def krum_scores(updates_KP: Tensor, hostile: int) -> Tensor:
    """Blanchard et al. 2017: the sum of squared distances to the K - f - 2 nearest others; a low one is trusted."""
    K = len(updates_KP)
    nearest = max(1, K - hostile - 2)
    ordered_KK = squared_distances(updates_KP).sort(dim=1).values
    return ordered_KK[:, 1 : 1 + nearest].sum(1)  # the first is the distance to itself


@register(Aggregator)
@final
@dataclass(frozen=True)
class Krum:
    """The one update that lies nearest to its neighbours; `share` of the clients may be hostile.

    The theory asks for K > 2 f + 2. With fewer the nearest neighbour decides, and nothing is promised.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        _require_share(self.share)

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        scores_K = krum_scores(updates_KP, round(self.share * len(updates_KP)))
        return updates_KP[int(scores_K.argmin())].clone()


@register(Aggregator)
@final
@dataclass(frozen=True)
class MultiKrum:
    """The plain mean of the K - f updates that Krum trusts most."""

    share: float = 0.2

    def __post_init__(self) -> None:
        _require_share(self.share)

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        hostile = round(self.share * len(updates_KP))
        kept = krum_scores(updates_KP, hostile).argsort(stable=True)[: len(updates_KP) - hostile]
        return updates_KP[kept.sort().values].mean(0)


@register(Aggregator)
@final
@dataclass(frozen=True)
class GeometricMedian:
    """The point with the least sum of distances to all updates (Weiszfeld's iteration, as Pillutla et al. 2022).

    It is a weighted mean of the updates, so that only K weights are sought: each step costs K x K, not K x P.
    """

    steps: int = 200
    tolerance: float = 1e-9  # of the sum of distances, from one step to the next

    def __post_init__(self) -> None:
        require(1 <= self.steps <= 100_000, "steps", self.steps, "1 to 100,000")
        require(0 < self.tolerance < 1, "tolerance", self.tolerance, "between 0 and 1")

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        return self.weights(squared_distances(updates_KP)).to(updates_KP.dtype) @ updates_KP

    def weights(self, squared_KK: Tensor) -> Tensor:
        """Of the clients, from their distances alone: with z = sum a_i u_i and sum a_i = 1,
        ||u_i - z||^2 = (D a)_i - a'Da / 2, where D holds the squared distances."""
        K = len(squared_KK)
        a_K, before = torch.full((K,), 1.0 / K, dtype=torch.float64), torch.inf
        least = float((squared_KK.max() * ROUNDING).sqrt())
        for _ in range(self.steps):
            reached_K = squared_KK @ a_K
            far_K = (reached_K - a_K @ reached_K / 2).clamp_min(0).sqrt()
            total = float(far_K.sum())
            if total <= least or before - total <= self.tolerance * total:
                break
            before = total
            a_K = 1 / far_K.clamp_min(least)
            a_K /= a_K.sum()
        return a_K


@register(Aggregator)
@final
@dataclass(frozen=True)
class NormBound:
    """The mean of updates cut to `factor` times the median length: nobody speaks louder than most (Sun et al. 2019).

    Lengths are measured from w^{r-1}: unlike the others, it does not move with a shift of all updates.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.factor <= 1e6, "factor", self.factor, "the bound, in median lengths, is above 0")

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        norms_K = torch.linalg.vector_norm(updates_KP, dim=1)
        bound = self.factor * float(norms_K.quantile(0.5))
        scale_K = torch.where(norms_K > bound, bound / norms_K, torch.ones_like(norms_K))
        return (scale_K / len(updates_KP)) @ updates_KP


def join_buffers(theirs: Sequence[Buffers], aggregator: Aggregator, sizes_K: Tensor) -> Buffers:
    """The clients' buffers as one. Integers take the maximum.

    Floats take the plain mean where the aggregator is a mean; the claimed sizes do not count. A trimmed mean joins them
    itself. Any other aggregator has the median of each coordinate for them: its distances are those of weights, among
    which the units of the buffers would decide.
    """
    floats_KF = torch.stack([each.floats_F for each in theirs])
    counts_I = torch.stack([each.counts_I for each in theirs]).amax(0)
    if isinstance(aggregator, Mean | WeightedMean):
        return Buffers(floats_KF.mean(0), counts_I)
    by_coordinate = aggregator if isinstance(aggregator, TrimmedMean) else Median()
    return Buffers(by_coordinate(floats_KF, sizes_K), counts_I)


def buffer_divergence(theirs: Sequence[Buffers], joined: Buffers) -> float | None:
    """Eq. 5 of the float buffers: the mean distance of the clients' from the joined ones; None where there are none."""
    if not joined.floats_F.numel():
        return None
    # In float64: a float32's square may overflow.
    far_K = [torch.linalg.vector_norm(each.floats_F.double() - joined.floats_F) for each in theirs]
    return float(torch.stack(far_K).mean())


def _require_share(share: float) -> None:
    require(0 <= share < 0.5, "share", share, "the hostile share that is borne lies in [0, 0.5)")


register_method("trimmed-mean", aggregator={"kind": "trimmed_mean", "share": 0.2}, recovery="never")
