"""One plan into one folder: begin or resume, play the rounds, keep each on disk, and say what happens.

Events, not callbacks: the command line draws them, tests take a slice, scripts print them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, final

import torch

from lindt.engines.inprocess import InProcess
from lindt.engines.processes.engine import Processes
from lindt.environment.threats import omniscient
from lindt.errors import PlanError, UserError
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan, private_clients
from lindt.plan.problem import Problem, import_task, load_task, problem_for
from lindt.protocols import Engine, Reply
from lindt.registry import kind_of
from lindt.runs.schema import CHECKS, record
from lindt.runs.store import Origin, Store, require_fitting, write_about
from lindt.runs.summary import about_run, software_versions, summarise_run
from lindt.server.checks import check, probe
from lindt.server.federation import RoundResult, begin, play_rounds, train_privately
from lindt.server.preflight import NOT_MADE
from lindt.server.preflight import preflight as look_before
from lindt.server.scores import require_updates
from lindt.weights import initial_weights


@final
@dataclass(frozen=True)
class RunStarted:
    store: Store
    plan: Plan
    clients: int
    round: int  # already played, when the run is resumed


@final
@dataclass(frozen=True)
class PrivateModelTrained:
    client: int
    clients: int
    cost: float | None = None  # of its training, in samples, as a multiple of what the client trains in the federation


@final
@dataclass(frozen=True)
class RoundPlayed:
    result: RoundResult
    line: dict[str, Any]  # as the store keeps it


@final
@dataclass(frozen=True)
class RoundFollowed:
    """A round that another process plays, as the store keeps it."""

    line: dict[str, Any]


@final
@dataclass(frozen=True)
class RunEnded:
    store: Store
    summary: dict[str, Any]


@final
@dataclass(frozen=True)
class OpenedRun:
    """A run's folder, begun or taken up, and the problem that was checked against the plan."""

    store: Store
    plan: Plan
    problem: Problem
    exists: bool  # before it was opened


NOTHING_TO_WITHHOLD = (
    "--withhold goes with a deployment (--superlink, --noise system): in a simulation the plan's seed and the v_i in "
    "the run's folder tell who was asked"
)
Event = RunStarted | PrivateModelTrained | RoundPlayed | RoundFollowed | RunEnded


def cache_folder() -> Path:
    """Where private models are kept between runs: LINDT_CACHE, or the user's cache folder."""
    chosen = os.environ.get("LINDT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return (Path(chosen) if chosen else Path.home() / ".cache") / "lindt" / "private"


def run_plan(
    plan: Plan | None,
    folder: Path,
    *,
    task: str | None = None,
    resume: bool = False,
    engine: str = "auto",
    device: str = "cpu",
    cache: Path | None = None,
    make_engine: Callable[[Plan, Problem], ClosableEngine] | None = None,
    secret: bool = False,
    preflight: bool = True,
    withhold: bool = False,
    deployment: bool = False,
) -> Iterator[Event]:
    """Run a plan into a folder; with `resume` go on where it stopped. `plan` None means the folder's own.

    A run that ends without one valid update is kept and raises a UserError.

    `make_engine` makes an engine that is none of ours to start. With `secret`, on a deployment, noise comes from the
    operating system's cryptographic generator; the seed of the sampling too, which is kept in the checkpoint only.
    With `withhold` the folder does not tell who took part, and nothing that is measured without noise. `preflight` is
    the look before training (server/preflight.py), once in a run: it refuses or warns, and what it found is kept in
    run.json. In a `deployment` clients are on machines of their own, and a plan that only a simulation can play is
    refused.
    """
    opened = open_run(
        plan,
        folder,
        task=task,
        resume=resume,
        engine=engine,
        device=device,
        noise="system" if secret else "plan",
        withhold=withhold,
        preflight=preflight,
        deployment=deployment,
    )
    if isinstance(opened, RunEnded):
        yield opened
        return
    store, plan, problem = opened.store, opened.plan, opened.problem
    with store.locked(), _marking_a_stop(store):
        if secret:
            # Before anything is played: the privacy budget counts what a start that crashed may have released.
            store.about = {**store.about, "attempts": (store.about.get("attempts") or 0) + 1}
            write_about(store.folder, store.about)
        engine_ = (
            make_engine(plan, problem)
            if make_engine
            else choose_engine(
                engine, plan, problem, task=task, run=store.run, folder=store.private, cache=cache, device=device
            )
        )
        try:
            state = begin(plan, problem, store.run)
            state = replace(state, secret=secrets.randbits(63)) if secret else state
            saved = store.resume() if opened.exists else None
            if saved:
                require_fitting(folder, saved, state)
            state = saved or state
            engine_.forget_after(state.round)
            if store.about.get("stopped"):  # it goes on now
                store.about = {name: value for name, value in store.about.items() if name != "stopped"}
                write_about(store.folder, store.about)
            yield RunStarted(store, plan, len(problem.data), state.round)
            private = len(private_clients(plan, len(problem.data)))
            for reply in train_privately(plan, problem, engine_, state):
                yield PrivateModelTrained(reply.client, private, private_cost(plan, len(problem.data), reply))
            clock = time.perf_counter()
            for after, result in play_rounds(state, plan, problem, engine_):
                now = time.perf_counter()
                line = store.append(after, result, now - clock)
                state, clock = after, now
                yield RoundPlayed(result, line)
        finally:
            engine_.close()
        if store.about.get("withheld"):
            store.forget_participants(state)
        summary = summarise_run(plan, store.rounds(), problem, state.buffers.floats_F.numel() > 0, store.about)
        store.finish(summary)
    require_updates(store.rounds())
    yield RunEnded(store, summary)


@contextmanager
def _marking_a_stop(store: Store) -> Iterator[None]:
    """Keep in run.json that somebody stopped the run, by Ctrl-C or by leaving the loop over its events."""
    try:
        yield
    except (KeyboardInterrupt, GeneratorExit):
        if not store.ended:
            write_about(store.folder, {**store.about, "stopped": True})
        raise


def private_cost(plan: Plan, clients: int, reply: Reply) -> float | None:
    """What P_i's training took, as a multiple of what the client trains in the federation if it is asked evenly."""
    seen = (reply.notes or {}).get("samples_seen")
    visits = plan.rounds * plan.environment.participation.wanted(clients) / clients
    return None if seen is None else seen / (visits * plan.training.epochs * reply.size)


def open_run(
    plan: Plan | None,
    folder: Path,
    *,
    task: str | None,
    resume: bool,
    engine: str,
    device: str,
    preflight: bool = True,
    noise: str = "plan",
    withhold: bool = False,
    deployment: bool = False,
) -> OpenedRun | RunEnded:
    """The folder of a run, begun or taken up once everything has been checked; RunEnded where nothing is left to do.

    `noise` says where noise comes from: plan or system. A folder that withholds who took part goes on to do so.
    """
    if withhold and noise != "system":
        raise UserError(NOTHING_TO_WITHHOLD)
    exists = (folder / "plan.toml").exists()
    if exists and not resume:
        raise UserError(f"{folder} holds a run already; name another --out, or continue it with --resume")
    if task:
        import_task(task)  # the folder's plan may name components that the user's module registers
    store = Store.open(folder) if exists else None
    plan = _same_plan(plan, store)
    if store and store.ended:
        require_updates(store.rounds())
        return RunEnded(store, store.summary())
    if store and store.about.get("task") != task:
        raise UserError(f"{folder} was run with --task {store.about.get('task')}; give the same to resume it")
    if store and store.about.get("noise") not in (None, noise):
        kept = store.about["noise"]
        raise UserError(f"{folder} was begun with --noise {kept}; give --engine flower --noise {kept} to resume it")
    if store and withhold and not store.about.get("withheld"):
        raise UserError(f"{folder} was begun without --withhold and names clients; resume it without, or start anew")
    check_engine(engine, plan, device, deployment)
    problem = load_task(task) if task else problem_for(plan)
    model = check(plan, problem)
    if store and task:
        store.require_data(task, problem)
    if store is None or store.about.get("checks") is None:
        checks = record(look_before(plan, problem) if preflight else NOT_MADE, CHECKS)
        if store is None:
            about = about_run(plan, problem, task, noise, withhold) | {"checks": checks}
            store = Store.create(folder, plan, about)
        else:
            store.record_checks(checks)
    store.origin = Origin(to_dict(plan), probe(plan, problem, model), software_versions())
    return OpenedRun(store, plan, problem, exists)


def _same_plan(plan: Plan | None, store: Store | None) -> Plan:
    if store is None:
        if plan is None:
            raise UserError("there is no run to resume here, and no plan to start one from")
        return plan
    kept = store.plan()
    if plan is not None and plan != kept:
        raise UserError(f"{store.folder} holds a run of another plan; resume it without one, or name another --out")
    return kept


ENGINES = ("auto", "inprocess", "processes", "flower")


class ClosableEngine(Engine, Protocol):
    """An engine that somebody has to close."""

    def close(self) -> None: ...


# Parameters times samples times rounds: a worker's start costs seconds, which about this much training takes.
WORKERS_PAY_FROM = 1e10


def check_engine(name: str, plan: Plan, device: str, deployment: bool = False) -> None:
    """Refuse what cannot carry the run, before anything is written."""
    if name not in ENGINES:
        raise UserError(f"--engine {name}: choose among {', '.join(ENGINES)}")
    if name == "processes" and plan.threads != 1:
        raise UserError(f"--engine processes: its workers have one thread each, the plan asks for {plan.threads}")
    if name == "flower" and find_spec("flwr") is None:
        raise UserError("--engine flower: Flower is not installed; pip install 'lindt[flower]'")
    if name == "flower" and device != "cpu":
        raise UserError("--device: on Flower each node names its own, --node-config 'device=\"cuda\"'")
    threat = plan.environment.threat
    if deployment and omniscient(threat) is not None:
        fix = "its attackers know all updates, which only a simulation can show them; leave out --superlink"
        raise PlanError("environment.threat", kind_of(threat), fix)
    if device not in ("cpu", "cuda"):
        raise UserError(f"--device {device}: choose among cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine or this build of torch has none; use cpu")


def choose_engine(
    name: str,
    plan: Plan,
    problem: Problem,
    *,
    task: str | None,
    run: str,
    folder: Path,
    cache: Path | None,
    device: str,
) -> InProcess | Processes:
    if name == "flower":
        raise UserError("--engine flower starts a run of its own: use `lindt run`")
    if name == "processes" or (name == "auto" and plan.threads == 1 and device == "cpu" and workers_pay(plan, problem)):
        return Processes(plan, problem, task=task, run=run, folder=folder, cache=cache, device=device)
    return InProcess(plan, problem, run=run, folder=folder, cache=cache, device=device)


def workers_pay(plan: Plan, problem: Problem) -> bool:
    samples = sum(len(train) for train, _ in problem.data) / len(problem.data)
    answers = plan.environment.participation.wanted(len(problem.data)) * plan.rounds
    work = initial_weights(problem, plan).w_P.numel() * samples * answers * plan.training.epochs
    return (os.cpu_count() or 1) > 1 and work > WORKERS_PAY_FROM
