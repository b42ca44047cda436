"""The problem of a federation: the clients' data, a model, a loss and a metric. From a plan, or the user's own.

The metrics by name are accuracy and macro F1; a user's own function returns one number per sample. Clients send a
metric as a tally: sums over samples, which the server adds over clients.

Legend: n samples, C classes.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from lindt.data.clients import LazyClients, Made, VisitedData, VisitedValidation
from lindt.data.examples import Collated, Rows, add_samples, as_examples, pool, split, stratified
from lindt.data.inputs import of_pandas, take_inputs
from lindt.data.partition import Roles
from lindt.data.sources import SOURCES, Crowd, Pools
from lindt.errors import PlanError, UserError, in_short, require_type
from lindt.plan.metrics import METRICS as METRICS
from lindt.plan.metrics import Accuracy as Accuracy
from lindt.plan.metrics import MacroF1 as MacroF1
from lindt.plan.metrics import MeanOf as MeanOf
from lindt.plan.metrics import as_metric as as_metric
from lindt.plan.metrics import paired as paired
from lindt.plan.metrics import require_classes as require_classes
from lindt.plan.metrics import sample_values as sample_values
from lindt.plan.plan import Data, Plan, Training, reporting_clients
from lindt.protocols import ChoosesOnValidation, Examples, Loss, Metric, Optimizer, Schedule, has_several
from lindt.registry import kind_of
from lindt.seeds import isolated_random_state
from lindt.user_code import describe_error, user_frames
from lindt.weights import InitialWeights

_importing: Final[ContextVar[str]] = ContextVar("importing", default="")  # the task whose module is being imported


@final
@dataclass(frozen=True)
class Problem:
    """The problem of a federation: the clients' data, a model, a loss, a metric, and the clients' optimizer.

    `lindt run --task package.module:function` takes a function that returns one.

    Raises:
        UserError: There are fewer than 2 clients, a client has too few samples, or `model` is not a function.

    Examples:
        >>> import lindt, torch
        >>> from torch import nn
        >>> x, y = torch.randn(20, 4), torch.randint(2, (20,))
        >>> pair = ((x[:10], y[:10]), (x[10:], y[10:]))
        >>> problem = lindt.Problem([pair, pair, pair], lambda: nn.Linear(4, 2), class_names=("cat", "dog"))
        >>> len(problem.data), len(problem.data[0][0])
        (3, 10)
    """

    # For each client a pair (train, test), or (train, validation, test): tensors, arrays, map-style datasets or
    # DataLoaders (data/inputs.py). A given validation part is V_i; then the plan holds out no samples for it.
    # `LazyClients` are made when they are visited.
    clients: Sequence[Sequence[object]]
    model: Callable[[], nn.Module]  # builds an untrained model
    loss: Loss = cross_entropy  # of outputs and targets
    # A Metric, or a function of outputs and targets that returns one number per sample; None for the plan's.
    metric: Metric | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    class_names: tuple[str, ...] = ()  # for pages and tables: one for each class, or empty
    client_names: tuple[str, ...] = ()  # one for each client, no two the same, or empty
    # `optimizer(parameters)` builds the optimizer of the clients' steps; None for the plan's training.optimizer.
    optimizer: Optimizer | None = None
    # `schedule(optimizer)` builds an LRScheduler that changes its rate after each step of a round; the plan's `decay`
    # lowers the rate from round to round, too.
    schedule: Schedule | None = None
    accumulate: int | None = None  # the number of batches per step; None for the plan's training.accumulate
    weights: Sequence[float] = ()  # alpha_i of Eq. 3, one for each client, as scoring.weights of a plan
    # The clients' samples, as training reads them.
    data: Sequence[tuple[Examples, Examples]] = field(init=False, repr=False)
    validation: Sequence[Examples] = field(init=False, repr=False)  # one for each client, or empty
    batch: int | None = field(init=False, repr=False)  # the batch size of the DataLoaders; None without DataLoaders
    # The last computed initial weights, by seed and threads.
    _initial: dict[tuple[int, int], InitialWeights] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        require_type("clients", self.clients, Iterable, "give a list of pairs (train, test)")
        if isinstance(self.clients, Mapping):
            raise UserError("clients: it is a dict; give a list of its values, and its keys as client_names")
        if isinstance(self.model, nn.Module) or not callable(self.model):
            name = type(self.model).__name__
            raise UserError(
                f"model: it is of type {name}; give a function that builds a new model at each call, such as "
                f"`lambda: Net()`"
            )
        if isinstance(self.clients, LazyClients):
            self._read_when_visited(self.clients)
        else:
            self._read_all()
        N = len(self.data)
        for field_name in ("client_names", "class_names"):
            _require_texts(field_name, getattr(self, field_name))
        if self.client_names and len(self.client_names) != N:
            raise UserError(f"client_names: it has {len(self.client_names)}; give one for each of {N} clients")
        name, times = Counter(self.client_names).most_common(1)[0] if self.client_names else ("", 1)
        if times > 1:
            raise UserError(f"client_names: {times} clients are named {in_short(name)}; give each client its own name")
        self._check_scoring()
        self._check_training()

    def _read_all(self) -> None:
        parts = [_parts(index, client) for index, client in enumerate(self.clients)]
        if len(parts) < 2:
            raise UserError(f"clients: there {'is' if len(parts) == 1 else 'are'} {len(parts)}; give at least 2")
        for index, own in enumerate(parts):
            _check_sizes(index, own)
        validation = tuple(own[1] for own in parts if len(own) == 3)
        if validation and len(validation) != len(parts):
            raise UserError(
                f"clients: {len(validation)} of {len(parts)} have a validation part; give one to all, or to none"
            )
        object.__setattr__(self, "data", tuple((own[0], own[-1]) for own in parts))
        object.__setattr__(self, "validation", validation)
        object.__setattr__(self, "batch", _batch_size(self.clients))

    def _read_when_visited(self, clients: LazyClients) -> None:
        def read(client: int) -> Made:
            given = clients[client]
            with isolated_random_state(0, torch.device("cpu")):  # a dataset that draws numbers is read here
                parts = _parts(client, given)
            _check_sizes(client, parts)
            return Made(tuple(parts), _batch_size([given]))

        data = VisitedData(len(clients), read)
        first = data.made(0)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "validation", VisitedValidation(data) if len(first.parts) == 3 else ())
        object.__setattr__(self, "batch", first.batch)

    @property
    def checked(self) -> Sequence[int]:
        """The clients that are read before training: all of them; of `LazyClients` some, drawn at random."""
        return self.data.checked if isinstance(self.data, VisitedData) else range(len(self.data))

    def _check_scoring(self) -> None:
        for name, given in (("loss", self.loss), ("metric", self.metric)):
            if isinstance(given, type):
                prefix = "nn." if given.__module__.startswith("torch.nn.") else ""
                called = f"{prefix}{given.__name__}"
                raise UserError(f"{name}: it is the class {called}; give an instance, {called}()")
        if not callable(self.loss):
            raise UserError(f"loss: it is of type {type(self.loss).__name__}; give a function of outputs and targets")
        if isinstance(self.metric, str):
            raise UserError(
                f"metric: it is a text, {in_short(self.metric)}; set a metric by name in the plan, "
                f'overrides={{"scoring.metric": ...}} with one of {", ".join(METRICS)}'
            )
        if self.metric is not None:
            as_metric(self.metric)

    def _check_training(self) -> None:
        if isinstance(self.optimizer, torch.optim.Optimizer) or not (
            self.optimizer is None or callable(self.optimizer)
        ):
            raise UserError(
                f"optimizer: it is of type {type(self.optimizer).__name__}; give a function that builds one for the "
                "parameters of each client's model, such as `lambda params: torch.optim.AdamW(params, lr=1e-3)`"
            )
        if self.schedule is not None and not callable(self.schedule):
            raise UserError(
                f"schedule: it is of type {type(self.schedule).__name__}; give a function that builds one for an "
                "optimizer, such as `lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)`"
            )
        if self.accumulate is not None and (type(self.accumulate) is not int or self.accumulate < 1):
            raise UserError(f"accumulate: it is {self.accumulate!r}; give the number of batches per step, 1 or more")
        try:
            weights = tuple(float(weight) for weight in self.weights)
        except (TypeError, ValueError):
            raise UserError(f"weights: it is {in_short(self.weights)}; give one number for each client") from None
        object.__setattr__(self, "weights", weights)

    def build(self) -> nn.Module:
        """An untrained model, built by `model`. It takes several inputs where the samples have several."""
        model = self.model()
        pairs = (self.data[i] for i in self.checked)
        structured = any(isinstance(part, Collated) or has_several(getattr(part, "x", None)) for part, _ in pairs)
        return take_inputs(model) if structured and isinstance(model, nn.Module) else model

    def metric_for(self, plan: Plan) -> Metric:
        if self.metric is None:
            return METRICS[plan.scoring.metric]
        return as_metric(self.metric)


def steps_differ(plan: Plan, problem: Problem) -> bool:
    """Whether the clients' steps differ from plain SGD with one step per batch."""
    own = problem.optimizer is not None or problem.schedule is not None or problem.accumulate not in (None, 1)
    return own or not plan.training.optimizer.plain or plan.training.accumulate != 1


def settled(plan: Plan, problem: Problem) -> Plan:
    """The plan with the settings of the problem: the weights of clients, and the batch size of DataLoaders."""
    if problem.batch is not None:
        training = replace(plan.training, batch=problem.batch)
        if plan.training not in (training, replace(plan.training, batch=Training().batch)):
            fix = f"the DataLoaders have batch_size = {problem.batch}; give both the same value"
            raise PlanError("training.batch", plan.training.batch, fix)
        plan = replace(plan, training=training)
    if problem.weights:
        scoring = replace(plan.scoring, weighting="given", weights=tuple(problem.weights))
        if plan.scoring not in (scoring, replace(scoring, weights=()), replace(scoring, weighting="equal", weights=())):
            fix = "the problem has weights of its own; leave out one of the two"
            raise PlanError("scoring.weighting", plan.scoring.weighting, fix)
        plan = replace(plan, scoring=scoring)
    return plan


def _parts(index: int, client: object) -> list[Examples]:
    if not isinstance(client, tuple | list) or len(client) not in (2, 3):
        size = f" with {len(client)} parts" if isinstance(client, tuple | list) else ""
        parts = 'client["train"], client["test"]' if isinstance(client, Mapping) else "train, test"
        raise UserError(
            f"clients[{index}]: it is of type {type(client).__name__}{size}; give a pair ({parts}), or a triple "
            "(train, validation, test)"
        )
    if len(client) == 2 and _is_one_part(*client):
        raise UserError(
            f"clients[{index}]: it looks like one (x, y) without test data; give a pair (train, test), each of them "
            "(x, y)"
        )
    names = ("training data", "validation data", "test data") if len(client) == 3 else ("training data", "test data")
    return [_examples(f"clients[{index}], {name}", part) for name, part in zip(names, client, strict=True)]


def _check_sizes(index: int, parts: Sequence[Examples]) -> None:
    train, test = parts[0], parts[-1]
    if len(train) < 2 or len(test) < 1:
        raise UserError(
            f"clients[{index}]: it has {len(train)} training and {len(test)} test samples; "
            "give at least 2 and 1, or leave the client out"
        )
    if len(parts) == 3 and not len(parts[1]):
        raise UserError(f"clients[{index}]: its validation part is empty; give at least 1 sample")


def _require_texts(field_name: str, names: object) -> None:
    """Refuse names that are no texts: `run.predict(3, x)` takes a number for a client's index, not for its name."""
    require_type(field_name, names, list | tuple, "give a list of texts")
    for name in names if isinstance(names, list | tuple) else ():
        if not isinstance(name, str):
            raise UserError(f"{field_name}: {in_short(name)} is of type {type(name).__name__}; give texts")


def _is_one_part(first: object, second: object) -> bool:
    """Whether these are inputs and labels of one part: training and test data cannot be bare arrays."""
    if isinstance(second, Tensor | np.ndarray):
        return isinstance(first, Tensor | np.ndarray) or second.ndim < 2
    if getattr(second, "ndim", 2) < 2 and of_pandas(second):
        return True
    labels = isinstance(second, list) and all(isinstance(one, int | float | str) for one in second)
    return labels and isinstance(first, Tensor | np.ndarray)


def _examples(where: str, data: object) -> Examples:
    try:
        return as_examples(data)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _batch_size(clients: Sequence[Sequence[object]]) -> int | None:
    loaders = [client[0] for client in clients if isinstance(client[0], DataLoader)]
    sizes = {loader.batch_size for loader in loaders if loader.batch_size is not None}
    if len(sizes) > 1:
        raise UserError(
            f"clients: the DataLoaders for training have batch_size {', '.join(map(str, sorted(sizes)))}; "
            "give all the same batch_size"
        )
    return next(iter(sizes), None)


def problem_for(plan: Plan) -> Problem:
    """The plan's own data and model."""
    pools = SOURCES[plan.data.source](plan.data.test_share, plan.seed, plan.data.text)
    if isinstance(pools, Crowd):
        return _problem_of_crowd(plan, pools)
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


def _problem_of_crowd(plan: Plan, crowd: Crowd) -> Problem:
    if plan.data.allocation != Data().allocation:
        fix = f"the source {plan.data.source} makes each client's data itself; leave data.allocation out"
        raise PlanError("data.allocation", kind_of(plan.data.allocation), fix)
    clients = LazyClients(plan.data.clients, crowd.make)
    return Problem(clients, lambda: plan.model.build(crowd.classes), class_names=crowd.class_names)


def allocate(plan: Plan, pools: Pools) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The rows of each client, among the pool's training and test rows."""
    train_y, test_y = pools.y[pools.train].numpy(), pools.y[pools.test].numpy()
    roles = None if pools.roles is None else (pools.roles[pools.train].numpy(), pools.roles[pools.test].numpy())
    shares = plan.data.allocation.split(train_y, test_y, plan.data.clients, plan.seed, roles)
    return [(torch.as_tensor(share.train), torch.as_tensor(share.test)) for share in shares]


def validation_samples(samples: int) -> int:
    """|V_i| of a client with `samples` training samples: three tenths of them up to 30, or a tenth where that is more.

    0 below 5 samples: such a client reports no gains.
    """
    return 0 if samples < 5 else max(math.ceil(0.1 * samples), min(math.ceil(0.3 * samples), 30))


def split_validation(plan: Plan, problem: Problem, client: int) -> tuple[Examples, Examples | None]:
    """A client's training samples, and its validation part V_i, which is not trained on; None where it has no V_i."""
    train = problem.data[client][0]
    if problem.validation:
        return train, problem.validation[client]
    reports = client in reporting_clients(plan, len(problem.data))
    chooses = plan.detection.reports and isinstance(
        plan.method.adaptation, ChoosesOnValidation
    )  # outside the panel too
    held_out = validation_samples(len(train)) if reports or chooses else 0
    if not held_out:
        return train, None
    return split(train, stratified(train.labels, held_out, plan.seed_for("validation", client)))


def backdoor_of(plan: Plan, problem: Problem) -> Examples | None:
    """The backdoor samples of the attackers. Raises a PlanError where the threat does not fit the labels."""
    threat = plan.environment.threat
    if not threat.share:
        return None
    if threat.per_batch and has_several(problem.data[0][0].take(torch.arange(1))[0]):
        fix = "this attack needs samples with one input, and these have several; set threat = 'no_threat'"
        raise PlanError("environment.threat", kind_of(threat), fix)
    try:
        # Attackers get copies of other clients' samples, but not of a V_i, since w would train on it.
        return threat.pool(pool([split_validation(plan, problem, i)[0] for i in problem.checked]))
    except PlanError as error:
        raise error.within("environment.threat") from None


def import_task(name: str) -> Callable[[], object]:
    """The function `package.module:function` of the user's code. Its name comes from the command line, not from a plan.

    Importing the module registers the components that it defines. So a plan that names one of them is read afterwards.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function:
        raise UserError(f"task {name}: write it as package.module:function")
    if any(sign in module for sign in "/\\") or module.endswith(".py"):
        dotted = module.removesuffix(".py").replace("\\", "/").removeprefix("./").strip("/").replace("/", ".")
        raise UserError(f"task {name}: {module} is the path of a file; write the module, {dotted}:{function}")
    if module == "__main__":
        raise UserError(
            f"task {name}: only this process has this __main__; name the module of a file, or give the lindt.Problem "
            "as problem="
        )
    sys.path.insert(0, str(Path.cwd()))
    importing = _importing.set(name)
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if user_frames(error):
            raise UserError(f"task {name}: {module} cannot be imported ({describe_error(error)})") from error
        raise UserError(f"task {name}: {error}; run it from the folder that holds the module") from error
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task {name}: {module} cannot be imported ({describe_error(error)})") from error
    finally:
        _importing.reset(importing)
        sys.path.pop(0)
    found = getattr(loaded, function, None)
    if not callable(found):
        raise UserError(f"task {name}: {module} has no function {function}")
    return cast(Callable[[], object], found)


def require_no_import() -> None:
    """Refuse to play a run while the module of a task is imported: each worker imports it, and would play a run."""
    if name := _importing.get():
        raise UserError(
            f"task {name}: its module plays a run when it is imported, as each worker process does; put that call "
            'under `if __name__ == "__main__":`, or write the function into a module of its own'
        )


def load_task(name: str) -> Problem:
    """The Problem that the function `package.module:function` returns."""
    function = import_task(name)
    try:
        problem = function()
    except (UserError, OSError):
        raise  # its text is for the user already
    except Exception as error:
        raise UserError(f"task {name}: it failed ({describe_error(error)})") from error
    if not isinstance(problem, Problem):
        raise UserError(f"task {name}: it returned an object of type {type(problem).__name__}; return a lindt.Problem")
    return problem


def fingerprint(problem: Problem) -> str:
    """A hash of all clients' samples; of lazy clients those of the checked ones, and N."""
    digest = hashlib.sha256()
    if len(problem.checked) < len(problem.data):
        digest.update(f"{len(problem.data)} clients".encode())
    for client in problem.checked:
        for data in problem.data[client]:
            add_samples(digest, data)
    for client in problem.checked if problem.validation else ():
        add_samples(digest, problem.validation[client])
    return digest.hexdigest()
