"""A plan: everything that decides a run's numbers, as frozen, checked values.

Its method is a composition of an adaptation, an aggregator, a penalty and a recovery. There is no class per method.
Named methods register where their components are defined (`registry.register_method`). METHODS holds all of them.

The plan also decides, by its seed, the role of each client: which clients attack, report, or count in scores.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Final, Literal, final

import numpy as np
import torch

from lindt.data.partition import Classes, Partition
from lindt.data.sources import SOURCES, Text
from lindt.environment import Environment
from lindt.environment.participation import MANY, Drawn, choose_attackers, drawn
from lindt.errors import require
from lindt.plan.models import Model, SmallCnn
from lindt.protocols import Adaptation, Aggregator, Detection, LocalOptimizer, Metric, Penalty, Recovery
from lindt.registry import OMITTED, Named, build, component, is_protocol, kind_of, kinds, method_tables
from lindt.seeds import seed_for


@final
@dataclass(frozen=True)
class Method:
    """How clients adapt the model, how the server joins their updates, and when recovery runs.

    Examples:
        >>> import lindt
        >>> from dataclasses import replace
        >>> from lindt.server.aggregation import Median
        >>> method = replace(lindt.METHODS["lindt-always"], aggregator=Median())
        >>> plan = replace(lindt.resolve("digits-nfl"), method=method)
        >>> plan.method.aggregator
        Median()
    """

    adaptation: Adaptation = field(default_factory=lambda: component(Adaptation, "global_only"))  # the client's side
    aggregator: Aggregator = field(default_factory=lambda: component(Aggregator, "mean"))  # joins updates on the server
    penalty: Penalty = field(default_factory=lambda: component(Penalty, "no_penalty"))  # a term of the clients' loss
    recovery: Recovery = field(default_factory=lambda: component(Recovery, "always"))  # when the client's side runs
    # How clients predict after recovery has stopped: with their adapted models, not trained further, or with w.
    after_stop: Literal["adapted", "global"] = "adapted"

    @property
    def keeps_adapted(self) -> bool:
        """Whether clients predict with their adapted models after recovery has stopped.

        A recovery that follows reports stops when these models are shown to be worse than w: then they predict with w.
        """
        return self.after_stop == "adapted" and not getattr(self.recovery, "needs_reports", False)


# The order of the paper's main table; other methods follow by name.
METHOD_ORDER: Final = (
    "fedavg",
    "fedprox",
    "trimmed-mean",
    "fb",
    "apfl",
    "lindt-always",
    "lindt-tm",
    "lindt-before",
    "lindt-on-detection",
    "watch",
    "fine-tune",
    "guarded",
    "guarded-fine-tune",
    "guarded-all",
    "ditto",
    "fl-guard",
    "fedper",
    "fedrep",
    "fedbabu",
    "fedala",
)


# Earlier names of methods, which plans, commands and stored results may still use.
EARLIER_NAMES: Final = {"lindt": "lindt-always", "runtime": "lindt-on-detection"}


def _method_names() -> list[str]:
    for part in typing.get_type_hints(Method).values():
        if is_protocol(part):
            kinds(part)  # imports the components, which register their methods
    rank = {name: place for place, name in enumerate(METHOD_ORDER)}
    return sorted(method_tables(), key=lambda name: (rank.get(name, len(rank)), name))


def _method(name: str) -> Method:
    method: Method = build(Method, method_tables()[name], "")
    return method


METHODS: Mapping[str, Method] = Named(_method_names, _method, EARLIER_NAMES)
"""The named methods, each a `Method`: `lindt methods` lists them.

Examples:
    >>> import lindt
    >>> {"fedavg", "fedprox", "lindt-always", "ditto", "guarded"} <= set(lindt.METHODS)
    True
    >>> type(lindt.METHODS["fedavg"].aggregator).__name__
    'Mean'
"""


@cache
def _watch() -> Method:
    """The method of a plan without `method`: detection only."""
    return METHODS["watch"]


def _watch_within(rounds: int) -> Method:
    """The same with an r' for so many rounds: the paper's 250, or in a short run 25 of 80 rounds, in proportion."""
    recovery: Any = _watch().recovery
    return replace(_watch(), recovery=replace(recovery, patience=min(recovery.patience, rounds * 25 // 80)))


PANEL: Final = 1000  # the clients that are scored where there are more than MANY

Weighting = Literal["equal", "size", "given"]


@final
@dataclass(frozen=True)
class Data:
    source: str = "digits"
    clients: int = 20  # N
    test_share: float = 0.5  # where the source has no test set of its own
    allocation: Partition = field(default_factory=Classes)
    text: Text = field(default_factory=Text)  # where the source is text

    def __post_init__(self) -> None:
        require(self.source in SOURCES, "source", self.source, f"choose among {sorted(SOURCES)}")
        require(self.clients >= 2, "clients", self.clients, "give at least 2 clients")
        require(0 < self.test_share < 1, "test_share", self.test_share, "give a share between 0 and 1")


@final
@dataclass(frozen=True)
class Training:
    """A client's training in a round (Table 9)."""

    rate: float = 0.1  # eta
    decay: float = 0.992  # the factor on the rate after each round
    epochs: int = 1  # E
    batch: int = 10  # B
    max_norm: float = 5.0  # the largest norm of a gradient
    optimizer: LocalOptimizer = field(
        default_factory=lambda: component(LocalOptimizer, "sgd"), repr=False, metadata=OMITTED
    )
    accumulate: int = field(default=1, repr=False, metadata=OMITTED)  # batches per step

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1e6, "rate", self.rate, "give a learning rate above 0, up to 1e6")
        require(0 < self.decay <= 1, "decay", self.decay, "give the rate's factor per round, above 0 and up to 1")
        require(self.epochs >= 1, "epochs", self.epochs, "train for at least 1 epoch")
        require(self.batch >= 1, "batch", self.batch, "a batch has at least 1 sample")
        require(self.max_norm > 0, "max_norm", self.max_norm, "the gradient's bound must be above 0")
        require(self.accumulate >= 1, "accumulate", self.accumulate, "a step takes the gradient of at least 1 batch")

    def rate_at(self, round: int) -> float:
        return float(self.rate * self.decay ** (round - 1))


@final
@dataclass(frozen=True)
class Alone:
    """The references: a private model P_i per client, trained on D_i only, by one rule for every allocation.

    Model, optimizer and decay are those of the federation (an epoch counts as a round). The number of epochs is chosen
    on `held_out` of the TRAINING data: the latest epoch with the best score there; the search ends after `patience`
    epochs below the best. (If the lowest loss decided, a client that holds out three samples would stop far too early.)
    With `refit` the model is then trained on all of D_i for that number of epochs, as the federation uses all of D_i
    too; `stretch` multiplies that number, to measure how much the rule matters.

    Clients that report hold out a part V_i of D_i, and compare on it w and a P_i that has not trained on it. On its own
    a client would train on all of D_i. So with `with_validation` a second P_i does: scores on test data compare with
    it, and guarded prediction predicts with it. Without it the first P_i serves for all.
    """

    private: bool = True
    epochs: int = 100  # the most epochs
    patience: int = 20
    held_out: float = 0.1
    refit: bool = True
    stretch: float = field(
        default=1.0, repr=False
    )  # the factor on the chosen epochs; client/private_models.py adds it to its key separately
    with_validation: bool = field(
        default=True, repr=False
    )  # repr=False: it is no part of the rule, nor of the cache's key

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", self.epochs, "train for at least 1 epoch")
        require(self.patience >= 1, "patience", self.patience, "wait for at least 1 epoch")
        require(0 < self.held_out < 1, "held_out", self.held_out, "give a share between 0 and 1")
        require(
            0 < self.stretch <= 100, "stretch", self.stretch, "give the factor on the chosen epochs, above 0 to 100"
        )
        require(self.refit or self.stretch == 1, "stretch", self.stretch, "it applies to the refit; set refit = true")


@final
@dataclass(frozen=True)
class Scoring:
    """The rounds that are scored, every `every`-th and each of the `last`, and how."""

    every: int = 10
    last: int = 10
    metric: str = "accuracy"
    weighting: Weighting = "equal"  # alpha_i of Eq. 3
    weights: tuple[float, ...] = ()  # where weighting is "given", one for each client
    attackers: Literal["left out", "counted"] = "left out"  # whether attackers count in local scores and beta
    # The number of clients that are scored, drawn once for a run; scores then have an interval. 0: all clients, of more
    # than 100,000 a panel of 1,000. N or more: all clients.
    panel: int = field(default=0, repr=False, metadata=OMITTED)

    def __post_init__(self) -> None:
        require(self.every >= 1, "every", self.every, "give 1 to score every round, or more")
        require(self.last >= 1, "last", self.last, "give at least 1 last round, whose mean is the result")
        metrics = kinds(Metric)
        require(self.metric in metrics, "metric", self.metric, f"choose among {sorted(metrics)}")
        require(self.panel == 0 or self.panel >= 2, "panel", self.panel, "give at least 2 clients, or 0")
        # "given" without weights: those of the problem (`settled`); `server.checks` refuses it where there are none.
        given, fix = self.weighting == "given", "set weighting = 'given' and one weight for each client"
        require(given or not self.weights, "weights", self.weights, fix)
        require(all(a >= 0 for a in self.weights), "weights", self.weights, "give weights of 0 or more")
        above = not self.weights or sum(self.weights) > 0
        require(above, "weights", self.weights, "give at least one weight above 0")


@final
@dataclass(frozen=True)
class EarlyStop:
    """Ends the run once the clients' mean score on their validation parts has not risen for `patience` scored rounds.

    With 0 all rounds are played. Otherwise the final models, w and each v_i, are those of the best round, also where
    all rounds were played. The score is that of the client's predictions on V_i; test data are not used.
    """

    patience: int = 0

    def __post_init__(self) -> None:
        require(
            self.patience >= 0, "patience", self.patience, "give the scored rounds to wait for, or 0 to play all rounds"
        )


@final
@dataclass(frozen=True)
class Plan:
    """Everything that decides a run's numbers. The same plan gives the same numbers, byte for byte.

    A plan is frozen: `dataclasses.replace` makes a changed copy. `resolve` reads a plan from a preset or a TOML file.

    Examples:
        >>> import lindt
        >>> from dataclasses import replace
        >>> plan = replace(lindt.resolve("digits-control"), rounds=20, seed=1)
        >>> plan.rounds, plan.data.source, plan.data.clients
        (20, 'digits', 20)
    """

    name: str = "digits-nfl"  # a word that can name a folder
    seed: int = 0  # every other seed is derived from it and a name
    rounds: int = 80  # the number of rounds
    threads: int = 1  # threads of a worker; part of the plan, as the order of sums changes their last bits
    data: Data = field(default_factory=Data)  # the data, and how they are divided among clients
    model: Model = field(default_factory=SmallCnn)  # not used where a problem of the user's own has one
    training: Training = field(default_factory=Training)  # a client's training in a round
    environment: Environment = field(default_factory=Environment)  # participation, attackers, privacy
    # How clients adapt the model, and how the server joins their updates; by default detection only.
    method: Method = field(default_factory=_watch)
    alone: Alone = field(default_factory=Alone)  # the private models that the gain is measured against
    scoring: Scoring = field(default_factory=Scoring)  # which rounds are scored, and how
    detection: Detection = field(default_factory=lambda: component(Detection, "delta"))  # the test of NFL
    # When a run ends before its last round.
    early_stop: EarlyStop = field(default_factory=EarlyStop, metadata=OMITTED)

    def __post_init__(self) -> None:
        word = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.name)
        require(
            word is not None, "name", self.name, "give a word of letters, digits, '.', '_', '-' that can name a folder"
        )
        require(self.seed >= 0, "seed", self.seed, "give 0 or more")
        require(self.rounds >= 1, "rounds", self.rounds, "give at least 1 round")
        require(1 <= self.threads <= 1024, "threads", self.threads, "give 1 to 1024 threads")
        if self.method is _watch():
            object.__setattr__(self, "method", _watch_within(self.rounds))
        reports, recovery = self.detection.reports, getattr(self.method, "recovery", None)  # check() names other types
        follows = getattr(recovery, "needs_reports", False)
        fix = (
            f"{kind_of(recovery)} follows the clients' reports: set detection = 'gain', or with the paper's rule "
            "method.recovery = 'on_detection'"
        )
        require(reports or not follows, "detection", kind_of(self.detection), fix)
        fix = "reports compare w with a private model: set alone.private = true, or detection = 'delta'"
        require(self.alone.private or not reports, "alone.private", self.alone.private, fix)
        mixed, batch = self.environment.threat.per_batch, self.training.batch
        fix = f"leave room for the attacker's own samples in a batch of {batch}"
        require(mixed < batch, "environment.threat.per_batch", mixed, fix)

    def seed_for(self, *names: str | int) -> int:
        return seed_for(self.seed, *names)

    def scored(self, round: int) -> bool:
        return round % self.scoring.every == 0 or round > self.rounds - self.scoring.last


def attackers_of(plan: Plan, clients: int) -> Set[int]:
    return choose_attackers(plan.environment.threat.share, clients, plan.seed_for("attackers"))


def reporting_clients(plan: Plan, clients: int) -> Set[int]:
    """The clients that hold out a V_i and train a P_i to report gains: the panel. It includes attackers."""
    if not plan.detection.reports:
        return frozenset()
    share = getattr(plan.detection, "panel", 1.0)
    if clients > MANY:
        return drawn(clients, max(1, round(share * clients)), plan.seed_for("panel"))
    if share == 1:
        return frozenset(range(clients))
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(plan.seed_for("panel")))
    return frozenset(order[: max(1, round(share * clients))].tolist())


def private_clients(plan: Plan, clients: int) -> Set[int]:
    """The clients that train a P_i: those whose gain counts, and those that report."""
    if not plan.alone.private:
        return frozenset()
    counted, reporting = counted_clients(plan, range(clients)), reporting_clients(plan, clients)
    return _Either(counted, reporting, clients) if clients > MANY else frozenset(counted) | reporting


def counted_clients(plan: Plan, clients: Sequence[int]) -> Set[int]:
    """The clients whose local scores and gains count."""
    N = len(clients)
    left_out = attackers_of(plan, N) if plan.scoring.attackers == "left out" else frozenset()
    if isinstance(left_out, Drawn):
        return left_out.others
    return drawn(N, N, plan.seed_for("attackers")) if N > MANY else frozenset(clients) - left_out


def scored_clients(plan: Plan, clients: int) -> Sequence[int]:
    """The clients that are asked for scores: all of them, or the panel of `scoring.panel`, in ascending order.

    The panel is drawn uniformly among all clients, attackers too, once for a run: each of them then trains a P_i once.
    """
    size = plan.scoring.panel or (PANEL if clients > MANY else clients)
    if size >= clients:
        return range(clients)
    return _panel(clients, size, plan.seed_for("scored panel"))


@lru_cache(8)
def _panel(clients: int, size: int, seed: int) -> tuple[int, ...]:
    return tuple(sorted(np.random.default_rng(seed).choice(clients, size, replace=False).tolist()))


def trained_before(plan: Plan, clients: int) -> list[int]:
    """The clients that train P_i before round 1: those that are scored, and of up to MANY clients those that report.

    Every other client trains its P_i when it is first needed.
    """
    private = private_clients(plan, clients)
    scored = {i for i in scored_clients(plan, clients) if i in private}
    return sorted(scored if clients > MANY else scored | (reporting_clients(plan, clients) & private))


@final
@dataclass(frozen=True, eq=False)
class _Either(Set[int]):
    """The union of two sets of the clients 0 to `clients` - 1, without a list."""

    first: Set[int]
    second: Set[int]
    clients: int

    @classmethod
    def _from_iterable(cls, clients: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        return frozenset(clients)  # of a difference, a union or an intersection

    def __contains__(self, client: object) -> bool:
        return client in self.first or client in self.second

    def __iter__(self) -> Iterator[int]:
        return (client for client in range(self.clients) if client in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
