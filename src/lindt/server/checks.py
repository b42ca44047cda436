"""Checks before anything trains: does the model run on the data, do the labels fit, does the method suit the model?"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from lindt.client.private_models import held_out_samples
from lindt.client.training import seeded
from lindt.errors import PlanError, UserError, one_line
from lindt.plan.methods import Method
from lindt.plan.metrics import Accuracy, MacroF1
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, backdoor_of, counted_clients, first_model, initial_weights
from lindt.protocols import ChecksModel, Context, Examples, Metric
from lindt.weights import read_w


def keeps_private(plan: Plan, problem: Problem) -> bool:
    """Whether the clients of this plan's method keep a v_i each: asked of the method itself, as client 0 would."""
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
        return plan.method.adaptation.begin(ctx, model) is not None


def check(plan: Plan, problem: Problem) -> None:
    """What only the data can tell: K against N, weights against clients, labels against the threat."""
    if not isinstance(plan.method, Method):
        raise PlanError("method", plan.method, "give a Method, such as lindt.METHODS['lindt']")
    N = len(problem.data)
    try:
        plan.environment.participation.wanted(N)
    except PlanError as error:
        raise error.within("environment.participation") from None
    check_model(plan, problem)
    backdoor_of(plan, problem)
    weights, counted = plan.scoring.weights, counted_clients(plan, range(N))
    if weights and len(weights) != N:
        raise PlanError("scoring.weights", weights, f"give one weight for each of {N} clients")
    if weights and not any(weights[i] for i in counted):
        raise PlanError("scoring.weights", weights, f"give a weight above 0 to one of the clients {sorted(counted)}")
    if not counted:
        raise PlanError("environment.threat.share", plan.environment.threat.share, "leave a client that is benign")


def check_model(plan: Plan, problem: Problem) -> None:
    """A dry run: the model, loss and metric on two samples of each client, before anything trains or is written."""
    model = first_model(problem, plan)
    if not isinstance(model, nn.Module):
        raise UserError(f"model: it builds an object of type {type(model).__name__}; build an nn.Module")
    if first_model(problem, plan) is model:
        # The second run, and each client's private model, would begin where the one before ended.
        raise UserError("model: it gives the same module at every call; build a new one each time")
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
            _check_metric(problem.metric_for(plan), client, data.take(torch.arange(min(2, len(data))))[1], outputs)
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
    except Exception as error:  # noqa: BLE001  # the model, loss, metric and data are the user's: any error may come
        text = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {text[0] if text else ''}"
        raise UserError(f"client {client}: model, loss or metric do not fit the data ({what})") from None
    return outputs


def _check_metric(metric: Metric, client: int, y: Tensor, outputs: Tensor) -> None:
    """The metrics of classes compare the largest output with the label; with other targets they would give 0."""
    if not isinstance(metric, Accuracy | MacroF1):
        return
    fix = "give metric=, a function of outputs and targets with one number a sample, higher is better"
    name = type(metric).__name__
    if y.is_floating_point():
        raise UserError(f"client {client}: its targets are floats, and {name} compares classes; {fix}")
    if y.shape != outputs.shape[:-1]:
        raise UserError(
            f"client {client}: outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(y.shape)} are not "
            f"one class a prediction, which {name} compares; {fix}"
        )


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
