"""Checks before training: the model runs on the data, the labels fit its outputs, and the method suits the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lindt.client.optimizers import check_optimizer, identity, optimization_of
from lindt.client.private_models import held_out_samples
from lindt.client.training import FEW, name_of, training_step
from lindt.errors import PlanError, UserError, one_line
from lindt.plan.plan import Method, Plan, counted_clients, scored_clients
from lindt.plan.problem import (
    Accuracy,
    MacroF1,
    MeanOf,
    Problem,
    backdoor_of,
    require_classes,
    split_validation,
    steps_differ,
)
from lindt.protocols import Batch, ChecksModel, Context, Examples, Inputs, Metric, tensors_of
from lindt.seeds import isolated_random_state, seeded, with_threads
from lindt.user_code import callable_without_arguments, describe_error
from lindt.weights import first_model, initial_weights, read_w


def keeps_private(plan: Plan, problem: Problem) -> bool:
    """Whether the clients of this plan's method keep a v_i each."""
    return first_private(plan, problem) is not None


def first_private(plan: Plan, problem: Problem) -> nn.Module | None:
    """The first v_i of client 0, built by the plan's method; None where the method has no v_i."""
    model, device = first_model(problem, plan), torch.device("cpu")
    ctx = Context(
        client=0,
        round=1,
        rate=plan.training.rate_at(1),
        max_norm=plan.training.max_norm,
        batch=plan.training.batch,
        train=problem.data[0][0],
        loss=problem.loss,
        penalty=plan.method.penalty,
        received_P=read_w(model),
        generator=torch.Generator().manual_seed(0),
        device=device,
    )
    with seeded(0, device):  # a first v_i may be drawn at random
        return plan.method.adaptation.begin(ctx, model)


def check(plan: Plan, problem: Problem) -> nn.Module:
    """Check the plan against the data: K and N, the weights and the clients, the labels and the threat.

    Returns the untrained model that was built for it.
    """
    if not isinstance(plan.method, Method):
        raise PlanError("method", plan.method, "give a Method, such as lindt.METHODS['lindt-always']")
    N = len(problem.data)
    try:
        plan.environment.participation.wanted(N)
    except PlanError as error:
        raise error.within("environment.participation") from None
    with with_threads(plan.threads):  # more threads would wait for each other on a busy machine
        model = check_model(plan, problem)
    if steps_differ(plan, problem):
        check_optimizer(plan, problem, model)
    backdoor_of(plan, problem)
    weights, counted = plan.scoring.weights, counted_clients(plan, range(N))
    if plan.early_stop.patience and not any(
        split_validation(plan, problem, i)[1] for i in problem.checked if i in counted
    ):
        fix = "no client has a validation part: give clients as (train, validation, test), or set detection = 'gain'"
        raise PlanError("early_stop.patience", plan.early_stop.patience, fix)
    if plan.scoring.weighting == "given" and not weights:
        fix = "weighting is 'given': give one weight for each client, or weights= beside clients="
        raise PlanError("scoring.weights", weights, fix)
    if weights and len(weights) != N:
        raise PlanError("scoring.weights", weights, f"give one weight for each of {N} clients")
    if weights and not any(weights[i] for i in counted):
        raise PlanError("scoring.weights", weights, f"give a weight above 0 to one of the clients {sorted(counted)}")
    if not counted:
        raise PlanError("environment.threat.share", plan.environment.threat.share, "at least one client must be benign")
    if not any(i in counted for i in scored_clients(plan, N)):
        raise PlanError("scoring.panel", plan.scoring.panel, "all clients of the panel attack; give a larger panel")
    return model


def check_model(plan: Plan, problem: Problem) -> nn.Module:
    """A dry run: the model, loss and metric on two samples of each client, before training and before files exist."""
    with _users_code("model: it cannot be built", lambda _error: _model_hint(problem)):
        model, second = first_model(problem, plan), first_model(problem, plan)
    if not isinstance(model, nn.Module):
        raise UserError(f"model: it builds an object of type {type(model).__name__}; build an nn.Module")
    _check_sizes(model)
    _check_second(model, second)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: it has no parameter to train; set requires_grad of at least one parameter")
    model.eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UserError(
                f"model: {name} is {parameter.dtype}; weights are sent as float32, call .float() on the model"
            )
    initial_weights(problem, plan, model)  # stored for later, as the model is built here anyway
    for client in problem.checked:
        for data in problem.data[client]:
            outputs = _dry(plan, problem, model, data, f"client {client}")
    for client in problem.checked if problem.validation else ():
        _dry(plan, problem, model, problem.validation[client], f"client {client}, validation data")
    if plan.environment.threat.share:
        labels = [problem.data[client][0].labels for client in problem.checked]
        wanted = torch.cat([plan.environment.threat.goal(y) for y in labels])
        _check_labels("environment.threat", wanted, outputs, problem.metric_for(plan), least=-1)
    _check_lone_samples(plan, problem, model)
    _check_gradient(plan, problem, model)
    adaptation = plan.method.adaptation
    if isinstance(adaptation, ChecksModel):
        try:
            with torch.no_grad():
                adaptation.fits(model, problem.data[0][0].take(torch.arange(2))[0])
        except PlanError as error:
            raise error.within("method.adaptation") from None
    return model


Part = tuple[str, list[float]]  # names, and some numbers computed from a few samples


def probe(plan: Plan, problem: Problem, model: nn.Module) -> dict[str, Part]:
    """Names and numbers of model, loss and metric, to notice that a task was changed before a run is resumed.

    `model` is untrained. The names of types, parameters and functions have to be the same; the numbers about the same,
    since another machine or version may round differently. "training" is the model in training mode.
    """
    train, metric = problem.data[0][0], problem.metric_for(plan)
    x, y = train.take(torch.arange(min(len(train), plan.training.batch, FEW)))
    with with_threads(plan.threads):
        with torch.no_grad(), seeded(0, x.device):
            outputs = model.eval()(x)
            value, tally = problem.loss(outputs, y), metric.tally(outputs, y)
        trained, *_ = training_step(model, problem.loss, (x, y))
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    weights = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    by = optimization_of(plan, problem) if steps_differ(plan, problem) else None
    own = {} if by is None else {"optimizer": (identity(by, model, train, problem, len(train)), list[float]())}
    return own | {
        "model": (repr((modules, weights)), _some(outputs)),
        "loss": (name_of(problem.loss), _some(value)),
        "metric": (name_of(metric.function if isinstance(metric, MeanOf) else metric), _some(tally)),
        "training": ("", _some(trained)),
    }


def _some(values: Tensor) -> list[float]:
    return [float(value) for value in values.flatten()[:64]]


def _check_sizes(model: nn.Module) -> None:
    """Refuse lazy layers: their weights have no size before the first batch."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise UserError(
                f"model: {name} belongs to a lazy layer and has no size yet; give the sizes (nn.Linear(64, 10) for "
                "nn.LazyLinear(10)), or call the model once on a batch in the function that builds it"
            )


def _check_second(model: nn.Module, second: nn.Module) -> None:
    """Check that two calls of the user's function give two separate models with the same weights.

    Otherwise a second run, and each client's private model, would start from trained weights.
    """
    if second is model:
        raise UserError("model: it returns the same module at every call; build a new one each time")
    found, others = (
        dict(chain(one.named_parameters(), one.named_buffers())) for one in (model, second)
    )  # a tied weight is listed once, under its first name
    places = {tensor.untyped_storage().data_ptr() for tensor in others.values() if tensor.numel()}
    for name, tensor in found.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() in places:
            raise UserError(f"model: two calls return modules that share {name}; build a new one each time")
    for name in found | others:
        if name not in found or name not in others or not _same(found[name], others[name]):
            raise UserError(
                f"model: two calls with the same seed differ at {name}; draw the weights with torch's generator, "
                "which the plan's seed sets, or from a fixed seed"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are bitwise equal: NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


@torch.no_grad()
def _check_lone_samples(plan: Plan, problem: Problem, model: nn.Module) -> None:
    """Refuse batches of one sample where the model cannot train on them, as with BatchNorm."""
    sizes = {i: len(problem.data[i][0]) for i in problem.checked} if plan.alone.private else {}
    small = [client for client, size in sizes.items() if size - held_out_samples(plan, size) == 1]
    if plan.training.batch > 1 and not small:
        return
    client = 0 if plan.training.batch == 1 else small[0]
    train = problem.data[client][0]
    model = copy.deepcopy(model).train()  # a forward pass changes BatchNorm's statistics
    try:
        with seeded(0, torch.device("cpu")):
            model(train.take(torch.arange(1))[0])
    except ValueError as error:
        why = f"the model cannot train on a batch of 1 sample ({one_line(str(error))})"
        if plan.training.batch == 1:
            raise PlanError("training.batch", 1, f"{why}; give 2 or more, or a model without BatchNorm") from None
        raise UserError(
            f"client {client}: {why}, and only 1 of its {len(train)} samples is left to train its private model, the "
            "others are held out; give the client more samples, or set alone.private = false"
        ) from None


def _check_gradient(plan: Plan, problem: Problem, model: nn.Module) -> None:
    """Refuse a model or a loss that has no gradient in training mode: the first step would fail.

    One of up to four clients needs a gradient, since the first batch of a client may have none by chance.
    """
    reached, outputs = False, None
    for client in problem.checked[:4]:
        train, tried = problem.data[client][0], copy.deepcopy(model).train()  # a forward pass changes BatchNorm
        failed, device = f"client {client}: a training step on its samples fails", torch.device("cpu")
        with _users_code(failed), _broadcasting(), torch.enable_grad(), isolated_random_state(0, device):
            x, y = train.take(torch.arange(min(len(train), plan.training.batch, FEW)))
            outputs = tried(x)
            reached = problem.loss(outputs, y).requires_grad
        if reached:
            return
    if isinstance(outputs, Tensor) and not outputs.requires_grad:
        raise UserError(
            "model: a training step changes no weight, as the outputs have no gradient; compute them from the weights, "
            "without torch.no_grad() and .detach()"
        )
    raise UserError(
        "loss: a training step changes no weight, as the loss has no gradient; compute it from the outputs, without "
        "torch.no_grad() and .detach()"
    )


@torch.no_grad()
def _dry(plan: Plan, problem: Problem, model: nn.Module, data: Examples, owner: str) -> Tensor:
    """The model's outputs for two samples of `owner`, such as client 0; loss and metric are called on them, too.

    More samples are taken where 2 is also a size of outputs or targets: a loss that needs both of one shape takes
    outputs (2, 2) and labels (2,), but no other number of labels.
    """
    metric, n = problem.metric_for(plan), min(2, len(data))
    outputs, y = _outputs(problem, model, data, n, owner)
    sizes = {*outputs.shape[1:], *y.shape[1:]}
    if n in sizes and (more := next(other for other in count(3) if other not in sizes)) <= len(data):
        outputs, y = _outputs(problem, model, data, more, owner)
    require_classes(metric, owner, outputs, y)
    shapes = f"outputs of shape {_shape(outputs)} and targets of shape {_shape(y)}"
    with _users_code(f"{owner}: its labels cannot be read"):
        labels = data.labels
    _check_labels(owner, labels, outputs, metric)
    names, highest = problem.class_names, -1 if labels.is_floating_point() or not labels.numel() else int(labels.max())
    if names and highest >= len(names):
        raise UserError(
            f"class_names: it has {len(names)}, but {owner} has the label {highest}; give one name for each class, "
            "from that of class 0 on"
        )
    with _broadcasting():
        with _users_code(f"{owner}: the loss does not take {shapes}"):
            value = problem.loss(outputs, y)
            if not isinstance(value, Tensor):
                raise UserError(f"the loss is a {type(value).__name__}; return a tensor, without .item() or float()")
            if value.numel() != 1:
                raise UserError("the loss is not one number; return the mean over the samples")
        with _users_code(f"{owner}: the metric does not take {shapes}"):
            metric.value(metric.tally(outputs, y))
    return outputs


def _outputs(problem: Problem, model: nn.Module, data: Examples, n: int, owner: str) -> Batch:
    """The model's outputs for the first n samples, and their targets."""
    with _users_code(f"{owner}: its samples cannot be read"):
        x, y = data.take(torch.arange(n))
    with _users_code(
        f"{owner}: the model does not take inputs of shape {_shape(x)}", lambda error: _input_hint(problem, x, error)
    ):
        outputs: Tensor = model(x)
    if not isinstance(outputs, Tensor):
        raise UserError(f"{owner}: the model returns an object of type {type(outputs).__name__}; return one tensor")
    return outputs, y


@contextmanager
def _broadcasting() -> Iterator[None]:
    """Without the warning of torch's losses that outputs and targets broadcast, which preflight refuses."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using a target size")
        yield


@contextmanager
def _users_code(what: str, hint: Callable[[Exception], str] = lambda _error: "") -> Iterator[None]:
    """A block that calls the user's model, loss, metric or data set. An exception becomes the cause of a UserError.

    A UserError keeps its text; only the client is put before it.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{what.partition(':')[0]}: {error}") from error.__cause__
    except Exception as error:
        raise UserError(f"{what} ({describe_error(error)}){hint(error)}") from error


def _model_hint(problem: Problem) -> str:
    """What to change in a function that does not build a model."""
    called = callable_without_arguments(problem.model)
    return "" if called else "; give a function without arguments, such as `lambda: Net(...)`"


def _input_hint(problem: Problem, x: Tensor, error: Exception) -> str:
    """What to change in inputs that the model does not take; empty where nothing is known."""
    given: object = x  # of several inputs it is no tensor (data/inputs.py)
    if isinstance(given, Inputs) and isinstance(error, TypeError):
        names = [f"x{name + 1}" if isinstance(name, int) else name for name in given.values]
        return f"; the inputs of a sample are {', '.join(names)}: leave out fields that the model does not take"
    dtype = next((one.dtype for one in tensors_of(x) if one.dtype != torch.float32), None)
    first = problem.data[0][0].take(torch.arange(len(tensors_of(x)[0])))[0]
    if dtype is None:
        same = _shape(first) == _shape(x)
        return "" if same else f"; those of client 0 have shape {_shape(first)}: give all clients one shape"
    kind = str(dtype).removeprefix("torch.")
    tokens = " unless they are tokens" if dtype in (torch.int32, torch.int64) else ""
    return f"; its inputs are {kind} and the model's weights float32: give x.float(){tokens}"


def _shape(value: Tensor) -> str:
    """A shape as text, such as (2, 3); the shape of each where there are several inputs."""
    return " and ".join(str(tuple(one.shape)) for one in tensors_of(value))


def _check_labels(owner: str, y: Tensor, outputs: Tensor, metric: Metric | None = None, least: int = 0) -> None:
    """Check that classes are 0 to C - 1. Float targets (regression) and models with one output are not checked."""
    if y.is_floating_point() or outputs.dim() != 2 or not y.numel():
        return
    if outputs.shape[1] == 1 and not isinstance(metric, Accuracy | MacroF1):
        return
    low, high = int(y.min()), int(y.max())
    if low < least or high >= outputs.shape[1]:
        raise UserError(
            f"{owner}: labels from {low} to {high}, but the model has outputs for 0 to {outputs.shape[1] - 1}; number "
            "the classes from 0, or give the model an output for each"
        )
