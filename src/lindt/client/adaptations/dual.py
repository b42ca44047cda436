"""LINDT's dual model (Sec. 4.1, Eq. 8-10) on any nn.Module, and its client (Sec. 4.2, Alg. 2 c4-c15): w and v_i train
jointly as one intertwined model.

Two models are joined at named attach points. A forward hook on the global model keeps the output of each point; a
forward hook on the local model replaces its output there by the intertwined representation. Neither model has to be
rewritten. The hooks exist during one call only, so that deepcopy, state_dict and torch.compile see two plain models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lindt.client.training import Initial, gradient_step, initial_private, norm_of
from lindt.errors import PlanError, UserError, require, require_choice, require_type
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable

Position = Literal["after", "before"]
SAME: Final = "give two models of the same structure, such as copy.deepcopy(global_model)"
NONE: Final = 'set method = \'guarded-fine-tune\', which needs none: overrides={"method": "guarded-fine-tune"}'


@final
class Intertwined(nn.Module):
    """The dual model (Sec. 5.2): two models of the same structure, joined at attach points. `intertwine` makes it.

    `global_output, local_output = dual(x)`; clients predict with the local one. `scores` holds the mean score at each
    point of the last call when `watch` is set.

    Args:
        global_model: The shared model w.
        local_model: The client's own model v.
        points: The attach points by name, each with `sample` or `step`: one score per sample, or per step.
        scale: How the score at a point is computed.

    Examples:
        >>> import copy, lindt, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> dual = lindt.intertwine(model, copy.deepcopy(model))
        >>> isinstance(dual, lindt.Intertwined), list(dual.points)
        (True, ['1'])
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
                    "build that module with inplace=False, or name that module as the point"
                )
            if theirs.shape != ours.shape:
                raise UserError(
                    f"attach point {name!r}: its output has shape {tuple(theirs.shape)} in the global model, "
                    f"{tuple(ours.shape)} in the local model; give two models of the same structure"
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
                raise PlanError("points", name, "its output is the model's output; name a layer before the last")
        with _hooks(self.local_model, self.points, replace):
            local_output = self.local_model(x)
        if kept:
            raise UserError(_fired(next(iter(kept)), "not at all in the local model"))
        return global_output, local_output

    def joint_loss(self, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """Eq. 10: the loss of the global output plus the loss of the local one; both reach w and v.

        Args:
            loss: A function of outputs and targets.
            x: The inputs of a batch.
            y: Its targets.

        Returns:
            The sum of both losses; call its `backward`, and step both models.
        """
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
    """Join two models of the same structure: a dual model, the paper's recovery.

    Args:
        global_model: The shared model w, which is sent back to the server.
        local_model: The client's own model v, which stays with the client. It begins as a copy of w.
        points: Names of the submodules at which the models are joined; by default those of the model's
            `attach_points`, or in a plain `nn.Sequential` the module after each layer but the last. A mapping gives for
            each name `sample` or `step`: one score per sample, or one per step of a sequence.
        scale: How the score at a point is computed; `paper` is Eq. 8.
        position: Whether the default points of a plain `nn.Sequential` are `after` an activation or `before` it.

    Returns:
        The dual model: `dual(x)` gives the outputs of both, `dual.joint_loss(loss, x, y)` trains both.

    Raises:
        UserError: The models are the same object, or not of the same structure: the same modules in order, by name and
            type, with weights and buffers of the same shapes. Settings such as a dropout rate may differ.
        PlanError: A point is not in the model, or the model has no points.

    Examples:
        >>> import copy, lindt, torch
        >>> from torch import nn
        >>> from torch.nn.functional import cross_entropy
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> private = copy.deepcopy(model)  # kept on the client between rounds
        >>> dual = lindt.intertwine(model, private)
        >>> x, y = torch.randn(5, 4), torch.tensor([0, 1, 0, 1, 1])
        >>> dual.joint_loss(cross_entropy, x, y).backward()  # gradients for both
        >>> global_output, local_output = dual(x)
        >>> local_output.shape
        torch.Size([5, 2])
    """
    require_choice("scale", scale, Scale)
    require_choice("position", position, Position)
    require_type("global_model", global_model, nn.Module, "give an nn.Module")
    require_type("local_model", local_model, nn.Module, "give an nn.Module")
    points = [points] if isinstance(points, str) else points  # one name, not its letters
    dual = _join(global_model, local_model, points, scale, position)
    # Not in `_join`: in lindt's own rounds v begins as a copy of w, and the check would cost time in each of them.
    _require_one_structure(global_model, local_model)
    return dual


def _join(
    global_model: nn.Module,
    local_model: nn.Module,
    points: Sequence[str] | Mapping[str, Per] | None,
    scale: Scale,
    position: Position,
) -> Intertwined:
    if global_model is local_model:
        raise UserError(
            "local_model: it is the same module as global_model; give it weights of its own, such as "
            "copy.deepcopy(global_model)"
        )
    theirs = {id(parameter) for parameter in global_model.parameters() if parameter.requires_grad}
    for name, parameter in local_model.named_parameters():
        if id(parameter) in theirs:
            raise UserError(
                f"local_model: its {name} is a weight of global_model, too; give it weights of its own, such as "
                "copy.deepcopy(global_model)"
            )
    for model in (global_model, local_model):
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise UserError(
                f"{type(model).__name__} runs copies of the model without the hooks; "
                "intertwine its `.module`, and wrap the result"
            )
    names = default_points(global_model, position) if points is None else points
    chosen = (
        dict(_named(f"{n}:{p}") for n, p in names.items()) if isinstance(names, Mapping) else dict(map(_named, names))
    )
    if not chosen:
        raise PlanError(
            "points", names, f"a model of one layer has no attach point; name points, add a layer, or {NONE}"
        )
    known = dict(global_model.named_modules())
    for name in chosen:
        if name not in known or not name:
            raise PlanError("points", name, f"no such submodule in the model; choose among {[n for n in known if n]}")
    # The output of a recurrent module is a sequence, with one score for each step.
    per: dict[str, Per] = {
        n: p or ("step" if isinstance(known[n], nn.RNNBase) else "sample") for n, p in chosen.items()
    }
    return Intertwined(global_model, local_model, per, scale)


def _require_one_structure(global_model: nn.Module, local_model: nn.Module) -> None:
    """UserError with the first difference: in names and types of the modules, then in shapes of weights and buffers.

    Types are compared by name: in a notebook the cell with a model's class may have run again between the two models.
    """
    for theirs, ours in zip_longest(_modules(global_model), _modules(local_model)):
        if theirs != ours:
            raise UserError(f"local_model: it has {_in_words(ours)} where global_model has {_in_words(theirs)}; {SAME}")
    shapes, own = _shapes(global_model), _shapes(local_model)
    for name in shapes | own:
        found, expected = own.get(name, "missing"), shapes.get(name, "missing")
        if found != expected:
            raise UserError(f"local_model: its {name!r} is {found}, in global_model {expected}; {SAME}")


def _modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names and types in order. A module with two names counts twice, as where each name has a module of its own."""
    return ((name, type(module).__qualname__) for name, module in model.named_modules(remove_duplicate=False))


def _in_words(module: tuple[str, str] | None) -> str:
    if module is None:
        return "no further module"
    name, kind = module
    return f"module {name!r} of type {kind}" if name else f"the type {kind}"


def _shapes(model: nn.Module) -> dict[str, str]:
    """Of weights and kept buffers, in words. Other buffers are caches, whose size may depend on the last input."""
    kept = ((name, part) for name, part in model.state_dict().items() if isinstance(part, Tensor))
    return {name: "without a size yet" if is_lazy(part) else f"of shape {tuple(part.shape)}" for name, part in kept}


def _named(point: str) -> tuple[str, Per | None]:
    """The name and the kind of score of a point: `block1`, or `encoder:step` for one score per step."""
    name, _, per = point.partition(":")
    if per not in ("", "sample", "step"):
        raise PlanError("points", point, "write `sample` or `step` after the colon")
    return name, per or None  # type: ignore[return-value]  # checked above


def default_points(model: nn.Module, position: Position = "after") -> list[str]:
    """m = 1..M-1: the model's `attach_points`, or points between the layers of a plain nn.Sequential.

    `after` takes the last module before each next layer with parameters (after activation and pooling), `before` each
    layer with parameters itself; never the last layer, whose outputs are the logits.
    """
    named = getattr(model, "attach_points", None)
    if named is not None:
        if position == "before":
            raise PlanError("position", position, "the model names its own attach points; name others in `points`")
        return list(named)
    if not isinstance(model, nn.Sequential):
        raise PlanError(
            "points", None, f"a {type(model).__name__} has no default attach points; name submodules, set "
            f"`attach_points` on the model, or {NONE}"
        )  # fmt: skip
    children = list(model.named_children())
    # An embedding has parameters, but is not one of the layers m = 1..M-1.
    layers = [
        index
        for index, (_, child) in enumerate(children)
        if any(True for _ in child.parameters()) and not isinstance(child, nn.Embedding)
    ]
    if position == "before":
        return [children[index][0] for index in layers[:-1]]
    return [_joint(children, start, stop) for start, stop in pairwise(layers)]


def _joint(children: list[tuple[str, nn.Module]], start: int, stop: int) -> str:
    """The last module before the next layer that transforms its input: dropout and reshaping are left out."""
    passing = (nn.Dropout, nn.Dropout2d, nn.Flatten, nn.Identity)
    last = stop - 1
    while last > start and isinstance(children[last][1], passing):
        last -= 1
    return children[last][0]


def _fired(name: str, how: str) -> str:
    return f"attach point {name!r} ran {how} in one forward pass; name a submodule that runs exactly once"


def _version(tensor: Tensor) -> int:
    """A number that grows with every change in place; 0 for tensors of inference mode, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version


def _first(name: str, output: Any) -> Tensor:
    """The representation in a module's output: recurrent modules return (output, state)."""
    tensor = output[0] if isinstance(output, tuple) else output
    if not isinstance(tensor, Tensor):
        raise UserError(
            f"attach point {name!r} returns a {type(tensor).__name__}, not a tensor; name another submodule"
        )
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
_ZERO = 1e-12  # a vector with a smaller norm has no direction: the score is 0.5 and its gradient stays finite


def score(global_B: Tensor, local_B: Tensor, per: Per = "sample", scale: Scale = "paper") -> Tensor:
    """Eq. 8: sigmoid of the scalar projection of the global representation on the local one.

    One score per sample (the first dimension), or per step of a sequence (all dimensions but the last), in a shape that
    broadcasts. Limit: with `sample`, a module whose first dimension is time mixes samples.
    """
    return torch.sigmoid(_projection(global_B, local_B, per, scale)[0])


def _projection(global_B: Tensor, local_B: Tensor, per: Per, scale: Scale) -> tuple[Tensor, Tensor, Tensor | float]:
    """The argument of the sigmoid, the local norm that it was divided by, and the other divisor."""
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
    plain = (
        torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    )  # these derive the backward themselves
    if plain or local_B.dtype == torch.float16:  # float16 cannot represent 1 / |L|^2
        return torch.lerp(local_B, global_B, score(global_B, local_B, per, scale))
    h: Tensor = _Attach.apply(global_B, local_B, per, scale)  # type: ignore[no-untyped-call]
    return h


@final
class _Attach(torch.autograd.Function):
    """Eq. 9 with a backward written by hand: autograd's takes 26 operators, 13 of which pass over whole tensors."""

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
        if torch.is_grad_enabled():  # for a second derivative: the values saved by forward have no graph
            p, norm, factor = _projection(G, L, ctx.per, ctx.scale)
            s, other = torch.sigmoid(p), [factor] if isinstance(factor, Tensor) else []
        slope = torch.ops.aten.sigmoid_backward((g_B * (G - L)).sum(_over(L, ctx.per), keepdim=True), s)
        along = slope / norm
        back = p * along / norm
        turn = along / (other[0] if other else ctx.factor)
        to_G = s * g_B
        to_L = (g_B - to_G).addcmul_(turn, G).addcmul_(back, L, value=-1)
        to_G.addcmul_(turn, L)
        if other:  # cosine: p depends on |G| as well
            to_G.addcmul_(p * slope / other[0].square(), G, value=-1)
        return to_G, to_L, None, None


Trains = Literal["all", "head"]


@register(Adaptation)
@final
@dataclass(frozen=True)
class Dual:
    """Eq. 8-10. Empty `points` are the model's own; `name:step` scores each step of a sequence.

    `trains = "head"` is an ablation: only the last layer of v trains.
    """

    points: tuple[str, ...] = ()
    scale: Scale = "paper"
    position: Position = "after"
    first: Initial = "copy"
    trains: Trains = "all"

    takes_optimizer = True
    predictor_runs_w = True  # once for each batch, unchanged: guarded prediction takes the outputs of w from there

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module:
        """c5-c6: v_i starts as the received w, or at random."""
        return initial_private(shared, self.first)

    def __post_init__(self) -> None:
        require_choice("scale", self.scale, Scale)
        require_choice("position", self.position, Position)
        require_choice("first", self.first, Initial)
        require_choice("trains", self.trains, Trains)
        named = bool(self.points) and self.position == "before"
        require(
            not named, "position", self.position, "it applies to default points only; leave it out or leave out points"
        )

    def fits(self, model: nn.Module, x: Tensor) -> None:
        self.dual(model, copy.deepcopy(model))(x)

    def dual(self, shared: nn.Module, private: nn.Module) -> Intertwined:
        """c7: layer-wise intertwine G(., w_i) with L_i(., v_i)."""
        return _join(shared, private, self.points or None, self.scale, self.position)

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        """c12-c13: one backward of the sum (Eq. 10), then a step of w and of v, each clipped separately."""
        assert private is not None
        dual = self.dual(shared, private)
        sections = v_sections(private, list(dual.points))
        if self.trains == "head":
            sections = {"head": sections["head"]}
        w, v = trainable(shared), [p for section in sections.values() for p in section]
        dual.watch = True  # the mean score and v's gradient norm of the round's first batch are logged

        def loss(x: Tensor, y: Tensor) -> Tensor:
            global_output, local_output = dual(x)
            return ctx.shared_loss(shared, global_output, y) + ctx.loss(local_output, y)

        named = (self, *dual.points.items())
        down = gradient_step(ctx, named, loss, (shared, w), (private, v))

        def step(batch: Batch) -> None:
            _, grads = down(batch)
            if dual.watch:
                dual.watch = False
                ctx.notes.update({f"score/{name}": value for name, value in dual.scores.items()})
                ctx.notes.update(_norms(sections, grads))

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        """A client predicts with the local output of the dual model, and with w before it has a v_i."""
        if private is None:
            return shared
        dual = self.dual(shared, private)

        def predict(x: Tensor) -> Tensor:
            local_output: Tensor = dual(x)[1]
            return local_output

        return predict


def v_sections(private: nn.Module, points: list[str]) -> dict[str, list[nn.Parameter]]:
    """The parameters of v by the next attach point after them; those after the last point are the "head"."""
    order = [name for name, _ in private.named_modules()]
    ends = sorted((_last_inside(order, point), point) for point in points)
    sections: dict[str, list[nn.Parameter]] = {point: [] for point in [*(p for _, p in ends), "head"]}
    for name, parameter in private.named_parameters():
        if parameter.requires_grad:
            place = order.index(name.rpartition(".")[0])
            sections[next((point for end, point in ends if place <= end), "head")].append(parameter)
    return sections


def _last_inside(order: list[str], point: str) -> int:
    """The index of the last submodule of a point in the order of modules."""
    return max(index for index, name in enumerate(order) if name == point or name.startswith(f"{point}."))


def _norms(sections: dict[str, list[nn.Parameter]], grads: list[Tensor | None]) -> dict[str, float]:
    norms: dict[str, float] = {}
    for name, section in sections.items():
        mine, grads = [g for g in grads[: len(section)] if g is not None], grads[len(section) :]
        if mine:
            norms[f"gradient/{name}"] = float(norm_of(mine))
    return norms


# LINDT from the first round on: the paper's all-time mode.
register_method("lindt-always", adaptation="dual")


register_method("lindt-tm", adaptation="dual", aggregator={"kind": "trimmed_mean", "share": 0.2})


# Attached before the activations: the best variant of the ablation, by a small margin.
register_method("lindt-before", adaptation={"kind": "dual", "position": "before"})


# Detection and recovery: FedAvg until NFL is detected, LINDT from then on.
register_method(
    "lindt-on-detection", adaptation="dual", recovery={"kind": "on_detection", "epsilon": 0.1, "patience": 250}
)
