"""Aggregators of the clients' updates: means, trimmed mean, median, and robust aggregators against hostile clients.

The robust aggregators use the K x K distances between updates and never copy the K x P. They have no known L2
sensitivity, so they have no privacy guarantee. Which attack each withstands: docs/attacks.md.

An aggregator with `by_coordinate` joins each coordinate by itself, so that it can be given some coordinates at a time.
`ClippedUpdates` does this with updates that clipping shortens: the clipped K x P is never held as a whole.

`join_buffers` joins buffers. Under a robust aggregator a hostile minority cannot move them beyond the honest clients'.

Legend: K clients, P parameters, F floats in buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Final, final

import torch
from torch import Tensor

from lindt.errors import require
from lindt.protocols import Aggregator, Buffers
from lindt.registry import register, register_method
from lindt.server.detection.divergence import Distances

AT_A_TIME: Final = 2**19  # values of a block: its 2 MB stay in the cache; sorting takes 12 bytes more for each
NARROWEST, WIDEST, BLOCK = 256, 2**15, 64  # coordinates; over more than WIDEST a sum in float32 loses digits


@register(Aggregator)
@final
@dataclass(frozen=True)
class Mean:
    """The plain average of Alg. 1: 1/K * sum of w_i. The clients' sizes do not count."""

    by_coordinate: ClassVar = True

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        return updates_KP.mean(0)

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip / active


@register(Aggregator)
@final
@dataclass(frozen=True)
class WeightedMean:
    """The original FedAvg: a mean weighted by the n_i that clients claim. An n_i above `most` counts as `most`.

    Without that bound a client that claims a large n_i would decide alone.
    """

    by_coordinate: ClassVar = True

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

    On each side max(1, round(share * K)) values are dropped, but never all values: for K = 1 or 2 none are dropped.
    """

    by_coordinate: ClassVar = True

    share: float = 0.2

    def __post_init__(self) -> None:
        require(0 < self.share < 0.5, "share", self.share, "trim more than 0 and less than 0.5 on each side")

    def trimmed(self, active: int) -> int:
        return min(max(1, round(self.share * active)), (active - 1) // 2)

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        K, t = len(updates_KP), self.trimmed(len(updates_KP))
        return _by_coordinates(updates_KP, lambda ordered_KC: ordered_KC[t : K - t].mean(0))

    def sensitivity(self, clip: float, active: int) -> float:
        # Per coordinate the result is 1/(K - 2t)-Lipschitz in each value: when one value changes continuously, the
        # sorted list changes in one place at a time. Summing squares over coordinates gives 2 S / (K - 2t).
        return 2 * clip / (active - 2 * self.trimmed(active))


@register(Aggregator)
@final
@dataclass(frozen=True)
class Median:
    """Yin et al. 2018: the median of each coordinate; the mean of the middle two for an even K."""

    by_coordinate: ClassVar = True

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        K = len(updates_KP)
        return _by_coordinates(updates_KP, lambda v_KC: torch.lerp(v_KC[(K - 1) // 2], v_KC[K // 2], 0.5))

    def sensitivity(self, clip: float, active: int) -> float:
        return 2 * clip if active % 2 else clip


def _by_coordinates(updates_KP: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `join` to the K sorted values of each coordinate, some coordinates at a time. The result is bitwise that of
    all at once, without a second and a third K x P (the sorted values, and their indices as integers of 8 bytes)."""
    return _in_blocks(updates_KP, lambda values_KC: join(values_KC.sort(dim=0).values))


def _in_blocks(updates_KP: Tensor, join: Callable[[Tensor], Tensor]) -> Tensor:
    """Join the updates some coordinates at a time. Each part is written into the result at once: many small parts that
    are kept between the large temporary ones can stop the C library from using freed memory again, up to 2 K x P."""
    K, P = updates_KP.shape
    joined_P = updates_KP.new_empty(P)
    for columns in _blocks(K, P):
        joined_P[columns] = join(updates_KP[:, columns])
    return joined_P


def _blocks(K: int, P: int) -> Iterator[slice]:
    """All coordinates, in blocks of about AT_A_TIME values of K clients.

    Only whole blocks, without a narrow last part: torch adds the columns that do not fill its vector registers in
    another order than the others, so the last bits would differ.
    """
    C = min(max(NARROWEST, AT_A_TIME // K // BLOCK * BLOCK), WIDEST)
    return (slice(start, stop) for start, stop in pairwise([*range(0, max(P - C, 1), C), P]))


@final
@dataclass(frozen=True)
class ClippedUpdates:
    """Updates after clipping. Each is multiplied by its factor where it is read, so there is no second K x P.

    `scales_K` is None where clipping shortens no update.
    """

    updates_KP: Tensor
    scales_K: Tensor | None = None

    def blocks(self) -> Iterator[slice]:
        """All coordinates, in blocks whose K rows stay in the processor's cache."""
        return _blocks(*self.updates_KP.shape)

    def part(self, of: slice) -> ClippedUpdates:
        """Some coordinates of all clients, as a view."""
        return ClippedUpdates(self.updates_KP[:, of], self.scales_K)

    def columns(self, of: slice) -> Tensor:
        """Some coordinates of all clients, after clipping."""
        part_KC = self.updates_KP[:, of]
        return part_KC if self.scales_K is None else part_KC * self.scales_K[:, None]

    def share(self) -> float:
        """The share of updates that clipping shortens."""
        return 0.0 if self.scales_K is None else float((self.scales_K < 1).float().mean())

    def step(self, aggregator: Aggregator, sizes_K: Tensor, noise_P: Tensor, found: Distances) -> Tensor:
        """The step w^r - w^{r-1} (Eq. 4): the aggregate of the updates, and the noise.

        Each block of coordinates is joined and measured while it is in the cache; `found` receives its distances. Only
        an aggregator that compares whole updates is given a copy of those that clipping shortens.
        """
        by_coordinate = getattr(aggregator, "by_coordinate", False)
        whole_P = None if by_coordinate else aggregator(self.columns(slice(None)), sizes_K)
        step_P = self.updates_KP.new_empty(self.updates_KP.shape[1])
        for block in self.blocks():
            part, clipped_KC = self.part(block), self.columns(block)
            noise_C = noise_P[block].contiguous()  # without noise it is one zero, expanded, which is slow to read
            aggregate_C = aggregator(clipped_KC, sizes_K) if whole_P is None else whole_P[block]
            found.add(
                part,
                clipped_KC,
                aggregate_C=aggregate_C,
                step_C=torch.add(aggregate_C, noise_C, out=step_P[block]),
                noise_C=noise_C,
                mean_C=aggregate_C if isinstance(aggregator, Mean) else clipped_KC.mean(0),
            )
        return step_P


ROUNDING: Final = 1e-12  # of the largest squared distance: below it two updates are the same


def squared_distances(updates_KP: Tensor) -> Tensor:
    """The K x K squared distances, in float64. Each from the difference of two updates, so that near ones are exact."""
    K, P = updates_KP.shape
    found_KK = torch.zeros(K, K, dtype=torch.float64)
    for columns in _blocks(K, P):
        part_KC = updates_KP[:, columns]
        for i in range(K - 1):
            others_KC = part_KC[i + 1 :] - part_KC[i]
            found_KK[i, i + 1 :] += torch.linalg.vector_norm(others_KC, dim=1, dtype=torch.float64).square()
    return found_KK + found_KK.T


def krum_scores(updates_KP: Tensor, hostile: int) -> Tensor:
    """Blanchard et al. 2017: the sum of squared distances to the K - f - 2 nearest others. Low scores are trusted."""
    K = len(updates_KP)
    nearest = max(1, K - hostile - 2)
    ordered_KK = squared_distances(updates_KP).sort(dim=1).values
    return ordered_KK[:, 1 : 1 + nearest].sum(1)  # the first is the distance to itself


@register(Aggregator)
@final
@dataclass(frozen=True)
class Krum:
    """The update that is nearest to its neighbours. `share` of the clients may be hostile.

    The theory requires K > 2 f + 2. With fewer clients the nearest neighbour decides, and there is no guarantee.
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
        kept = kept.sort().values
        return _in_blocks(updates_KP, lambda values_KC: values_KC.index_select(0, kept).mean(0))


@register(Aggregator)
@final
@dataclass(frozen=True)
class GeometricMedian:
    """The point with the least sum of distances to all updates (Weiszfeld's iteration, as Pillutla et al. 2022).

    It is a weighted mean of the updates, so only the K weights are iterated: each step costs K x K, not K x P.
    """

    steps: int = 200
    tolerance: float = 1e-9  # of the sum of distances, from one step to the next

    def __post_init__(self) -> None:
        require(1 <= self.steps <= 100_000, "steps", self.steps, "1 to 100,000")
        require(0 < self.tolerance < 1, "tolerance", self.tolerance, "between 0 and 1")

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        return self.weights(squared_distances(updates_KP)).to(updates_KP.dtype) @ updates_KP

    def weights(self, squared_KK: Tensor) -> Tensor:
        """The weights a_i of the clients, from their distances only: with z = sum a_i u_i and sum a_i = 1,
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
    """The mean of updates scaled down to at most `factor` times the median norm (Sun et al. 2019).

    Norms are measured from w^{r-1}. Unlike the others, this aggregator is not equivariant to a shift of all updates.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.factor <= 1e6, "factor", self.factor, "give the bound, in median norms, above 0 and up to 1e6")

    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor:
        norms_K = torch.linalg.vector_norm(updates_KP, dim=1)
        bound = self.factor * float(norms_K.quantile(0.5))
        scale_K = torch.where(norms_K > bound, bound / norms_K, torch.ones_like(norms_K))
        return (scale_K / len(updates_KP)) @ updates_KP


def join_buffers(theirs: Sequence[Buffers], aggregator: Aggregator, sizes_K: Tensor) -> Buffers:
    """The clients' buffers joined into one. Integers are joined by the maximum.

    Floats are joined by the plain mean where the aggregator is a mean; the claimed sizes do not count. A trimmed mean
    is used for floats, too. With any other aggregator floats are joined by the median of each coordinate: these
    aggregators use distances between weights, in which buffers with large units would dominate.
    """
    floats_KF = torch.stack([each.floats_F for each in theirs])
    counts_I = torch.stack([each.counts_I for each in theirs]).amax(0)
    if isinstance(aggregator, Mean | WeightedMean):
        return Buffers(floats_KF.mean(0), counts_I)
    by_coordinate = aggregator if isinstance(aggregator, TrimmedMean) else Median()
    return Buffers(by_coordinate(floats_KF, sizes_K), counts_I)


def buffer_divergence(theirs: Sequence[Buffers], joined: Buffers) -> float | None:
    """Eq. 5 for the float buffers: the mean distance of the clients' from the joined; None without float buffers."""
    if not joined.floats_F.numel():
        return None
    # In float64: the square of a float32 may overflow.
    far_K = [torch.linalg.vector_norm(each.floats_F.double() - joined.floats_F) for each in theirs]
    return float(torch.stack(far_K).mean())


def _require_share(share: float) -> None:
    require(0 <= share < 0.5, "share", share, "give the share of hostile clients to withstand, from 0 to below 0.5")


register_method("trimmed-mean", aggregator={"kind": "trimmed_mean", "share": 0.2}, recovery="never")
