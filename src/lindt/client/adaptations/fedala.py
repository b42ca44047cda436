"""FedALA (Zhang et al. 2023, arXiv 2212.01197): each client mixes w into its own model, element by element.

Before it trains, a client takes the lower layers from w. In the top layers it starts from v_i + (w - v_i) * A, where
each element of A in [0, 1] is learned on a sample of its own data: as the authors' code does, by steps of
A - eta * gradient * (w - v_i). Then it trains as in FedAvg, and sends the trained weights.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from statistics import pstdev
from typing import Final, final

import torch
from torch import Tensor, nn

from lindt.client.training import fit, global_step, initial_private
from lindt.data.examples import LocalWork, subset
from lindt.errors import require
from lindt.protocols import Adaptation, Batch, Context, Predictor, Step
from lindt.registry import register, register_method
from lindt.weights import trainable

LOSSES: Final = 10  # the number of last losses whose standard deviation is the test of convergence
STILL: Final = 0.1  # the standard deviation below which A has converged
MOST_EPOCHS: Final = 100  # the most epochs of the first learning of A; the authors have no limit


@final
class _Local(nn.Module):
    """v_i, the model that the client trained last, and A for the elements of its top layers."""

    learned: Tensor

    def __init__(self, model: nn.Module, top: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("learned", torch.tensor(False))  # whether A was learned before
        for place, parameter in enumerate(trainable(model)[top:]):
            self.register_buffer(f"A{place}", torch.ones_like(parameter))
        self.top = top

    @property
    def weights(self) -> list[Tensor]:
        return [getattr(self, f"A{place}") for place in range(len(trainable(self.model)) - self.top)]


@register(Adaptation)
@final
@dataclass(frozen=True)
class FedAla:
    """`layers` top layers are mixed by weights that are learned on `sample` of the client's data, at the rate `eta`.

    At its first mixing a client learns A until the losses of the last 10 epochs have a standard deviation below 0.1,
    later for one epoch. It predicts with the mixture of the newest w and v_i, as the authors evaluate it.
    """

    layers: int = 1  # the paper's p
    sample: float = 0.8  # the paper's s
    eta: float = 1.0

    takes_optimizer = True

    def __post_init__(self) -> None:
        require(self.layers >= 1, "layers", self.layers, "mix at least the last layer")
        require(0 < self.sample <= 1, "sample", self.sample, "give a share above 0, up to 1")
        require(self.eta > 0, "eta", self.eta, "the rate of the weights must be above 0")

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module:
        return _Local(initial_private(shared, "copy"), self._top(shared))

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        assert isinstance(private, _Local)
        self._mix(ctx, shared, private)
        step_w = global_step(ctx, shared)
        trained = [*shared.parameters(), *shared.buffers()]
        kept = [*private.model.parameters(), *private.model.buffers()]

        def step(batch: Batch) -> None:
            step_w(batch)
            with torch.no_grad():  # after each batch, since a step does not know whether it is the last of the round
                for mine, theirs in zip(kept, trained, strict=True):
                    mine.copy_(theirs)

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        if private is None:
            return shared
        assert isinstance(private, _Local)
        mixed, local = copy.deepcopy(shared).train(), copy.deepcopy(private)
        with torch.enable_grad():
            self._mix(ctx, mixed, local)
        return mixed.eval()

    def _top(self, model: nn.Module) -> int:
        """The index of the first trainable parameter of the top layers."""
        owners = [name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad]
        top = list(dict.fromkeys(owners))[-self.layers :]
        return min(place for place, owner in enumerate(owners) if owner in top)

    def _mix(self, ctx: Context, shared: nn.Module, private: _Local) -> None:
        """Learn A, and write the mixture into the module that holds w."""
        w, v = trainable(shared)[private.top :], trainable(private.model)[private.top :]
        apart = [p_w.detach() - p_v.detach() for p_w, p_v in zip(w, v, strict=True)]
        if not any(bool(part.any()) for part in apart):
            return  # the client's first round: v_i is w
        model = copy.deepcopy(shared)  # the lower layers are those of w; the copy's buffers may change
        mixed = trainable(model)[private.top :]

        @torch.no_grad()
        def place() -> None:
            for p, p_v, part, A in zip(mixed, v, apart, private.weights, strict=True):
                p.copy_(p_v + part * A)

        last = math.nan

        def learn(batch: Batch) -> None:
            nonlocal last
            x, y = batch
            loss = ctx.loss(model(x), y)
            slopes = torch.autograd.grad(loss, mixed, allow_unused=True)
            with torch.no_grad():
                for slope, part, A in zip(slopes, apart, private.weights, strict=True):
                    if slope is not None:
                        A.sub_(self.eta * slope * part).clamp_(0, 1)
            place()
            last = float(loss.detach())

        place()
        rows = torch.randperm(len(ctx.train), generator=ctx.generator)
        data = subset(ctx.train, rows[: max(2, int(self.sample * len(ctx.train)))])  # BatchNorm needs two
        losses: list[float] = []
        epochs = 1 if bool(private.learned) else MOST_EPOCHS
        for _ in fit(learn, LocalWork(data, epochs), ctx.batch, ctx.generator, ctx.device):
            losses.append(last)
            if len(losses) > LOSSES and pstdev(losses[-LOSSES:]) < STILL:
                break
        private.learned.fill_(True)
        with torch.no_grad():
            for p_w, p in zip(w, mixed, strict=True):
                p_w.copy_(p)
        ctx.notes["share of w"] = float(torch.cat([A.flatten() for A in private.weights]).mean())


register_method("fedala", adaptation="fed_ala")
