"""The references of Sec. 3.2: a private model P_i that a client trains alone, and centralized training.

Both follow one rule (plan.Alone) and the one training loop.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from lindt.client.sgd import GradientStep, recording_key
from lindt.client.training import fit, forward_all, prepare_model, seeded
from lindt.data.examples import LocalWork, add_samples, pool, subset
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, first_model
from lindt.protocols import Batch, Examples, Metric
from lindt.resources import with_threads
from lindt.runs.files import write_whole
from lindt.seeds import seed_for
from lindt.weights import trainable

RULE = 1  # of training alone; a change of it makes kept outputs stale


def held_out_samples(plan: Plan, samples: int) -> int:
    """How many of a client's samples choose its number of epochs; the others train (plan.Alone)."""
    return min(max(1, round(plan.alone.held_out * samples)), samples - 1)


@final
@dataclass(frozen=True)
class PrivateModel:
    """What a trained model says of the test samples, and the number of epochs that the rule chose."""

    outputs: Tensor
    epochs: int = 0  # 0: not known, kept by an older version


@final
@dataclass(frozen=True)
class PrivateTraining:
    """One model to train without a federation: on a client's own data, or on everyone's."""

    name: str  # "client 7", "centralized": seeds come from names
    train: Examples
    test: Examples
    plan: Plan
    problem: Problem
    device: torch.device

    @property
    def seed(self) -> int:
        return self.plan.seed_for("alone", self.name)

    def learn(self) -> PrivateModel:
        rule = self.plan.alone
        shuffle = torch.Generator().manual_seed(seed_for(self.seed, "held out"))
        rows = torch.randperm(len(self.train), generator=shuffle)
        cut = held_out_samples(self.plan, len(self.train))
        held_out, rest = subset(self.train, rows[:cut]), subset(self.train, rows[cut:])
        best_score, best_epoch, best = float("-inf"), 0, torch.empty(0)
        for epoch, model in self._epochs(rest, rule.epochs):
            score = self._score(model, held_out)
            if score >= best_score or not best_epoch:
                best_score, best_epoch = score, epoch
                if not rule.refit:
                    best = forward_all(model, self.test, self.device)
            if epoch - best_epoch >= rule.patience:
                break
        return self.refit(best_epoch) if rule.refit else PrivateModel(best.cpu(), best_epoch)

    def refit(self, chosen: int) -> PrivateModel:
        """Trained on all of D_i for the chosen number of epochs, stretched."""
        epochs, outputs = max(1, round(self.plan.alone.stretch * chosen)), torch.empty(0)
        for epoch, model in self._epochs(self.train, epochs):
            if epoch == epochs:
                outputs = forward_all(model, self.test, self.device)
        return PrivateModel(outputs.cpu(), chosen)

    def unstretched(self) -> PrivateTraining:
        return replace(self, plan=replace(self.plan, alone=replace(self.plan.alone, stretch=1.0)))

    def _epochs(self, train: Examples, epochs: int) -> Iterator[tuple[int, nn.Module]]:
        """The model after each epoch, in evaluation mode; an epoch counts as a round for the rate's decay."""
        model = prepare_model(first_model(self.problem, self.plan), self.device, train.take(torch.arange(1))[0])
        training, loss, rate = self.plan.training, self.problem.loss, self.plan.training.rate

        def objective(x: Tensor, y: Tensor) -> Tensor:
            return loss(model(x), y)

        down = GradientStep(objective, [trainable(model)], [model], recording_key(objective, loss, "alone"))

        def step(batch: Batch) -> None:
            down(batch, rate, training.max_norm)

        generator = torch.Generator().manual_seed(seed_for(self.seed, "batches"))
        with seeded(seed_for(self.seed, "dropout"), self.device):
            model.train()
            for epoch in fit(step, LocalWork(train, epochs), training.batch, generator, self.device):
                model.eval()
                yield epoch, model
                model.train()
                rate = training.rate_at(epoch + 1)

    def _score(self, model: nn.Module, data: Examples) -> float:
        metric = self.problem.metric_for(self.plan)
        return metric.value(metric.tally(forward_all(model, data, self.device).cpu(), data.labels))

    def key(self) -> str:
        """The content that decides the outputs: data, first weights, structure, rule and seed."""
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
        if self.plan.alone.stretch != 1:
            digest.update(f"stretch {self.plan.alone.stretch!r}".encode())
        loss = self.problem.loss
        digest.update(name_of(loss).encode())
        for tensor in model.state_dict().values():  # frozen weights and buffers too
            digest.update(tensor.contiguous().numpy().tobytes())
        # A changed forward, loss or metric need not show in its name: what they say of a few samples does.
        few = subset(self.test, torch.arange(min(len(self.test), 16)))
        outputs = forward_all(model.eval(), few, torch.device("cpu"))
        digest.update(outputs.numpy().tobytes())
        metric = self.problem.metric_for(self.plan)
        digest.update(repr(self.problem.loss(outputs, few.labels).tolist()).encode())
        digest.update(f"{type(metric).__name__} {metric.tally(outputs, few.labels).tolist()}".encode())
        for data in (self.train, self.test):
            add_samples(digest, data)
        return digest.hexdigest()


def training_key(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    metric: Metric,
    train: Examples,
    test: Examples,
    rule: Sequence[object],
) -> str:
    """A hash of what decides a private model's scores in a user's own loop: the untrained model, loss, metric, data.

    `rule` holds the settings: epochs, batch size, seed, optimizer. What model, loss and metric say of a few samples
    is part of the key, since a changed `forward` need not show in a name. Limit: data that differ each time they are
    read, by a generator that no seed of torch, NumPy or Python reaches, give another key each time.
    """
    digest = hashlib.sha256()
    for part in (model, *map(name_of, (loss, metric, *rule)), torch.__version__):
        digest.update(f"{part!r}\n".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    few = subset(test, torch.arange(min(len(test), 16)))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    outputs = forward_all(model.eval(), few, device).cpu()
    said = (outputs, loss(outputs, few.labels), metric.per_sample(outputs, few.labels))
    digest.update(repr([tensor.tolist() for tensor in said]).encode())
    for data in (train, test):
        add_samples(digest, data)
    return digest.hexdigest()


def name_of(value: object) -> str:
    """A name that is the same in every process: of a function its own, else the representation without addresses."""
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


@final
@dataclass(frozen=True)
class PrivateModelCache:
    """Outputs of lessons on disk, by content, so that methods and runs share them; no folder, no cache."""

    folder: Path | None = None

    def outputs(self, training_: PrivateTraining) -> Tensor:
        return self.learned(training_).outputs

    def learned(self, training_: PrivateTraining) -> PrivateModel:
        if self.folder is None:
            return training_.learn()
        path = self.folder / f"{training_.key()}.safetensors"
        if path.exists():
            try:
                kept = load(path.read_bytes())
                return PrivateModel(kept["outputs"], int(kept.get("epochs", 0)))
            except (SafetensorError, KeyError):
                path.unlink()  # damaged: a cache can be made anew
        # A stretched training takes the number of epochs from the plain one: most of the work is in choosing it.
        chosen = self.learned(training_.unstretched()).epochs if training_.plan.alone.stretch != 1 else 0
        learned = training_.refit(chosen) if chosen else training_.learn()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, save({"outputs": learned.outputs.contiguous(), "epochs": torch.tensor(learned.epochs)}))
        return learned


def centralized(plan: Plan, problem: Problem, device: str = "cpu", cache: Path | None = None) -> float:
    """The score on everyone's test data of one model trained on everyone's training data."""
    train, test = pool([t for t, _ in problem.data]), pool([t for _, t in problem.data])
    training_ = PrivateTraining("centralized", train, test, plan, problem, torch.device(device))
    metric = problem.metric_for(plan)
    with with_threads(plan.threads):
        outputs = PrivateModelCache(cache).outputs(training_)
    return metric.value(metric.tally(outputs, test.labels))
