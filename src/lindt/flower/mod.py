"""Dual: the paper's recovery (Alg. 2, c4-c16) in a Flower app whose model is named.

    app = wrap(app, dual=Dual(model=..., data=..., optimizer=..., epochs=1))

Until the server's flag is set, the user's own training runs unchanged. Then the mod trains the dual model in its place
and sends back w_i alone; v_i stays in a file on this machine. The user's own evaluation always runs and scores the
shared model; the mod adds the scores of the model with which the client predicts. It is the last of the app's mods, so
that the mods before it (for clipping, say) see what it sends. `wrap` puts it there.

If the server tests gains, the client trains a private model P_i once, and adds a GainReport to the reply of each
training: the score of the received w on its validation part V_i, less the score of P_i. The app's own training reads
its own data, so V_i cannot be taken from the training data: it is the result of `validation(context)`, or one half of
the "test" split, drawn from a seed; the other half is the test data of beta. Samples of V_i that are in the "train"
split too are left out. A client that is not in the server's panel holds out nothing, trains no P_i and reports nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import torch
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.app import Context as AppContext
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from lindt.client.adaptations.dual import Dual as DualModel
from lindt.client.adaptations.dual import Scale
from lindt.client.training import FEW, NoPenalty, fit, forward_all, global_step, initial_private, name_of, training_step
from lindt.data.examples import LocalWork, add_samples, as_examples, sample_hashes, split, stratified, subset
from lindt.errors import PlanError, UserError, one_line, require
from lindt.flower.client_store import AloneScores, ClientStore
from lindt.flower.messages import PREFIX, Instruction, Visit, log_message, no_report
from lindt.flower.protocol import (
    ClientReport,
    Next,
    attach_gain,
    attach_visit,
    instruction_of,
    must_be_last,
    penalty_of,
    record_of,
    sums_of,
)
from lindt.flower.replies import load_arrays, to_arrays
from lindt.flower.vault import default_folder, is_in, origin_of, unwritable
from lindt.gains import with_noise
from lindt.plan.plan import Alone
from lindt.plan.problem import METRICS, MeanOf, paired, sample_values
from lindt.protocols import (
    ClientTally,
    Context,
    Examples,
    GainReport,
    Loss,
    Metric,
    Optimizer,
    Penalty,
    Predictor,
    Step,
)
from lindt.seeds import isolated_random_state, seed_for, seeded
from lindt.server.preflight import Subject, look
from lindt.weights import read_w


@final
@dataclass
class LossRecorder:
    """The user's loss, with the mean of its values."""

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
    dual: DualModel
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

    def train_alone(self, model: nn.Module, work: LocalWork, seed: int) -> Iterator[int]:
        """The private model P_i (Sec. 3.2): on the client's own data only. Yields after each epoch."""
        ctx = self._context(model, work.data, self.loss, 0, seed, NoPenalty())
        model.train()
        for epoch in fit(global_step(ctx, model), work, ctx.batch, ctx.generator, ctx.device):
            yield epoch
            model.train()

    def chosen_epochs(self, build: Callable[[], nn.Module], train: Examples, seed: int, rule: Alone) -> int:
        """The number of epochs of P_i, chosen on a part of the training data by the rule of plan.Alone."""
        rows = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed_for(seed, "held out")))
        cut = min(max(1, round(rule.held_out * len(train))), len(train) - 1)
        held_out, rest, model = subset(train, rows[:cut]), subset(train, rows[cut:]), build()
        best_score, best_epoch = -math.inf, 0
        for epoch in self.train_alone(model, LocalWork(rest, rule.epochs), seed):
            score = float(self.values(model.eval(), held_out).mean())
            if score >= best_score or not best_epoch:
                best_score, best_epoch = score, epoch
            if epoch - best_epoch >= rule.patience:
                break
        return best_epoch

    def first(self, shared: nn.Module) -> nn.Module:
        """c5-c6: v_i starts as the received w."""
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
        """One number per test sample."""
        outputs = forward_all(predict, test, self.device)
        return self.metric.per_sample(outputs.cpu(), test.labels).to(torch.float64)

    @torch.no_grad()
    def values(self, predict: Predictor, data: Examples) -> Tensor:
        """One number per sample, as in the reports of other engines: the mean if a sample has several predictions."""
        return sample_values(self.metric, forward_all(predict, data, self.device).cpu(), data.labels)

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


def samples_of(found: object, split: str) -> Examples:
    """The result of `data(context, split)` as Examples: a pair of tensors, a dataset, or a DataLoader's dataset."""
    if isinstance(found, DataLoader):
        found = found.dataset
    if isinstance(found, IterableDataset):
        raise UserError(f"data: the {split} split is an IterableDataset; give a dataset with a length and an index")
    if hasattr(found, "__getitem__") and hasattr(found, "__len__"):
        first = found[0] if len(found) else None
        if isinstance(first, Mapping):
            found = _Paired(found, *_field_names(first))
    examples = as_examples(found)
    least = 2 if split == "train" else 1
    if len(examples) < least:
        raise TooFewSamplesError(
            f"data: its {split} data have {_counted(len(examples))}, but v_i and P_i need {least} or more; give this "
            "client more data, or leave it out"
        )
    return examples


class TooFewSamplesError(UserError):
    """The client has too few samples for a model of its own; it can still train the shared model."""


def _counted(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"


def batch_of(found: object) -> int | None:
    size = getattr(found, "batch_size", None)
    return size if isinstance(found, DataLoader) and isinstance(size, int) else None


def _field_names(sample: Mapping[str, Any]) -> tuple[str, str]:
    """The names of x and y in a sample of Flower's datasets: `{"img": x, "label": y}`."""
    label = [name for name in sample if name in ("label", "labels", "y", "target")]
    rest = [name for name in sample if name not in label]
    if len(label) != 1 or len(rest) != 1:
        raise UserError(f"data: a sample has {sorted(sample)}; give pairs (x, y), or two fields, one named 'label'")
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


def _untrained(held_out: Examples, train: Examples) -> Tensor:
    """The rows of `held_out` whose x is not in `train`. It does not recognise samples that change when read."""
    known, found = set(sample_hashes(train, labels=False)), sample_hashes(held_out, labels=False)
    return torch.tensor([row for row, x in enumerate(found) if x not in known], dtype=torch.int64)


@final
class Dual:
    """The paper's intertwined training in a Flower app: `wrap(app, dual=Dual(model=..., data=..., optimizer=...))`.

    Args:
        model: A function of the context that builds the app's nn.Module.
        data: A function of the context and "train" or "test" that gives the samples: a pair of tensors, a dataset or a
            DataLoader.
        optimizer: `optimizer(params)`, or `optimizer(params, config)` with the message's config; called for w and for
            v_i.
        loss: A function of outputs and targets.
        epochs: Epochs of training in a round, or a function of the context that says so.
        points: The names of the attach points where the model is no nn.Sequential.
        client_id: A function of the context that returns a permanent name of this client; by default the partition-id.
        private_epochs: For how many epochs the client trains its private model P_i, once, when it is first needed; 0
            for no P_i. With None (the default) the number is chosen on a part of the training data (plan.Alone) if
            the server tests gains, else there is no P_i. With a P_i the client reports its gain beta_i (Eq. 2).
        validation: A function of the context that returns V_i, samples that the app's training never reads. By default
            V_i is half of "test".
        batch: The batch size; by default that of the DataLoader, else 32.
        scale: How the score at an attach point is computed.
        metric: "accuracy", or a function of outputs and targets that returns one number per sample.
        folder: The folder in which the client keeps its models.
        device: The device on which models train.
        weighted_by: The name of the metric with the number of samples that the client trained on.
        preflight: Whether a client that trains a P_i checks its data, model, loss and metric before its first round
            (server/preflight.py). Findings are warnings in its log, never errors.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from flwr.clientapp import ClientApp
        >>> from lindt.flower import Dual, wrap
        >>> def model(context):
        ...     return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> def data(context, split):
        ...     return torch.randn(20, 4), torch.randint(2, (20,))
        >>> def optimizer(params):
        ...     return torch.optim.SGD(params, lr=0.1)
        >>> app = wrap(ClientApp(), dual=Dual(model=model, data=data, optimizer=optimizer))
        >>> isinstance(app, ClientApp)
        True
    """

    def __init__(
        self,
        *,
        model: Callable[[AppContext], nn.Module],
        data: Callable[[AppContext, str], object],
        optimizer: Optimizer | Callable[[list[nn.Parameter], Mapping[str, Any]], torch.optim.Optimizer],
        loss: Loss = cross_entropy,
        epochs: int | Callable[[AppContext], int] = 1,
        points: Sequence[str] = (),
        client_id: Callable[[AppContext], object] | None = None,
        private_epochs: int | None = None,
        validation: Callable[[AppContext], object] | None = None,
        batch: int | None = None,
        scale: Scale = "paper",
        metric: str | Callable[[Tensor, Tensor], Tensor] = "accuracy",
        folder: str | Path | None = None,
        device: str = "cpu",
        weighted_by: str = "num-examples",
        preflight: bool = True,
    ) -> None:
        enough = private_epochs is None or private_epochs >= 0
        require(enough, "private_epochs", private_epochs, "give a number of epochs, 0 for no P_i, or None for a rule")
        require(batch is None or batch >= 1, "batch", batch, "a batch has at least 1 sample")
        known = callable(metric) or metric == "accuracy"
        require(known, "metric", metric, "give 'accuracy', or a function that returns one number per sample")
        self.model, self.data, self.epochs, self.private_epochs = model, data, epochs, private_epochs
        self.client_id, self.batch, self.weighted_by, self.validation = client_id, batch, weighted_by, validation
        self.preflight = preflight
        self.adds_noise = False  # to the client's updates; `wrap` sets it where it finds LocalDpMod
        self.folder = Path(folder) if folder is not None else default_folder()
        judge: Metric = MeanOf(metric) if callable(metric) else METRICS[metric]
        dual = DualModel(points=tuple(points), scale=scale)
        self._optimizer, self._config = optimizer, dict[str, Any]()
        self._sees_config = _takes_config(optimizer)
        self.trainer = ClientTrainer(loss, self._made_optimizer, dual, batch or 32, judge, torch.device(device))

    def _made_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The user's optimizer, which may read the learning rate from the config of the message."""
        made: Any = self._optimizer
        found: torch.optim.Optimizer = made(parameters, self._config) if self._sees_config else made(parameters)
        return found

    def __call__(self, message: Message, context: AppContext, call_next: Next) -> Message:
        must_be_last(call_next)
        try:
            return self._answer(message, context, call_next)
        except TooFewSamplesError as error:  # before the app's own function is called, or in place of it
            problem = str(error)
        except OSError as error:  # also before or in place of it
            if not is_in(self.folder, error):
                raise
            problem = unwritable(self.folder, error)
        log_message(f"client {self._client(context)}: no report: {problem}; without it there is no v_i", warn=True)
        reply = call_next(message, context)
        if not reply.has_error():
            attach_visit(reply.content, Visit(self._client(context), problem=problem))
        return reply

    def _answer(self, message: Message, context: AppContext, call_next: Next) -> Message:
        kind = message.metadata.message_type.partition(".")[0]
        instruction = instruction_of(message)
        if instruction is None or kind not in (MessageType.TRAIN, MessageType.EVALUATE):
            return call_next(message, context)
        configs = message.content.config_records
        self._config = {k: v for k, v in next(iter(configs.values())).items() if not k.startswith(PREFIX)}
        store = self._store(instruction, context)
        if store.new:
            self._require_fit(message, context, instruction)
            store.open()
        examples = None
        if kind == MessageType.TRAIN and instruction.recovering:
            with isolated_random_state(self._seed(instruction, context, "train"), self.trainer.device):
                examples = len(self._samples(context, "train")[0])
        origin = origin_of(context.node_config, context.run_config, record_of(message), examples)
        with store.locked():
            note = store.set_aside_moved(origin, (kind, f"{instruction.session}/{context.node_id}"))
        if note:
            log_message(f"client {self._client(context)}: {note}, in {store.home / 'aside'}", warn=True)
        if kind == MessageType.TRAIN:
            gain, problem, ours = None, "", False
            silent = self.adds_noise and not instruction.noise
            if silent and instruction.reports:
                log_message(no_report(self._client(context), "it adds noise to its updates"), warn=True)
            if self._reports(instruction):
                gain, problem, ours = self._gain_or_problem(record_of(message), context, instruction, store)
            recovering = instruction.recovering
            reply = self._train(message, context, instruction, store) if recovering else call_next(message, context)
            if not reply.has_error():
                if gain is not None:
                    attach_gain(reply.content, gain)
                if recovering or problem or note or silent:
                    visit = Visit(self._client(context), recovers=recovering, silent=silent, problem=problem)
                    attach_visit(reply.content, replace(visit, ours=ours, note=note))
            return reply
        record = record_of(message)
        w = ArrayRecord(dict(record))  # the user's evaluation may take the arrays out of the message
        reply = call_next(message, context)
        if not reply.has_error() and not self.adds_noise:  # scores would have no noise
            try:
                report = self._report(w, context, instruction, store)
            except Exception as error:  # noqa: BLE001  # the user's own evaluation goes out as it is
                problem = one_line(str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
                log_message(f"client {self._client(context)}: no report: {problem}", warn=True)
            else:
                if report is not None:
                    report.attach(reply.content)
        return reply

    def predictor(self, message: Message, context: AppContext) -> Predictor:
        """This client's predictor, for a function of your own: the dual model's local output, or w without a v_i."""
        instruction = instruction_of(message)
        if instruction is None:
            raise UserError("message: it has no instruction of NFLDetector, so there is no v_i; pass a message as sent")
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
            seed = self._seed(instruction, context, "batches")
            work = LocalWork(train, self._epochs(context))
            loss = trainer.train_dual(shared, private, work, instruction.round, seed, penalty_of(message))
            store.write(private, instruction)
        metrics = MetricRecord({self.weighted_by: len(train), "train_loss": loss})
        return Message(RecordDict({name: to_arrays(shared, record), "metrics": metrics}), reply_to=message)

    def _report(
        self, record: ArrayRecord, context: AppContext, instruction: Instruction, store: ClientStore
    ) -> ClientReport | None:
        """The client's scores on its test data; None for a client that has no P_i and does not recover."""
        with isolated_random_state(self._seed(instruction, context, "evaluate"), self.trainer.device), store.locked():
            store.begin_session(instruction)
            store.prune(instruction)
            has_private = self._trains_alone(instruction)
            if not (store.rounds() or instruction.recovering or has_private):
                return None
            predict, shared, own = self._predictor(record, context, instruction, store)
            test, _, trainer = self._held_out(context, instruction)
            central = trainer.scores(shared.eval(), test)
            local = trainer.scores(predict, test) if own else central
            alone = self._alone(context, instruction, store).test_n if has_private else None
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
        """The predictor, w, and whether the predictor uses v_i.

        Under the paper's rule the client keeps predicting with v_i, unchanged, when recovery has stopped. If gains are
        tested, recovery stops because v_i was shown to make predictions worse: then the client predicts with w.
        """
        shared = self._shared(record, context)
        private = self.trainer.first(shared)
        own = instruction.recovering or not instruction.reports
        own = own and store.read(private, up_to=instruction.round)
        return self.trainer.predictor(shared, private if own else None), shared, own

    def _reports(self, instruction: Instruction) -> bool:
        """Whether the server asks for gain reports, the client has a P_i, and reports have noise if its updates do."""
        silent = self.adds_noise and not instruction.noise
        return instruction.reports and self._trains_alone(instruction) and not silent

    def _trains_alone(self, instruction: Instruction) -> bool:
        """Whether the client has a P_i. A client outside the panel has no P_i, even if `private_epochs` is given."""
        by_default = instruction.reports if self.private_epochs is None else self.private_epochs > 0
        return instruction.panel and by_default

    def _gain_or_problem(
        self, record: ArrayRecord, context: AppContext, instruction: Instruction, store: ClientStore
    ) -> tuple[GainReport | None, str, bool]:
        """The gain report; else a sentence that says why there is none, and whether the use of lindt is the reason.
        An error here does not stop the training."""
        try:
            gain = self._gain(record, context, instruction, store)
            return gain, "" if gain is not None else self._no_validation(context), False
        except Exception as error:
            if isinstance(error, TooFewSamplesError) or (isinstance(error, OSError) and is_in(self.folder, error)):
                raise  # there is no v_i either
            ours = isinstance(error, UserError)
            problem = one_line(str(error) if ours else f"{type(error).__name__}: {error}")
            log_message(f"client {self._client(context)}: no report: {problem}", warn=True)
            return None, problem, ours

    def _gain(
        self, record: ArrayRecord, context: AppContext, instruction: Instruction, store: ClientStore
    ) -> GainReport | None:
        """The gain of the received w over P_i on V_i; None if there is no V_i. No training is changed by it."""
        with isolated_random_state(self._seed(instruction, context, "gain"), self.trainer.device), store.locked():
            store.begin_session(instruction)
            alone = self._alone(context, instruction, store, trust=True)
            _, held_out, trainer = self._held_out(context, instruction)
            if alone.rows_v is None or held_out is None:
                return None
            validation, metric, private_n = subset(held_out, alone.rows_v), trainer.metric, alone.at()
            shared = self._shared(record, context).eval()
            w_n = trainer.values(shared, validation)
            train, trainer = self._samples(context, "train")
            generator = torch.Generator().manual_seed(self._seed(instruction, context, "first batch"))
            first = subset(train, torch.randperm(len(train), generator=generator)[: trainer.batch])
            first_batch = float(trainer.values(shared, first).mean() - private_n.mean())
            adapted = adapted_private = None
            if instruction.recovering:
                private = trainer.first(shared)
                own = store.read(private, up_to=instruction.round - 1)  # v_i as it was when w was made
                adapted_n = trainer.values(trainer.predictor(shared, private if own else None), validation)
                adapted, adapted_private = paired(metric, adapted_n, w_n), paired(metric, adapted_n, private_n)
            report = GainReport(
                samples=len(validation),
                private=paired(metric, w_n, private_n),
                equal_age=paired(metric, w_n, alone.at(instruction.round * self._epochs(context))),
                adapted=adapted,
                adapted_private=adapted_private,
                first_batch=first_batch,
            )
            return with_noise(report, instruction.noise)

    def _alone(
        self, context: AppContext, instruction: Instruction, store: ClientStore, *, trust: bool = False
    ) -> AloneScores:
        """The scores of P_i, which is trained at the first call, and again when settings, model or data have changed.

        With `trust` the key is compared once per session, since the comparison reads all data.
        """
        if trust and store.checked(instruction.session) and (known := store.read_alone(None)) is not None:
            return known
        seed = seed_for(0, instruction.experiment, self._client(context), "alone")
        with isolated_random_state(seed, self.trainer.device):
            model = self.model(context)
            train, trainer = self._samples(context, "train")
            test, validation, _ = self._held_out(context, instruction)
            optimizer = trainer.optimizer([*model.parameters()])
            rule = (self.private_epochs or Alone(), trainer.batch, seed, optimizer, trainer.device.type)
            key = training_key(model, trainer.loss, trainer.metric, train, test, rule)
            if validation is not None:
                digest = hashlib.sha256(f"{key} validation".encode())
                add_samples(digest, validation)
                key = digest.hexdigest()
        kept = store.read_alone(key, len(test))
        if kept is None:
            kept = self._train_alone(context, instruction, store, key, seed)
        if instruction.reports:
            store.check(instruction.session)
        return kept

    def _train_alone(
        self, context: AppContext, instruction: Instruction, store: ClientStore, key: str, seed: int
    ) -> AloneScores:
        def build() -> nn.Module:
            return self.model(context).to(self.trainer.device)

        with isolated_random_state(seed, self.trainer.device):
            train, trainer = self._samples(context, "train")
            epochs = self.private_epochs or trainer.chosen_epochs(build, train, seed, Alone())
        with isolated_random_state(seed, self.trainer.device):
            model = build()
            train, trainer = self._samples(context, "train")
            test, held_out, _ = self._held_out(context, instruction)
            rows = None if held_out is None else _untrained(held_out, train)
            values: list[Tensor] = []
            for _ in trainer.train_alone(model, LocalWork(train, epochs), seed):
                if held_out is not None and rows is not None and len(rows):
                    values.append(trainer.values(model.eval(), subset(held_out, rows)))
            alone = AloneScores(trainer.scores(model.eval(), test))
            if values:
                alone = replace(alone, validation_ev=torch.stack(values), rows_v=rows)
        if not store.write_alone(key, alone, model):
            diverged = "trained alone to NaN or infinity: the private model is not kept, and is trained again each time"
            log_message(f"client {self._client(context)}: {diverged}; lower its learning rate", warn=True)
        self._log_private_training(context, epochs, held_out, rows)
        return alone

    def _log_private_training(
        self, context: AppContext, epochs: int, held_out: Examples | None, rows: Tensor | None
    ) -> None:
        """Log how long P_i was trained, and how many samples of V_i were left out."""
        client = self._client(context)
        log_message(f"client {client}: trained alone for {epochs} epochs, once")
        if held_out is None or rows is None:
            return
        if len(rows) < len(held_out):
            left = f"{len(rows)} are left" if len(rows) else "none is left, so it reports no gain"
            trained = f"{len(held_out) - len(rows)} of {len(held_out)} validation samples"
            log_message(f"client {client}: {trained} are in the training data too; {left}", warn=True)

    def _held_out(
        self, context: AppContext, instruction: Instruction
    ) -> tuple[Examples, Examples | None, ClientTrainer]:
        """The test data of beta, V_i (None if the client does not report), and the trainer with their batch size."""
        test, trainer = self._samples(context, "test")
        if not self._reports(instruction):
            return test, None, trainer
        if self.validation is not None:
            return test, samples_of(self.validation(context), "validation"), trainer
        if len(test) < 2:
            return test, None, trainer
        seed = seed_for(0, self._client(context), "validation")
        test, validation = split(test, stratified(test.labels, len(test) // 2, seed))
        return test, validation, trainer

    def _no_validation(self, context: AppContext) -> str:
        """Log and return why a client that is asked for a report has no V_i; "" if all samples of V_i were left out."""
        count = len(self._samples(context, "test")[0])
        if self.validation is not None or count >= 2:
            return ""
        problem = (
            f"its test data have {_counted(count)}, too few to take half of them as V_i; give validation= or more test "
            "data"
        )
        log_message(f"client {self._client(context)}: no report: {problem}", warn=True)
        return problem

    def _epochs(self, context: AppContext) -> int:
        return int(self.epochs(context) if callable(self.epochs) else self.epochs)

    def _require_fit(self, message: Message, context: AppContext, instruction: Instruction) -> None:
        """Make any error of the checks a UserError: the server then ends a run in which all clients have it."""
        try:
            self._check(message, context, instruction)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"Dual: model, data, loss or metric failed at the first message ({type(error).__name__}: "
                f"{one_line(str(error))}); correct the function that you gave"
            ) from error

    def _check(self, message: Message, context: AppContext, instruction: Instruction) -> None:
        """Check before the first round, not when recovery starts, that the model fits and has attach points."""
        with isolated_random_state(self._seed(instruction, context, "check"), self.trainer.device), torch.no_grad():
            shared = self._shared(record_of(message), context).eval()
            train, trainer = self._samples(context, "train")
            x, y = train.take(torch.arange(min(2, len(train))))
            trainer.dual.fits(shared, x.to(trainer.device))
            _try_loss(trainer, shared(x.to(trainer.device)).cpu(), y)
        if self._trains_alone(instruction):
            if self.preflight:
                self._run_preflight(context, instruction)
            else:
                log_message(f"client {self._client(context)}: the checks before training were left out", warn=True)

    def _run_preflight(self, context: AppContext, instruction: Instruction) -> None:
        """Log what the checks before training find in this client's own data and model."""
        seed, name = self._seed(instruction, context, "preflight"), f"client {self._client(context)}"
        with isolated_random_state(seed, self.trainer.device):
            train, trainer = self._samples(context, "train")
            test, _ = self._samples(context, "test")

            def build() -> nn.Module:
                with seeded(seed, trainer.device):
                    return self.model(context)

            def first_step(model: nn.Module, data: Examples) -> Context:
                return trainer._context(model, data, trainer.loss, 1, seed, NoPenalty())

            subject = Subject([(name, train, test)], build, trainer.loss, trainer.metric, first_step, trainer.device)
            for finding in look(subject, {}):
                log_message(finding.text, warn=True)

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
                "client_id", None, "give a function of the context that returns this client's name; the node's id "
                "cannot be the name, since it changes when the node is registered again"
            )  # fmt: skip
        return str(context.node_config["partition-id"])

    def _store(self, instruction: Instruction, context: AppContext) -> ClientStore:
        return ClientStore(self.folder, instruction.experiment, self._client(context))

    def _seed(self, instruction: Instruction, context: AppContext, purpose: str) -> int:
        return seed_for(0, instruction.experiment, self._client(context), instruction.round, purpose)


def _takes_config(optimizer: Callable[..., Any]) -> bool:
    """Whether the function has a second argument that is named `config` or has no default."""
    arguments = list(inspect.signature(optimizer).parameters.values())[1:]
    return any(
        one.name == "config" or (one.default is one.empty and one.kind < one.VAR_POSITIONAL) for one in arguments
    )


def _try_loss(trainer: ClientTrainer, outputs: Tensor, y: Tensor) -> None:
    """Try the loss and the metric on two samples. Raises UserError if they do not suit the model's outputs."""
    shapes = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(y.shape)}"
    if trainer.loss is cross_entropy and outputs.dim() == 2 and outputs.shape[1] == 1:
        raise UserError(
            "loss: cross entropy of a model with one output is always 0, so nothing would train; give the app's own "
            "loss and metric, such as binary_cross_entropy_with_logits"
        )
    try:
        loss = trainer.loss(outputs, y)
        values = trainer.metric.per_sample(outputs, y)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UserError(f"loss or metric: they fail on {shapes} ({one_line(str(error))}); give the app's own") from None
    if loss.dim() or len(values) != len(y):
        raise UserError(
            f"loss or metric: with {shapes} the loss must be one number and the metric one number per sample; give the "
            "app's own"
        )


def LindtMod(**arguments: Any) -> Dual:  # noqa: N802  # the earlier name of Dual
    """Deprecated: the earlier name of `Dual`, which `wrap(app, dual=Dual(...))` puts behind the app's other mods.

    Args:
        **arguments: Those of `Dual`.

    Returns:
        A `Dual`.

    Examples:
        >>> import warnings
        >>> import torch
        >>> import lindt.flower
        >>> def model(context):
        ...     return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> def data(context, split):
        ...     return torch.randn(20, 4), torch.randint(2, (20,))
        >>> with warnings.catch_warnings(action="ignore"):
        ...     mod = lindt.flower.LindtMod(model=model, data=data, optimizer=torch.optim.Adam)
        >>> isinstance(mod, lindt.flower.Dual)
        True
    """
    warnings.warn(
        "LindtMod is deprecated; end the client's file with app = lindt.flower.wrap(app, dual=Dual(...))",
        DeprecationWarning,
        stacklevel=2,
    )
    return Dual(**arguments)


def training_key(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    metric: Metric,
    train: Examples,
    test: Examples,
    rule: Sequence[object],
) -> str:
    """A hash of everything that determines a private model's scores: the untrained model, loss, metric and data.

    `rule` holds the settings: epochs, batch size, seed, optimizer. The results of model, loss and metric on a few
    samples and of one training step are part of the key, since a changed `forward` need not change a name. Limit: data
    that differ each time they are read, from a generator that the seeds of torch, NumPy and Python do not reach, give
    another key each time.
    """
    digest = hashlib.sha256()
    for part in (model, *map(name_of, (loss, metric, *rule)), torch.__version__):
        digest.update(f"{part!r}\n".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    few = subset(test, torch.arange(min(len(test), FEW)))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    outputs = forward_all(model.eval(), few, device).cpu()
    results = (outputs, loss(outputs, few.labels), metric.per_sample(outputs, few.labels))
    digest.update(repr([tensor.tolist() for tensor in results]).encode())
    x, y = train.take(torch.arange(min(len(train), FEW)))
    step = training_step(model, loss, (x.to(device), y.to(device)))
    digest.update(repr([tensor.tolist() for tensor in step]).encode())
    for data in (train, test):
        add_samples(digest, data)
    return digest.hexdigest()
