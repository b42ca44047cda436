"""LindtMod: recovery (Alg. 2, c4-c16) in one line of a ClientApp.

    app = ClientApp(mods=[LindtMod(model=..., data=..., optimizer=..., epochs=1)])

Until the server's flag is set the user's own training runs, untouched. Then the mod trains the dual model in its
place and sends back w_i alone; v_i stays in a file on this machine. The user's own evaluation always runs and
speaks of the shared model; the mod adds how the client itself fares. It must be the last of the app's mods: those
before it (clipping, say) then see what it sends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.app import Context as AppContext
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from lindt.client.adaptations.base import global_step, initial_private
from lindt.client.adaptations.dual import Dual
from lindt.client.dual_model import Scale
from lindt.client.private_models import training_key
from lindt.client.training import NoPenalty, fit, forward_all, seeded
from lindt.data.examples import LocalWork, as_examples
from lindt.errors import PlanError, UserError, require
from lindt.flower.client_store import ClientStore, default_folder
from lindt.flower.protocol import (
    ClientReport,
    Instruction,
    Next,
    instruction_of,
    must_be_last,
    penalty_of,
    record_of,
    sums_of,
)
from lindt.flower.replies import load_arrays, to_arrays
from lindt.plan.metrics import METRICS, MeanOf
from lindt.protocols import ClientTally, Context, Examples, Loss, Metric, Optimizer, Penalty, Predictor, Step
from lindt.seeds import seed_for
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


@final
class LindtMod:
    """`model(context)` builds the user's nn.Module; `data(context, "train")`, or "test", gives the samples: a pair of
    tensors, a dataset or a DataLoader. `optimizer(params)` is called for w and for v_i. `points` names attach points
    where the model is no nn.Sequential. With `private_epochs` the client trains alone once, at its first evaluation,
    and reports its gain beta_i (Eq. 2).
    """

    def __init__(
        self,
        *,
        model: Callable[[AppContext], nn.Module],
        data: Callable[[AppContext, str], object],
        optimizer: Optimizer,
        loss: Loss = cross_entropy,
        epochs: int | Callable[[AppContext], int] = 1,
        points: Sequence[str] = (),
        client_id: Callable[[AppContext], object] | None = None,
        private_epochs: int = 0,
        batch: int | None = None,
        scale: Scale = "paper",
        metric: str | Callable[[Tensor, Tensor], Tensor] = "accuracy",
        folder: str | Path | None = None,
        device: str = "cpu",
        weighted_by: str = "num-examples",
    ) -> None:
        require(private_epochs >= 0, "private_epochs", private_epochs, "0 for none, or the epochs to train alone")
        require(batch is None or batch >= 1, "batch", batch, "a batch has at least 1 sample")
        require(callable(metric) or metric == "accuracy", "metric", metric, "'accuracy', or one number a sample")
        self.model, self.data, self.epochs, self.private_epochs = model, data, epochs, private_epochs
        self.client_id, self.batch, self.weighted_by = client_id, batch, weighted_by
        self.folder = Path(folder) if folder is not None else default_folder()
        judge: Metric = MeanOf(metric) if callable(metric) else METRICS[metric]
        dual = Dual(points=tuple(points), scale=scale)
        self.trainer = ClientTrainer(loss, optimizer, dual, batch or 32, judge, torch.device(device))

    def __call__(self, message: Message, context: AppContext, call_next: Next) -> Message:
        must_be_last(call_next)
        kind = message.metadata.message_type.partition(".")[0]
        instruction = instruction_of(message)
        if instruction is None or kind not in (MessageType.TRAIN, MessageType.EVALUATE):
            return call_next(message, context)
        store = self._store(instruction, context)
        if store.new:
            self._check(message, context, instruction)
            store.open()
        if kind == MessageType.TRAIN:
            return (
                self._train(message, context, instruction, store)
                if instruction.recovering
                else call_next(message, context)
            )
        record = record_of(message)
        w = ArrayRecord(dict(record))  # the user's evaluation may take the arrays out of the message
        reply = call_next(message, context)
        if not reply.has_error():
            report = self._report(w, context, instruction, store)
            if report is not None:
                report.attach(reply.content)
        return reply

    def predictor(self, message: Message, context: AppContext) -> Predictor:
        """How this client predicts, for a function of your own: by the dual model's local head, before v_i by w."""
        instruction = instruction_of(message)
        if instruction is None:
            raise UserError("the message carries no order of NFLDetector's, so there is no v_i to predict with")
        store = self._store(instruction, context)
        with isolated_random_state(self._seed(instruction, context, "predict"), self.trainer.device), store.locked():
            return self._predictor(record_of(message), context, instruction, store)[0]

    def _train(self, message: Message, context: AppContext, instruction: Instruction, store: ClientStore) -> Message:
        """c4-c16."""
        name, record = next(iter(message.content.array_records.items()))
        with isolated_random_state(self._seed(instruction, context, "train"), self.trainer.device), store.locked():
            store.begin_session(instruction)
            shared = self._shared(record, context)
            train, trainer = self._samples(context, "train")
            private = trainer.first(shared)
            store.read(private, up_to=instruction.round - 1)
            epochs = self.epochs(context) if callable(self.epochs) else self.epochs
            seed = self._seed(instruction, context, "batches")
            work = LocalWork(train, int(epochs))
            loss = trainer.train_dual(shared, private, work, instruction.round, seed, penalty_of(message))
            store.write(private, instruction)
        metrics = MetricRecord({self.weighted_by: len(train), "train_loss": loss})
        return Message(RecordDict({name: to_arrays(shared, record), "metrics": metrics}), reply_to=message)

    def _report(
        self, record: ArrayRecord, context: AppContext, instruction: Instruction, store: ClientStore
    ) -> ClientReport | None:
        """How the client fares, where it trains alone or recovers; None while there is nothing to tell."""
        with isolated_random_state(self._seed(instruction, context, "evaluate"), self.trainer.device), store.locked():
            store.begin_session(instruction)
            if not (store.rounds() or instruction.recovering or self.private_epochs):
                return None
            predict, shared, own = self._predictor(record, context, instruction, store)
            test, trainer = self._samples(context, "test")
            central = trainer.scores(shared.eval(), test)
            local = trainer.scores(predict, test) if own else central
            alone = self._alone(context, instruction, store) if self.private_epochs else None
            better = local - alone if alone is not None else torch.zeros(0)
            tally = ClientTally(
                samples=len(test),
                central=sums_of(central),
                local=sums_of(local),
                private=None if alone is None else sums_of(alone),
                wins=int((better > 0).sum()),
                losses=int((better < 0).sum()),
            )
            return ClientReport(self._client(context), tally, trainer.metric.percent)

    def _predictor(
        self, record: ArrayRecord, context: AppContext, instruction: Instruction, store: ClientStore
    ) -> tuple[Predictor, nn.Module, bool]:
        """The predictor, w, and whether there is a v_i: it predicts on, frozen, when recovery has stopped."""
        shared = self._shared(record, context)
        private = self.trainer.first(shared)
        own = store.read(private, up_to=instruction.round)
        return self.trainer.predictor(shared, private if own else None), shared, own

    def _alone(self, context: AppContext, instruction: Instruction, store: ClientStore) -> Tensor:
        seed = seed_for(0, instruction.experiment, self._client(context), "alone")
        with isolated_random_state(seed, self.trainer.device):
            model = self.model(context)
            (train, trainer), (test, _) = self._samples(context, "train"), self._samples(context, "test")
            optimizer = trainer.optimizer([*model.parameters()])
            rule = (self.private_epochs, trainer.batch, seed, optimizer, trainer.device.type)
            key = training_key(model, trainer.loss, trainer.metric, train, test, rule)
        kept = store.read_alone(key, len(test))
        if kept is not None:
            return kept
        with isolated_random_state(seed, self.trainer.device):
            model = self.model(context).to(self.trainer.device)
            train, trainer = self._samples(context, "train")
            trainer.train_alone(model, LocalWork(train, self.private_epochs), seed)
            test, _ = self._samples(context, "test")
            scores = trainer.scores(model.eval(), test)
        store.write_alone(key, scores)
        return scores

    def _check(self, message: Message, context: AppContext, instruction: Instruction) -> None:
        """At the first meeting, not in the round in which recovery is wanted: does the model suit, has it points?"""
        with isolated_random_state(self._seed(instruction, context, "check"), self.trainer.device), torch.no_grad():
            shared = self._shared(record_of(message), context).eval()
            train, trainer = self._samples(context, "train")
            x = train.take(torch.arange(2))[0].to(trainer.device)
            trainer.dual.fits(shared, x)

    def _samples(self, context: AppContext, split: str) -> tuple[Any, ClientTrainer]:
        found = self.data(context, split)
        return samples_of(found, split), self.trainer.with_batch(self.batch or batch_of(found))

    def _shared(self, record: ArrayRecord, context: AppContext) -> nn.Module:
        return load_arrays(self.model(context), record).to(self.trainer.device)

    def _client(self, context: AppContext) -> str:
        if self.client_id is not None:
            return str(self.client_id(context))
        if "partition-id" not in context.node_config:
            raise PlanError(
                "client_id", None, "give a function of the context that names this client; a node's id is no name, "
                "it changes when the node is registered anew"
            )  # fmt: skip
        return str(context.node_config["partition-id"])

    def _store(self, instruction: Instruction, context: AppContext) -> ClientStore:
        return ClientStore(self.folder, instruction.experiment, self._client(context))

    def _seed(self, instruction: Instruction, context: AppContext, purpose: str) -> int:
        return seed_for(0, instruction.experiment, self._client(context), instruction.round, purpose)
