"""A plan: everything that decides a run's numbers, as frozen, checked values.

Its method is a composition of an adaptation, an aggregator, a penalty and a recovery. There is no class per method.
Named methods register where their components are defined (`registry.register_method`). METHODS holds all of them.

The plan also decides, by its seed, each client's part: who attacks, who reports, whose scores count.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

import torch

from lindt.data.partition import Classes, Partition
from lindt.data.sources import SOURCES, Text
from lindt.environment import Environment
from lindt.environment.participation import choose_attackers
from lindt.errors import require
from lindt.plan.models import Model, SmallCnn
from lindt.protocols import Adaptation, Aggregator, Detection, Metric, Penalty, Recovery
from lindt.registry import Named, build, component, is_protocol, kind_of, kinds, method_tables
from lindt.seeds import seed_for


@final
@dataclass(frozen=True)
class Method:
    """What the clients learn for themselves, how the server joins it, and when recovery runs.

    `after_stop` is how clients predict once recovery has stopped: with what they learned, frozen ("adapted"),
    or with the global model alone.
    """

    adaptation: Adaptation = field(default_factory=lambda: component(Adaptation, "global_only"))
    aggregator: Aggregator = field(default_factory=lambda: component(Aggregator, "mean"))
    penalty: Penalty = field(default_factory=lambda: component(Penalty, "no_penalty"))
    recovery: Recovery = field(default_factory=lambda: component(Recovery, "always"))
    after_stop: Literal["adapted", "global"] = "adapted"

    @property
    def keeps_adapted(self) -> bool:
        """Whether clients predict with what they learned, once recovery has stopped.

        A recovery that follows reports stops because that was shown worse than w: then they predict with w.
        """
        return self.after_stop == "adapted" and not getattr(self.recovery, "needs_reports", False)


# The order of the paper's main table; other methods follow by name.
METHOD_ORDER: Final = (
    "fedavg",
    "fedprox",
    "trimmed-mean",
    "fb",
    "apfl",
    "lindt",
    "lindt-tm",
    "lindt-before",
    "runtime",
    "watch",
    "fine-tune",
    "guarded",
    "guarded-fine-tune",
    "ditto",
    "fl-guard",
    "fedper",
    "fedrep",
    "fedbabu",
    "fedala",
)


def _method_names() -> list[str]:
    for part in typing.get_type_hints(Method).values():
        if is_protocol(part):
            kinds(part)  # imports the components, which register the methods that they stand in
    rank = {name: place for place, name in enumerate(METHOD_ORDER)}
    return sorted(method_tables(), key=lambda name: (rank.get(name, len(rank)), name))


def _method(name: str) -> Method:
    method: Method = build(Method, method_tables()[name], "")
    return method


METHODS: Mapping[str, Method] = Named(_method_names, _method)


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
        require(self.clients >= 2, "clients", self.clients, "a federation has at least 2 clients")
        require(0 < self.test_share < 1, "test_share", self.test_share, "a share between 0 and 1")


@final
@dataclass(frozen=True)
class Training:
    """Table 9: what a client does in a round."""

    rate: float = 0.1  # eta
    decay: float = 0.992  # of the rate, a round
    epochs: int = 1  # E
    batch: int = 10  # B
    max_norm: float = 5.0  # of a gradient

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1e6, "rate", self.rate, "the learning rate must be above 0, and not absurd")
        require(0 < self.decay <= 1, "decay", self.decay, "the rate's factor a round lies in (0, 1]")
        require(self.epochs >= 1, "epochs", self.epochs, "train for at least 1 epoch")
        require(self.batch >= 1, "batch", self.batch, "a batch has at least 1 sample")
        require(self.max_norm > 0, "max_norm", self.max_norm, "the gradient's bound must be above 0")

    def rate_at(self, round: int) -> float:
        return float(self.rate * self.decay ** (round - 1))


@final
@dataclass(frozen=True)
class Alone:
    """The references: a private model P_i per client, trained on D_i only, by one rule for every allocation.

    Same model, optimiser and decay (an epoch counts as a round). The number of epochs is chosen on `held_out` of
    the TRAINING data: the latest that scores best there, given up after `patience` epochs below the best. (By the
    lowest loss instead, a client that holds out three samples stops far too early.) With `refit` the model is
    then trained on all of D_i for that long, as the federation uses all of it too; `stretch` times that long, to
    see how much hangs on the rule.
    """

    private: bool = True
    epochs: int = 100  # at most
    patience: int = 20
    held_out: float = 0.1
    refit: bool = True
    stretch: float = field(
        default=1.0, repr=False
    )  # of the chosen epochs; client/private_models.py's key counts it apart

    def __post_init__(self) -> None:
        require(self.epochs >= 1, "epochs", self.epochs, "train for at least 1 epoch")
        require(self.patience >= 1, "patience", self.patience, "wait for at least 1 epoch")
        require(0 < self.held_out < 1, "held_out", self.held_out, "a share between 0 and 1")
        require(0 < self.stretch <= 100, "stretch", self.stretch, "the factor on the chosen epochs is above 0, to 100")
        require(self.refit or self.stretch == 1, "stretch", self.stretch, "stretches the refit; set refit = true")


@final
@dataclass(frozen=True)
class Scoring:
    """Which rounds are scored and how: every `every`-th, and each of the `last`."""

    every: int = 10
    last: int = 10
    metric: str = "accuracy"
    weighting: Weighting = "equal"  # alpha_i of Eq. 3
    weights: tuple[float, ...] = ()  # where weighting is "given", one a client
    attackers: Literal["left out", "counted"] = "left out"  # of local scores and beta

    def __post_init__(self) -> None:
        require(self.every >= 1, "every", self.every, "score every 1st round or less often")
        require(self.last >= 1, "last", self.last, "the result is the mean of at least 1 last round")
        metrics = kinds(Metric)
        require(self.metric in metrics, "metric", self.metric, f"choose among {sorted(metrics)}")
        given = self.weighting == "given"
        require(given == bool(self.weights), "weights", self.weights, "go with weighting = 'given', one a client")
        require(all(a >= 0 for a in self.weights), "weights", self.weights, "must be 0 or more")
        require(not given or sum(self.weights) > 0, "weights", self.weights, "cannot all be 0")


@final
@dataclass(frozen=True)
class Plan:
    name: str = "digits-nfl"
    seed: int = 0
    rounds: int = 80
    threads: int = 1  # of a worker; part of the plan, as sums in another order have other last bits
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=SmallCnn)
    training: Training = field(default_factory=Training)
    environment: Environment = field(default_factory=Environment)
    method: Method = field(default_factory=Method)
    alone: Alone = field(default_factory=Alone)
    scoring: Scoring = field(default_factory=Scoring)
    detection: Detection = field(default_factory=lambda: component(Detection, "delta"))

    def __post_init__(self) -> None:
        word = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", self.name)
        require(word is not None, "name", self.name, "a word of letters, digits, '.', '_', '-' that can name a folder")
        require(self.seed >= 0, "seed", self.seed, "0 or more")
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1 round")
        require(1 <= self.threads <= 1024, "threads", self.threads, "1 to 1024 threads")
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


def attackers_of(plan: Plan, clients: int) -> frozenset[int]:
    return choose_attackers(plan.environment.threat.share, clients, plan.seed_for("attackers"))


def reporting_clients(plan: Plan, clients: int) -> frozenset[int]:
    """The clients that hold out a V_i and train a P_i to report gains: the panel. Attackers are in it, too."""
    if not plan.detection.reports:
        return frozenset()
    share = getattr(plan.detection, "panel", 1.0)
    if share == 1:
        return frozenset(range(clients))
    order = torch.randperm(clients, generator=torch.Generator().manual_seed(plan.seed_for("panel")))
    return frozenset(order[: max(1, round(share * clients))].tolist())


def private_clients(plan: Plan, clients: int) -> frozenset[int]:
    """The clients that train a P_i: those whose gain counts, and those that report."""
    if not plan.alone.private:
        return frozenset()
    return counted_clients(plan, range(clients)) | reporting_clients(plan, clients)


def counted_clients(plan: Plan, clients: Sequence[int]) -> frozenset[int]:
    """Whose local scores and gains count."""
    left_out = attackers_of(plan, len(clients)) if plan.scoring.attackers == "left out" else frozenset()
    return frozenset(clients) - left_out
