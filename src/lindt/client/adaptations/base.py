"""A client method is a step over shared w and private v, plus a predictor. Nothing else differs on a client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, final, get_args

from torch import Tensor, nn

from lindt.client.training import GradientStep, recording_key
from lindt.client.training import sgd_step as sgd_step
from lindt.errors import require
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable

Initial = Literal["copy", "random"]


def gradient_step(
    ctx: Context,
    named: Hashable,
    loss: Callable[[Tensor, Tensor], Tensor],
    *sides: tuple[nn.Module, list[nn.Parameter]],
) -> Callable[[Batch], list[list[Tensor | None]]]:
    """How a client steps down the loss of its batches for one round, by `Descent` or with the user's optimizer.

    A side is a module and those of its parameters that step, clipped apart. `named` is the method with its settings.
    Steps are recorded only where `loss` is defined in this package and `named` holds every Python number that it
    reads: a tape would keep the numbers of the step that was recorded (see `recording_key`). Others take the long way.
    """
    groups = [group for _, group in sides]
    if ctx.optimizer is None:
        kind = recording_key(loss, ctx.loss, named, ctx.penalty)
        down = GradientStep(loss, groups, [module for module, _ in sides], kind, [ctx.received_P])
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


def require_choice(field: str, value: object, choices: object) -> None:
    """Raise a PlanError unless the value is one of a Literal's: a misspelt word must not be taken for another."""
    known = get_args(choices)
    require(value in known, field, value, f"choose among {', '.join(map(str, known))}")


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


def global_step(ctx: Context, shared: nn.Module) -> Step:
    """Alg. 1, c7: w_i <- w_i - eta * grad of the mean loss over the batch."""
    down = gradient_step(ctx, "w", lambda x, y: ctx.shared_loss(shared, shared(x), y), (shared, trainable(shared)))

    def step(batch: Batch) -> None:
        down(batch)

    return step


@register(Adaptation)
@final
@dataclass(frozen=True)
class GlobalOnly:
    """FedAvg's client: trains w, keeps nothing, predicts with w."""

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        return None

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        return global_step(ctx, shared)

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        return shared


register_method("fedavg", recovery="never")
