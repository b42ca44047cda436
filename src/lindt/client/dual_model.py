"""The layer-wise intertwined dual model (Sec. 4.1) on any nn.Module, by naming its attach points.

A forward hook on the global model keeps each point's output; a forward hook on the local model replaces its
own output there by the intertwined representation. Neither model has to be rewritten, and the hooks live for
one call, so that deepcopy, state_dict and torch.compile see two plain models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn

from lindt.errors import PlanError, UserError, require, require_type

Position = Literal["after", "before"]


@final
class Intertwined(nn.Module):
    """The dual model: `global_output, local_output = dual(x)`. Clients predict with the local one.

    `scores` holds the mean score at each point of the last call when `watch` is set.
    """

    def __init__(
        self,
        global_model: nn.Module,
        local_model: nn.Module,
        points: Mapping[str, Per],
        scale: Scale = "paper",
    ) -> None:
        super().__init__()
        self.global_model, self.local_model = global_model, local_model
        self.points, self.scale = dict(points), scale
        self.watch = False
        self.scores: dict[str, float] = {}

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept: dict[str, tuple[Tensor, int]] = {}

        def keep(name: str, output: Any) -> Any:
            if name in kept:
                raise UserError(_fired(name, "more than once"))
            theirs = _first(name, output)
            kept[name] = theirs, _version(theirs)
            return output

        def replace(name: str, output: Any) -> Any:
            if name not in kept:
                raise UserError(_fired(name, "more often in the local model than in the global one"))
            (theirs, version), ours, per = kept.pop(name), _first(name, output), self.points[name]
            if _version(theirs) != version:
                raise UserError(
                    f"attach point {name!r}: the module after it changes its output in place; "
                    "build that one with inplace=False, or name it as the point instead"
                )
            if theirs.shape != ours.shape:
                raise UserError(
                    f"attach point {name!r}: the global model gives {tuple(theirs.shape)} there, the local "
                    f"model {tuple(ours.shape)}; both need the same structure"
                )
            if self.watch:
                self.scores[name] = float(score(theirs, ours, per, self.scale).detach().mean())
            return _with_first(output, attach(theirs, ours, per, self.scale))

        with _hooks(self.global_model, self.points, keep):
            global_output = self.global_model(x)
        for name in self.points:
            if name not in kept:
                raise UserError(_fired(name, "not at all"))
            if kept[name][0] is global_output:
                raise PlanError("points", name, "its output are the logits; attach before the last layer")
        with _hooks(self.local_model, self.points, replace):
            local_output = self.local_model(x)
        if kept:
            raise UserError(_fired(next(iter(kept)), "not at all in the local model"))
        return global_output, local_output

    def joint_loss(self, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Eq. 10: the loss of the global output plus the loss of the local one; both reach w and v."""
        global_output, local_output = self(x)
        return loss(global_output, y) + loss(local_output, y)


def intertwine(
    global_model: nn.Module,
    local_model: nn.Module,
    points: Sequence[str] | Mapping[str, Per] | None = None,
    *,
    scale: Scale = "paper",
    position: Position = "after",
) -> Intertwined:
    """Join two models of the same structure at `points`, names of submodules; by default `default_points`."""
    for field, value, choices in (("scale", scale, get_args(Scale)), ("position", position, get_args(Position))):
        require(value in choices, field, value, f"choose among {', '.join(choices)}")
    require_type("global_model", global_model, nn.Module, "give an nn.Module")
    require_type("local_model", local_model, nn.Module, "give an nn.Module")
    points = [points] if isinstance(points, str) else points  # one name, not its letters
    if global_model is local_model:
        raise UserError("the global and the local model are the same module; give the local model weights of its own")
    for model in (global_model, local_model):
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise UserError(
                f"{type(model).__name__} runs copies of the model that no hook follows; "
                "intertwine the inner `.module` and wrap the result"
            )
    names = default_points(global_model, position) if points is None else points
    chosen = (
        dict(_named(f"{n}:{p}") for n, p in names.items()) if isinstance(names, Mapping) else dict(map(_named, names))
    )
    if not chosen:
        raise PlanError("points", names, "a model of one layer has nothing to intertwine; name points, or add a layer")
    known, known_local = dict(global_model.named_modules()), dict(local_model.named_modules())
    for name in chosen:
        if name not in known or name not in known_local or not name:
            raise PlanError("points", name, f"no such submodule in the model; choose among {[n for n in known if n]}")
    # A recurrent module's output is a sequence whose steps agree or contradict one by one.
    per: dict[str, Per] = {
        n: p or ("step" if isinstance(known[n], nn.RNNBase) else "sample") for n, p in chosen.items()
    }
    return Intertwined(global_model, local_model, per, scale)


def _named(point: str) -> tuple[str, Per | None]:
    """`block1`, or `encoder:step` where the score is wanted per step."""
    name, _, per = point.partition(":")
    if per not in ("", "sample", "step"):
        raise PlanError("points", point, "after the colon stands `sample` or `step`")
    return name, per or None  # type: ignore[return-value]  # checked above


def default_points(model: nn.Module, position: Position = "after") -> list[str]:
    """m = 1..M-1: what a model names as its `attach_points`, or the joints of a plain nn.Sequential.

    `after` takes the module before each next parametrised one (activation and pooling included), `before`
    each parametrised module itself; never the last, whose output are the logits.
    """
    named = getattr(model, "attach_points", None)
    if named is not None:
        if position == "before":
            raise PlanError("position", position, "the model names its own attach points; name others in `points`")
        return list(named)
    if not isinstance(model, nn.Sequential):
        raise PlanError(
            "points", None, f"a {type(model).__name__} has no default attach points; name submodules, or set "
            "`attach_points` on the model"
        )  # fmt: skip
    children = list(model.named_children())
    # An embedding has parameters but no representation of a layer yet: it is no m = 1..M-1.
    layers = [
        index
        for index, (_, child) in enumerate(children)
        if any(True for _ in child.parameters()) and not isinstance(child, nn.Embedding)
    ]
    if position == "before":
        return [children[index][0] for index in layers[:-1]]
    return [_joint(children, start, stop) for start, stop in pairwise(layers)]


def _joint(children: list[tuple[str, nn.Module]], start: int, stop: int) -> str:
    """The last module before the next layer that still transforms: dropout and reshaping only pass on."""
    passing = (nn.Dropout, nn.Dropout2d, nn.Flatten, nn.Identity)
    last = stop - 1
    while last > start and isinstance(children[last][1], passing):
        last -= 1
    return children[last][0]


def _fired(name: str, how: str) -> str:
    return f"attach point {name!r} fired {how} in one forward pass; name a submodule that runs exactly once"


def _version(tensor: Tensor) -> int:
    """Grows with every change in place; tensors of inference mode do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _first(name: str, output: Any) -> Tensor:
    """The representation in a module's output: recurrent modules give (output, state)."""
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, Tensor):
        raise UserError(f"attach point {name!r} gives a {type(tensor).__name__}, not a tensor; name another submodule")
    return tensor


def _with_first(output: Any, tensor: Tensor) -> Any:
    return (tensor, *output[1:]) if isinstance(output, tuple) else tensor


@contextmanager
def _hooks(model: nn.Module, points: Mapping[str, Per], act: Callable[[str, Any], Any]) -> Iterator[None]:
    def hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        return lambda _module, _inputs, output: act(name, output)

    handles = [model.get_submodule(name).register_forward_hook(hook(name)) for name in points]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


Per = Literal["sample", "step"]
Scale = Literal["paper", "sqrt_d", "cosine"]
_ZERO = 1e-12  # a norm below this is no direction: the score is 0.5 and its gradient stays finite


def score(global_B: Tensor, local_B: Tensor, per: Per = "sample", scale: Scale = "paper") -> Tensor:
    """Eq. 8: sigmoid of the scalar projection of the global representation on the local one.

    One score a sample (the first dimension), or one a step of a sequence (all but the last); shaped to
    broadcast. Limit: a module that puts time first mixes samples under `sample`.
    """
    return torch.sigmoid(_projection(global_B, local_B, per, scale)[0])


def _projection(global_B: Tensor, local_B: Tensor, per: Per, scale: Scale) -> tuple[Tensor, Tensor, Tensor | float]:
    """What the sigmoid is taken of, the local norm it was divided by, and what else."""
    over = _over(local_B, per)
    norm = _nonzero(torch.linalg.vector_norm(local_B, dim=over, keepdim=True))
    dot = (local_B * global_B).sum(over, keepdim=True) / norm
    other: Tensor | float = 1.0
    if scale == "sqrt_d":
        other = (local_B.numel() // dot.numel()) ** 0.5
    elif scale == "cosine":
        other = _nonzero(torch.linalg.vector_norm(global_B, dim=over, keepdim=True))
    return (dot if scale == "paper" else dot / other), norm, other


def _over(local_B: Tensor, per: Per) -> tuple[int, ...]:
    """The dimensions that sums run over: all but the batch, or the features only."""
    return tuple(range(1, local_B.dim())) if per == "sample" else (-1,)


def _nonzero(norm: Tensor) -> Tensor:
    return torch.where(norm > _ZERO, norm, torch.ones_like(norm))


def attach(global_B: Tensor, local_B: Tensor, per: Per = "sample", scale: Scale = "paper") -> Tensor:
    """Eq. 9: h = score * G + (1 - score) * L."""
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()  # they make their own backward
    if plain or local_B.dtype == torch.float16:  # which has no room for 1 / |L|^2
        return torch.lerp(local_B, global_B, score(global_B, local_B, per, scale))
    h: Tensor = _Attach.apply(global_B, local_B, per, scale)  # type: ignore[no-untyped-call]
    return h


@final
class _Attach(torch.autograd.Function):
    """With its backward by hand: autograd's own takes 26 operators for it, of which 13 pass over whole tensors."""

    @staticmethod
    def forward(ctx: Any, global_B: Tensor, local_B: Tensor, per: Per, scale: Scale) -> Tensor:
        projection, norm, other = _projection(global_B, local_B, per, scale)
        score = torch.sigmoid(projection)
        kept = [global_B, local_B, projection, score, norm]
        ctx.save_for_backward(*kept, *([other] if isinstance(other, Tensor) else []))
        ctx.per, ctx.scale, ctx.factor = per, scale, other
        return torch.lerp(local_B, global_B, score)

    @staticmethod
    def backward(ctx: Any, g_B: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """With p the projection: dp/dL = G / (|L| f) - p L / |L|^2, dp/dG = L / (|L| f), f = 1, sqrt(d) or |G|."""
        G, L, p, s, norm, *other = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: what forward kept has no graph
            p, norm, factor = _projection(G, L, ctx.per, ctx.scale)
            s, other = torch.sigmoid(p), [factor] if isinstance(factor, Tensor) else []
        slope = torch.ops.aten.sigmoid_backward((g_B * (G - L)).sum(_over(L, ctx.per), keepdim=True), s)
        along = slope / norm
        back = p * along / norm
        turn = along / (other[0] if other else ctx.factor)
        to_G = s * g_B
        to_L = (g_B - to_G).addcmul_(turn, G).addcmul_(back, L, value=-1)
        to_G.addcmul_(turn, L)
        if other:  # cosine: p falls with |G| as well
            to_G.addcmul_(p * slope / other[0].square(), G, value=-1)
        return to_G, to_L, None, None
