"""Ditto (Li et al. 2021, arXiv 2012.04221): a private model, regularised towards the shared model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import nn

from lindt.client.training import global_step, gradient_step, initial_private
from lindt.errors import require
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable


@register(Adaptation)
@final
@dataclass(frozen=True)
class Ditto:
    """w trains as in FedAvg; v_i on its own loss plus pull / 2 * ||v_i - w^{r-1}||^2. The client predicts with v_i.

    The penalty is applied as a proximal step, its exact minimum; the paper uses its gradient. The two agree for a small
    rate * pull, and with a large one the proximal step does not overshoot.
    """

    pull: float = 0.1  # the paper's lambda

    def __post_init__(self) -> None:
        require(self.pull >= 0, "pull", self.pull, "the pull towards w must be 0 or more")

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module:
        return initial_private(shared, "copy")

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        assert private is not None
        step_w, v = global_step(ctx, shared), trainable(private)
        step_v = gradient_step(ctx, "v", lambda x, y: ctx.loss(private(x), y), (private, v))
        received = [p.detach().clone() for p in trainable(shared)]  # w^{r-1}: no step has changed it yet
        share = ctx.rate * self.pull / (1 + ctx.rate * self.pull)

        def step(batch: Batch) -> None:
            step_w(batch)
            step_v(batch)
            with torch.no_grad():
                for p_v, p_w in zip(v, received, strict=True):
                    p_v.lerp_(p_w, share)

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        return shared if private is None else private


register_method("ditto", adaptation={"kind": "ditto", "pull": 1.0})
