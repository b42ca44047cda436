"""How the server joins the clients' updates (Alg. 1, s5). Legend: K clients answering, P parameters.

Every aggregator ignores the order of the clients and moves with a shift of all updates. `sensitivity` is by
how much the result can move, in L2 norm, when one client's clipped update is replaced by another (2 S apart
at most): what the privacy budget needs. An aggregator without that method gets no guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from lindt.errors import require


class Aggregator(Protocol):
    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor: ...


@runtime_checkable
class Bounded(Protocol):
    """An aggregator whose L2 sensitivity under replace-one is known."""

    def sensitivity(self, clip: float, active: int) -> float: ...


@final
@dataclass(frozen=True)
class Mean:
    """The plain average of Alg. 1: 1/K * sum of w_i, whatever the clients' sizes."""

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        return updates_KP.mean(0)

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip / active


@final
@dataclass(frozen=True)
class WeightedMean:
    """The original FedAvg: weighted by n_i."""

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        weights_K = sizes_K.to(updates_KP.dtype)
        return (weights_K / weights_K.sum()) @ updates_KP

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip  # one client may hold all the weight


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
        t = self.trimmed(len(updates_KP))
        ordered_KP = updates_KP.sort(dim=0).values
        return ordered_KP[t : len(updates_KP) - t].mean(0)

    def sensitivity(self, clip: float, active: int) -> float:
        # Per coordinate the result is 1/(K - 2t)-Lipschitz in each single value: while one value moves, the
        # sorted list changes in one place at a time. Squares summed over coordinates: 2 S / (K - 2t).
        return 2 * clip / (active - 2 * self.trimmed(active))


@final
@dataclass(frozen=True)
class Median:
    """Yin et al. 2018: the median of each coordinate; the mean of the middle two for an even K."""

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        K = len(updates_KP)
        ordered_KP = updates_KP.sort(dim=0).values
        return torch.lerp(ordered_KP[(K - 1) // 2], ordered_KP[K // 2], 0.5)

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip if active % 2 else clip
