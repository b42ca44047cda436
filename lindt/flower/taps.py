"""Seeing through Flower's DP wrappers, which do not show their noise (Eq. 4, 7).

A Tap stands over the wrapper and another under it. What the lower one passes up is the aggregate before noise, what the
upper one passes up the aggregate after: their difference is the noise. The lower one also sees the clipped updates.

Legend: K clients answering, P weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from lindt.errors import UserError
from lindt.flower.replies import weights_of

ORDER = "the detector must stand outside: NFLDetector(DifferentialPrivacy...(FedAvg(...)))"


@final
class Tap(Strategy):
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
class Taps:
    """Around a DP wrapper, if there is one."""

    outer: Tap | None = None
    inner: Tap | None = None

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
        for tap in (self.outer, self.inner):
            if tap:
                tap.names = names

    def forget(self) -> None:
        for tap in (self.outer, self.inner):
            if tap:
                tap.given, tap.result = [], None


def tapped(strategy: Strategy) -> tuple[Strategy, Taps]:
    """The strategy with taps around its DP wrapper. The wrapper stays the user's own object, with its budget."""
    links = list(chain(strategy))
    noisy = [link for link in links if adds_noise(link)]
    if not noisy:
        return strategy, Taps()
    if len(noisy) > 1:
        raise UserError("strategy: two DP wrappers in one another; add noise once, then wrap that with NFLDetector")
    (wrapper,) = noisy
    under: Any = wrapper
    inner = under.strategy if isinstance(under.strategy, Tap) else Tap(under.strategy)
    under.strategy = inner
    place = links.index(wrapper)
    above: Any = links[place - 1] if place else None
    if isinstance(above, Tap):
        return strategy, Taps(above, inner)
    outer = Tap(wrapper)
    if above is None:
        return outer, Taps(outer, inner)
    above.strategy = outer
    return strategy, Taps(outer, inner)
