"""The one training loop of the package (`fit`) and the step of SGD that it repeats.

Clients, FB's fine-tuning, private and centralized training call them.

`sgd_step` is one step with clipped gradients. `GradientStep` takes many of the same loss: the step's operators are
recorded once and replayed with other numbers, by the same kernels, in the same order, with bitwise the same result. A
replay skips the Python code of the layers and the graph of autograd, which are the same in each step and take a tenth
of the time. A `Tape` holds only the operators, as torch's dispatcher sees them below autograd, and the slots of their
operands and results.

Some steps cannot be recorded: those that read a value in Python (`.item()`), have a shape that depends on values, use a
generator of their own, or use a tensor that is neither an input nor computed in the step. The recorder notices it, and
such steps always run in full. It cannot notice a decision in Python code; so only layers without such decisions are
recorded (`PLAIN`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lindt.client.optimizers import optimizer_step
from lindt.data.examples import LocalWork
from lindt.errors import require
from lindt.protocols import Batch, Context, Examples, LocalOptimizer, Penalty, Step
from lindt.registry import register, register_method
from lindt.seeds import seeded
from lindt.weights import trainable

Initial = Literal["copy", "random"]
FEW: Final = 16  # samples whose outputs, loss and metric go into a key, to tell one model from another


def prepare_model(model: nn.Module, device: torch.device, sample: Tensor) -> nn.Module:
    """A model on its device. A model with convolutions gets the channels-last format, which is faster on a CPU.

    Not with group norm, whose kernels take two to three times as long in that format. The format does not work with
    every model: `.view()` on a convolution's output fails. So it is tried on a sample first.
    """
    model = model.to(device)
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return model
    if any(isinstance(module, nn.GroupNorm | nn.InstanceNorm2d) for module in model.modules()):
        return model
    training = model.training
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            model.eval()(sample.to(device))
    except RuntimeError:  # a failure for another reason occurs again in training, where it is reported
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return model.train(training)


def fit(
    step: Callable[[Batch], None],
    work: LocalWork,
    batch: int,
    generator: torch.Generator,
    device: torch.device,
) -> Iterator[int]:
    """Alg. 1, c4-c7. Yields after each epoch, so that the caller may stop."""
    for epoch in range(1, work.epochs + 1):
        for x, y in work.batches(batch, generator):
            step((x.to(device), y.to(device)))
        yield epoch


@torch.no_grad()
def forward_all(predict: Callable[[Tensor], Tensor], data: Examples, device: torch.device, batch: int = 128) -> Tensor:
    """The outputs for all samples of a client, in order."""
    rows = torch.arange(len(data))
    return torch.cat([predict(data.take(chunk)[0].to(device)) for chunk in rows.split(batch)])


@register(Penalty)
@final
@dataclass(frozen=True)
class NoPenalty:
    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        return None


@register(Penalty)
@final
@dataclass(frozen=True)
class Proximal:
    """FedProx (Sahu et al. 2018, Eq. 2): mu / 2 * ||w_i - w^{r-1}||^2."""

    mu: float = 0.001

    def __post_init__(self) -> None:
        require(self.mu >= 0, "mu", self.mu, "the proximal coefficient must be 0 or more")

    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        w_P = torch.cat([p.reshape(-1) for p in trainable(shared)])
        return self.mu / 2 * (w_P - received_P).square().sum()


register_method("fedprox", penalty={"kind": "proximal", "mu": 0.001}, recovery="never")


@register(LocalOptimizer)
@final
@dataclass(frozen=True)
class Sgd:
    """SGD, as in torch.optim.SGD."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.momentum < 1, "momentum", self.momentum, "the momentum lies in [0, 1)")
        require(not self.nesterov or self.momentum > 0, "nesterov", self.nesterov, "give it a momentum above 0")
        _require_decay(self.weight_decay)

    @property
    def plain(self) -> bool:
        return not self.momentum and not self.weight_decay

    def build(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, rate, momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay
        )


@register(LocalOptimizer)
@final
@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015), as in torch.optim.Adam: the weight decay is part of the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    plain = False

    def __post_init__(self) -> None:
        _require_moments(self.betas, self.eps)
        _require_decay(self.weight_decay)

    def build(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, rate, self.betas, self.eps, self.weight_decay)


@register(LocalOptimizer)
@final
@dataclass(frozen=True)
class Adamw:
    """AdamW (Loshchilov and Hutter 2019), as in torch.optim.AdamW: the weight decay is separate from the gradient."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    plain = False

    def __post_init__(self) -> None:
        _require_moments(self.betas, self.eps)
        _require_decay(self.weight_decay)

    def build(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, rate, self.betas, self.eps, self.weight_decay)


def _require_moments(betas: tuple[float, float], eps: float) -> None:
    require(all(0 <= beta < 1 for beta in betas), "betas", betas, "both lie in [0, 1)")
    require(eps > 0, "eps", eps, "the denominator's constant must be above 0")


def _require_decay(weight_decay: float) -> None:
    require(weight_decay >= 0, "weight_decay", weight_decay, "the weight decay must be 0 or more")


def global_step(ctx: Context, shared: nn.Module) -> Step:
    """Alg. 1, c7: w_i <- w_i - eta * grad of the mean loss over the batch."""
    down = gradient_step(ctx, "w", lambda x, y: ctx.shared_loss(shared, shared(x), y), (shared, trainable(shared)))

    def step(batch: Batch) -> None:
        down(batch)

    return step


def gradient_step(
    ctx: Context,
    named: Hashable,
    loss: Callable[[Tensor, Tensor], Tensor],
    *sides: tuple[nn.Module, list[nn.Parameter]],
    also: Sequence[Tensor] = (),
) -> Callable[[Batch], list[list[Tensor | None]]]:
    """A client's training step on a batch, for one round: by `GradientStep`, or with the optimizer of `ctx`.

    A side is a module and its parameters to train; the gradient of each side is clipped separately. `named` is the
    method with its settings; with None no step is recorded. `also` are other tensors that the loss reads.
    Steps are recorded only where `loss` is defined in this package and `named` holds every Python number that it
    reads: a tape keeps the numbers of the recorded step (see `recording_key`). Other steps run in full.
    """
    groups = [group for _, group in sides]
    if ctx.optimizer is None:
        kind = recording_key(loss, ctx.loss, named, ctx.penalty)
        down = GradientStep(loss, groups, [module for module, _ in sides], kind, [ctx.received_P, *also])
        return lambda batch: down(batch, ctx.rate, ctx.max_norm)
    return optimizer_step(ctx, ctx.optimizer, loss, groups)


def initial_private(shared: nn.Module, first: Initial) -> nn.Module:
    """The first value of v_i: a copy of the received w, or the same structure with random weights."""
    private = copy.deepcopy(shared)
    if first == "random":
        for module in private.modules():
            # MultiheadAttention spells it with an underscore.
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
    return private


BEFORE: Final = 20  # steps of a kind before one is recorded, as recording takes up to three times as long as a step
MOST: Final = 100  # the most shapes of batches that are remembered for a kind
# Layers whose operators depend only on the shapes of their inputs and on their settings.
PLAIN: Final = {
    nn.Sequential, nn.Identity, nn.Flatten, nn.Unflatten,
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Softplus,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm,
}  # fmt: skip
SIMPLE: Final = (int, float, str, type(None))
Gradients = list[Tensor | None]
Slopes = list[tuple[Gradients, Tensor | None]]  # by group: the gradients, and their norm where there are any


def sgd_step(loss: Tensor, rate: float, max_norm: float, *groups: list[nn.Parameter]) -> list[Gradients]:
    """One step of SGD from one backward of `loss`; the gradient of each group is clipped to `max_norm` separately.

    Returns the gradients before clipping, by group; None for a parameter that the loss does not depend on. Clipping
    follows the rule of torch.nn.utils.clip_grad_norm_, but scales the step: the gradients are not changed, which saves
    a pass over them and is safe for a tensor that two parameters share.
    """
    return _move(_slopes(loss, groups), rate, max_norm, groups)


def _slopes(loss: Tensor, groups: Sequence[list[nn.Parameter]]) -> Slopes:
    parameters = [parameter for group in groups for parameter in group]
    slopes: Slopes = []
    found: Gradients = list(torch.autograd.grad(loss, parameters, allow_unused=True))
    with torch.no_grad():
        for group in groups:
            mine, found = found[: len(group)], found[len(group) :]
            reached = [g for g in mine if g is not None]
            slopes.append((mine, norm_of(reached) if reached else None))
    return slopes


def _move(slopes: Slopes, rate: float, max_norm: float, groups: Sequence[list[nn.Parameter]]) -> list[Gradients]:
    with torch.no_grad():
        for group, (found, norm) in zip(groups, slopes, strict=True):
            if norm is None:
                continue
            step = rate * min(1.0, max_norm / (float(norm) + 1e-6))
            reached = [(p, g) for p, g in zip(group, found, strict=True) if g is not None]
            torch._foreach_add_([p for p, _ in reached], [g for _, g in reached], alpha=-step)
    return [found for found, _ in slopes]


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    """The norm of several gradients as one vector."""
    length: Tensor = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(list(grads)))))
    return length


@final
class GradientStep:
    """`sgd_step` for many batches of one client. `loss` of a batch may read `modules` and `also`, nothing else.

    `kind` identifies the loss besides its modules, with every Python number that it reads (see `recording_key`); with
    None no step is recorded. Steps of a frequent kind are recorded and replayed from a tape, with bitwise the same
    result; the gradients of a replay must not be changed in place. A client's first step always runs in full, so that a
    method can measure it.
    Limit: modules are examined once. To freeze, hook or switch a layer later, build a new GradientStep.
    """

    def __init__(
        self,
        loss: Callable[[Tensor, Tensor], Tensor],
        groups: Sequence[list[nn.Parameter]],
        modules: Sequence[nn.Module] = (),
        kind: Hashable = None,
        also: Sequence[Tensor] = (),  # other tensors that the loss reads
    ) -> None:
        self._loss, self._groups = loss, list(groups)
        self._held = [*also, *(t for module in modules for t in (*module.parameters(), *module.buffers()))]
        known = kind is not None and all(map(_plain, modules))
        self._kept = _KEPT.setdefault((kind, _structure(modules, self._held, groups)), {}) if known else None
        self._first = True

    def __call__(self, batch: Batch, rate: float, max_norm: float) -> list[Gradients]:
        x, y = batch
        first, self._first = self._first, False
        if first or self._kept is None or torch.is_autocast_enabled("cpu") or torch.is_anomaly_enabled():
            slopes = self._long_way(x, y)
        else:
            slopes = self._recorded(x, y, self._kept)
        return _move(slopes, rate, max_norm, self._groups)

    def _long_way(self, x: Tensor, y: Tensor) -> Slopes:
        return _slopes(self._loss(x, y), self._groups)

    def _recorded(self, x: Tensor, y: Tensor, kept: dict[Hashable, _Recorded | int]) -> Slopes:
        shapes = (_signature(x), _signature(y))
        found = kept.get(shapes, 0)
        if isinstance(found, _Recorded):
            return found.slopes([x, y, *self._held])
        if found != BEFORE or x.device.type != "cpu":
            if shapes in kept or len(kept) < MOST:
                kept[shapes] = min(found + 1, BEFORE + 1)
            return self._long_way(x, y)
        slopes: Slopes = []

        def work() -> list[Tensor]:
            slopes.extend(self._long_way(x, y))
            return _flat(slopes)

        tape = record(work, [x, y, *self._held])
        kept[shapes] = BEFORE + 1 if tape is None else _Recorded(tape, [_shape(one) for one in slopes])
        return slopes


@final
@dataclass(frozen=True)
class _Recorded:
    """A tape, and for each group which gradients, and whether a norm, are among its results."""

    tape: Tape
    shapes: list[tuple[list[bool], bool]]

    def slopes(self, inputs: Sequence[Tensor]) -> Slopes:
        tensors = iter(self.tape.play(inputs))
        return [
            ([next(tensors) if there else None for there in gradients], next(tensors) if norm else None)
            for gradients, norm in self.shapes
        ]


# By kind and shapes: a tape, or the number of steps so far; above BEFORE it cannot be recorded.
_KEPT: dict[Hashable, dict[Hashable, _Recorded | int]] = {}


def _flat(slopes: Slopes) -> list[Tensor]:
    return [tensor for found, norm in slopes for tensor in (*found, norm) if tensor is not None]


def _shape(slope: tuple[Gradients, Tensor | None]) -> tuple[list[bool], bool]:
    found, norm = slope
    return [g is not None for g in found], norm is not None


def recording_key(objective: Callable[..., Tensor], loss: Callable[..., Tensor], *named: object) -> Hashable:
    """The kind of a training step: the loss, the method and its settings, which decide the operators.

    None where the operators cannot be known. A tape keeps every Python number that the objective read while it was
    recorded, so all of them must be in the kind. An objective of this package reads numbers from `named` only. An
    objective that is defined elsewhere may read any number (`self.share`, `ctx.round`), and so may a user's method that
    is called by this package. A loss of torch.nn.functional has the same operators for the same shapes.
    """
    known = getattr(functional, getattr(loss, "__name__", ""), None) is loss and all(map(_fixed, named))
    own = isinstance(objective, FunctionType) and _in_package(objective.__globals__.get("__name__"))
    try:
        hash(named)
    except TypeError:
        return None
    return (loss, *named) if known and own else None


def _fixed(value: object) -> bool:
    """Whether it is a plain value, or one of this package's frozen settings: then equal values give equal operators."""
    if isinstance(value, tuple):
        return all(map(_fixed, value))
    return type(value) in (bool, int, float, str) or _in_package(type(value).__module__)


def _in_package(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == __name__.partition(".")[0]


def _plain(module: nn.Module) -> bool:
    """Whether all of its layers are unchanged layers of torch: without hooks, and with their own forward."""
    return (
        all(
            type(one) in PLAIN
            and "forward" not in vars(one)
            and one._compiled_call_impl is None
            and not (one._forward_hooks or one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks)
            and not any(p._backward_hooks for p in one.parameters(recurse=False))
            for one in module.modules()
        )
        and not _has_any_global_hook()
    )


def _structure(
    modules: Sequence[nn.Module], held: Sequence[Tensor], groups: Sequence[Sequence[Tensor]] = ()
) -> Hashable:
    """What decides the operators besides the batch: layers, settings, modes, memory formats, trained parameters."""
    place = {id(tensor): index for index, tensor in enumerate(held)}
    layers = [
        (
            name,
            type(one),
            *(v if isinstance(v, SIMPLE) else repr(v) for k, v in vars(one).items() if k[0] != "_"),
            *(place.get(id(t), -1) for t in (*one._parameters.values(), *one._buffers.values())),
        )
        for module in modules
        for name, one in module.named_modules(remove_duplicate=False)  # a layer that is used twice is listed twice
    ]
    stepping = tuple(tuple(place.get(id(p), -1) for p in group) for group in groups)
    return tuple(layers), tuple((*_signature(t), t.requires_grad) for t in held), stepping


def _signature(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_aten = torch.ops.aten
_UNFORESEEN: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Slot(NamedTuple):
    """The place of a tensor while a tape is replayed."""

    place: int


class _Operation(NamedTuple):
    operator: Callable[..., Any]
    operands: list[Any]  # slots, constants, and lists of them
    options: dict[str, Any]
    into: int | list[int]  # the slot of its result, or one for each of several
    last: list[int]  # slots that no later operation reads


@final
class Tape:
    """Operators to replay on inputs of the same shapes. It holds no tensor.

    The operators are written as the lines of one Python function, one call each: a loop over them takes twice as long.
    """

    def __init__(self, operations: Sequence[_Operation], inputs: int, results: Sequence[int]) -> None:
        self._operations = len(operations)
        self._play = _as_function(operations, inputs, results)

    def __len__(self) -> int:
        return self._operations

    def play(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode():
            return self._play(*inputs)


def _as_function(operations: Sequence[_Operation], inputs: int, results: Sequence[int]) -> Callable[..., list[Tensor]]:
    """A function of the inputs that calls the operators in order. Its text has only names that are made here."""
    names: dict[str, Any] = {}

    def named(value: Any) -> str:
        names[name := f"c{len(names)}"] = value
        return name

    def text(one: Any) -> str:
        if isinstance(one, _Slot):
            return f"t{one.place}"
        if isinstance(one, list) and _slots_of(one):
            return f"[{', '.join(map(text, one))}]"
        return named(one)

    lines = [f"def play({', '.join(f't{slot}' for slot in range(inputs))}):"]
    for operator, operands, options, into, last in operations:
        arguments = [*map(text, operands), *([f"**{named(options)}"] if options else [])]
        # -1 is a gradient that was not asked for.
        made = [f"t{slot}" if slot >= 0 else "_" for slot in ([into] if isinstance(into, int) else into)]
        target = made[0] if isinstance(into, int) else f"[{', '.join(made)}]"
        lines.append(f"    {target} = {named(operator)}({', '.join(arguments)})")
        if last:
            lines.append(f"    {' = '.join(f't{slot}' for slot in last)} = None")
    lines.append(f"    return [{', '.join(f't{slot}' for slot in results)}]")
    exec("\n".join(lines), names)
    play: Callable[..., list[Tensor]] = names["play"]
    return play


def record(work: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Tape | None:
    """Run `work` and return its tape; None where it cannot be replayed. The results of this run are valid."""
    recorder = _Recorder(inputs)
    with recorder:
        results = work()
    return recorder.tape(results)


@final
class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[Tensor] = []  # keeps all tensors alive, so that no other tensor gets their id
        self._slot: dict[int, int] = {}
        self._made: list[tuple[Any, list[Any], dict[str, Any], int | list[int]]] = []
        self._untransposed: dict[int, int] = {}
        self._slots = 0
        self._refused = False
        for tensor in inputs:
            self._refused |= id(tensor) in self._slot  # one tensor given twice may be two tensors in the next step
            self._new(tensor)
        self._inputs = self._slots

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operator imports torch's compiler, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if not self._refused:
            try:
                self._note(func, args, options, result)
            except _RefusedError:
                self._refused = True
        return result

    def _note(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        if _UNFORESEEN.intersection(func.tags):
            raise _RefusedError
        arguments, named = [self._operand(one) for one in args], {n: self._operand(one) for n, one in options.items()}
        if any(isinstance(one, _Slot) for one in named.values()):
            raise _RefusedError  # tensors as keyword arguments are not supported; no operator of a step has any
        if func is _aten.detach.default:  # a replay builds no graph, so that there is nothing to detach
            self._same(result, arguments[0].place)
        elif func is _aten.t.default and arguments[0].place in self._untransposed:
            self._same(result, self._untransposed[arguments[0].place])
        else:
            several = isinstance(result, list | tuple)
            into = [self._result(one) for one in result] if several else self._result(result)
            if func is _aten.t.default:
                self._untransposed[self._result(result)] = arguments[0].place
            self._made.append((func, arguments, named, into))

    def _operand(self, one: Any) -> Any:
        if isinstance(one, Tensor):
            if id(one) not in self._slot:
                raise _RefusedError
            return _Slot(self._slot[id(one)])
        if isinstance(one, torch.Generator):
            raise _RefusedError
        if isinstance(one, list | tuple):
            return [self._operand(each) for each in one]
        return one

    def _result(self, one: Any) -> int:
        if one is None:
            return -1  # a gradient that was not asked for
        if not isinstance(one, Tensor):
            raise _RefusedError
        return self._slot[id(one)] if id(one) in self._slot else self._new(one)

    def _new(self, tensor: Tensor) -> int:
        self._slots += 1
        return self._same(tensor, self._slots - 1)

    def _same(self, tensor: Tensor, slot: int) -> int:
        self._seen.append(tensor)
        self._slot[id(tensor)] = slot
        return slot

    def tape(self, results: Sequence[Tensor]) -> Tape | None:
        if self._refused or any(id(tensor) not in self._slot for tensor in results):
            return None
        kept = [self._slot[id(tensor)] for tensor in results]
        needed = set(kept)
        operations = []
        for func, arguments, options, into in reversed(self._made):
            touched = {slot for one in arguments for slot in _slots_of(one)}.union(
                [into] if type(into) is int else into
            )
            last = sorted(touched - needed - {-1})
            needed |= touched
            called = getattr(func, "_op", func)  # the operator that func calls: saves half a microsecond
            operations.append(_Operation(called, arguments, options, into, last))
        return Tape(operations[::-1], self._inputs, kept)


class _RefusedError(Exception):
    """The step cannot be recorded."""


def _slots_of(one: Any) -> set[int]:
    if isinstance(one, _Slot):
        return {one.place}
    return {slot for each in one for slot in _slots_of(each)} if isinstance(one, list) else set()


def training_step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> Iterator[Tensor]:
    """Outputs, loss and gradients of one step in training mode, in which dropout and some forwards differ."""
    model = copy.deepcopy(model).train()  # BatchNorm changes its statistics
    x, y = batch
    with torch.enable_grad(), seeded(0, x.device):
        outputs = model(x)
        value = loss(outputs, y)
        reached = value.requires_grad  # by chance a batch may have no gradient (server/checks.py)
        gradients = torch.autograd.grad(value, trainable(model), allow_unused=True) if reached else ()
    yield outputs.detach().cpu()
    yield value.detach().cpu()
    for gradient in gradients:
        yield torch.empty(0) if gradient is None else gradient.cpu()


def name_of(value: object) -> str:
    """A name that is the same in every process: a function's own name, else the representation without addresses."""
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
