"""What a client trains with on Flower: the user's model, loss, optimizer and data in our one training loop.

The dual model is adaptations.Dual, private training is FedAvg's own step; only the optimizer is the user's.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lindt.client.adaptations.base import global_step, initial_private
from lindt.client.adaptations.dual import Dual
from lindt.client.penalties import NoPenalty
from lindt.client.training import fit, forward_all, seeded
from lindt.data.batches import LocalWork
from lindt.data.examples import as_examples
from lindt.errors import UserError
from lindt.protocols import Context, Examples, Loss, Metric, Optimizer, Penalty, Predictor, Step
from lindt.weights import read_w


@final
@dataclass
class LossRecorder:
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
class ClientTrainer:
    loss: Loss
    optimizer: Optimizer
    dual: Dual
    batch: int
    metric: Metric
    device: torch.device

    def with_batch(self, size: int | None) -> ClientTrainer:
        return replace(self, batch=size) if size else self

    def train_dual(
        self, shared: nn.Module, private: nn.Module, work: LocalWork, round: int, seed: int, penalty: Penalty
    ) -> float:
        """Alg. 2, c7-c13: w and v_i train jointly. Returns the mean loss of the two outputs."""
        losses = LossRecorder(self.loss)
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
        return initial_private(shared, self.dual.first)

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
def isolated_random_state(seed: int, device: torch.device) -> Iterator[None]:
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


def samples_of(found: object, split: str) -> Examples:
    """What `data(context, split)` gave: a pair of tensors, a dataset, or a DataLoader, whose dataset is taken."""
    if isinstance(found, DataLoader):
        found = found.dataset
    if isinstance(found, IterableDataset):
        raise UserError(f"data: the {split} split is a stream; give a dataset with a length and an index")
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        first = found[0] if len(found) else None
        if isinstance(first, Mapping):
            found = _Paired(found, *_field_names(first))
    examples = as_examples(found)
    if len(examples) < (2 if split == "train" else 1):
        raise UserError(f"data: the {split} split has {len(examples)} samples; that is too few")
    return examples


def batch_of(found: object) -> int | None:
    size = getattr(found, "batch_size", None)
    return size if isinstance(found, DataLoader) and isinstance(size, int) else None


def _field_names(sample: Mapping[str, Any]) -> tuple[str, str]:
    """Flower's datasets give tables: `{"img": x, "label": y}`."""
    label = [name for name in sample if name in ("label", "labels", "y", "target")]
    rest = [name for name in sample if name not in label]
    if len(label) != 1 or len(rest) != 1:
        raise UserError(f"data: a sample has {sorted(sample)}; give pairs (x, y), or two fields of which one is label")
    return rest[0], label[0]


@final
@dataclass(frozen=True)
class _Paired:
    dataset: Any
    x: str
    y: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        sample = self.dataset[row]
        return sample[self.x], sample[self.y]
