"""Steps with an optimizer of torch: the plan's (training.optimizer), or the user's own (Problem.optimizer).

This file is not used for plain SGD, whose steps are in `GradientStep` of client/training.py.

In a round each side (w, v_i) has an optimizer of its own, built for that side's parameters. Its rate is multiplied by
the plan's decay of the round; a schedule changes the rate after each step, and restarts in each round. The gradient of
a side is clipped to training.max_norm, by the rule of torch.nn.utils.clip_grad_norm_. The state of w's optimizer
(momentum, Adam's moments) is new in each round, since the received w is new. The state of v_i's is stored with v_i.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lindt.errors import PlanError, UserError, one_line
from lindt.plan.plan import Plan, Training
from lindt.plan.problem import Problem, steps_differ
from lindt.protocols import Batch, Context, Examples, Optimizer, OptimizerMemory, Schedule
from lindt.registry import kind_of
from lindt.seeds import seeded
from lindt.weights import trainable

Gradients = list[Tensor | None]
BEFORE_NAMES: Final = "."  # no name in a state dict begins with it
PLAIN_TYPES: Final[Mapping[str, type]] = {"int": int, "float": float, "bool": bool}
NOT_IN_GROUPS: Final = ("params", "param_names")
FEW_STEPS: Final = 16  # steps whose result goes into the identity of an optimizer of the user's own class
FEW_SAMPLES: Final = 16


@final
@dataclass(frozen=True)
class Optimization:
    """The optimizer, schedule and accumulation of the clients' steps, where they are not plain SGD."""

    training: Training
    optimizer: Optimizer | None  # None: the plan's
    schedule: Schedule | None
    accumulate: int

    @property
    def own(self) -> bool:
        """Whether optimizer, schedule or accumulation come from the problem and not from the plan."""
        own = self.optimizer is not None or self.schedule is not None
        return own or self.accumulate != self.training.accumulate

    def at(self, round: int) -> Optimizer:
        """The function that builds the optimizers of a round, with the rate after the plan's decay."""

        def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            if self.optimizer is None:
                return self.training.optimizer.build(parameters, self.training.rate_at(round))
            built = self.optimizer(parameters)
            if not isinstance(built, torch.optim.Optimizer):
                raise UserError(f"optimizer: it builds a {type(built).__name__}; build a torch.optim.Optimizer")
            given = {id(parameter) for parameter in parameters}
            if any(id(parameter) not in given for group in built.param_groups for parameter in group["params"]):
                raise UserError(
                    "optimizer: it builds an optimizer of other parameters than it was given; build a new one for the "
                    "given parameters at every call"
                )
            for group in built.param_groups:
                group["lr"] = group["lr"] * self.training.decay ** (round - 1)
            return built

        return build


def optimization_of(plan: Plan, problem: Problem) -> Optimization | None:
    """The optimization of a plan and a problem; None for plain SGD. A PlanError where plan and problem disagree."""
    training, planned = plan.training, plan.training.optimizer
    if problem.optimizer is not None and planned != type(training)().optimizer:
        fix = "the problem has an optimizer of its own; leave out one of the two"
        raise PlanError("training.optimizer", kind_of(planned), fix)
    if problem.accumulate is not None and training.accumulate not in (1, problem.accumulate):
        fix = f"the problem says accumulate = {problem.accumulate}; leave out one of the two"
        raise PlanError("training.accumulate", training.accumulate, fix)
    if not steps_differ(plan, problem):
        return None
    accumulate = problem.accumulate or training.accumulate
    return Optimization(training, problem.optimizer, problem.schedule, accumulate)


def optimizer_step(
    ctx: Context, make: Optimizer, loss: Callable[[Tensor, Tensor], Tensor], groups: Sequence[list[nn.Parameter]]
) -> Callable[[Batch], list[Gradients]]:
    """The training step of a round, with an optimizer for each group; returns gradients as `gradient_step` does."""
    return stepping(loss, groups, make, ctx.schedule, ctx.batch, ctx.accumulate, ctx.max_norm, ctx.memory)


def stepping(
    loss: Callable[[Tensor, Tensor], Tensor],
    groups: Sequence[list[nn.Parameter]],
    make: Optimizer,
    schedule: Schedule | None,
    batch: int,
    accumulate: int,
    max_norm: float,
    memory: OptimizerMemory | None = None,
) -> Callable[[Batch], list[Gradients]]:
    """A function that makes one step at each call, and returns the gradients before clipping.

    A call takes the samples of up to `accumulate` batches. The loss of a batch is a mean over samples; the gradient of
    the step is the mean over all of its samples, as for one large batch.
    """
    optimizers = [make(group) for group in groups]
    if memory is not None:
        for optimizer in optimizers:
            memory.restore(optimizer)
    schedules = [schedule(optimizer) for optimizer in optimizers] if schedule is not None else []
    parameters = [parameter for group in groups for parameter in group]

    def step(samples: Batch) -> list[Gradients]:
        _clear(parameters)
        for part, share in _parts(samples, batch, accumulate):
            value = loss(*part)
            (value if share == 1 else value * share).backward(inputs=parameters)
        found: list[Gradients] = [[p.grad for p in group] for group in groups]
        for group in groups:
            _clip(group, max_norm)
        for optimizer in optimizers:
            optimizer.step()
        for one in schedules:
            one.step()
        _clear(parameters)  # the models of the next client are copies of these, and would copy the gradients
        return found

    return step


def _clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _parts(samples: Batch, batch: int, accumulate: int) -> Iterator[tuple[Batch, float]]:
    """The batches of a step, each with its share of the samples. A single last sample is added to the batch before."""
    x, y = samples
    if accumulate == 1 or len(y) <= batch:
        yield samples, 1.0
        return
    sizes = [batch] * (len(y) // batch) + ([len(y) % batch] if len(y) % batch else [])
    if sizes[-1] == 1 < batch:
        sizes[-2:] = [sizes[-2] + 1]
    for part, size in zip(zip(x.split(sizes), y.split(sizes), strict=True), sizes, strict=True):
        yield part, size / len(y)


@torch.no_grad()
def _clip(group: Sequence[nn.Parameter], max_norm: float) -> None:
    """Clip as clip_grad_norm_ does, but into new tensors: the unclipped gradients are returned to the caller."""
    found = [p for p in group if p.grad is not None]
    if not found or math.isinf(max_norm):
        return
    norm = torch.nn.utils.get_total_norm([p.grad for p in found if p.grad is not None])
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    if factor < 1:
        for p in found:
            assert p.grad is not None
            p.grad = p.grad * factor


@final
class OptimizerStates:
    """The state of the optimizers of one module, by the names of its parameters. That of v_i is stored with v_i.

    Only `optimizer.state` is stored: rates and other settings are those of the round.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # of a parameter, by its id
        self._kept: dict[str, dict[str, Any]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []

    def begin(self, module: nn.Module, kept: Mapping[str, Tensor] | None = None) -> None:
        """Set the module whose parameters are optimized. `kept` is a stored result of `tensors`."""
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._kept = {}
        self._optimizers = []
        for place, tensor in (kept or {}).items():
            name, key, kind = json.loads(place.removeprefix(BEFORE_NAMES))
            value = tensor if kind == "tensor" else PLAIN_TYPES[kind](tensor.item())
            self._kept.setdefault(name, {})[key] = value

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                kept = self._kept.get(self._names.get(id(parameter), ""))
                if kept is not None:
                    optimizer.state[parameter] = {key: _placed(key, value, parameter) for key, value in kept.items()}
        self._optimizers.append(optimizer)

    def carry_on(self) -> None:
        """Keep the state of the present optimizers for the next ones."""
        self._kept = dict(self._states())
        self._optimizers = []

    def tensors(self) -> dict[str, Tensor]:
        """The state, to store with a state dict; no name equals one of the state dict. Empty with NaN or infinity."""
        found: dict[str, Tensor] = {}
        for name, state in self._states():
            for key, value in state.items():
                kind = "tensor" if isinstance(value, Tensor) else type(value).__name__
                found[BEFORE_NAMES + json.dumps([name, key, kind])] = _as_tensor(value)
        return found if all(bool(torch.isfinite(tensor).all()) for tensor in found.values()) else {}

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for optimizer in self._optimizers:
            for parameter, state in optimizer.state.items():
                if id(parameter) in self._names:
                    values = {key: value for key, value in state.items() if value is not None}
                    yield self._names[id(parameter)], values


def _as_tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _placed(key: str, value: Any, parameter: nn.Parameter) -> Any:
    """A copy in the form that the optimizer needs: moments in the parameter's memory format, "step" on the CPU."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape and value.dtype == parameter.dtype:
        return torch.empty_like(parameter, requires_grad=False).copy_(value)
    return value.clone() if key == "step" else value.to(parameter.device, copy=True)


def split_states(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A module's own tensors, and those of `OptimizerStates.tensors`."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(BEFORE_NAMES)}
    return own, {name: tensor for name, tensor in tensors.items() if name not in own}


def check_optimizer(plan: Plan, problem: Problem, model: nn.Module) -> None:
    """Refuse an optimizer or schedule that fails, before training: two steps are tried on a copy of the model."""
    optimization = optimization_of(plan, problem)
    if optimization is None:
        return
    adaptation = plan.method.adaptation
    if not getattr(adaptation, "takes_optimizer", False):
        fix = (
            f"this method trains with plain SGD only, not with {describe(optimization)}; "
            "leave out optimizer, schedule and accumulate, or choose another method"
        )
        raise PlanError("method.adaptation", kind_of(adaptation), fix)
    samples = problem.data[0][0].take(torch.arange(2))
    for schedule in {None, optimization.schedule}:
        tried, made = copy.deepcopy(model).train(), list[torch.optim.Optimizer]()
        try:
            with torch.enable_grad(), seeded(0, torch.device("cpu")):
                step = _trial(replace(optimization, schedule=schedule), tried, problem, plan, made)
                before = [_settings(group) for group in made[0].param_groups]
                started = [parameter.detach().clone() for parameter in trainable(tried)]
                gradients = [gradient for _ in range(2) for group in step(samples) for gradient in group]
        except UserError:
            raise
        except Exception as error:  # optimizer, schedule and model are the user's code, which may raise any error
            why = one_line(f"{type(error).__name__}: {error}")
            if not made:
                raise UserError(f"optimizer: the function that builds it raised {why}; correct the function") from error
            fix = (
                f"give {'an optimizer' if schedule is None else 'a schedule'} whose step() needs no argument"
                if "required positional" in why
                else "correct the optimizer, the schedule or the model"
            )
            raise UserError(
                f"{'optimizer' if schedule is None else 'schedule'}: a step on client 0's samples fails ({why}); {fix}"
            ) from error
        if schedule is None:
            _check_state(made[0], before)
            stays = all(map(torch.equal, started, trainable(tried)))
            if stays and any(gradient is not None and bool(gradient.any()) for gradient in gradients):
                raise UserError("optimizer: its steps change no weight; give it a learning rate above 0")


def _trial(
    optimization: Optimization, model: nn.Module, problem: Problem, plan: Plan, made: list[torch.optim.Optimizer]
) -> Callable[[Batch], list[Gradients]]:
    """The training step of a model, to try it; the optimizer is appended to `made`."""
    build, loss = optimization.at(1), problem.loss

    def noted(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(build(parameters))
        return made[-1]

    max_norm, batch = plan.training.max_norm, plan.training.batch
    return stepping(
        lambda x, y: loss(model(x), y), [trainable(model)], noted, optimization.schedule, batch, 1, max_norm
    )


def _check_state(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Check that an optimizer remembers everything in its state, as only the state is saved with v_i."""
    name, allowed = type(optimizer).__name__, (*PLAIN_TYPES.values(), type(None))
    for state in optimizer.state.values():
        for key, value in state.items():
            if not isinstance(value, Tensor) and type(value) not in allowed:
                raise UserError(
                    f"optimizer: {name} keeps a {type(value).__name__} as {key!r} in its state, which cannot be saved "
                    "with v_i; keep tensors or numbers"
                )
    after = [_settings(group) for group in optimizer.param_groups]
    changed = sorted({key for old, new in zip(before, after, strict=True) for key in new if new[key] != old.get(key)})
    if changed:
        raise UserError(
            f"optimizer: {name} changes {', '.join(changed)} of its param_groups while it steps, which is not saved "
            "with v_i; keep it in the optimizer's state"
        )


def describe(optimization: Optimization) -> str:
    """The optimization as text, for a message."""
    given = optimization.optimizer
    parts = [kind_of(optimization.training.optimizer) if given is None else f"the optimizer of {_name(given)}"]
    parts += [f"schedule {_name(optimization.schedule)}"] if optimization.schedule is not None else []
    parts += [f"accumulate = {optimization.accumulate}"] if optimization.accumulate > 1 else []
    return ", ".join(parts)


def built_names(optimization: Optimization, model: nn.Module) -> str:
    """The classes of the optimizer and the schedule that are built for a model, and the number of batches a step."""
    optimizer = optimization.at(1)(trainable(model))
    found = [type(optimizer).__name__]
    found += [type(optimization.schedule(optimizer)).__name__] if optimization.schedule is not None else []
    found += [f"{optimization.accumulate} batches a step"] if optimization.accumulate > 1 else []
    return ", ".join(found)


def _name(thing: object) -> str:
    return str(getattr(thing, "__qualname__", type(thing).__qualname__))


def identity(optimization: Optimization, model: nn.Module, train: Examples, problem: Problem, samples: int) -> str:
    """A hash of all that decides the steps on a model: equal settings give equal hashes in every process.

    For torch's own optimizers it covers class and settings. For another class it also covers the source code, and the
    weights after some steps on a few samples. For a schedule it covers the settings after each step of an epoch of
    `samples` samples.
    """
    optimizer = optimization.at(1)(trainable(copied := copy.deepcopy(model).train()))
    place = {id(parameter): index for index, parameter in enumerate(trainable(copied))}
    text: list[object] = [type(optimizer).__module__, type(optimizer).__qualname__, optimization.accumulate]
    text += [([place[id(p)] for p in group["params"]], _settings(group)) for group in optimizer.param_groups]
    if not type(optimizer).__module__.startswith("torch.optim"):
        text += [
            _source(cls) for cls in type(optimizer).__mro__ if not cls.__module__.startswith(("torch", "builtins"))
        ]
        text.append(_effect(optimization, model, train, problem))
    if optimization.schedule is not None:
        text.append(_scheduled(optimization, model, samples))
    return hashlib.sha256(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(text)).encode()).hexdigest()


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in group.items() if key not in NOT_IN_GROUPS}
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in sorted(plain.items())}


def _source(cls: type) -> str:
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def _effect(optimization: Optimization, model: nn.Module, train: Examples, problem: Problem) -> str:
    tried, digest = copy.deepcopy(model).train(), hashlib.sha256()
    samples = train.take(torch.arange(min(len(train), FEW_SAMPLES)))
    optimizer = optimization.at(1)(trainable(tried))
    with torch.enable_grad(), seeded(0, torch.device("cpu")):
        for _ in range(FEW_STEPS):
            optimizer.zero_grad()
            problem.loss(tried(samples[0]), samples[1]).backward()
            optimizer.step()
    for parameter in trainable(tried):
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _scheduled(optimization: Optimization, model: nn.Module, samples: int) -> str:
    """The settings after each step of an epoch."""
    assert optimization.schedule is not None
    optimizer = optimization.at(1)(trainable(copy.deepcopy(model)))
    schedule, digest = optimization.schedule(optimizer), hashlib.sha256(type(optimizer).__qualname__.encode())
    per_step = optimization.training.batch * optimization.accumulate
    for _ in range(-(-samples // per_step)):
        digest.update(repr([_settings(group) for group in optimizer.param_groups]).encode())
        optimizer.step()  # without gradients it changes nothing
        schedule.step()
    return digest.hexdigest()
