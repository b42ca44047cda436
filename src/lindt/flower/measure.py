"""One round as the detector sees it: what came back, what the strategy made of it, what noise lies in between.

Flower's DP wrappers do not show their noise (Eq. 4, 7). A probe strategy stands over the wrapper and another under it.
What the lower one passes up is the aggregate before noise, what the upper one passes up the aggregate after: their
difference is the noise. The lower one also sees the clipped updates.

Legend: K clients answering, P weights, L of them in the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from lindt.errors import UserError
from lindt.flower.messages import log_message
from lindt.flower.replies import ValidReplies, statistics_of, weights_of
from lindt.protocols import Buffers, Divergence, Statistic
from lindt.server.aggregation import buffer_divergence
from lindt.server.detection.divergence import divergence, measure
from lindt.weights import NORM_STATISTICS

# A client that clips itself sends an update of length S, give or take what float32 loses.
CLIP_TOLERANCE = 1 - 1e-4
NO_COUNTS = torch.empty(0, dtype=torch.int64)


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
    """Eq. 5 and 7; None where nothing can be measured. `clip_norm` is S as it was when the round was clipped.
    `updates`: clients sent updates, which the strategy was given as they are; `valid` has the weights.

    `sent` is w^{r-1}, `arrays` what the strategy made of the replies.
    """
    if not valid.nodes:
        return None
    w_P = weights_of(arrays, valid.names)
    if valid.w_KP.shape[1] != w_P.numel():
        log_message("the aggregate has other weights than the clients sent: there is nothing to measure", warn=True)
        return None
    given_KP = probes.given(valid.w_KP)
    if updates and given_KP is not valid.w_KP:
        given_KP = given_KP + weights_of(sent, valid.names)
    clipped = clipped_share(valid.lengths_K, clip_norm)
    # `spread` is the same of weights as of updates: they differ by w^{r-1} alone.
    seen = measure(valid.w_KP, w_P, probes.noise(w_P), given_KP, clipped, last_updates(given_KP, sent, valid.names))
    if not all(math.isfinite(value) for value in vars(seen).values() if value is not None):
        log_message("the aggregate is NaN or infinite; the strategy made it so, no client's update was", warn=True)
        return None
    if clip_norm is not None:
        warnings.clipping(clipped, len(valid.nodes))
    if not is_mean(probes.before_noise(w_P), given_KP, torch.tensor(valid.sizes_K)):
        warnings.no_mean()
    return seen


def last_updates(given_KP: Tensor, sent: ArrayRecord, names: frozenset[str]) -> Tensor | None:
    """The updates of the last layer: of the arrays whose names begin as that of the last one, up to its last dot.

    The order is that of `sent`, a state dict's. None where the arrays have no such names, as those of a list, and where
    clients return others than they were sent.
    """
    ordered = [name for name in sent if name in names and not name.endswith(NORM_STATISTICS)]
    if not ordered or not names <= sent.keys() or "." not in ordered[-1]:
        return None
    layer, sizes = ordered[-1].rpartition(".")[0], {name: math.prod(sent[name].shape) for name in ordered}
    if sum(sizes.values()) != given_KP.shape[1]:
        return None
    # `weights_of` puts the arrays one after another by name.
    columns_P = torch.cat([torch.full((sizes[name],), name.rpartition(".")[0] == layer) for name in sorted(ordered)])
    return given_KP[:, columns_P] - weights_of(sent, names)[columns_P]


def measure_statistics(valid: ValidReplies, arrays: ArrayRecord) -> float | None:
    """How far BatchNorm's statistics lie from those of the aggregate; None where one of the two has none."""
    names = valid.statistics_K[0].keys() if valid.statistics_K else ()
    if not names or not names <= arrays.keys():
        return None
    joined = statistics_of({name: arrays[name].numpy() for name in names})
    theirs = [Buffers(torch.cat([*each.values()]), NO_COUNTS) for each in valid.statistics_K]
    found = buffer_divergence(theirs, Buffers(torch.cat([*joined.values()]), NO_COUNTS))
    return found if found is not None and math.isfinite(found) else None  # what the strategy made of them may be NaN


def clipped_share(lengths_K: list[float], clip_norm: float | None) -> float:
    """The share of updates at least as long as S."""
    if clip_norm is None:
        return 0.0
    return sum(length >= clip_norm * CLIP_TOLERANCE for length in lengths_K) / len(lengths_K)


def is_mean(result_P: Tensor, given_KP: Tensor, sizes_K: Tensor) -> bool:
    """Whether the result is the mean of what was given, plain or weighted: told by what the strategy did, not by
    its name, so that a user's own is judged as well."""
    for weights_K in (torch.ones(len(given_KP)), sizes_K.to(torch.float32)):
        mean_P = (weights_K / weights_K.sum()) @ given_KP
        gap = float(torch.linalg.vector_norm(result_P - mean_P))
        room = 1e-3 * divergence(given_KP, mean_P) + 1e-5 * float(torch.linalg.vector_norm(mean_P))
        if gap <= room:
            return True
    return False


ORDER = "the detector must stand outside: NFLDetector(DifferentialPrivacy...(FedAvg(...)))"


@final
class ProbeStrategy(Strategy):
    """Changes nothing, keeps a copy of what passed in the last round."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.names: frozenset[str] = frozenset()  # of the arrays that make w
        self.given: list[Tensor] = []
        self.result: Tensor | None = None

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
        # By node, as the detector's own rows are; a copy, since some strategies take the arrays out of the replies.
        good.sort(key=lambda reply: reply.metadata.src_node_id)
        good = good if self.names else []
        self.given = [weights_of(next(iter(reply.content.array_records.values())), self.names) for reply in good]
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        self.result = weights_of(arrays, self.names) if arrays and self.names else None
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
    """A strategy and those it wraps, from the outside in."""
    yield strategy
    inner = getattr(strategy, "strategy", None)
    if isinstance(inner, Strategy):
        yield from chain(inner)


def adds_noise(strategy: Strategy) -> bool:
    """Flower's four DP wrappers, and any that is made like them."""
    named = vars(strategy)
    return isinstance(named.get("strategy"), Strategy) and "noise_multiplier" in named


@final
@dataclass(frozen=True)
class Probes:
    """Around a DP wrapper, if there is one."""

    outer: ProbeStrategy | None = None
    inner: ProbeStrategy | None = None

    def clip_norm(self) -> float | None:
        """S, as it stands before the round is aggregated: adaptive clipping moves it then."""
        found = getattr(self.outer.strategy, "clipping_norm", None) if self.outer else None
        return float(found) if isinstance(found, int | float) else None

    def clips_here(self) -> bool:
        """Whether the wrapper clips updates on the server: those of Flower's keep w^{r-1} for it."""
        return self.outer is not None and "current_arrays" in vars(self.outer.strategy)

    def noise(self, like_P: Tensor) -> Tensor:
        if self.outer is None or self.inner is None or self.outer.result is None or self.inner.result is None:
            return torch.zeros_like(like_P)
        return self.outer.result - self.inner.result

    def given(self, otherwise: Tensor) -> Tensor:
        """The weights that the base strategy was given: after the wrapper's clipping."""
        return torch.stack(self.inner.given) if self.inner and self.inner.given else otherwise

    def before_noise(self, otherwise: Tensor) -> Tensor:
        return self.inner.result if self.inner and self.inner.result is not None else otherwise

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
        raise UserError("strategy: two DP wrappers in one another; add noise once, then wrap that with NFLDetector")
    (wrapper,) = noisy
    under: Any = wrapper
    inner = under.strategy if isinstance(under.strategy, ProbeStrategy) else ProbeStrategy(under.strategy)
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
    """What a user is told once. `statistic` is the one held against epsilon, None where there is no epsilon."""

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
        text = f"none of the {connected} connected clients is on the panel of {share:g}: nobody reports; raise panel"
        self._once("panel", text)

    def _limit(self) -> str:
        return (
            f"{self.statistic} then has no limit of zero, so choose epsilon against a healthy control, or watch "
            'statistic="spread", which has'
        )

    def _once(self, key: str, text: str) -> None:
        if key not in self.said:
            self.said.add(key)
            log_message(text, warn=True)
