"""What a federation learns: the clients' data, a model, a loss and a metric. From a plan, or the user's own.

The plan's seed also decides which clients attack, and with that whose scores count.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lindt.data.examples import Rows, add_samples, as_examples, pool
from lindt.data.partition import Roles
from lindt.data.sources import SOURCES, Pools
from lindt.environment.participation import choose_attackers
from lindt.errors import PlanError, UserError, require_type
from lindt.plan.metrics import METRICS, MeanOf
from lindt.plan.plan import Plan
from lindt.protocols import Buffers, Examples, Loss, Metric
from lindt.resources import with_threads
from lindt.weights import read_buffers, read_w


@final
@dataclass(frozen=True)
class InitialWeights:
    """What the server knows of a model: w^0 and its buffers. Legend: P parameters."""

    w_P: torch.Tensor
    buffers: Buffers

    @property
    def float_buffers(self) -> bool:
        return self.buffers.floats_F.numel() > 0


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
        problem._initial[key] = InitialWeights(read_w(model), read_buffers(model))
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


def backdoor_of(plan: Plan, problem: Problem) -> Examples | None:
    """What the attackers hold in common. Raises a PlanError where the threat does not fit the labels."""
    threat = plan.environment.threat
    if not threat.share:
        return None
    try:
        return threat.pool(pool([train for train, _ in problem.data]))
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
