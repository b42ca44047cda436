"""LINDT's client (Sec. 4.2, Alg. 2 c4-c15): w and v_i train jointly as one intertwined dual model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor, nn

from lindt.client.adaptations.base import Initial, gradient_step, initial_private, require_choice
from lindt.client.dual_model import Intertwined, Position, Scale, intertwine
from lindt.client.sgd import Gradient, norm_of
from lindt.errors import require
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable

Trains = Literal["all", "head"]


@register(Adaptation)
@final
@dataclass(frozen=True)
class Dual:
    """Eq. 8-10. `points` empty means the model's own; `name:step` scores a sequence step by step.

    `trains = "head"` is the ablation: only v's last layer learns.
    """

    points: tuple[str, ...] = ()
    scale: Scale = "paper"
    position: Position = "after"
    first: Initial = "copy"
    trains: Trains = "all"

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module:
        """c5-c6: v_i starts as the received w, or at random."""
        return initial_private(shared, self.first)

    def __post_init__(self) -> None:
        require_choice("scale", self.scale, Scale)
        require_choice("position", self.position, Position)
        require_choice("first", self.first, Initial)
        require_choice("trains", self.trains, Trains)
        named = bool(self.points) and self.position == "before"
        require(not named, "position", self.position, "chooses among default points; leave it where points are named")

    def fits(self, model: nn.Module, x: Tensor) -> None:
        self.dual(model, copy.deepcopy(model))(x)

    def dual(self, shared: nn.Module, private: nn.Module) -> Intertwined:
        """c7: layer-wise intertwine G(., w_i) with L_i(., v_i)."""
        points = self.points or None
        return intertwine(shared, private, points, scale=self.scale, position=self.position)

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        """c12-c13: one backward of the sum (Eq. 10), then both step; w and v are clipped apart."""
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
        """A client predicts with the local head of the dual model; before its first v_i with w."""
        if private is None:
            return shared
        dual = self.dual(shared, private)

        def predict(x: Tensor) -> Tensor:
            local_output: Tensor = dual(x)[1]
            return local_output

        return predict


def v_sections(private: nn.Module, points: list[str]) -> dict[str, list[nn.Parameter]]:
    """v's parameters by the attach point they lead to; those after the last point are the "head"."""
    order = [name for name, _ in private.named_modules()]
    ends = sorted((_last_inside(order, point), point) for point in points)
    sections: dict[str, list[nn.Parameter]] = {point: [] for point in [*(p for _, p in ends), "head"]}
    for name, parameter in private.named_parameters():
        if parameter.requires_grad:
            place = order.index(name.rpartition(".")[0])
            sections[next((point for end, point in ends if place <= end), "head")].append(parameter)
    return sections


def _last_inside(order: list[str], point: str) -> int:
    """Where a point's own submodules end in the order of modules."""
    return max(index for index, name in enumerate(order) if name == point or name.startswith(f"{point}."))


def _norms(sections: dict[str, list[nn.Parameter]], grads: list[Gradient | None]) -> dict[str, float]:
    norms: dict[str, float] = {}
    for name, section in sections.items():
        mine, grads = [g for g in grads[: len(section)] if g is not None], grads[len(section) :]
        if mine:
            norms[f"gradient/{name}"] = float(norm_of(mine))
    return norms


register_method("lindt", adaptation="dual")


register_method("lindt-tm", adaptation="dual", aggregator={"kind": "trimmed_mean", "share": 0.2})


# Attached before the activations: the best of the ablation, by little.
register_method("lindt-before", adaptation={"kind": "dual", "position": "before"})


# Detection and recovery: FedAvg until NFL is detected, LINDT from then on.
register_method("runtime", adaptation="dual", recovery={"kind": "on_detection", "epsilon": 0.1, "patience": 250})
