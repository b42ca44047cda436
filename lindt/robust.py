"""Aggregators for a federation with hostile clients, by how far whole updates lie from each other.

They look at the K x K distances between updates and never copy the K x P. None has a known L2 sensitivity, so none
comes with a privacy guarantee. Which attack each withstands: docs/attacks.md.

Legend: K clients, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Final, final

import torch
from torch import Tensor

from lindt.errors import require

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


def _require_share(share: float) -> None:
    require(0 <= share < 0.5, "share", share, "the hostile share that is borne lies in [0, 0.5)")
