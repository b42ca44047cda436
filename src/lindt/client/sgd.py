"""Steps of SGD with clipped gradients: one (`descend`), or many of the same loss (`Descent`), which are recorded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from lindt.client.replay import Tape, record
from lindt.client.thin_gradients import Gradient, Thin, gradients, norm_of
from lindt.protocols import Batch

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


Gradients = list[Gradient | None]


Slopes = list[tuple[Gradients, Tensor | None]]  # by group: the gradients, and their norm where there are any


def sgd_step(loss: Tensor, rate: float, max_norm: float, *groups: list[nn.Parameter]) -> list[Gradients]:
    """One step of SGD from one backward of `loss`; each group's gradient is clipped to `max_norm` apart.

    Returns the gradients as they were before clipping, a group at a time; None for a parameter that the loss does
    not reach, `Thin` for a wide layer's weights (`dense()` multiplies it out). The clip is the rule of
    torch.nn.utils.clip_grad_norm_, folded into the step's length: the gradients themselves are not touched, which
    saves a pass over them and leaves a tensor that two parameters share alone.
    """
    return _move(_slopes(loss, groups), rate, max_norm, groups)


def _slopes(loss: Tensor, groups: Sequence[list[nn.Parameter]]) -> Slopes:
    found, slopes = gradients(loss, [parameter for group in groups for parameter in group]), []
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
        pairs = list(zip(group, found, strict=True))
        dense = [(p, g) for p, g in pairs if isinstance(g, Tensor)]
        if dense:
            torch._foreach_add_([p for p, _ in dense], [g for _, g in dense], alpha=-step)
        for p, g in pairs:
            if isinstance(g, Thin):
                g.add_to(p, -step)
    return [found for found, _ in slopes]


@final
class GradientStep:
    """`descend` over and over, for one client: `loss` of a batch, which asks `modules` and nothing else that changes.

    `kind` says what the loss is besides its modules, every Python number that it reads included (see `kind_of`);
    None: it may be anything, and no step is recorded. Steps of a kind that has been met often are recorded and played
    from a tape, with the same bits; gradients that come from one are not to be changed in place. A client's first step
    is always taken the long way, so that a method may look closer at it.
    Limit: modules are looked at once. Who freezes, hooks or switches a layer later takes a new Descent.
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
    """A tape and how its tensors make slopes: of each group, how many there are for each gradient and for the norm."""

    tape: Tape
    shapes: list[tuple[list[int], int]]

    def slopes(self, inputs: Sequence[Tensor]) -> Slopes:
        tensors = iter(self.tape.play(inputs))
        made: Slopes = []
        for parts, norms in self.shapes:
            found: Gradients = [
                None if not count else next(tensors) if count == 1 else Thin(next(tensors), next(tensors))
                for count in parts
            ]
            made.append((found, next(tensors) if norms else None))
        return made


# By kind and shapes: a tape, or how often it was met; beyond BEFORE it is not to be recorded.
_KEPT: dict[Hashable, dict[Hashable, _Recorded | int]] = {}


def _flat(slopes: Slopes) -> list[Tensor]:
    tensors: list[Tensor] = []
    for found, norm in slopes:
        for g in found:
            tensors += [g.g_BO, g.x_BI] if isinstance(g, Thin) else [] if g is None else [g]
        tensors += [] if norm is None else [norm]
    return tensors


def _shape(slope: tuple[Gradients, Tensor | None]) -> tuple[list[int], int]:
    found, norm = slope
    return [2 if isinstance(g, Thin) else int(g is not None) for g in found], int(norm is not None)


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
