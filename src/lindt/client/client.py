"""A client: it owns D_i and v_i, and answers tasks. Neither ever leaves it."""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from lindt.client.private_models import PrivateModel, PrivateModelCache, PrivateTraining
from lindt.client.private_store import PrivateStore, newest, prune
from lindt.client.training import fit, forward_all, global_step
from lindt.data.examples import LocalWork, subset
from lindt.errors import UserError
from lindt.gains import with_noise
from lindt.plan.plan import Plan, private_clients
from lindt.plan.problem import Problem, paired, sample_values, split_validation
from lindt.protocols import (
    ChoosesOnValidation,
    ClientTally,
    Context,
    Examples,
    GainReport,
    Predictor,
    Reply,
    Task,
    has_global,
)
from lindt.seeds import seeded
from lindt.weights import read_buffers, read_w, write


@final
@dataclass(frozen=True)
class WorkerContext:
    """What the clients of one worker share: the plan, modules to work in, and where things are kept."""

    plan: Plan
    problem: Problem
    shared: nn.Module
    versions: PrivateStore
    cache: PrivateModelCache
    device: torch.device
    attackers: frozenset[int]
    backdoor: Examples | None  # what attackers mix in
    far_away: bool = False  # from the server, which must not foresee what the clients draw for their privacy

    @cached_property
    def private_module(self) -> nn.Module:
        """A second module to work in, for P_i; as with `shared`, the next client writes its own weights into it."""
        return copy.deepcopy(self.shared).eval()


@final
class Client:
    def __init__(self, id: int, worker: WorkerContext) -> None:
        self.id, self.worker = id, worker
        self.test = worker.problem.data[id][1]
        self.train, self.validation = split_validation(worker.plan, worker.problem, id)
        self.metric = worker.problem.metric_for(worker.plan)
        self._alone: PrivateModel | None = None

    def handle(self, task: Task) -> Reply:
        if task.client != self.id:
            raise ValueError(f"client {self.id} was sent a task for client {task.client}")
        report = self._report(task) if task.kind == "train" and self.validation is not None else None
        with self._seeded(task):
            if task.kind == "train":
                return replace(self._train(task), report=report)
            if task.kind == "evaluate":
                return self._evaluate(task)
            if task.kind == "private":
                chosen = self._private_model().epochs
                notes = {"samples_seen": float(self._private_training.samples_seen(chosen))}
                return Reply(self.id, task.round, len(self.train), notes=notes)
        raise ValueError(f"a task of kind {task.kind!r}: a client knows train, evaluate and private")

    def _train(self, task: Task) -> Reply:
        """Alg. 2, c2-c16."""
        plan, shared, adaptation = self.worker.plan, self.worker.shared, self.worker.plan.method.adaptation
        ctx = self._open(task)
        work = LocalWork(self.train, plan.training.epochs)
        threat = plan.environment.threat
        if self.id in self.worker.attackers:
            work = threat.corrupt(work, self.worker.backdoor, task.round)
        shared.train()  # before v_i is made: it takes its mode from w
        recovering = task.recovering and work.honest
        private = self._private(ctx, task.round - 1, create=True) if recovering else None
        step = adaptation.step(ctx, shared, private) if recovering else global_step(ctx, shared)
        for _ in fit(step, work, plan.training.batch, ctx.generator, self.worker.device):
            pass
        # A v_i gone to NaN would never come back: the client keeps the one before, as the server keeps its w.
        if private is not None and all(_finite(tensor) for tensor in private.state_dict().values()):
            notes = {name: value for name, value in ctx.notes.items() if math.isfinite(value)}
            prune(self.worker.versions, self.id, task.keep)  # first: to look for old ones is to wait for the new one
            self.worker.versions.write(self.id, task.round, (private.state_dict(), notes))
        w = read_w(shared)
        if not work.honest:
            w = task.w + threat.report(w - task.w, plan.seed_for("report", task.round, self.id), task.round)
        return Reply(self.id, task.round, len(self.train), w, read_buffers(shared))

    def _report(self, task: Task) -> GainReport:
        """How the received w does on V_i, against P_i. Called before training, which writes w into the module again."""
        worker, plan, validation = self.worker, self.worker.plan, self.validation
        assert validation is not None
        shared, metric, y = worker.shared, self.metric, validation.labels
        alone = self._private_model()
        private_n = alone.values_at()
        generator = torch.Generator().manual_seed(plan.seed_for("gain", task.round, self.id))

        def values(predict: Predictor, data: Examples, labels: Tensor) -> Tensor:
            return sample_values(metric, forward_all(predict, data, worker.device).cpu(), labels)

        with seeded(plan.seed_for("dropout", "gain", task.round, self.id), worker.device):
            ctx = replace(self._open(task), generator=generator)
            shared.eval()
            with torch.no_grad():
                w_n = values(shared, validation, y)
                first = subset(self.train, torch.randperm(len(self.train), generator=generator)[: plan.training.batch])
                first_n = values(shared, first, first.labels)
            adapted = adapted_private = None
            if task.recovering and self.id not in worker.attackers:
                adaptation = plan.method.adaptation
                predict: Predictor | None = None
                if isinstance(adaptation, ChoosesOnValidation):
                    kept = self._private(ctx, task.round - 1, create=False)
                    adapted_n = sample_values(metric, adaptation.held_out_outputs(ctx, shared, kept).cpu(), y)
                else:
                    predict, _ = self._predictor(ctx, replace(task, round=task.round - 1))
                    adapted_n = values(predict, validation, y)
                adapted_private = paired(metric, adapted_n, private_n)
                if has_global(adaptation):
                    adapted = paired(metric, adapted_n, w_n)
                else:  # what the federation gives to the client is what it predicts with; there is no w to compare with
                    if predict is None:
                        predict, _ = self._predictor(ctx, replace(task, round=task.round - 1))
                    w_n, first_n = adapted_n, values(predict, first, first.labels)
        report = GainReport(
            samples=len(validation),
            private=paired(metric, w_n, private_n),
            equal_age=paired(metric, w_n, alone.values_at(task.round * plan.training.epochs)),
            adapted=adapted,
            adapted_private=adapted_private,
            first_batch=float(first_n.mean() - private_n.mean()),
        )
        return self._noisy(report, task.round)

    def _noisy(self, report: GainReport, round: int) -> GainReport:
        """With noise, where the plan's detection asks for it; in a simulation by the plan's seed."""
        b, plan = getattr(self.worker.plan.detection, "noise", 0.0), self.worker.plan
        if not b or self.worker.far_away:
            return with_noise(report, b)
        generator = torch.Generator().manual_seed(plan.seed_for("report noise", round, self.id))
        return with_noise(report, b, lambda: float(torch.rand((), generator=generator, dtype=torch.float64)))

    def _evaluate(self, task: Task) -> Reply:
        """How the client fares on its own test data: with w, with what it predicts with, and alone."""
        shared, device = self.worker.shared, self.worker.device
        ctx = self._open(task)
        shared.eval()
        predict, _ = self._predictor(ctx, task)
        if task.recovering and not has_global(self.worker.plan.method.adaptation):
            tally = self._tally(None, forward_all(predict, self.test, device).cpu())
            return Reply(self.id, task.round, len(self.train), tally=tally, notes=ctx.notes)
        passing = OutputCapture(shared)
        local = forward_all(passing.watched(predict), self.test, device)
        outputs = local if predict is shared else passing.outputs(len(self.test))
        if outputs is None:
            outputs = forward_all(shared, self.test, device)
        tally = self._tally(outputs.cpu(), local.cpu())
        return Reply(self.id, task.round, len(self.train), tally=tally, notes=ctx.notes)

    def predictor(self, task: Task) -> tuple[Predictor, nn.Module, nn.Module | None]:
        """How the client predicts after a round, with the modules whose weights that takes."""
        with self._seeded(task):
            ctx = self._open(task)
            self.worker.shared.eval()
            predict, private = self._predictor(ctx, task)
            return predict, self.worker.shared, private

    def _predictor(self, ctx: Context, task: Task) -> tuple[Predictor, nn.Module | None]:
        method, shared = self.worker.plan.method, self.worker.shared
        private = self._private(ctx, task.round, create=False)
        if task.recovering or (private is not None and method.keeps_adapted):
            return method.adaptation.predictor(ctx, shared, private), private
        return shared, None

    @property
    def _counted(self) -> bool:
        """Whether its gain counts; who is left out of beta needs no private model."""
        return self.worker.plan.scoring.attackers == "counted" or self.id not in self.worker.attackers

    def _tally(self, outputs: Tensor | None, local: Tensor) -> ClientTally:
        """`outputs` are those of the global model, where there is a whole one."""
        plan, y, metric = self.worker.plan, self.test.labels, self.metric
        alone = self._private_model().outputs if plan.alone.private and self._counted else None
        wins = losses = 0
        if alone is not None:
            better = metric.per_sample(local, y) - metric.per_sample(alone, y)
            wins, losses = int((better > 0).sum()), int((better < 0).sum())
        goal = plan.environment.threat.goal(y)
        wanted = goal >= 0

        def hits(found: Tensor) -> int:
            return int((found.argmax(-1) == goal)[wanted].sum()) if wanted.any() else 0

        return ClientTally(
            samples=len(self.test),
            central=None if outputs is None else metric.tally(outputs, y),
            local=metric.tally(local, y),
            private=None if alone is None else metric.tally(alone, y),
            wins=wins,
            losses=losses,
            attack_chances=int(wanted.sum()),
            attack_central=0 if outputs is None else hits(outputs),
            attack_local=hits(local),
        )

    def _seeded(self, task: Task) -> AbstractContextManager[None]:
        return seeded(self.worker.plan.seed_for("dropout", task.kind, task.round, self.id), self.worker.device)

    def _open(self, task: Task) -> Context:
        """c2-c3: w_i <- w^{r-1}."""
        plan = self.worker.plan
        write(self.worker.shared, task.w, task.buffers)
        return Context(
            client=self.id,
            round=task.round,
            rate=plan.training.rate_at(task.round),
            max_norm=plan.training.max_norm,
            batch=plan.training.batch,
            train=self.train,
            loss=self.worker.problem.loss,
            penalty=plan.method.penalty,
            received_P=task.w.to(self.worker.device),
            generator=torch.Generator().manual_seed(plan.seed_for(task.kind, task.round, self.id)),
            device=self.worker.device,
            validation=self.validation,
            metric=self.metric,
            private_model=self._private_module if plan.alone.private else None,
        )

    def _private(self, ctx: Context, up_to: int, create: bool) -> nn.Module | None:
        """v_i as it was after round `up_to`, or its first value (c5-c6)."""
        kept = newest(self.worker.versions, self.id, up_to=up_to)
        if kept is None and not create:
            return None
        private = self.worker.plan.method.adaptation.begin(ctx, self.worker.shared)
        if private is None or kept is None:
            return private
        ctx.notes.clear()
        ctx.notes.update(kept[1])
        try:
            private.load_state_dict(kept[0])
        except RuntimeError as error:
            raise UserError(f"client {self.id}: its v_i does not fit the model: {error}") from None
        return private.train(self.worker.shared.training)

    def _private_model(self) -> PrivateModel:
        """P_i. The weights stay in the cache on disk where there is one."""
        if self._alone is None:
            learned = self.worker.cache.learned(self._private_training)
            self._alone = learned if self.worker.cache.folder is None else replace(learned, w_P=None, buffers=None)
        return self._alone

    def _private_module(self) -> nn.Module | None:
        """P_i as a module, in evaluation mode; None where this client trains none."""
        if self.id not in private_clients(self.worker.plan, len(self.worker.problem.data)):
            return None
        learned = self._private_model()
        if learned.w_P is None:
            learned = self.worker.cache.learned(self._private_training)
        assert learned.w_P is not None
        assert learned.buffers is not None
        module = self.worker.private_module
        write(module, learned.w_P, learned.buffers)
        return module

    @cached_property
    def _private_training(self) -> PrivateTraining:
        worker = self.worker
        return PrivateTraining(
            f"client {self.id}", self.train, self.test, worker.plan, worker.problem, worker.device, self.validation
        )


@final
class OutputCapture:
    """The global model's outputs, caught while a predictor that asks it on the way runs: one pass for two scores."""

    def __init__(self, shared: nn.Module) -> None:
        self._shared = shared
        self._caught: list[Tensor] = []

    def watched(self, predict: Predictor) -> Predictor:
        def watched(x: Tensor) -> Tensor:
            handle = self._shared.register_forward_hook(lambda _module, _inputs, output: self._caught.append(output))
            try:
                return predict(x)
            finally:
                handle.remove()

        return watched

    def outputs(self, samples: int) -> Tensor | None:
        """None where the global model was not asked exactly once for each sample."""
        if sum(len(output) for output in self._caught) != samples:
            return None
        return torch.cat(self._caught)


def _finite(tensor: Tensor) -> bool:
    """By its extremes, which NaN and infinity show in: one pass, without a mask as large as the tensor."""
    if tensor.is_floating_point() and tensor.numel():
        return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
    return bool(torch.isfinite(tensor).all())
