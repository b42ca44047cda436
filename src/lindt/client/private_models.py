"""The references of Sec. 3.2: a private model P_i that a client trains alone, and centralized training.

Both follow one rule (plan.Alone) and the one training loop.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor, nn

from lindt.client.optimizers import Optimization, OptimizerStates, identity, optimization_of, stepping
from lindt.client.training import (
    FEW,
    GradientStep,
    fit,
    forward_all,
    name_of,
    prepare_model,
    recording_key,
    training_step,
)
from lindt.data.examples import LocalWork, add_samples, pool, subset
from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, sample_values, steps_differ
from lindt.protocols import Batch, Buffers, Examples, Step
from lindt.runs.files import BrokenError, read_plain, seal, unseal, write_whole
from lindt.seeds import seed_for, seeded, with_threads
from lindt.weights import first_model, read_buffers, read_w, trainable

RULE = 1  # the version of the training rule; a new version makes stored outputs invalid
_LOG: Final = logging.getLogger("lindt")  # prints to stderr by default


def held_out_samples(plan: Plan, samples: int) -> int:
    """How many of a client's samples choose its number of epochs; the others train (plan.Alone)."""
    return min(max(1, round(plan.alone.held_out * samples)), samples - 1)


@final
@dataclass(frozen=True)
class PrivateModel:
    """A trained model's outputs on the test samples, and the number of epochs that the rule chose."""

    outputs: Tensor
    epochs: int = 0  # 0: not trained
    validation_en: Tensor | None = None  # the metric of each sample of V_i after each epoch, where there is a V_i
    w_P: Tensor | None = None  # the model itself, where the training keeps it
    buffers: Buffers | None = None

    def values_at(self, epoch: int | None = None) -> Tensor:
        """The metric of each validation sample after `epoch` epochs, at most those of the finished model."""
        assert self.validation_en is not None
        last = len(self.validation_en)
        return self.validation_en[(last if epoch is None else min(max(1, epoch), last)) - 1]


@final
@dataclass(frozen=True)
class PrivateTraining:
    """The training of one model without a federation: on one client's data, or on all clients' data."""

    name: str  # "client 7" or "centralized"; the seed is derived from it
    train: Examples
    test: Examples
    plan: Plan
    problem: Problem
    device: torch.device
    validation: Examples | None = None  # V_i, which is not used to choose epochs

    @property
    def seed(self) -> int:
        return self.plan.seed_for("alone", self.name)

    def learn(self) -> PrivateModel:
        rule = self.plan.alone
        shuffle = torch.Generator().manual_seed(seed_for(self.seed, "held out"))
        rows = torch.randperm(len(self.train), generator=shuffle)
        cut = held_out_samples(self.plan, len(self.train))
        held_out, rest = subset(self.train, rows[:cut]), subset(self.train, rows[cut:])
        best_score, best_epoch, best = float("-inf"), 0, PrivateModel(torch.empty(0))
        values: list[Tensor] = []
        for epoch, model in self._epochs(rest, rule.epochs):
            score = self._score(model, held_out)
            if not rule.refit and self.validation is not None:
                values.append(self._values(model, self.validation))
            if score >= best_score or not best_epoch:
                best_score, best_epoch = score, epoch
                if not rule.refit:
                    best = self._finished(model, epoch, values)
            if epoch - best_epoch >= rule.patience:
                break
        return self.refit(best_epoch) if rule.refit else best

    def refit(self, chosen: int) -> PrivateModel:
        """Train on all of D_i, for `stretch` times the chosen number of epochs."""
        epochs, finished = max(1, round(self.plan.alone.stretch * chosen)), PrivateModel(torch.empty(0))
        values: list[Tensor] = []
        for epoch, model in self._epochs(self.train, epochs):
            if self.validation is not None:
                values.append(self._values(model, self.validation))
            if epoch == epochs:
                finished = self._finished(model, chosen, values)
        return finished

    def _finished(self, model: nn.Module, chosen: int, values: Sequence[Tensor]) -> PrivateModel:
        outputs = forward_all(model, self.test, self.device).cpu()
        if not self.keeps_weights:
            return PrivateModel(outputs, chosen)
        on_validation = None if self.validation is None else torch.stack(list(values))
        return PrivateModel(outputs, chosen, on_validation, read_w(model).cpu(), read_buffers(model))

    @property
    def keeps_weights(self) -> bool:
        """Whether the model itself is kept: for reports on V_i, or for a method that predicts with it."""
        return self.validation is not None or getattr(self.plan.method.adaptation, "uses_private_model", False)

    def samples_seen(self, chosen: int) -> int:
        """The number of samples that training reads: in the epochs that choose, and in the refit."""
        rule, held_out = self.plan.alone, held_out_samples(self.plan, len(self.train))
        choosing = min(chosen + rule.patience, rule.epochs) * (len(self.train) - held_out)
        return choosing + (max(1, round(rule.stretch * chosen)) * len(self.train) if rule.refit else 0)

    def unstretched(self) -> PrivateTraining:
        return replace(self, plan=replace(self.plan, alone=replace(self.plan.alone, stretch=1.0)))

    def _epochs(self, train: Examples, epochs: int) -> Iterator[tuple[int, nn.Module]]:
        """The model after each epoch, in evaluation mode. For the decay of the rate an epoch counts as a round."""
        model = prepare_model(first_model(self.problem, self.plan), self.device, train.take(torch.arange(1))[0])
        training, steps = self.plan.training, self._steps(model)
        by, now = self._optimization, steps(1)

        def step(batch: Batch) -> None:
            now(batch)

        samples = training.batch if by is None else training.batch * by.accumulate
        generator = torch.Generator().manual_seed(seed_for(self.seed, "batches"))
        with seeded(seed_for(self.seed, "dropout"), self.device):
            model.train()
            for epoch in fit(step, LocalWork(train, epochs), samples, generator, self.device):
                model.eval()
                yield epoch, model
                model.train()
                now = steps(epoch + 1)

    @cached_property
    def _optimization(self) -> Optimization | None:
        return optimization_of(self.plan, self.problem) if steps_differ(self.plan, self.problem) else None

    def _steps(self, model: nn.Module) -> Callable[[int], Step]:
        """The step of an epoch. An optimizer's state is kept from epoch to epoch; its schedule restarts in each."""
        loss, training, by = self.problem.loss, self.plan.training, self._optimization

        def objective(x: Tensor, y: Tensor) -> Tensor:
            return loss(model(x), y)

        if by is None:
            down = GradientStep(objective, [trainable(model)], [model], recording_key(objective, loss, "alone"))
            return lambda epoch: lambda batch: _ignored(down(batch, training.rate_at(epoch), training.max_norm))
        states = OptimizerStates()
        states.begin(model)

        def with_optimizer(epoch: int) -> Step:
            states.carry_on()
            made, group = by.at(epoch), [trainable(model)]
            sizes = training.batch, by.accumulate, training.max_norm
            taken = stepping(objective, group, made, by.schedule, *sizes, states)
            return lambda batch: _ignored(taken(batch))

        return with_optimizer

    def _values(self, model: nn.Module, data: Examples) -> Tensor:
        return sample_values(
            self.problem.metric_for(self.plan), forward_all(model, data, self.device).cpu(), data.labels
        )

    def _score(self, model: nn.Module, data: Examples) -> float:
        metric = self.problem.metric_for(self.plan)
        return metric.value(metric.tally(forward_all(model, data, self.device).cpu(), data.labels))

    def key(self) -> str:
        """A hash of all that decides the outputs: data, initial weights, structure, a step, rule and seed."""
        return self.identity.key

    @cached_property
    def identity(self) -> Identity:
        """The key, and the shapes of the tensors stored under it. Computed once: it reads all data and takes a step."""
        model, digest = first_model(self.problem, self.plan), hashlib.sha256()
        for text in (
            model,
            self.plan.training,
            self.plan.alone,
            self.seed,
            self.plan.threads,
            torch.__version__,
            self.device.type,
            RULE,
        ):
            digest.update(repr(text).encode())
        if (by := self._optimization) is not None:
            digest.update(f"optimizer {identity(by, model, self.train, self.problem, len(self.train))}".encode())
        if self.plan.alone.stretch != 1:
            digest.update(f"stretch {self.plan.alone.stretch!r}".encode())
        loss = self.problem.loss
        digest.update(name_of(loss).encode())
        for tensor in model.state_dict().values():  # frozen weights and buffers too
            digest.update(tensor.contiguous().numpy().tobytes())
        # A changed forward, loss or metric may keep its name: so their values on a few samples go into the key, too.
        few = subset(self.test, torch.arange(min(len(self.test), FEW)))
        outputs = forward_all(model.eval(), few, torch.device("cpu"))
        digest.update(outputs.numpy().tobytes())
        metric = self.problem.metric_for(self.plan)
        digest.update(repr(self.problem.loss(outputs, few.labels).tolist()).encode())
        digest.update(f"{type(metric).__name__} {metric.tally(outputs, few.labels).tolist()}".encode())
        rows = torch.arange(min(len(self.train), self.plan.training.batch, FEW))
        for tensor in training_step(model, loss, self.train.take(rows)):
            digest.update(tensor.contiguous().numpy().tobytes())
        for data in (self.train, self.test):
            add_samples(digest, data)
        if self.validation is not None:
            digest.update(b"validation")
            add_samples(digest, self.validation)
        elif self.keeps_weights:
            digest.update(b"weights")
        return Identity(
            digest.hexdigest(),
            (len(self.test), *outputs.shape[1:]),
            None if self.validation is None else len(self.validation),
            self.keeps_weights,
            read_w(model).numel(),
            read_buffers(model),
            self.plan.alone.epochs,
        )


def _ignored(_gradients: object) -> None:
    """Drop the gradients: a Step returns None."""


@final
@dataclass(frozen=True)
class Identity:
    """A private model's key, and the shapes that its file must have."""

    key: str
    outputs: tuple[int, ...]  # the shape
    validation: int | None  # samples
    weights: bool  # whether the model itself is kept
    w: int  # parameters
    buffers: Buffers  # of the untrained model
    epochs: int  # at most

    def read(self, kept: Mapping[str, Tensor], words: Mapping[str, str]) -> PrivateModel:
        """The private model of a sealed file. Raises BrokenError where the file is of another model or not valid."""
        if words.get("key") != self.key:
            raise BrokenError("it is the file of another model")
        shapes = {"outputs": self.outputs, "epochs": ()}
        if self.weights:
            shapes |= {"w": (self.w,), "floats": self.buffers.floats_F.shape, "counts": self.buffers.counts_I.shape}
        if self.validation is not None:
            if "validation" not in kept or kept["validation"].dim() != 2 or not len(kept["validation"]):
                raise BrokenError("validation is missing")
            shapes["validation"] = (len(kept["validation"]), self.validation)
        for name, shape in shapes.items():
            if name not in kept or kept[name].shape != shape:
                raise BrokenError(f"{name} is missing, or of another shape")
            if kept[name].is_floating_point() == (name in ("epochs", "counts")):
                raise BrokenError(f"{name} is {kept[name].dtype}")
            if not torch.isfinite(kept[name]).all():
                raise BrokenError(f"{name} has NaN or infinity")
        if not 1 <= int(kept["epochs"]) <= self.epochs:
            raise BrokenError(f"epochs is {int(kept['epochs'])}")
        on_validation = None if self.validation is None else kept["validation"]
        plain = PrivateModel(kept["outputs"], int(kept["epochs"]), on_validation)
        if not self.weights:
            return plain
        return replace(plain, w_P=kept["w"], buffers=Buffers(kept["floats"], kept["counts"]))


@final
@dataclass(frozen=True)
class PrivateModelCache:
    """A cache of private models on disk, by content, so that methods and runs share them. Without a folder: no cache.

    FOLDER/sealed/KEY.safetensors   sealed as checkpoints are; earlier versions wrote FOLDER/KEY.safetensors

    A file that does not fit is renamed, and its model is trained again. A cache that cannot be written is not used.
    """

    folder: Path | None = None
    _said: list[str] = field(
        init=False, repr=False, compare=False, default_factory=list
    )  # errors of writing that were logged

    def outputs(self, training_: PrivateTraining) -> Tensor:
        return self.learned(training_).outputs

    def learned(self, training_: PrivateTraining) -> PrivateModel:
        if self.folder is None:
            return training_.learn()
        identity = training_.identity
        path = self.folder / "sealed" / f"{identity.key}.safetensors"
        kept = self._read(path, identity)
        if kept is not None:
            return kept
        # A stretched training takes the number of epochs from the plain one, as choosing it is most of the work.
        chosen = self.learned(training_.unstretched()).epochs if training_.plan.alone.stretch != 1 else 0
        learned = training_.refit(chosen) if chosen else training_.learn()
        tensors = _as_tensors(learned)
        if all(torch.isfinite(tensor).all() for tensor in tensors.values()):  # a file with NaN would be refused
            self._write(path, seal(tensors, {"key": identity.key}))
        return learned

    def _read(self, path: Path, identity: Identity) -> PrivateModel | None:
        if not os.path.lexists(path):
            return None
        try:
            return identity.read(*unseal(read_plain(path)))
        except BrokenError as error:
            wrong = f"{path} does not fit ({error})"
        try:
            os.replace(path, path.with_suffix(".damaged"))
        except FileNotFoundError:  # another process has renamed it, and logs it
            return None
        except OSError as error:
            self._unwritable(error)
            return None
        _LOG.warning("%s; it is renamed to .damaged, and the private model is trained again", wrong)
        return None

    def _write(self, path: Path, content: bytes) -> None:
        try:
            self._make(path.parent)
            write_whole(path, content)
        except OSError as error:
            self._unwritable(error)

    def _make(self, home: Path) -> None:
        assert self.folder is not None
        if home.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(home))
        if home.is_dir():
            return
        old = self.folder.is_dir() and any(self.folder.glob("*.safetensors"))
        home.mkdir(parents=True, exist_ok=True)
        if old:
            _LOG.warning(
                "%s: its private models are of an earlier version of lindt, and are trained again; "
                "the *.safetensors beside the folder %s can be deleted",
                *(self.folder, home.name),
            )

    def _unwritable(self, error: OSError) -> None:
        if not self._said:
            self._said.append(str(error))
            _LOG.warning(
                "%s cannot be written (%s); the run continues without a cache; set LINDT_CACHE to another folder",
                *(error.filename or self.folder, error.strerror),
            )


def _as_tensors(model: PrivateModel) -> dict[str, Tensor]:
    found = {"outputs": model.outputs, "epochs": torch.tensor(model.epochs)}
    if model.validation_en is not None:
        found["validation"] = model.validation_en
    if model.w_P is not None and model.buffers is not None:
        found |= {"w": model.w_P, "floats": model.buffers.floats_F, "counts": model.buffers.counts_I}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def centralized(plan: Plan, problem: Problem, device: str = "cpu", cache: Path | None = None) -> float:
    """The score of one model that is trained and tested on the data of all clients."""
    N = len(problem.data)
    if len(problem.checked) < N:
        raise UserError(
            f"centralized: it trains on the data of all clients, and these {N:,} are lazy; give a list of fewer clients"
        )
    pairs = [problem.data[i] for i in range(N)]
    train, test = pool([t for t, _ in pairs]), pool([t for _, t in pairs])
    training_ = PrivateTraining("centralized", train, test, plan, problem, torch.device(device))
    metric = problem.metric_for(plan)
    with with_threads(plan.threads):
        outputs = PrivateModelCache(cache).outputs(training_)
    return metric.value(metric.tally(outputs, test.labels))
