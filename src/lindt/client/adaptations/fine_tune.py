"""Fine-tuning of all of w on a client's own data (Wang et al. 2019, arXiv 1910.10252; Yu et al. 2020, 2002.04758)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lindt.client.training import GradientStep, fit, global_step, initial_private, recording_key
from lindt.data.examples import LocalWork
from lindt.errors import require
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable


@register(Adaptation)
@final
@dataclass(frozen=True)
class FineTune:
    """The client trains w as FedAvg does, and predicts with a copy of w that it tunes on its own data.

    By default the copy is tuned for each prediction, from the newest w, for `epochs`, and is not stored. With `kept` it
    is tuned in training: from the received w, on the batches of the round, and stored until the client trains again;
    then prediction needs no tuning, and `epochs` is not used.
    """

    rate: float = 0.02
    epochs: int = 5
    kept: bool = False

    takes_optimizer = True  # for w; the copy is tuned by SGD at `rate`

    def __post_init__(self) -> None:
        require(self.rate > 0, "rate", self.rate, "the fine-tuning rate must be above 0")
        require(self.epochs >= 1, "epochs", self.epochs, "fine-tune for at least 1 epoch")

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        return initial_private(shared, "copy") if self.kept else None

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        step_w = global_step(ctx, shared)
        if private is None:
            return step_w
        private.load_state_dict(shared.state_dict())  # from the received w, not from the stored v_i
        tune = self._tuning(ctx, private)

        def step(batch: Batch) -> None:
            step_w(batch)
            tune(batch)

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        if self.kept:
            return shared if private is None else private
        tuned = copy.deepcopy(shared).train()
        work = LocalWork(ctx.train, self.epochs)
        with torch.enable_grad():
            for _ in fit(self._tuning(ctx, tuned), work, ctx.batch, ctx.generator, ctx.device):
                pass
        return tuned.eval()

    def _tuning(self, ctx: Context, tuned: nn.Module) -> Step:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            return ctx.loss(tuned(x), y)

        down = GradientStep(loss, [trainable(tuned)], [tuned], recording_key(loss, ctx.loss, "tuned"))

        def step(batch: Batch) -> None:
            down(batch, self.rate, ctx.max_norm)

        return step


register_method("fine-tune", adaptation="fine_tune")
