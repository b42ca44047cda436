"""A client: it holds D_i and v_i, which never leave it, and answers tasks."""

from __future__ import annotations

import copy
import math
from collections.abc import Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import final

import torch
from torch import Tensor, nn

from lindt.client.optimizers import Optimization, OptimizerStates, split_states
from lindt.client.private_models import PrivateModel, PrivateModelCache, PrivateTraining
from lindt.client.private_store import PrivateStore, newest, prune
from lindt.client.training import fit, forward_all, global_step
from lindt.data.examples import LocalWork, subset
from lindt.errors import UserError
from lindt.gains import with_noise
from lindt.plan.plan import Plan, private_clients, reporting_clients
from lindt.plan.problem import Problem, paired, sample_values, split_validation
from lindt.protocols import (
    VALIDATION,
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
    """What the clients of one worker share: the plan, the modules that they train in, and the stores."""

    plan: Plan
    problem: Problem
    shared: nn.Module
    versions: PrivateStore
    cache: PrivateModelCache
    device: torch.device
    attackers: Set[int]
    backdoor: Examples | None  # the samples that attackers add to their data
    far_away: bool = False  # whether the server is on another machine: then it must not know the noise of the clients
    optimization: Optimization | None = None  # None where clients train with plain SGD
    panel: frozenset[int] = frozenset()  # lazy clients that are scored: their P_i are kept between visits, in `alone`
    alone: dict[tuple[int, bool], PrivateModel] = field(default_factory=dict)  # by client, and whether V_i is in it

    @cached_property
    def private_module(self) -> nn.Module:
        """A second module, for P_i. As with `shared`, each client writes its own weights into it."""
        return copy.deepcopy(self.shared).eval()

    @cached_property
    def private_module_on_whole(self) -> nn.Module:
        """A third, for the P_i that has trained on V_i too. A client may use both at once."""
        return copy.deepcopy(self.shared).eval()


@final
class Client:
    def __init__(self, id: int, worker: WorkerContext) -> None:
        self.id, self.worker = id, worker
        self.test = worker.problem.data[id][1]
        self.train, self.validation = split_validation(worker.plan, worker.problem, id)
        reporting = reporting_clients(worker.plan, len(worker.problem.data))
        self.reports = self.validation is not None and id in reporting
        self.metric = worker.problem.metric_for(worker.plan)
        held_out = self.validation is not None and not worker.problem.validation
        # All of the client's data where lindt has held V_i out and a second P_i trains on V_i too; else None.
        self.whole = worker.problem.data[id][0] if held_out and worker.plan.alone.with_validation else None
        self._alone: dict[bool, PrivateModel] = {}
        self._trainings: dict[bool, PrivateTraining] = {}

    def handle(self, task: Task) -> Reply:
        if task.client != self.id:
            raise ValueError(f"client {self.id} was sent a task for client {task.client}")
        report = self._report(task) if task.kind == "train" and self.reports else None
        with self._seeded(task):
            if task.kind == "train":
                return replace(self._train(task), report=report)
            if task.kind == "evaluate":
                return self._evaluate(task)
            if task.kind == "private":
                seen = 0
                for whole in (False,) if self.whole is None else (False, True):
                    seen += self._private_training(whole).samples_seen(self._private_model(whole).epochs)
                return Reply(self.id, task.round, len(self.train), notes={"samples_seen": float(seen)})
        raise ValueError(f"task.kind is {task.kind!r}, not train, evaluate or private")

    def _train(self, task: Task) -> Reply:
        """One round of local training (Alg. 2, c2-c16)."""
        plan, shared, adaptation = self.worker.plan, self.worker.shared, self.worker.plan.method.adaptation
        ctx = self._open(task)
        work = LocalWork(self.train, plan.training.epochs)
        threat = plan.environment.threat
        if self.id in self.worker.attackers:
            work = threat.corrupt(work, self.worker.backdoor, task.round)
        shared.train()  # before v_i is built, which copies the mode of w
        recovering = task.recovering and work.honest
        private = self._private(ctx, task.round - 1, create=True) if recovering else None
        step = adaptation.step(ctx, shared, private) if recovering else global_step(ctx, shared)
        work = replace(work, mixed=work.mixed * ctx.accumulate)  # keeps the share of backdoor samples in a step
        for _ in fit(step, work, ctx.samples_a_step, ctx.generator, self.worker.device):
            pass
        # A v_i with NaN stays NaN in all later rounds: the client keeps the version before, as the server keeps w.
        if private is not None and all(_finite(tensor) for tensor in private.state_dict().values()):
            notes = {name: value for name, value in ctx.notes.items() if math.isfinite(value)}
            prune(self.worker.versions, self.id, task.keep)  # before writing: listing versions waits for the write
            states = ctx.memory.tensors() if isinstance(ctx.memory, OptimizerStates) else {}
            self.worker.versions.write(self.id, task.round, (private.state_dict() | states, notes))
        w = read_w(shared)
        if not work.honest:
            w = task.w + threat.report(w - task.w, plan.seed_for("report", task.round, self.id), task.round)
        return Reply(self.id, task.round, len(self.train), w, read_buffers(shared))

    def _report(self, task: Task) -> GainReport:
        """The gains of the received w over P_i on V_i. Called before training, which writes w into the module again."""
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
                else:  # there is no whole w: the model that the client predicts with is compared in its place
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
        """The report with the noise of the plan's detection; in a simulation it is drawn from the plan's seed."""
        b, plan = getattr(self.worker.plan.detection, "noise", 0.0), self.worker.plan
        if not b or self.worker.far_away:
            return with_noise(report, b)
        generator = torch.Generator().manual_seed(plan.seed_for("report noise", round, self.id))
        return with_noise(report, b, lambda: float(torch.rand((), generator=generator, dtype=torch.float64)))

    def _evaluate(self, task: Task) -> Reply:
        """The scores on the client's test data: of w, of the model that it predicts with, and of P_i."""
        shared, device = self.worker.shared, self.worker.device
        ctx = self._open(task)
        shared.eval()
        predict, private = self._predictor(ctx, task)
        if self.worker.plan.early_stop.patience and self.validation is not None:
            ctx.notes[VALIDATION] = self._on_validation(ctx, predict, private, self.validation)
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

    def _on_validation(
        self, ctx: Context, predict: Predictor, private: nn.Module | None, validation: Examples
    ) -> float:
        """The score on V_i of the client's predictions. A method that chooses on V_i is scored on the other half."""
        adaptation, shared = self.worker.plan.method.adaptation, self.worker.shared
        if isinstance(adaptation, ChoosesOnValidation) and predict is not shared:
            outputs = adaptation.held_out_outputs(ctx, shared, private)
        else:
            outputs = forward_all(predict, validation, self.worker.device)
        return self.metric.value(self.metric.tally(outputs.cpu(), validation.labels))

    def predictor(self, task: Task) -> tuple[Predictor, nn.Module, nn.Module | None]:
        """The client's predictor after a round, with the modules that it uses: w's, and v_i's or None."""
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
        """Whether the client's gain counts in beta. Otherwise it needs no private model."""
        return self.worker.plan.scoring.attackers == "counted" or self.id not in self.worker.attackers

    def _tally(self, outputs: Tensor | None, local: Tensor) -> ClientTally:
        """The client's tally. `outputs` are those of the global model; None where there is no whole global model."""
        plan, y, metric = self.worker.plan, self.test.labels, self.metric
        alone = None
        if plan.alone.private and self._counted:
            alone = self._private_model(self.whole is not None).outputs
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
        """Write the received w into the module (c2-c3: w_i <- w^{r-1}) and build the context of the task."""
        plan, optimization = self.worker.plan, self.worker.optimization
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
            whole=self.whole,
            private_on_whole=partial(self._private_module, whole=True) if plan.alone.private else None,
            optimizer=None if optimization is None else optimization.at(task.round),
            schedule=None if optimization is None else optimization.schedule,
            accumulate=1 if optimization is None else optimization.accumulate,
            memory=None if optimization is None else OptimizerStates(),
        )

    def _private(self, ctx: Context, up_to: int, create: bool) -> nn.Module | None:
        """v_i as it was after round `up_to`. Without one: its first value (c5-c6) with `create`, else None."""
        kept = newest(self.worker.versions, self.id, up_to=up_to)
        if kept is None and not create:
            return None
        private = self.worker.plan.method.adaptation.begin(ctx, self.worker.shared)
        if private is None:
            return None
        own, states = ({}, {}) if kept is None else (kept[0], {}) if ctx.memory is None else split_states(kept[0])
        if isinstance(ctx.memory, OptimizerStates):
            ctx.memory.begin(private, states)
        if kept is None:
            return private
        ctx.notes.clear()
        ctx.notes.update(kept[1])
        try:
            private.load_state_dict(own)
        except RuntimeError as error:
            raise UserError(
                f"client {self.id}: its stored v_i does not fit the model ({error}); start a new run"
            ) from None
        return private.train(self.worker.shared.training)

    def _private_model(self, whole: bool = False) -> PrivateModel:
        """P_i, with `whole` that of all the client's data. With a cache on disk its weights are not kept in memory."""
        worker, place = self.worker, (self.id, whole)
        if whole not in self._alone and place in worker.alone:
            self._alone[whole] = worker.alone[place]
        if whole not in self._alone:
            learned = worker.cache.learned(self._private_training(whole))
            self._alone[whole] = learned if worker.cache.folder is None else replace(learned, w_P=None, buffers=None)
            if self.id in worker.panel:
                worker.alone[place] = self._alone[whole]
        return self._alone[whole]

    def _private_module(self, whole: bool = False) -> nn.Module | None:
        """P_i as a module, in evaluation mode; None where this client trains no P_i."""
        if self.id not in private_clients(self.worker.plan, len(self.worker.problem.data)):
            return None
        learned = self._private_model(whole)
        if learned.w_P is None:
            learned = self.worker.cache.learned(self._private_training(whole))
        assert learned.w_P is not None
        assert learned.buffers is not None
        module = self.worker.private_module_on_whole if whole else self.worker.private_module
        write(module, learned.w_P, learned.buffers)
        return module

    def _private_training(self, whole: bool = False) -> PrivateTraining:
        """The training of P_i. It is kept, since its key in the cache takes a pass over the data and a step."""
        if whole not in self._trainings:
            worker, train, validation = self.worker, self.train, self.validation
            if whole:
                assert self.whole is not None
                train, validation = self.whole, None
            given = worker.plan, worker.problem, worker.device, validation
            self._trainings[whole] = PrivateTraining(f"client {self.id}", train, self.test, *given)
        return self._trainings[whole]


@final
class OutputCapture:
    """Captures the global model's outputs while a predictor that calls it runs: one pass gives two scores."""

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
        """The captured outputs; None where the global model did not run exactly once for each sample."""
        if sum(len(output) for output in self._caught) != samples:
            return None
        return torch.cat(self._caught)


def _finite(tensor: Tensor) -> bool:
    """Whether all values are finite, by minimum and maximum: one pass, without a mask as large as the tensor."""
    if tensor.is_floating_point() and tensor.numel():
        return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
    return bool(torch.isfinite(tensor).all())
