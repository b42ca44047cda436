"""A client method is a step over shared w and private v, plus a predictor. Nothing else differs on a client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from lindt.adaptations.thin import Gradient, Thin, gradients, norm_of
from lindt.data.examples import Batch, Examples
from lindt.penalties import Penalty
from lindt.weights import trainable

Step = Callable[[Batch], None]
Predictor = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
First = Literal["copy", "random"]


@final
@dataclass
class Context:
    """What a client has at hand in one round, whatever the method."""

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


def descend(loss: Tensor, rate: float, max_norm: float, *groups: list[nn.Parameter]) -> list[list[Gradient | None]]:
    """One step of SGD from one backward of `loss`; each group's gradient is clipped to `max_norm` apart.

    Returns the gradients as they were before clipping, a group at a time; None for a parameter that the loss does
    not reach, `Thin` for a wide layer's weights (`dense()` multiplies it out). The clip is the rule of
    torch.nn.utils.clip_grad_norm_, folded into the step's length: the gradients themselves are not touched, which
    saves a pass over them and leaves a tensor that two parameters share alone.
    """
    found = gradients(loss, [parameter for group in groups for parameter in group])
    result: list[list[Gradient | None]] = []
    with torch.no_grad():
        for group in groups:
            mine, found = found[: len(group)], found[len(group) :]
            reached = [g for g in mine if g is not None]
            if reached:
                step = rate * min(1.0, max_norm / (float(norm_of(reached)) + 1e-6))
                dense = [(p, g) for p, g in zip(group, mine, strict=True) if isinstance(g, Tensor)]
                if dense:
                    torch._foreach_add_([p for p, _ in dense], [g for _, g in dense], alpha=-step)
                for p, g in zip(group, mine, strict=True):
                    if isinstance(g, Thin):
                        g.add_to(p, -step)
            result.append(mine)
    return result


def descent(ctx: Context, *groups: list[nn.Parameter]) -> Callable[[Tensor], list[list[Gradient | None]]]:
    """How a client steps down a loss for one round: by `descend`, or with the user's optimizer, one a group."""
    if ctx.optimizer is None:
        return lambda loss: descend(loss, ctx.rate, ctx.max_norm, *groups)
    optimizers = [ctx.optimizer(group) for group in groups]

    def step(loss: Tensor) -> list[list[Gradient | None]]:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return [[p.grad for p in group] for group in groups]

    return step


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
    down = descent(ctx, trainable(shared))

    def step(batch: Batch) -> None:
        x, y = batch
        down(ctx.shared_loss(shared, shared(x), y))

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
