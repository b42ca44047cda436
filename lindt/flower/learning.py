"""What a client learns with on Flower: the user's model, loss, optimizer and data in our one training loop.

The dual model is adaptations.Dual, training alone is FedAvg's own step; only the optimizer is the user's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch
from torch import Tensor, nn

from lindt.adaptations.base import Context, Loss, Optimizer, Predictor, Step, first_private, global_step
from lindt.adaptations.dual import Dual
from lindt.data.examples import Examples
from lindt.fit import LocalWork, fit, forward_all, seeded
from lindt.metrics import Metric
from lindt.penalties import NoPenalty, Penalty
from lindt.weights import read_w


@final
@dataclass
class Losses:
    """The user's loss, with the mean of what it said."""

    loss: Loss
    values: list[float] = field(default_factory=list)

    def __call__(self, output: Tensor, y: Tensor) -> Tensor:
        value = self.loss(output, y)
        self.values.append(float(value.detach()))
        return value

    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values) if self.values else 0.0


@final
@dataclass(frozen=True)
class Learner:
    loss: Loss
    optimizer: Optimizer
    dual: Dual
    batch: int
    metric: Metric
    device: torch.device

    def with_batch(self, size: int | None) -> Learner:
        return replace(self, batch=size) if size else self

    def train_dual(
        self, shared: nn.Module, private: nn.Module, work: LocalWork, round: int, seed: int, penalty: Penalty
    ) -> float:
        """Alg. 2, c7-c13: w and v_i train jointly. Returns the mean loss of the two outputs."""
        losses = Losses(self.loss)
        ctx = self._context(shared, work.data, losses, round, seed, penalty)
        shared.train()
        private.train()
        self._fit(self.dual.step(ctx, shared, private), work, ctx)
        return losses.mean()

    def train_alone(self, model: nn.Module, work: LocalWork, seed: int) -> None:
        """The private model P_i (Sec. 3.2): on the client's own data only."""
        ctx = self._context(model, work.data, self.loss, 0, seed, NoPenalty())
        model.train()
        self._fit(global_step(ctx, model), work, ctx)

    def first(self, shared: nn.Module) -> nn.Module:
        """c5-c6: v_i begins as the w received."""
        return first_private(shared, self.dual.first)

    def predictor(self, shared: nn.Module, private: nn.Module | None) -> Predictor:
        shared.eval()
        if private is None:
            return shared
        private.eval()
        dual = self.dual.dual(shared, private)

        def predict(x: Tensor) -> Tensor:
            local_output: Tensor = dual(x)[1]
            return local_output

        return predict

    def scores(self, predict: Predictor, test: Examples) -> Tensor:
        """One number a test sample."""
        outputs = forward_all(predict, test, self.device)
        return self.metric.per_sample(outputs.cpu(), test.labels).to(torch.float64)

    def _fit(self, step: Step, work: LocalWork, ctx: Context) -> None:
        for _ in fit(step, work, ctx.batch, ctx.generator, ctx.device):
            pass

    def _context(
        self, shared: nn.Module, train: Examples, loss: Loss, round: int, seed: int, penalty: Penalty
    ) -> Context:
        return Context(
            client=0,
            round=round,
            rate=math.nan,  # the optimizer's own
            max_norm=math.inf,
            batch=self.batch,
            train=train,
            loss=loss,
            penalty=penalty,
            received_P=read_w(shared).to(self.device),
            generator=torch.Generator().manual_seed(seed),
            device=self.device,
            optimizer=self.optimizer,
        )


@contextmanager
def undisturbed(seed: int, device: torch.device) -> Iterator[None]:
    """Work with seeds of our own, and leave the user's generators as they were found."""
    ours, theirs = random.getstate(), np.random.get_state()
    try:
        with seeded(seed, device):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)
