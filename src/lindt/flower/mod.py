"""LindtMod: recovery (Alg. 2, c4-c16) in one line of a ClientApp.

    app = ClientApp(mods=[LindtMod(model=..., data=..., optimizer=..., epochs=1)])

Until the server's flag is set the user's own training runs, untouched. Then the mod trains the dual model in its
place and sends back w_i alone; v_i stays in a file on this machine. The user's own evaluation always runs and
speaks of the shared model; the mod adds how the client itself fares. It must be the last of the app's mods: those
before it (clipping, say) then see what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

import torch
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lindt.client.adaptations.dual import Dual
from lindt.client.dual_model import Scale
from lindt.client.private_models import training_key
from lindt.data.batches import LocalWork
from lindt.errors import PlanError, UserError, require
from lindt.flower.arrays import load_arrays, to_arrays
from lindt.flower.client_store import ClientStore, default_folder
from lindt.flower.protocol import ClientReport, Instruction, Next, instruction_of, must_be_last, penalty_of, record_of
from lindt.flower.trainer import ClientTrainer, batch_of, isolated_random_state, samples_of
from lindt.plan.metrics import METRICS, MeanOf
from lindt.protocols import Loss, Metric, Optimizer, Predictor
from lindt.seeds import seed_for


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
        model: Callable[[Context], nn.Module],
        data: Callable[[Context, str], object],
        optimizer: Optimizer,
        loss: Loss = cross_entropy,
        epochs: int | Callable[[Context], int] = 1,
        points: Sequence[str] = (),
        client_id: Callable[[Context], object] | None = None,
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
        self.learner = ClientTrainer(loss, optimizer, dual, batch or 32, judge, torch.device(device))

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        must_be_last(call_next)
        kind = message.metadata.message_type.partition(".")[0]
        order = instruction_of(message)
        if order is None or kind not in (MessageType.TRAIN, MessageType.EVALUATE):
            return call_next(message, context)
        vault = self._vault(order, context)
        if vault.new:
            self._check(message, context, order)
            vault.open()
        if kind == MessageType.TRAIN:
            return self._train(message, context, order, vault) if order.recovering else call_next(message, context)
        record = record_of(message)
        w = ArrayRecord(dict(record))  # the user's evaluation may take the arrays out of the message
        reply = call_next(message, context)
        if not reply.has_error():
            report = self._report(w, context, order, vault)
            if report is not None:
                report.attach(reply.content)
        return reply

    def predictor(self, message: Message, context: Context) -> Predictor:
        """How this client predicts, for a function of your own: by the dual model's local head, before v_i by w."""
        order = instruction_of(message)
        if order is None:
            raise UserError("the message carries no order of NFLDetector's, so there is no v_i to predict with")
        vault = self._vault(order, context)
        with isolated_random_state(self._seed(order, context, "predict"), self.learner.device), vault.locked():
            return self._predictor(record_of(message), context, order, vault)[0]

    def _train(self, message: Message, context: Context, order: Instruction, vault: ClientStore) -> Message:
        """c4-c16."""
        name, record = next(iter(message.content.array_records.items()))
        with isolated_random_state(self._seed(order, context, "train"), self.learner.device), vault.locked():
            vault.meet(order)
            shared = self._shared(record, context)
            train, learner = self._samples(context, "train")
            private = learner.first(shared)
            vault.read(private, up_to=order.round - 1)
            epochs = self.epochs(context) if callable(self.epochs) else self.epochs
            seed = self._seed(order, context, "batches")
            work = LocalWork(train, int(epochs))
            loss = learner.train_dual(shared, private, work, order.round, seed, penalty_of(message))
            vault.write(private, order)
        metrics = MetricRecord({self.weighted_by: len(train), "train_loss": loss})
        return Message(RecordDict({name: to_arrays(shared, record), "metrics": metrics}), reply_to=message)

    def _report(
        self, record: ArrayRecord, context: Context, order: Instruction, vault: ClientStore
    ) -> ClientReport | None:
        """How the client fares, where it trains alone or recovers; None while there is nothing to tell."""
        with isolated_random_state(self._seed(order, context, "evaluate"), self.learner.device), vault.locked():
            vault.meet(order)
            if not (vault.rounds() or order.recovering or self.private_epochs):
                return None
            predict, shared, own = self._predictor(record, context, order, vault)
            test, learner = self._samples(context, "test")
            central = learner.scores(shared.eval(), test)
            local = learner.scores(predict, test) if own else central
            alone = self._alone(context, order, vault) if self.private_epochs else None
            better = local - alone if alone is not None else torch.zeros(0)
            return ClientReport(
                client=self._client(context),
                samples=len(test),
                central=float(central.sum()),
                local=float(local.sum()),
                private=None if alone is None else float(alone.sum()),
                wins=int((better > 0).sum()),
                losses=int((better < 0).sum()),
                percent=learner.metric.percent,
            )

    def _predictor(
        self, record: ArrayRecord, context: Context, order: Instruction, vault: ClientStore
    ) -> tuple[Predictor, nn.Module, bool]:
        """The predictor, w, and whether there is a v_i: it predicts on, frozen, when recovery has stopped."""
        shared = self._shared(record, context)
        private = self.learner.first(shared)
        own = vault.read(private, up_to=order.round)
        return self.learner.predictor(shared, private if own else None), shared, own

    def _alone(self, context: Context, order: Instruction, vault: ClientStore) -> Tensor:
        seed = seed_for(0, order.experiment, self._client(context), "alone")
        with isolated_random_state(seed, self.learner.device):
            model = self.model(context)
            (train, learner), (test, _) = self._samples(context, "train"), self._samples(context, "test")
            optimizer = learner.optimizer([*model.parameters()])
            rule = (self.private_epochs, learner.batch, seed, optimizer, learner.device.type)
            key = training_key(model, learner.loss, learner.metric, train, test, rule)
        kept = vault.read_alone(key, len(test))
        if kept is not None:
            return kept
        with isolated_random_state(seed, self.learner.device):
            model = self.model(context).to(self.learner.device)
            train, learner = self._samples(context, "train")
            learner.train_alone(model, LocalWork(train, self.private_epochs), seed)
            test, _ = self._samples(context, "test")
            scores = learner.scores(model.eval(), test)
        vault.write_alone(key, scores)
        return scores

    def _check(self, message: Message, context: Context, order: Instruction) -> None:
        """At the first meeting, not in the round in which recovery is wanted: does the model suit, has it points?"""
        with isolated_random_state(self._seed(order, context, "check"), self.learner.device), torch.no_grad():
            shared = self._shared(record_of(message), context).eval()
            train, learner = self._samples(context, "train")
            x = train.take(torch.arange(2))[0].to(learner.device)
            learner.dual.fits(shared, x)

    def _samples(self, context: Context, split: str) -> tuple[Any, ClientTrainer]:
        found = self.data(context, split)
        return samples_of(found, split), self.learner.with_batch(self.batch or batch_of(found))

    def _shared(self, record: ArrayRecord, context: Context) -> nn.Module:
        return load_arrays(self.model(context), record).to(self.learner.device)

    def _client(self, context: Context) -> str:
        if self.client_id is not None:
            return str(self.client_id(context))
        if "partition-id" not in context.node_config:
            raise PlanError(
                "client_id", None, "give a function of the context that names this client; a node's id is no name, "
                "it changes when the node is registered anew"
            )  # fmt: skip
        return str(context.node_config["partition-id"])

    def _vault(self, order: Instruction, context: Context) -> ClientStore:
        return ClientStore(self.folder, order.experiment, self._client(context))

    def _seed(self, order: Instruction, context: Context, purpose: str) -> int:
        return seed_for(0, order.experiment, self._client(context), order.round, purpose)
