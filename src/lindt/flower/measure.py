"""The measurements of a round: of the replies, of the strategy's aggregate, and of the noise.

Flower's DP wrappers do not show their noise (Eq. 4, 7). One probe strategy stands outside the wrapper, another inside
it. The inner probe sees the aggregate before noise, the outer probe the aggregate after it: the difference is the
noise. The inner probe also sees the clipped updates.

All vectors are views of bytes that exist anyway (vectors.py). Where Flower's wrapper clips on the server, the updates
before clipping are not kept: clipping only shortens an update, so it is lengthened again to the length that was
measured before.

Legend: K clients answering, P weights, C of them in a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    Strategy,
)
from numpy.typing import NDArray

from lindt.errors import UserError
from lindt.flower.messages import log_message
from lindt.flower.replies import ValidReplies, statistics_of
from lindt.flower.vectors import (
    Piece,
    Vector,
    buffer_for,
    chunks,
    distance_squares,
    in_parts,
    read,
    record_vector,
    row_squares,
    sizes_of,
    square_of,
    subtract,
)
from lindt.protocols import NORM_STATISTICS, Divergence, Statistic
from lindt.server.detection.divergence import CANCELLED, divergence_of

# A client that clips its own update sends one of length S, up to the rounding of float32.
CLIP_TOLERANCE = 1 - 1e-4
CLIPS_BY_LENGTH: Final = (  # w^{r-1} + update * min(1, S / length), in float32
    DifferentialPrivacyServerSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
)
# A share of S. Where float32 rounds w by more than this, the updates before clipping are kept and not computed. The
# error of an update's norm is below the square of this share.
MOST_ROUNDING: Final = 1e-3


def measure_round(
    valid: ValidReplies,
    sent: ArrayRecord,
    arrays: ArrayRecord,
    clip_norm: float | None,
    probes: Probes,
    warnings: DetectorWarnings,
    *,
    updates: bool = False,
) -> Divergence | None:
    """Eq. 5 and 7; None where nothing can be measured.

    `sent` is w^{r-1}, `arrays` the strategy's aggregate, `clip_norm` the S with which the round was clipped. `updates`:
    the clients sent updates, not weights.
    """
    if not valid.nodes:
        return None
    w, base = record_vector(arrays, valid.names), record_vector(sent, valid.names)
    given_K = probes.given(valid.w_K)
    if not given_K or any(sizes_of(one) != sizes_of(w) for one in given_K):
        log_message("the aggregate has other weights than the clients sent, so that nothing can be measured", warn=True)
        return None
    clipped = clipped_share(valid.lengths_K, clip_norm)
    vectors = RoundVectors(w, base, given_K, updates=updates)
    if probes.outer and probes.inner and probes.outer.result is not None and probes.inner.result is not None:
        vectors = replace(vectors, noisy=probes.outer.result, noiseless=probes.inner.result)
    if not valid.w_K and clip_norm is not None:
        vectors = replace(vectors, stretch_K=tuple(max(1.0, length / clip_norm) for length in valid.lengths_K))
    elif given_K is not valid.w_K:
        vectors = replace(vectors, sent_K=valid.w_K)
    sizes_K = np.array(valid.sizes_K) if warnings.asks_mean() else None
    with np.errstate(all="ignore"):  # a strategy's aggregate may be NaN or infinite
        found = distances_of(vectors, sizes_K)
        cosine = last_layer_cosine(given_K, sent, valid.names, updates=updates)
    seen = divergence_of(found.far_K, found.clean_K, found.spread_K, found.noise, clipped, cosine)
    if not all(math.isfinite(value) for value in vars(seen).values() if value is not None):
        log_message("the aggregate is NaN or infinite, and no client's update was; check the strategy", warn=True)
        return None
    if clip_norm is not None:
        warnings.clipping(clipped, len(valid.nodes))
    if not found.mean:
        warnings.no_mean()
    return seen


@final
@dataclass(frozen=True)
class RoundVectors:
    """The vectors of one round. `given_K` are those that the base strategy was given.

    Without `sent_K` and `stretch_K` the clients sent the same. `sent_K` are the vectors that they sent. `stretch_K`
    says by which factor clipping shortened each client's update.
    """

    w: Vector  # the new w
    base: Vector  # w^{r-1}
    given_K: Sequence[Vector]
    sent_K: Sequence[Vector] | None = None
    stretch_K: tuple[float, ...] | None = None
    noisy: Vector | None = None  # after the wrapper's noise
    noiseless: Vector | None = None
    updates: bool = False  # whether given_K and sent_K are updates of `base`


@final
@dataclass(frozen=True)
class Distances:
    """||w_i - w||, ||w_i - (w - noise)||, the distance of the given vectors from their mean; and ||noise||."""

    far_K: list[float]
    clean_K: list[float]
    spread_K: list[float]
    noise: float
    mean: bool  # whether the aggregate before noise is the plain or weighted mean of the given vectors


def distances_of(round: RoundVectors, sizes_K: NDArray[np.float64] | None = None) -> Distances:
    """All distances of a round in one pass. With `sizes_K` it is tested whether the aggregate is a mean."""
    clients, sizes = len(round.given_K), sizes_of(round.w)
    shares = [np.full(clients, 1 / clients, np.float32)]
    if sizes_K is not None and (sizes_K != sizes_K[0]).any():  # else the weighted mean is the plain mean
        shares.append((sizes_K / sizes_K.sum()).astype(np.float32))

    def sums(part: Sequence[list[Piece]]) -> _DistanceSums:
        found = _DistanceSums(round, shares, tests_mean=sizes_K is not None)
        buffers = [buffer_for(sizes, clients) for _ in range(3)]
        for pieces in part:
            found.add_chunk(pieces, *buffers)
        return found

    total = _DistanceSums(round, shares, tests_mean=sizes_K is not None)
    for part in in_parts(sums, list(chunks(sizes, clients))):
        total.add(part)
    return total.distances()


@final
class _DistanceSums:
    """The sums of squares over some chunks of coordinates."""

    def __init__(self, round: RoundVectors, shares: list[NDArray[np.float32]], *, tests_mean: bool) -> None:
        clients = len(round.given_K)
        self.round, self.shares, self.tests_mean = round, shares, tests_mean
        self.far_K, self.clean_K, self.spread_K, self.noise = *(np.zeros(clients) for _ in range(3)), 0.0
        self.means = [_MeanSums(clients) for _ in shares]

    def add_chunk(
        self, pieces: list[Piece], y_buffer: NDArray[Any], x_buffer: NDArray[Any], scratch: NDArray[Any]
    ) -> None:
        round = self.round
        centre_C, noise_C, aggregate_C = _around(round, pieces)
        base_C = read(round.base, pieces) if round.updates or round.stretch_K else None
        from_C = centre_C - base_C if round.updates and base_C is not None else centre_C
        given_KC = subtract(round.given_K, from_C, pieces, y_buffer)
        given_squares_K = row_squares(given_KC)
        own_KC: NDArray[Any] | None = given_KC
        squares_K = given_squares_K
        self.noise += 0.0 if noise_C is None else float(np.dot(noise_C, noise_C))
        if round.stretch_K is not None and base_C is not None and max(round.stretch_K) > 1:
            stretched = _Stretched(given_KC, given_squares_K, round.stretch_K, centre_C - base_C, noise_C)
            found = stretched.squares()
            if found is not None:
                self.clean_K += found[0]
                self.far_K += found[1]
                own_KC = None
            else:
                own_KC = stretched.rows(x_buffer)
                squares_K = row_squares(own_KC)
        elif round.sent_K is not None:
            own_KC = subtract(round.sent_K, from_C, pieces, x_buffer)
            squares_K = row_squares(own_KC)
        if own_KC is not None:
            self.clean_K += squares_K
            if noise_C is not None:
                self.far_K += distance_squares(own_KC, squares_K, noise_C, scratch)
        for share_K, sums in zip(self.shares, self.means, strict=True):
            mean_C = share_K @ given_KC
            from_mean_K = distance_squares(given_KC, given_squares_K, mean_C, scratch)
            if sums is self.means[0]:
                self.spread_K += from_mean_K
            if self.tests_mean:
                sums.add_chunk(mean_C, aggregate_C - centre_C, centre_C, from_mean_K)

    def add(self, other: _DistanceSums) -> None:
        self.far_K += other.far_K
        self.clean_K += other.clean_K
        self.spread_K += other.spread_K
        self.noise += other.noise
        for sums, others in zip(self.means, other.means, strict=True):
            sums.add(others)

    def distances(self) -> Distances:
        clean_K = np.sqrt(self.clean_K)
        far_K = np.sqrt(self.far_K) if self.noise else clean_K
        is_mean = not self.tests_mean or any(sums.is_mean() for sums in self.means)
        spread_K = np.sqrt(self.spread_K)
        return Distances(far_K.tolist(), clean_K.tolist(), spread_K.tolist(), math.sqrt(self.noise), is_mean)


def _around(round: RoundVectors, pieces: list[Piece]) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any]]:
    """A chunk of w - noise, of the noise, and of the aggregate before noise."""
    w_C = read(round.w, pieces)
    if round.noisy is None or round.noiseless is None:
        return w_C, None, w_C
    noiseless_C, noisy_C = read(round.noiseless, pieces), read(round.noisy, pieces)
    noise_C = noisy_C - noiseless_C
    # Where nothing changes the wrapper's aggregate, this is the same without rounding.
    centre_C = noiseless_C if np.array_equal(noisy_C, w_C) else w_C - noise_C
    return centre_C, noise_C, noiseless_C


@final
class _Stretched:
    """A chunk of the rows before clipping: a y + (a - 1) m.

    y is w^{r-1} + the clipped update - centre, a the length before clipping over the length after it, and m is
    centre - w^{r-1}.
    """

    def __init__(
        self,
        given_KC: NDArray[Any],
        squares_K: NDArray[np.float64],
        stretch_K: Sequence[float],
        moved_C: NDArray[Any],
        noise_C: NDArray[Any] | None,
    ) -> None:
        self.given_KC, self.squares_K, self.moved_C, self.noise_C = given_KC, squares_K, moved_C, noise_C
        self.a_K = np.array(stretch_K)
        self.b_K = self.a_K - 1

    def squares(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """The sums of squares of the rows, and of the rows less the noise, by expansion; None where that would lose
        digits."""
        others = [self.moved_C] if self.noise_C is None else [self.moved_C, self.noise_C]
        others_SC = np.array(others, self.given_KC.dtype)
        inner_SS = (others_SC @ others_SC.T).astype(np.float64)
        inner_SK = (others_SC @ self.given_KC.T).astype(np.float64)
        longest_K = self.a_K**2 * self.squares_K + self.b_K**2 * inner_SS[0, 0]
        own_K = longest_K + 2 * self.a_K * self.b_K * inner_SK[0]
        if not (own_K >= CANCELLED * longest_K).all():
            return None
        if self.noise_C is None:
            return own_K, own_K
        far_K = own_K - 2 * (self.a_K * inner_SK[1] + self.b_K * inner_SS[0, 1]) + inner_SS[1, 1]
        return (own_K, far_K) if (far_K >= CANCELLED * (own_K + inner_SS[1, 1])).all() else None

    def rows(self, buffer: NDArray[Any]) -> NDArray[Any]:
        found_KC = buffer[: self.given_KC.size].reshape(self.given_KC.shape)
        for found_C, given_C, a in zip(found_KC, self.given_KC, self.a_K.tolist(), strict=True):
            np.multiply(given_C, np.float32(a), out=found_C)
            if a > 1:
                found_C += np.float32(a - 1) * self.moved_C
        return found_KC


@final
class _MeanSums:
    """Whether an aggregate is a mean of the given vectors. This is computed, not read from the strategy's name, so that
    it also works for a user's own strategy."""

    def __init__(self, clients: int) -> None:
        self._gap, self._norm, self._distances_K = 0.0, 0.0, np.zeros(clients)

    def add_chunk(
        self,
        mean_C: NDArray[Any],
        aggregate_C: NDArray[Any],
        centre_C: NDArray[Any],
        distances_K: NDArray[np.float64],
    ) -> None:
        """Add a chunk; the mean and the aggregate are given relative to the centre."""
        gap_C, whole_C = aggregate_C - mean_C, centre_C + mean_C
        self._gap += float(np.dot(gap_C, gap_C))
        self._norm += float(np.dot(whole_C, whole_C))
        self._distances_K += distances_K

    def add(self, other: _MeanSums) -> None:
        self._gap += other._gap
        self._norm += other._norm
        self._distances_K += other._distances_K

    def is_mean(self) -> bool:
        room = 1e-3 * float(np.sqrt(self._distances_K).mean()) + 1e-5 * math.sqrt(self._norm)
        return math.sqrt(self._gap) <= room


def last_layer_cosine(
    given_K: Sequence[Vector], sent: ArrayRecord, names: frozenset[str], *, updates: bool
) -> float | None:
    """The mean over pairs of clients of the cosine of their updates of the last layer.

    The last layer are the arrays that share the name of the last array in `sent` up to its last dot. None where the
    arrays have no such names (those of a list), where clients return other arrays than they were sent, and where fewer
    than two updates are not zero. `mean_cosine` explains why a zero update is left out.
    """
    ordered = [name for name in sent if name in names and not name.endswith(NORM_STATISTICS)]
    base = record_vector(sent, names)
    if not ordered or not names <= sent.keys() or "." not in ordered[-1] or sizes_of(base) != sizes_of(given_K[0]):
        return None
    layer = ordered[-1].rpartition(".")[0]
    places = [place for place, name in enumerate(sorted(ordered)) if name.rpartition(".")[0] == layer]
    last_K = [tuple(vector[place] for place in places) for vector in given_K]
    last = tuple(base[place] for place in places)
    sizes, clients = sizes_of(last), len(given_K)
    buffer, squares_K, total = buffer_for(sizes, clients), np.zeros(clients), 0.0

    def rows() -> Iterator[NDArray[Any]]:
        for pieces in chunks(sizes, clients):
            yield subtract(last_K, None if updates else read(last, pieces), pieces, buffer)

    for rows_KC in rows():
        squares_K += row_squares(rows_KC)
    moved_K = squares_K > 0
    directions = int(moved_K.sum())
    if directions < 2:
        return None
    lengths_K = np.sqrt(np.where(moved_K, squares_K, 1.0))
    shares_K = np.where(moved_K, 1 / lengths_K, 0.0).astype(np.float32)
    for rows_KC in rows():
        sum_C = shares_K @ rows_KC
        total += float(np.dot(sum_C, sum_C))
    return (total - directions) / (directions * (directions - 1))


def measure_statistics(valid: ValidReplies, arrays: ArrayRecord) -> float | None:
    """The mean distance of BatchNorm's statistics from those of the aggregate; None where either has no statistics."""
    names = valid.statistics_K[0].keys() if valid.statistics_K else ()
    if not names or not names <= arrays.keys():
        return None
    joined = statistics_of({name: arrays[name].numpy() for name in names})
    joined_F = np.concatenate([*joined.values()]).astype(np.float64)  # a float32's square may overflow
    theirs = (np.concatenate([*each.values()]) for each in valid.statistics_K)
    found = float(np.mean([np.linalg.norm(floats_F - joined_F) for floats_F in theirs]))
    return found if math.isfinite(found) else None  # the strategy's aggregate may be NaN


def clipped_share(lengths_K: list[float], clip_norm: float | None) -> float:
    """The share of updates at least as long as S."""
    if clip_norm is None:
        return 0.0
    return sum(length >= clip_norm * CLIP_TOLERANCE for length in lengths_K) / len(lengths_K)


ORDER = "the detector must stand outside: NFLDetector(DifferentialPrivacy...(FedAvg(...)))"


@final
class ProbeStrategy(Strategy):
    """Changes nothing; keeps views of the vectors that passed through it in the last round."""

    def __init__(self, strategy: Strategy, *, keeps_given: bool = False) -> None:
        self.strategy, self.keeps_given = strategy, keeps_given
        self.names: frozenset[str] = frozenset()  # of the arrays of w
        self.given: list[Vector] = []
        self.result: Vector | None = None

    def __getattr__(self, name: str) -> Any:
        """Wrappers ask the strategy under them for its settings."""
        if name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        good = [reply for reply in replies if not reply.has_error()]
        # Sorted by node, as the detector's own rows are.
        good.sort(key=lambda reply: reply.metadata.src_node_id)
        good = good if self.names and self.keeps_given else []
        self.given = [record_vector(next(iter(reply.content.array_records.values())), self.names) for reply in good]
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        self.result = record_vector(arrays, self.names) if arrays and self.names else None
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()


def chain(strategy: Strategy) -> Iterator[Strategy]:
    """A strategy and the strategies inside it, from the outside in."""
    yield strategy
    inner = getattr(strategy, "strategy", None)
    if isinstance(inner, Strategy):
        yield from chain(inner)


def adds_noise(strategy: Strategy) -> bool:
    """Whether it is one of Flower's four DP wrappers, or another with the same fields."""
    named = vars(strategy)
    return isinstance(named.get("strategy"), Strategy) and "noise_multiplier" in named


@final
@dataclass(frozen=True)
class Probes:
    """The probes around a DP wrapper, if there is one."""

    outer: ProbeStrategy | None = None
    inner: ProbeStrategy | None = None

    def clip_norm(self) -> float | None:
        """S before the round is aggregated: adaptive clipping changes it during the aggregation."""
        found = getattr(self.outer.strategy, "clipping_norm", None) if self.outer else None
        return float(found) if isinstance(found, int | float) else None

    def clips_here(self) -> bool:
        """Whether the wrapper clips updates on the server: such wrappers of Flower's keep w^{r-1}."""
        return self.outer is not None and "current_arrays" in vars(self.outer.strategy)

    def given(self, otherwise: Sequence[Vector]) -> Sequence[Vector]:
        """The weights that the base strategy was given: after the wrapper's clipping."""
        return self.inner.given if self.inner and self.inner.given else otherwise

    def restores(self, valid: ValidReplies, sent: ArrayRecord, clip_norm: float | None) -> bool:
        """Whether the updates before clipping can be computed from the clipped ones, and need not be kept."""
        if self.outer is None or clip_norm is None or type(self.outer.strategy) not in CLIPS_BY_LENGTH:
            return False
        exact = all(values.dtype in (np.float32, np.float64) for vector in valid.w_K for values in vector)
        norm = valid.base_norm
        if norm is None:
            norm = math.sqrt(math.fsum(map(square_of, record_vector(sent, valid.names))))
        rounding = norm * float(np.finfo(np.float32).eps) / 2
        return exact and all(valid.lengths_K) and rounding <= MOST_ROUNDING * clip_norm

    def watch(self, names: frozenset[str]) -> None:
        for probe in (self.outer, self.inner):
            if probe:
                probe.names = names

    def forget(self) -> None:
        for probe in (self.outer, self.inner):
            if probe:
                probe.given, probe.result = [], None


def with_probes(strategy: Strategy) -> tuple[Strategy, Probes]:
    """The strategy with probes around its DP wrapper. The wrapper stays the user's own object, with its budget."""
    links = list(chain(strategy))
    noisy = [link for link in links if adds_noise(link)]
    if not noisy:
        return strategy, Probes()
    if len(noisy) > 1:
        raise UserError("strategy: it has a DP wrapper inside another; add noise once, then wrap that with NFLDetector")
    (wrapper,) = noisy
    under: Any = wrapper
    inner = under.strategy
    if not isinstance(inner, ProbeStrategy):
        inner = ProbeStrategy(inner, keeps_given=True)
    under.strategy = inner
    place = links.index(wrapper)
    above: Any = links[place - 1] if place else None
    if isinstance(above, ProbeStrategy):
        return strategy, Probes(above, inner)
    outer = ProbeStrategy(wrapper)
    if above is None:
        return outer, Probes(outer, inner)
    above.strategy = outer
    return strategy, Probes(outer, inner)


def reports_privacy(noise: float) -> str:
    """What a client's gain reports reveal, in words."""
    return f"are {2 / noise:.3g}-DP, each number by itself" if noise else "have no noise"


@final
class DetectorWarnings:
    """Warnings that are logged once. `statistic` is compared with epsilon; None where there is no epsilon."""

    def __init__(self, statistic: Statistic | None, links: Sequence[Strategy]) -> None:
        self.statistic, self.links = statistic, links
        self.said: set[str] = set()
        self._clipped = self._updates = 0.0
        own = [type(link).__name__ for link in links[1:] if type(link).start is not Strategy.start]
        if own:
            wraps = type(links[0]).__name__
            self._once("start", f"{', '.join(own)} has a start() of its own, which {wraps} around it does not call")

    def clipping(self, share: float, updates: int) -> None:
        self._clipped, self._updates = self._clipped + share * updates, self._updates + updates
        if self._updates >= 10 and self._clipped > self._updates / 10 and self.statistic not in (None, "spread"):
            found = 100 * self._clipped / self._updates
            self._once("clipping", f"{found:.0f}% of the updates are clipped: {self._limit()}")

    def asks_mean(self) -> bool:
        """Whether a warning about an aggregate that is not a mean is still needed."""
        return self.statistic not in (None, "spread") and "mean" not in self.said

    def no_mean(self) -> None:
        if self.statistic not in (None, "spread"):
            name = type(self.links[-1]).__name__
            self._once("mean", f"{name} does not take the mean of the updates: {self._limit()}")

    def resumed(self) -> None:
        if any(getattr(link, "accountant", None) is not None for link in self.links):
            self._once("accountant", "the privacy accountant starts anew: add what was spent before the restart")

    def reports(self, noise: float) -> None:
        if any(adds_noise(link) for link in self.links):
            self._once("reports", f"the clients' gain reports {reports_privacy(noise)}: outside the privacy guarantee")

    def no_panel(self, share: float, connected: int) -> None:
        text = f"none of the {connected} connected clients is on the panel of {share:g}: no client reports; raise panel"
        self._once("panel", text)

    def _limit(self) -> str:
        return (
            f"{self.statistic} then need not fall to zero; choose epsilon against a healthy control, or use "
            'statistic="spread"'
        )

    def _once(self, key: str, text: str) -> None:
        if key not in self.said:
            self.said.add(key)
            log_message(text, warn=True)
