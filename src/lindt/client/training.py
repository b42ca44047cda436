"""The one training loop of the package (`fit`) and the step of SGD that it repeats.

Clients, FB's fine-tuning, private and centralized training call them.

`sgd_step` is one step with clipped gradients. `GradientStep` takes many of the same loss: the step's operators are
recorded once and played again with other numbers, by the same kernels, in the same order, to the same bits. Around the
operators Python runs the layers, and autograd builds its graph and walks it back: the same each time, for a tenth of
the time. A `Tape` keeps only the operators, as torch's dispatcher sees them below autograd, with the places where their
operands come from and go to.

What a tape cannot be of is refused while it is recorded, and the step is then taken the long way for good: a value
that Python asked for (`.item()`), a shape that depends on values, a generator of one's own, a tensor that is neither
an input nor made on the way. What cannot be seen there is a choice that Python made by itself; so only layers that
make none are recorded (`PLAIN`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import FunctionType
from typing import Any, Final, Literal, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lindt.data.examples import LocalWork
from lindt.errors import require
from lindt.protocols import Batch, Context, Examples, Penalty, Step
from lindt.registry import register, register_method
from lindt.seeds import seeded
from lindt.weights import trainable

Initial = Literal["copy", "random"]
FEW: Final = 16  # samples by which a key tells one model, loss or metric from another


def prepare_model(model: nn.Module, device: torch.device, sample: Tensor) -> nn.Module:
    """A model where it trains. One with convolutions has its weights' channels last, which a CPU runs faster on.

    Not every model bears that: `.view()` on a convolution's output fails then. It is tried on a sample first.
    """
    model = model.to(device)
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return model
    training = model.training
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        with torch.no_grad():
            model.eval()(sample.to(device))
    except RuntimeError:  # if it fails for another reason, it will fail again where that can be told
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
    """How a client steps down the loss of its batches for one round, by `Descent` or with the user's optimizer.

    A side is a module and those of its parameters that step, clipped apart. `named` is the method with its settings;
    with None no step is recorded. `also` are tensors that the loss reads besides the modules'.
    Steps are recorded only where `loss` is defined in this package and `named` holds every Python number that it
    reads: a tape would keep the numbers of the step that was recorded (see `recording_key`). Others take the long way.
    """
    groups = [group for _, group in sides]
    if ctx.optimizer is None:
        kind = recording_key(loss, ctx.loss, named, ctx.penalty)
        down = GradientStep(loss, groups, [module for module, _ in sides], kind, [ctx.received_P, *also])
        return lambda batch: down(batch, ctx.rate, ctx.max_norm)
    optimizers = [ctx.optimizer(group) for group in groups]

    def step(batch: Batch) -> list[list[Tensor | None]]:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
        return [[p.grad for p in group] for group in groups]

    return step


def initial_private(shared: nn.Module, first: Initial) -> nn.Module:
    """v_i's first value: a copy of the received w, or the same structure at random."""
    private = copy.deepcopy(shared)
    if first == "random":
        for module in private.modules():
            # MultiheadAttention spells it with an underscore.
            reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
    return private


BEFORE: Final = 20  # steps of a kind that are taken before one is recorded, which takes up to three times as long
MOST: Final = 100  # shapes of batches that are remembered of a kind
# Layers that do the same for the same shapes whenever they are asked; what else they do is in their settings.
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
    """One step of SGD from one backward of `loss`; each group's gradient is clipped to `max_norm` apart.

    Returns the gradients as they were before clipping, a group at a time; None for a parameter that the loss does
    not reach. The clip is the rule of torch.nn.utils.clip_grad_norm_, folded into the step's length: the gradients
    themselves are not touched, which saves a pass over them and leaves a tensor that two parameters share alone.
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


@torch.no_grad()
def _move(slopes: Slopes, rate: float, max_norm: float, groups: Sequence[list[nn.Parameter]]) -> list[Gradients]:
    for group, (found, norm) in zip(groups, slopes, strict=True):
        if norm is None:
            continue
        step = rate * min(1.0, max_norm / (float(norm) + 1e-6))
        reached = [(p, g) for p, g in zip(group, found, strict=True) if g is not None]
        torch._foreach_add_([p for p, _ in reached], [g for _, g in reached], alpha=-step)
    return [found for found, _ in slopes]


def norm_of(grads: Sequence[Tensor]) -> Tensor:
    """Of several gradients as one vector."""
    length: Tensor = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(list(grads)))))
    return length


@final
class GradientStep:
    """`sgd_step` over and over, for one client: `loss` of a batch, which asks `modules` and nothing else that changes.

    `kind` says what the loss is besides its modules, every Python number that it reads included (see `recording_key`);
    None: it may be anything, and no step is recorded. Steps of a kind that has been met often are recorded and played
    from a tape, with the same bits; gradients that come from one are not to be changed in place. A client's first step
    is always taken the long way, so that a method may look closer at it.
    Limit: modules are looked at once. Who freezes, hooks or switches a layer later takes a new one.
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
    """A tape and how its tensors make slopes: of each group, which gradients and whether a norm are among them."""

    tape: Tape
    shapes: list[tuple[list[bool], bool]]

    def slopes(self, inputs: Sequence[Tensor]) -> Slopes:
        tensors = iter(self.tape.play(inputs))
        return [
            ([next(tensors) if there else None for there in gradients], next(tensors) if norm else None)
            for gradients, norm in self.shapes
        ]


# By kind and shapes: a tape, or how often it was met; beyond BEFORE it is not to be recorded.
_KEPT: dict[Hashable, dict[Hashable, _Recorded | int]] = {}


def _flat(slopes: Slopes) -> list[Tensor]:
    return [tensor for found, norm in slopes for tensor in (*found, norm) if tensor is not None]


def _shape(slope: tuple[Gradients, Tensor | None]) -> tuple[list[bool], bool]:
    found, norm = slope
    return [g is not None for g in found], norm is not None


def recording_key(objective: Callable[..., Tensor], loss: Callable[..., Tensor], *named: object) -> Hashable:
    """The kind of steps down an objective: the loss, the method, its settings, all that decides the operators.

    None where the operators cannot be known. A tape keeps every Python number that the objective read while it was
    recorded, so all of them must be in the kind. That is so for an objective of this package: it reads numbers from
    `named` only. An objective that is defined elsewhere may read anything (`self.share`, `ctx.round`), and so may a
    method of the user's that one of ours calls. A loss of torch.nn.functional does the same for the same shapes.
    """
    known = getattr(functional, getattr(loss, "__name__", ""), None) is loss and all(map(_fixed, named))
    own = isinstance(objective, FunctionType) and _in_package(objective.__globals__.get("__name__"))
    try:
        hash(named)
    except TypeError:
        return None
    return (loss, *named) if known and own else None


def _fixed(value: object) -> bool:
    """Whether it is a plain value, or one of this package's frozen settings: then equal values do the same."""
    if isinstance(value, tuple):
        return all(map(_fixed, value))
    return type(value) in (bool, int, float, str) or _in_package(type(value).__module__)


def _in_package(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == __name__.partition(".")[0]


def _plain(module: nn.Module) -> bool:
    """Whether all of its layers are torch's own, as they came: no hooks, no forward put in their place."""
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
    """What decides the operators besides the batch: layers, their settings and modes, how weights lie, which step."""
    place = {id(tensor): index for index, tensor in enumerate(held)}
    layers = [
        (
            name,
            type(one),
            *(v if isinstance(v, SIMPLE) else repr(v) for k, v in vars(one).items() if k[0] != "_"),
            *(place.get(id(t), -1) for t in (*one._parameters.values(), *one._buffers.values())),
        )
        for module in modules
        for name, one in module.named_modules(remove_duplicate=False)  # a layer that is used twice is there twice
    ]
    stepping = tuple(tuple(place.get(id(p), -1) for p in group) for group in groups)
    return tuple(layers), tuple((*_signature(t), t.requires_grad) for t in held), stepping


def _signature(tensor: Tensor) -> tuple[Hashable, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


_aten = torch.ops.aten
_UNFORESEEN: Final = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Slot(NamedTuple):
    """Where a tensor lies while a tape is played."""

    place: int


class _Operation(NamedTuple):
    operator: Callable[..., Any]
    operands: Callable[[list[Any]], Sequence[Any]]  # taken from the slots
    options: dict[str, Any]
    into: int | list[int]  # the slot of its result, or one for each of several
    last: list[int]  # slots that nothing after it reads


@final
class Tape:
    """Operators to be played on inputs of the same shapes. It holds no tensor; constants have slots of their own."""

    def __init__(self, operations: Sequence[_Operation], slots: Sequence[Any], results: Sequence[int]) -> None:
        self._operations, self._slots, self._results = list(operations), list(slots), list(results)

    def __len__(self) -> int:
        return len(self._operations)

    @torch.inference_mode()
    def play(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        slots = self._slots.copy()
        slots[: len(inputs)] = inputs
        for operator, operands, options, into, last in self._operations:
            made = operator(*operands(slots), **options)
            if type(into) is int:
                slots[into] = made
            else:
                for slot, tensor in zip(into, made, strict=True):  # type: ignore[arg-type]
                    slots[slot] = tensor
            for slot in last:
                slots[slot] = None
        return [slots[slot] for slot in self._results]


def record(work: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> Tape | None:
    """Do the work, which counts, and give the tape of it; None where it cannot be played again."""
    recorder = _Recorder(inputs)
    with recorder:
        results = work()
    return recorder.tape(results)


@final
class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[Tensor] = []  # all of them stay, so that no other takes their id
        self._slot: dict[int, int] = {}
        self._made: list[tuple[Any, list[Any], dict[str, Any], int | list[int]]] = []
        self._untransposed: dict[int, int] = {}
        self._slots = 0
        self._refused = False
        for tensor in inputs:
            self._refused |= id(tensor) in self._slot  # the same one twice may be two the next time
            self._new(tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first operator would import torch's compiler, a second's work

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
            raise _RefusedError  # no operator of a step has any
        if func is _aten.detach.default:  # nothing is detached where no graph is built
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
        slots: list[Any] = [None] * self._slots
        needed = set(kept)
        operations = []
        for func, arguments, options, into in reversed(self._made):
            touched = {slot for one in arguments for slot in _slots_of(one)}.union(
                [into] if type(into) is int else into
            )
            last = sorted(touched - needed - {-1})
            needed |= touched
            called = getattr(func, "_op", func)  # what func itself calls, half a microsecond later
            operations.append(_Operation(called, _operands(arguments, slots), options, into, last))
        return Tape(operations[::-1], [*slots, None], kept)  # the last one for gradients that were not asked for


class _RefusedError(Exception):
    """It cannot be played again."""


def _slots_of(one: Any) -> set[int]:
    if isinstance(one, _Slot):
        return {one.place}
    return {slot for each in one for slot in _slots_of(each)} if isinstance(one, list) else set()


def _operands(arguments: list[Any], slots: list[Any]) -> Callable[[list[Any]], Sequence[Any]]:
    """How an operator's arguments are taken from the slots; constants are put into new ones."""
    if any(isinstance(one, list) and _slots_of(one) for one in arguments):
        return lambda slots: [_filled(one, slots) for one in arguments]
    places = []
    for one in arguments:
        places.append(one.place if isinstance(one, _Slot) else len(slots))
        if not isinstance(one, _Slot):
            slots.append(one)
    if len(places) < 2:
        return lambda slots: [slots[place] for place in places]
    return itemgetter(*places)


def _filled(one: Any, slots: list[Any]) -> Any:
    if isinstance(one, _Slot):
        return slots[one.place]
    return [_filled(each, slots) for each in one] if isinstance(one, list) else one


def training_step(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], batch: Batch) -> Iterator[Tensor]:
    """Outputs, loss and gradients of one step in training mode: dropout, and a forward that asks for the mode."""
    model = copy.deepcopy(model).train()  # BatchNorm changes its statistics
    x, y = batch
    with torch.enable_grad(), seeded(0, x.device):
        outputs = model(x)
        value = loss(outputs, y)
        gradients = torch.autograd.grad(value, trainable(model), allow_unused=True)
    yield outputs.detach().cpu()
    yield value.detach().cpu()
    for gradient in gradients:
        yield torch.empty(0) if gradient is None else gradient.cpu()


def name_of(value: object) -> str:
    """A name that is the same in every process: of a function its own, else the representation without addresses."""
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))
