"""A client method is a step over shared w and private v, plus a predictor. Nothing else differs on a client."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal, Protocol, final, get_args, runtime_checkable

import torch
from torch import Tensor, nn

from lindt.adaptations.descending import Descent, kind_of
from lindt.adaptations.descending import descend as descend  # part of what methods are written with
from lindt.adaptations.thin import Gradient
from lindt.data.examples import Batch, Examples
from lindt.errors import require
from lindt.penalties import Penalty
from lindt.weights import trainable

Step = Callable[[Batch], None]
Predictor = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
First = Literal["copy", "random"]


@final
@dataclass(frozen=True, eq=False)
class Context:
    """What a client has at hand in one round, whatever the method.

    It is frozen, since recorded steps keep its loss and penalty: `dataclasses.replace` makes one with others.
    """

    client: int
    round: int
    rate: float  # eta, decayed to this round
    max_norm: float  # of a gradient
    batch: int  # B
    train: Examples  # D_i
    loss: Loss
    penalty: Penalty
    received_P: Tensor  # w^{r-1}
    generator: torch.Generator
    device: torch.device
    notes: dict[str, float] = field(default_factory=dict)  # what the method wants logged of this client
    optimizer: Optimizer | None = None  # the user's own; it has a rate of its own, and does not clip

    def shared_loss(self, shared: nn.Module, output: Tensor, y: Tensor) -> Tensor:
        """The loss of w_i on a batch, with the method's penalty."""
        loss, penalty = self.loss(output, y), self.penalty(shared, self.received_P)
        return loss if penalty is None else loss + penalty


class Adaptation(Protocol):
    """What a client does besides averaging."""

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        """v_i's first value, given the w just received; None where the method keeps nothing."""
        ...

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        """Called once a round in which the flag is on; what it returns is called once a batch."""
        ...

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        """How the client predicts; `private` is None where it has no v_i yet."""
        ...


@runtime_checkable
class Choosy(Protocol):
    """An adaptation that not every model suits."""

    def fits(self, model: nn.Module, x: Tensor) -> None:
        """Raise a PlanError before anything trains if this model will not do."""
        ...


def descent(
    ctx: Context,
    named: Hashable,
    loss: Callable[[Tensor, Tensor], Tensor],
    *sides: tuple[nn.Module, list[nn.Parameter]],
) -> Callable[[Batch], list[list[Gradient | None]]]:
    """How a client steps down the loss of its batches for one round, by `Descent` or with the user's optimizer.

    A side is a module and those of its parameters that step, clipped apart. `named` is the method with its settings.
    Steps are recorded only where `loss` is defined in this package and `named` holds every Python number that it
    reads: a tape would keep the numbers of the step that was recorded (see `kind_of`). Others take the long way.
    """
    groups = [group for _, group in sides]
    if ctx.optimizer is None:
        kind = kind_of(loss, ctx.loss, named, ctx.penalty)
        down = Descent(loss, groups, [module for module, _ in sides], kind, [ctx.received_P])
        return lambda batch: down(batch, ctx.rate, ctx.max_norm)
    optimizers = [ctx.optimizer(group) for group in groups]

    def step(batch: Batch) -> list[list[Gradient | None]]:
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


def first_private(shared: nn.Module, first: First) -> nn.Module:
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
    down = descent(ctx, "w", lambda x, y: ctx.shared_loss(shared, shared(x), y), (shared, trainable(shared)))

    def step(batch: Batch) -> None:
        down(batch)

    return step


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
