"""Steps of SGD with clipped gradients: one (`sgd_step`), or many of the same loss (`GradientStep`), which are recorded.

The gradient of a wide layer's weights is kept as two thin matrices, which are never multiplied out. For B rows of input
the gradient is g_BO^T x_BI. Its norm follows from two Gram matrices of B x B, and a step is one product into the
weights: the O x I numbers between, more than the caches hold, are neither written nor read. Autograd's graph says
where that is the whole gradient: a matrix whose one use is to be the transposed factor of one `addmm` or `mm`, which is
what nn.Linear makes of it. Weights that are used twice, shared or penalised have a second edge in it, and a gradient as
always; so have those with a hook of their own. The graph also shows a convolution's bias, whose gradient is a sum:
oneDNN takes several times as long for it.

Limits: a hook on the transposed weights or on the product's own node is not seen, since Python cannot see it. Under
activation checkpointing, asking for x_BI computes the layers before it once more.

Legend: B rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from lindt.client.replay import Tape, record
from lindt.protocols import Batch

# Numbers in a matrix from which on its gradient, 512 KiB, fills a core's own cache. A model with fewer in all has steps
# too short for looking at the graph.
WIDE: Final = 1 << 17
THIN: Final = 8  # times as many inputs and outputs as rows: above, two Gram matrices cost less than they save
EXACT: Final = (torch.float32, torch.float64)  # halves have no room for squares, complex numbers would conjugate
_PRODUCTS: Final = {"AddmmBackward0": ("_saved_mat1", 2), "MmBackward0": ("_saved_self", 1)}  # x, place of the factor


@final
@dataclass(frozen=True)
class Thin:
    """A gradient g_BO^T x_BI."""

    g_BO: Tensor
    x_BI: Tensor

    def norm(self) -> Tensor:
        """|g^T x|^2 is the sum of (g g^T) * (x x^T): B x B instead of O x I. Its terms cancel, hence the digits."""
        g, x = self.g_BO.double(), self.x_BI.double()
        return ((g @ g.T) * (x @ x.T)).sum().clamp_min(0).sqrt().to(self.g_BO.dtype)

    def dense(self) -> Tensor:
        return self.g_BO.T @ self.x_BI

    def add_to(self, weights_OI: Tensor, factor: float) -> None:
        weights_OI.addmm_(self.g_BO.T, self.x_BI, alpha=factor)


Gradient = Tensor | Thin
Made = Callable[[Tensor], Gradient]
Users = dict[Any, list[tuple[Any, int]]]  # of a node: the nodes whose gradient flows into it, and its place there


def gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Gradient | None]:
    """The gradient for each parameter, thin where it can be; None for one that the loss does not reach."""
    shortcuts = _shortcuts(loss, parameters)
    wanted: list[Any] = [shortcuts[i][0] if i in shortcuts else p for i, p in enumerate(parameters)]
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [shortcuts[i][1](g) if g is not None and i in shortcuts else g for i, g in enumerate(found)]


def norm_of(grads: Sequence[Gradient]) -> Tensor:
    """Of several gradients as one vector."""
    dense = [g for g in grads if isinstance(g, Tensor)]
    norms: list[Tensor] = list(torch._foreach_norm(dense)) if dense else []
    norms += [g.norm() for g in grads if isinstance(g, Thin)]
    length: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return length


def _shortcuts(loss: Tensor, parameters: Sequence[nn.Parameter]) -> dict[int, tuple[GradientEdge, Made]]:
    """By a parameter's place: an edge of the graph, and how what it brings makes the gradient."""
    if loss.grad_fn is None or sum(p.numel() for p in parameters) < WIDE:
        return {}
    asked = {id(p): i for i, p in enumerate(parameters) if not p._backward_hooks}
    # Who uses whom: for each node, the nodes whose gradient flows into it, with the place it has among their inputs.
    users: defaultdict[Any, list[tuple[Any, int]]] = defaultdict(list)
    leaves: dict[int, Any] = {}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        for place, (used, _) in enumerate(node.next_functions):
            if used is None:
                continue
            if used not in users:
                waiting.append(used)
                variable = getattr(used, "variable", None)
                if variable is not None and id(variable) in asked:
                    leaves[asked[id(variable)]] = used
            users[used].append((node, place))
    stepping = {p.untyped_storage().data_ptr() for p in parameters}
    found: dict[int, tuple[GradientEdge, Made]] = {}
    for index, leaf in leaves.items():
        p = parameters[index]
        shortcut = _bias(users, leaf) if p.dim() == 1 else _thin(users, leaf, p, stepping)
        if shortcut is not None:
            found[index] = shortcut
    return found


def _thin(users: Users, leaf: Any, weights_OI: Tensor, stepping: set[int]) -> tuple[GradientEdge, Made] | None:
    product = _only_product(users, leaf) if weights_OI.numel() >= WIDE and _plain_matrix(weights_OI) else None
    if product is None:
        return None
    saved = _PRODUCTS[product.name()][0]
    # The shape first: to ask for a saved tensor may cost its computation.
    if getattr(product, f"{saved}_sym_sizes")[0] * THIN > min(weights_OI.shape):
        return None
    x_BI: Tensor = getattr(product, saved).detach()
    # An input that is a parameter itself would have stepped when it is needed.
    if _plain_matrix(x_BI) and x_BI.dtype == weights_OI.dtype and x_BI.untyped_storage().data_ptr() not in stepping:
        return GradientEdge(product, 0), lambda g_BO: Thin(g_BO, x_BI)
    return None


def _bias(users: Users, leaf: Any) -> tuple[GradientEdge, Made] | None:
    """A convolution's bias: the sum of what comes back to it."""
    if [(node.name(), place) for node, place in users[leaf]] != [("ConvolutionBackward0", 2)]:
        return None
    ((convolution, _),) = users[leaf]
    return GradientEdge(convolution, 0), lambda g: g.sum([0, *range(2, g.dim())])


def _plain_matrix(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.dtype in EXACT and matrix.layout is torch.strided


def _only_product(users: Users, leaf: Any) -> Any | None:
    """The product x W^T that is the only use of W, if that is what it is."""
    if not leaf.name().endswith("AccumulateGrad") or [node.name() for node, _ in users[leaf]] != ["TBackward0"]:
        return None
    ((transposed, _),) = users[leaf]
    if len(users[transposed]) != 1:
        return None
    ((product, place),) = users[transposed]
    if product.name() not in _PRODUCTS or place != _PRODUCTS[product.name()][1]:
        return None
    return product if getattr(product, "_saved_alpha", 1) == 1 else None


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

    `kind` says what the loss is besides its modules, every Python number that it reads included (see `recording_key`);
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
