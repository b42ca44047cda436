"""How the server joins the clients' updates (Alg. 1, s5). Legend: K clients, P parameters, C of them at a time.

Every aggregator ignores the order of the clients and moves with a shift of all updates. `sensitivity` is by
how much the result can move, in L2 norm, when one client's clipped update is replaced by another (2 S apart
at most): what the privacy budget needs. An aggregator without that method gets no guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from lindt.errors import require

AT_A_TIME: Final = 2**20  # values that are sorted at a time: sorting holds 12 bytes for each beside the K x P
NARROWEST, BLOCK = 1024, 64  # coordinates


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
