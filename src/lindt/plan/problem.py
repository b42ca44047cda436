"""What a federation learns: the clients' data, a model, a loss and a metric. From a plan, or the user's own.

The plan's seed also decides which clients attack, and with that whose scores count.

The metrics by name are accuracy and macro F1; a user's own function gives one number a sample. A metric travels as a
tally: sums over samples that add up over clients.

Legend: n samples, C classes.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lindt.data.examples import Rows, add_samples, as_examples, pool, split, stratified
from lindt.data.partition import Roles
from lindt.data.sources import SOURCES, Pools
from lindt.environment.participation import choose_attackers
from lindt.errors import PlanError, UserError, require_type
from lindt.plan.plan import Plan
from lindt.protocols import Buffers, Examples, Loss, Metric, Paired
from lindt.registry import Named, component, kinds, register
from lindt.seeds import with_threads
from lindt.weights import float_buffers, parameter_sizes, read_buffers, read_w

OWN_METRIC: Final = "give metric=, a function of outputs and targets with one number a sample, higher is better"


def _hits(name: str, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
    """1 where the largest output is the label's. Other shapes than one label a prediction would be stretched."""
    if y_n.shape != outputs_nC.shape[:-1]:
        raise UserError(
            f"outputs of shape {tuple(outputs_nC.shape)} and targets of shape {tuple(y_n.shape)} are not one class a "
            f"prediction, which {name} compares; {OWN_METRIC}"
        )
    return (outputs_nC.argmax(-1) == y_n).to(torch.float64)


@register(Metric)
@final
@dataclass(frozen=True)
class Accuracy:
    percent = True
    bounded = True

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return _hits("Accuracy", outputs_nC, y_n)

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        hits = self.per_sample(outputs_nC, y_n)
        return torch.stack([hits.sum(), torch.tensor(float(hits.numel()), dtype=torch.float64)])

    def value(self, tally: Tensor) -> float:
        return float(tally[0] / tally[1])


@register(Metric)
@final
@dataclass(frozen=True)
class MacroF1:
    """The mean F1 over the classes that occur in truth or prediction; its tally is the confusion matrix."""

    percent = True
    bounded = True

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return _hits("MacroF1", outputs_nC, y_n)

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        self.per_sample(outputs_nC, y_n)  # refuses other shapes
        classes = outputs_nC.shape[-1]
        cells = y_n * classes + outputs_nC.argmax(-1)
        return torch.bincount(cells.flatten(), minlength=classes * classes).to(torch.float64)

    def value(self, tally: Tensor) -> float:
        confusion = tally.view(math.isqrt(tally.numel()), -1)
        hits, total = confusion.diagonal(), confusion.sum(0) + confusion.sum(1)
        return float((2 * hits / total)[total > 0].mean())


@final
@dataclass(frozen=True)
class MeanOf:
    """A user's own metric: a function that gives one number a sample, higher is better."""

    function: Callable[[Tensor, Tensor], Tensor]
    percent = False
    bounded = False

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        values = self.function(outputs_nC, y_n).to(torch.float64)
        if values.shape != (len(y_n),):
            raise ValueError(
                f"the metric gave shape {tuple(values.shape)} for {len(y_n)} samples; give one number each"
            )
        return values

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        values = self.per_sample(outputs_nC, y_n)
        return torch.stack([values.sum(), torch.tensor(float(len(values)), dtype=torch.float64)])

    def value(self, tally: Tensor) -> float:
        return float(tally[0] / tally[1])


def sample_values(metric: Metric, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
    """One number a sample; where a sample has several predictions, their mean."""
    return metric.per_sample(outputs_nC, y_n).to(torch.float64).reshape(len(y_n), -1).mean(1)


def paired(metric: Metric, first_n: Tensor, second_n: Tensor) -> Paired:
    """Two predictors compared on the same samples, by `sample_values` of each.

    A metric whose values per sample lie in [0, 1] says so by `bounded`. For another the sign of each difference
    counts: the mean is the share of samples won less the share lost.
    """
    d_n = first_n - second_n
    d_n = d_n if getattr(metric, "bounded", False) else d_n.sign()
    return Paired(float(d_n.mean()), float(d_n.square().mean()))


METRICS: Mapping[str, Metric] = Named(lambda: kinds(Metric), lambda kind: component(Metric, kind))


@final
@dataclass(frozen=True)
class InitialWeights:
    """What the server knows of a model: w^0, its buffers, and their names. Legend: P parameters."""

    w_P: torch.Tensor
    buffers: Buffers
    parameters: tuple[tuple[str, int], ...]  # the name and size of each part of w
    float_buffers: tuple[tuple[str, int], ...] = ()  # the name and size of each


@final
@dataclass(frozen=True)
class Problem:
    """`clients` is a (train, test) pair a client: tensors, arrays or map-style datasets.

    `model` builds an untrained nn.Module; `metric` is a Metric, or a function that gives one number a sample.
    """

    clients: Sequence[tuple[object, object]]
    model: Callable[[], nn.Module]
    loss: Loss = cross_entropy
    metric: Metric | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    class_names: tuple[str, ...] = ()
    client_names: tuple[str, ...] = ()  # one each, or none
    data: tuple[tuple[Examples, Examples], ...] = field(init=False, repr=False)
    # The initial weights that were asked for last, by seed and threads.
    _initial: dict[tuple[int, int], InitialWeights] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        require_type("clients", self.clients, Iterable, "give a list of pairs (train, test)")
        if isinstance(self.model, nn.Module) or not callable(self.model):
            name = type(self.model).__name__
            raise UserError(
                f"model: it is of type {name}; give a function that builds a model, such as `lambda: Net()`"
            )
        pairs = tuple(_pair(index, client) for index, client in enumerate(self.clients))
        if len(pairs) < 2:
            raise UserError(f"clients: {len(pairs)} given; a federation has at least 2")
        for index, (train, test) in enumerate(pairs):
            if len(train) < 2 or len(test) < 1:
                raise UserError(
                    f"clients[{index}]: {len(train)} training and {len(test)} test samples; "
                    "give at least 2 and 1, or leave the client out"
                )
        if self.client_names and len(self.client_names) != len(pairs):
            raise UserError(f"client_names: {len(self.client_names)} given; give one for each of {len(pairs)} clients")
        object.__setattr__(self, "data", pairs)

    def metric_for(self, plan: Plan) -> Metric:
        if self.metric is None:
            return METRICS[plan.scoring.metric]
        return self.metric if isinstance(self.metric, Metric) else MeanOf(self.metric)


def _pair(index: int, client: object) -> tuple[Examples, Examples]:
    if not isinstance(client, tuple | list) or len(client) != 2:
        raise UserError(f"clients[{index}]: give a pair (train, test)")
    return as_examples(client[0]), as_examples(client[1])


def first_model(problem: Problem, plan: Plan) -> nn.Module:
    """A new module with w^0: the same for every method, drawn from the plan's seed.

    It calls the user's function, which may take long: for each place that trains. Whoever needs w^0 or its size asks
    `initial_weights`.
    """
    with torch.random.fork_rng(devices=[]), with_threads(plan.threads):
        torch.manual_seed(plan.seed_for("model"))
        return problem.model()


def initial_weights(problem: Problem, plan: Plan, model: nn.Module | None = None) -> InitialWeights:
    """w^0 and its buffers, read once from `model`, an untrained `first_model`, or from one that is built here."""
    key = plan.seed_for("model"), plan.threads
    if key not in problem._initial:
        model = first_model(problem, plan) if model is None else model
        problem._initial.clear()  # one is kept, for the plan at hand
        problem._initial[key] = InitialWeights(
            read_w(model), read_buffers(model), parameter_sizes(model), float_buffers(model)
        )
    return problem._initial[key]


def problem_for(plan: Plan) -> Problem:
    """The plan's own data and model."""
    pools = SOURCES[plan.data.source](plan.data.test_share, plan.seed, plan.data.text)
    try:
        shares = allocate(plan, pools)
    except PlanError as error:
        raise error.within("data" if error.field == "clients" else "data.allocation") from None

    def rows(which: torch.Tensor) -> Rows:
        return Rows(pools.x, pools.y, which, pools.prepare)

    clients = [(rows(pools.train[train]), rows(pools.test[test])) for train, test in shares]
    names: tuple[str, ...] = ()
    if pools.roles is not None and isinstance(plan.data.allocation, Roles):
        names = tuple(pools.role_names[int(pools.roles[train.rows[0]])] for train, _ in clients)
    return Problem(clients, lambda: plan.model.build(pools.classes), class_names=pools.class_names, client_names=names)


def allocate(plan: Plan, pools: Pools) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of each client, among the pool's training and test rows."""
    train_y, test_y = pools.y[pools.train].numpy(), pools.y[pools.test].numpy()
    roles = None if pools.roles is None else (pools.roles[pools.train].numpy(), pools.roles[pools.test].numpy())
    shares = plan.data.allocation.split(train_y, test_y, plan.data.clients, plan.seed, roles)
    return [(torch.as_tensor(share.train), torch.as_tensor(share.test)) for share in shares]


def attackers_of(plan: Plan, clients: int) -> frozenset[int]:
    return choose_attackers(plan.environment.threat.share, clients, plan.seed_for("attackers"))


def validation_samples(samples: int) -> int:
    """|V_i| of a client with so many training samples: three tenths of them up to 30, a tenth where that is more.

    None below 5: such a client reports nothing.
    """
    return 0 if samples < 5 else max(math.ceil(0.1 * samples), min(math.ceil(0.3 * samples), 30))


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


def split_validation(plan: Plan, problem: Problem, client: int) -> tuple[Examples, Examples | None]:
    """A client's training samples, and its validation part V_i, which nothing trains on; None where it has no V_i."""
    train = problem.data[client][0]
    held_out = validation_samples(len(train)) if client in reporting_clients(plan, len(problem.data)) else 0
    if not held_out:
        return train, None
    return split(train, stratified(train.labels, held_out, plan.seed_for("validation", client)))


def backdoor_of(plan: Plan, problem: Problem) -> Examples | None:
    """What the attackers hold in common. Raises a PlanError where the threat does not fit the labels."""
    threat = plan.environment.threat
    if not threat.share:
        return None
    try:
        # The attackers' own copies of others' samples: a V_i is not among them, since w would train on it.
        return threat.pool(pool([split_validation(plan, problem, i)[0] for i in range(len(problem.data))]))
    except PlanError as error:
        raise error.within("environment.threat") from None


def counted_clients(plan: Plan, clients: Sequence[int]) -> frozenset[int]:
    """Whose local scores and gains count."""
    left_out = attackers_of(plan, len(clients)) if plan.scoring.attackers == "left out" else frozenset()
    return frozenset(clients) - left_out


def import_task(name: str) -> Callable[[], object]:
    """The function `package.module:function`, the user's own code: it comes from the command line, never from a plan.

    Importing the module registers the components that it defines. A plan that names one of them is read afterwards.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise UserError(f"--task {name}: write it as package.module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = importlib.import_module(module)
    except (ImportError, SyntaxError, TypeError, ValueError) as error:
        raise UserError(f"--task {name}: {error}; run it from the folder that holds the module") from None
    finally:
        sys.path.pop(0)
    found = getattr(loaded, function, None)
    if not callable(found):
        raise UserError(f"--task {name}: {module} has no function {function}")
    return cast(Callable[[], object], found)


def load_task(name: str) -> Problem:
    """What the function `package.module:function` returns."""
    problem = import_task(name)()
    if not isinstance(problem, Problem):
        raise UserError(f"--task {name}: it returned a {type(problem).__name__}; return a lindt.Problem")
    return problem


def fingerprint(problem: Problem) -> str:
    """A hash of everyone's samples."""
    digest = hashlib.sha256()
    for pair in problem.data:
        for data in pair:
            add_samples(digest, data)
    return digest.hexdigest()
