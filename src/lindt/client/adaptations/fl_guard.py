"""FL-GUARD's recovery (Lin et al. 2024, arXiv 2403.04146): a private model with an adaptive penalty towards w.

There is no public code. The paper leaves two things open, which are chosen here: the penalty's weight `pull` is
computed for each batch, and a direction of length 0 has divergence 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lindt.client.training import gradient_step, initial_private
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable


@register(Adaptation)
@final
@dataclass(frozen=True)
class FlGuard:
    """w trains as in FedAvg; v_i on l(v_i) + pull * ||v_i - w_i||^2, and the client predicts with v_i.

    pull = sigmoid(l(v_i) - l(w_i)) * sigmoid(cosine of v_i - w_i and the gradient of l at v_i). It is large where w_i
    fits the batch better, and where a gradient step leads towards w_i. It is measured before the step of the batch.
    It is applied as a proximal step towards w_i after the step, so that a large rate does not overshoot.
    """

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module:
        return initial_private(shared, "copy")

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        assert private is not None
        w, v = trainable(shared), trainable(private)
        ahead = 0.0  # l(v_i) - l(w_i) on the present batch

        def loss(x: Tensor, y: Tensor) -> Tensor:
            nonlocal ahead
            output = shared(x)
            loss_v, loss_w = ctx.loss(private(x), y), ctx.shared_loss(shared, output, y)
            with torch.no_grad():
                ahead = float(loss_v - ctx.loss(output, y))  # without the penalty of w
            # The losses share no weights: one backward of the sum equals two separate ones.
            return loss_w + loss_v

        down = gradient_step(ctx, None, loss, (shared, w), (private, v))  # not recorded: a replay would not set `ahead`
        pulls: list[float] = []

        def step(batch: Batch) -> None:
            with torch.no_grad():
                apart = [p_v - p_w for p_v, p_w in zip(v, w, strict=True)]
            _, slopes = down(batch)
            pull = _sigmoid(ahead) * _sigmoid(_cosine(apart, slopes))
            share = 2 * ctx.rate * pull / (1 + 2 * ctx.rate * pull)
            with torch.no_grad():
                for p_v, p_w in zip(v, w, strict=True):
                    p_v.lerp_(p_w, share)
            pulls.append(pull)
            ctx.notes["pull"] = sum(pulls) / len(pulls)

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        return shared if private is None else private


def _sigmoid(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).sigmoid())


@torch.no_grad()
def _cosine(apart: Sequence[Tensor], slopes: Sequence[Tensor | None]) -> float:
    """The cosine of two vectors given in parts; 0 where one of them has length 0."""
    product, squares = 0.0, [0.0, 0.0]
    for part, slope in zip(apart, slopes, strict=True):
        squares[0] += float(part.square().sum())
        if slope is not None:
            product += float((part * slope).sum())
            squares[1] += float(slope.square().sum())
    length = (squares[0] * squares[1]) ** 0.5
    return product / length if length > 0 else 0.0


register_method("fl-guard", adaptation="fl_guard")
