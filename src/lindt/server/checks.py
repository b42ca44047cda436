"""Checks before anything trains: does the model run on the data, do the labels fit, does the method suit the model?"""

from __future__ import annotations

import copy
from itertools import chain

import torch
from torch import Tensor, nn

from lindt.client.private_models import held_out_samples
from lindt.client.training import FEW, name_of, training_step
from lindt.errors import PlanError, UserError, one_line
from lindt.plan.plan import Method, Plan, counted_clients
from lindt.plan.problem import OWN_METRIC, Accuracy, MacroF1, MeanOf, Problem, backdoor_of
from lindt.protocols import ChecksModel, Context, Examples, Metric
from lindt.seeds import seeded
from lindt.weights import first_model, initial_weights, read_w


def keeps_private(plan: Plan, problem: Problem) -> bool:
    """Whether the clients of this plan's method keep a v_i each."""
    return first_private(plan, problem) is not None


def first_private(plan: Plan, problem: Problem) -> nn.Module | None:
    """The v_i with which a client begins, None where it keeps none: asked of the method itself, as client 0 would."""
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
    """What only the data can tell: K against N, weights against clients, labels against the threat.

    Returns the untrained model that was built for it.
    """
    if not isinstance(plan.method, Method):
        raise PlanError("method", plan.method, "give a Method, such as lindt.METHODS['lindt']")
    N = len(problem.data)
    try:
        plan.environment.participation.wanted(N)
    except PlanError as error:
        raise error.within("environment.participation") from None
    model = check_model(plan, problem)
    backdoor_of(plan, problem)
    weights, counted = plan.scoring.weights, counted_clients(plan, range(N))
    if weights and len(weights) != N:
        raise PlanError("scoring.weights", weights, f"give one weight for each of {N} clients")
    if weights and not any(weights[i] for i in counted):
        raise PlanError("scoring.weights", weights, f"give a weight above 0 to one of the clients {sorted(counted)}")
    if not counted:
        raise PlanError("environment.threat.share", plan.environment.threat.share, "leave a client that is benign")
    return model


def check_model(plan: Plan, problem: Problem) -> nn.Module:
    """A dry run: the model, loss and metric on two samples of each client, before anything trains or is written."""
    model = first_model(problem, plan)
    if not isinstance(model, nn.Module):
        raise UserError(f"model: it builds an object of type {type(model).__name__}; build an nn.Module")
    _check_second(model, first_model(problem, plan))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError("model: it has no parameter to train; set requires_grad on some")
    model.eval()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise UserError(
                f"model: {name} is {parameter.dtype}; weights travel as float32, call .float() on the model"
            )
    initial_weights(problem, plan, model)  # read here, where the model was built anyway
    for client, (train, test) in enumerate(problem.data):
        for data in (train, test):
            outputs = _dry(plan, problem, model, data, client)
            _check_metric(problem.metric_for(plan), client, data.take(torch.arange(min(2, len(data))))[1])
            _check_labels(client, data.labels, outputs)
    if plan.environment.threat.share:
        wanted = torch.cat([plan.environment.threat.goal(train.labels) for train, _ in problem.data])
        _check_labels("environment.threat", wanted, outputs, least=-1)
    _check_lone_samples(plan, problem, model)
    adaptation = plan.method.adaptation
    if isinstance(adaptation, ChecksModel):
        try:
            with torch.no_grad():
                adaptation.fits(model, problem.data[0][0].take(torch.arange(2))[0])
        except PlanError as error:
            raise error.within("method.adaptation") from None
    return model


Part = tuple[str, list[float]]  # names, and some of the numbers that are computed from a few samples


def probe(plan: Plan, problem: Problem, model: nn.Module) -> dict[str, Part]:
    """Names and numbers of model, loss and metric, by which a task that was changed between two sessions is noticed.

    `model` is an untrained one. Names of types, parameters and functions are to be the same; the numbers about the
    same, since another machine or version may round otherwise. "training" is the model in training mode.
    """
    train, metric = problem.data[0][0], problem.metric_for(plan)
    x, y = train.take(torch.arange(min(len(train), plan.training.batch, FEW)))
    with torch.no_grad(), seeded(0, x.device):
        outputs = model.eval()(x)
        value, tally = problem.loss(outputs, y), metric.tally(outputs, y)
    trained, *_ = training_step(model, problem.loss, (x, y))
    modules = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    weights = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return {
        "model": (repr((modules, weights)), _some(outputs)),
        "loss": (name_of(problem.loss), _some(value)),
        "metric": (name_of(metric.function if isinstance(metric, MeanOf) else metric), _some(tally)),
        "training": ("", _some(trained)),
    }


def _some(values: Tensor) -> list[float]:
    return [float(value) for value in values.flatten()[:64]]


def _check_second(model: nn.Module, second: nn.Module) -> None:
    """Two calls of the user's function give two models, apart from each other and with the same weights.

    The second run, and each client's private model, would else begin where the one before ended.
    """
    if second is model:
        raise UserError("model: it gives the same module at every call; build a new one each time")
    found, others = (
        dict(chain(one.named_parameters(), one.named_buffers())) for one in (model, second)
    )  # without those of a tied weight's second name
    places = {tensor.untyped_storage().data_ptr() for tensor in others.values() if tensor.numel()}
    for name, tensor in found.items():
        if tensor.numel() and tensor.untyped_storage().data_ptr() in places:
            raise UserError(f"model: two calls give modules that share {name}; build a new one each time")
    for name in found | others:
        if name not in found or name not in others or not _same(found[name], others[name]):
            raise UserError(
                f"model: two calls with the same seed differ at {name}; draw first weights with torch's generator, "
                "which the plan's seed sets, or from a fixed seed"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit: NaN equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    first, second = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


@torch.no_grad()
def _check_lone_samples(plan: Plan, problem: Problem, model: nn.Module) -> None:
    """Refuse batches of one sample where the model cannot train on them, as with BatchNorm."""
    left = [len(train) - held_out_samples(plan, len(train)) for train, _ in problem.data] if plan.alone.private else []
    small = [client for client, samples in enumerate(left) if samples == 1]
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
            f"client {client}: {why}, and 1 of its {len(train)} samples is left for training alone when the others "
            "are held out; give the client more samples, or set alone.private = false"
        ) from None


@torch.no_grad()
def _dry(plan: Plan, problem: Problem, model: nn.Module, data: Examples, client: int) -> Tensor:
    metric = problem.metric_for(plan)
    try:
        x, y = data.take(torch.arange(min(2, len(data))))
        outputs: Tensor = model(x)
        if problem.loss(outputs, y).numel() != 1:
            raise ValueError("the loss is not one number")
        metric.value(metric.tally(outputs, y))
    except UserError as error:  # a metric's own sentence
        raise UserError(f"client {client}: {error}") from None
    except Exception as error:  # noqa: BLE001  # the model, loss, metric and data are the user's: any error may come
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0] if text else ''}"
        raise UserError(f"client {client}: model, loss or metric do not fit the data ({what})") from None
    return outputs


def _check_metric(metric: Metric, client: int, y: Tensor) -> None:
    """The metrics of classes compare the largest output with the label; with other targets they would give 0."""
    if not isinstance(metric, Accuracy | MacroF1):
        return
    if y.is_floating_point():
        name = type(metric).__name__
        raise UserError(f"client {client}: its targets are floats, and {name} compares classes; {OWN_METRIC}")


def _check_labels(owner: int | str, y: Tensor, outputs: Tensor, least: int = 0) -> None:
    """Classes are 0 to C - 1; a regression's targets are floats and not looked at."""
    if y.is_floating_point() or outputs.dim() != 2 or not y.numel():
        return
    low, high = int(y.min()), int(y.max())
    if low < least or high >= outputs.shape[1]:
        who = owner if isinstance(owner, str) else f"client {owner}"
        raise UserError(
            f"{who}: labels from {low} to {high}, but the model has outputs for 0 to {outputs.shape[1] - 1}"
        )
