"""The ablation without attaching: every client trains a model of its own, which is not joined with the shared model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from lindt.client.training import Initial, gradient_step, initial_private
from lindt.errors import require_choice
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register
from lindt.weights import trainable


@register(Adaptation)
@final
@dataclass(frozen=True)
class Separate:
    """w trains as in FedAvg; v_i trains in the same rounds, on the same batches, on its own loss only.

    LINDT's gain over this method is the effect of intertwining; this method's gain over FedAvg is the effect of a model
    of one's own. Unlike the private model P_i, v_i starts from the shared model, and trains only in the rounds in which
    its client is asked.
    """

    first: Initial = "copy"

    takes_optimizer = True

    def __post_init__(self) -> None:
        require_choice("first", self.first, Initial)

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module:
        return initial_private(shared, self.first)

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        assert private is not None

        def loss(x: Tensor, y: Tensor) -> Tensor:
            # The losses share no weights: one backward of the sum equals two separate ones.
            return ctx.shared_loss(shared, shared(x), y) + ctx.loss(private(x), y)

        down = gradient_step(ctx, self, loss, (shared, trainable(shared)), (private, trainable(private)))

        def step(batch: Batch) -> None:
            down(batch)

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        return shared if private is None else private
