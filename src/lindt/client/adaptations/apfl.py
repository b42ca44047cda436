"""APFL (Deng et al. 2020): a private model mixed with the shared one by an adaptive alpha, as in the authors' code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lindt.client.training import GradientStep, Initial, global_step, initial_private, recording_key, sgd_step
from lindt.errors import require, require_choice
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import OMITTED, register, register_method
from lindt.weights import trainable

Mix = Literal["predictions", "weights"]
VLoss = Literal["mixture", "own"]


@final
class _Mixed(nn.Module):
    """v_i and its alpha, kept together between rounds."""

    alpha: Tensor

    def __init__(self, model: nn.Module, alpha: float) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("alpha", torch.tensor(alpha))


@register(Adaptation)
@final
@dataclass(frozen=True)
class Apfl:
    """Step w on its own loss, then v on the loss of the mixture at the new w.

    alpha is updated once a round, after the first batch: a gradient step on the mixture's loss along v - w, with the
    authors' decay of 0.02 * alpha, clipped to [0, 1]. `mix` says whether predictions or weights are mixed.

    Limit: on the mixture's loss v's gradient has the factor alpha, so at 0.01 v learns a hundred times slower than w,
    and at alpha = 0 not at all: the client stays near FedAvg. With `v_loss = "own"` v trains on its own loss, as in
    PFLlib, and alpha follows.
    """

    alpha: float = 0.01
    mix: Mix = "predictions"
    first: Initial = "copy"
    v_loss: VLoss = field(default="mixture", metadata=OMITTED)  # the loss that v trains on

    def __post_init__(self) -> None:
        require(0 <= self.alpha <= 1, "alpha", self.alpha, "give a mixing coefficient between 0 and 1")
        require_choice("mix", self.mix, Mix)
        require_choice("first", self.first, Initial)
        require_choice("v_loss", self.v_loss, VLoss)

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module:
        return _Mixed(initial_private(shared, self.first), self.alpha)

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        assert isinstance(private, _Mixed)
        step_w, w, v = global_step(ctx, shared), trainable(shared), trainable(private.model)

        def mixed_loss(x: Tensor, y: Tensor) -> Tensor:
            return ctx.loss(self._output(shared, private, x), y)

        def own_loss(x: Tensor, y: Tensor) -> Tensor:
            return ctx.loss(private.model(x), y)

        loss_v = own_loss if self.v_loss == "own" else mixed_loss
        down = GradientStep(
            loss_v, [v], [shared, private.model], recording_key(loss_v, ctx.loss, self), [private.alpha]
        )
        moved = False

        def step(batch: Batch) -> None:
            nonlocal moved
            step_w(batch)
            if moved:
                down(batch, ctx.rate, ctx.max_norm)
                return
            moved = True
            loss = mixed_loss(*batch)
            grads_w = torch.autograd.grad(loss, w, retain_graph=True, allow_unused=True)
            loss = own_loss(*batch) if self.v_loss == "own" else loss
            (grads_v,) = sgd_step(loss, ctx.rate, ctx.max_norm, v)
            private.alpha.copy_(_next_alpha(private.alpha, w, v, grads_w, grads_v, ctx.rate))
            ctx.notes["alpha"] = float(private.alpha)

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        if private is None:
            return shared
        assert isinstance(private, _Mixed)
        return lambda x: self._output(shared, private, x)

    def _output(self, shared: nn.Module, private: _Mixed, x: Tensor) -> Tensor:
        if self.mix == "predictions":
            return torch.lerp(shared(x), private.model(x), private.alpha)
        w = dict(shared.named_parameters())
        mixed = {n: torch.lerp(w[n], p, private.alpha) for n, p in private.model.named_parameters()}
        output: Tensor = functional_call(private.model, mixed, (x,))
        return output


@torch.no_grad()
def _next_alpha(
    alpha: Tensor,
    w: Sequence[Tensor],
    v: Sequence[Tensor],
    grads_w: Sequence[Tensor | None],
    grads_v: Sequence[Tensor | None],
    rate: float,
) -> Tensor:
    """alpha - eta * (<v - w, alpha * grad_v + (1 - alpha) * grad_w> + 0.02 * alpha), within [0, 1]."""
    slope = 0.02 * alpha
    for p_w, p_v, g_w, g_v in zip(w, v, grads_w, grads_v, strict=True):
        if g_w is not None and g_v is not None:
            slope = slope + ((p_v - p_w) * torch.lerp(g_w, g_v, alpha)).sum()
    return (alpha - rate * slope).clamp(0.0, 1.0)


register_method("apfl", adaptation={"kind": "apfl", "alpha": 0.01})
