"""Run one plan into one folder: begin or resume, play the rounds, write each round to disk, and yield events.

Events and no callbacks: the command line draws them, tests take a slice of them, scripts print them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, final

import torch

from lindt.engines.inprocess import InProcess
from lindt.engines.processes.engine import Processes
from lindt.environment.threats import omniscient
from lindt.errors import PlanError, UserError, is_interrupt
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan, trained_before
from lindt.plan.problem import Problem, import_task, load_task, problem_for, require_no_import, settled
from lindt.protocols import Engine, Reply
from lindt.registry import kind_of
from lindt.runs.about import VisitedClients, about_run, summarise_run
from lindt.runs.branch import Branch, require_branch, shared_rounds
from lindt.runs.schema import CHECKS, FROM_PYTHON, record
from lindt.runs.store import Origin, Store, require_fitting, write_about
from lindt.runs.summary import software_versions
from lindt.server.checks import check, probe
from lindt.server.federation import begin, play_rounds, train_privately
from lindt.server.preflight import NOT_MADE
from lindt.server.preflight import preflight as look_before
from lindt.server.scores import require_updates
from lindt.server.state import RoundResult
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
    cost: float | None = None  # samples that it trained on, as a multiple of the client's samples in the federation


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
    """A run's folder, new or resumed, and the problem that was checked against the plan."""

    store: Store
    plan: Plan
    problem: Problem
    exists: bool  # whether the folder held the run before


NOTHING_TO_WITHHOLD = (
    "--withhold needs a deployment (--superlink, --noise system): in a simulation the plan's seed and the v_i in the "
    "run's folder show which clients were asked"
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
    problem: Problem | None = None,
    resume: bool = False,
    engine: str = "auto",
    device: str = "cpu",
    cache: Path | None = None,
    make_engine: Callable[[Plan, Problem], ClosableEngine] | None = None,
    secret: bool = False,
    preflight: bool = True,
    withhold: bool = False,
    deployment: bool = False,
    keep: Sequence[int] = (),
    branch: Branch | None = None,
) -> Generator[Event, None, None]:
    """Run a plan into a folder; with `resume` continue where the run stopped. `plan` None means the folder's plan.

    A run that ends without one valid update keeps its folder and raises a UserError.

    The data and the model are those of the plan, of `task`, the user's `package.module:function`, or of `problem`,
    which was made in this process: worker processes cannot build it, so its run stays in this process.

    `make_engine` builds an engine that is not in ENGINES. With `secret`, on a deployment, noise comes from the
    operating system's cryptographic generator, and so does the seed of the sampling, which only the checkpoint holds.
    With `withhold` the folder does not name the clients that took part, and holds no measurement without noise.
    `preflight` makes the checks before training (server/preflight.py), once in a run: they refuse or warn, and run.json
    keeps their findings. In a `deployment` clients are on machines of their own, and a plan that only a simulation can
    play is refused. The states after the rounds `keep` are kept, and a run with a `branch` begins with the kept state
    of another run (runs/branch.py).
    """
    opened = open_run(
        plan,
        folder,
        task=task,
        problem=problem,
        resume=resume,
        engine=engine,
        device=device,
        noise="system" if secret else "plan",
        withhold=withhold,
        preflight=preflight,
        deployment=deployment,
        branch=branch,
    )
    if isinstance(opened, RunEnded):
        yield opened
        return
    own = problem is not None
    store, plan, problem = opened.store, opened.plan, opened.problem
    if own and engine == "auto":
        engine = "inprocess"
    with store.locked(), _marking_a_stop(store):
        store.keep_checkpoints(keep, plan.rounds)
        if secret:
            # Before any round: a start that crashed may have released noisy models, and the budget counts them.
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
            if store.about.get("stopped"):  # it runs again now
                store.about = {name: value for name, value in store.about.items() if name != "stopped"}
                write_about(store.folder, store.about)
            yield RunStarted(store, plan, len(problem.data), state.round)
            private = len(trained_before(plan, len(problem.data)))
            for reply in train_privately(plan, problem, engine_, state):
                yield PrivateModelTrained(reply.client, private, private_cost(plan, len(problem.data), reply))
            visited = VisitedClients(plan, problem, store.about.get("task"), store.visited)
            clock = time.perf_counter()
            for after, result in play_rounds(state, plan, problem, engine_):
                new = visited.new(result.asked)
                now = time.perf_counter()
                line = store.append(after, result, now - clock, new)
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
    """Write to run.json that the user stopped the run, by Ctrl-C or by leaving the loop over its events."""
    try:
        yield
    except BaseException as error:
        if (isinstance(error, GeneratorExit) or is_interrupt(error)) and not store.ended:
            write_about(store.folder, {**store.about, "stopped": True})
        raise


def private_cost(plan: Plan, clients: int, reply: Reply) -> float | None:
    """Samples that P_i trained on, as a multiple of those that the client trains on in the federation.

    The number in the federation is an expectation: every client is asked equally often.
    """
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
    problem: Problem | None = None,
    preflight: bool = True,
    noise: str = "plan",
    withhold: bool = False,
    deployment: bool = False,
    branch: Branch | None = None,
) -> OpenedRun | RunEnded:
    """Check everything, then create or open the folder of a run; RunEnded where the run has ended already.

    `noise` says where noise comes from: plan or system. A run begun with `withhold` keeps it when it is resumed.
    """
    if withhold and noise != "system":
        raise UserError(NOTHING_TO_WITHHOLD)
    if problem is not None and task:
        raise UserError("task and problem were both given; give one of the two")
    if problem is not None and engine not in ("auto", "inprocess"):
        raise UserError(
            f'engine = "{engine}": Python objects cannot be sent to other processes; name a function that returns the '
            'lindt.Problem, task="module:function", or use engine="inprocess"'
        )
    require_no_import()
    exists = (folder / "plan.toml").exists()
    if exists and not resume:
        raise UserError(f"{folder} holds a run already; name another --out, or continue it with --resume")
    if task:
        import_task(task)  # the folder's plan may name components that the user's module registers
    store = Store.open(folder) if exists else None
    if store and not store.ended:
        store.require_task(FROM_PYTHON if problem is not None else task, "resume")
    plan = _same_plan(plan, store, task, problem)
    if store and branch is not None:
        require_branch(store, branch)
    if store and store.ended:
        require_updates(store.rounds())
        return RunEnded(store, store.summary())
    if store and store.about.get("noise") not in (None, noise):
        kept = store.about["noise"]
        raise UserError(f"{folder} was begun with --noise {kept}; give --engine flower --noise {kept} to resume it")
    if store and withhold and not store.about.get("withheld"):
        raise UserError(
            f"{folder} was begun without --withhold and names clients; resume it without --withhold, or start a new run"
        )
    check_engine(engine, plan, device, deployment)
    if problem is not None:
        task = FROM_PYTHON
    else:
        problem = load_task(task) if task else problem_for(plan)
    plan = settled(plan, problem)
    model = check(plan, problem)
    if store and task:
        store.require_data(problem)
    origin = Origin(to_dict(plan), probe(plan, problem, model), software_versions())
    shared = None if branch is None or store else shared_rounds(branch, plan, problem, origin, task)
    if store is None or store.about.get("checks") is None:
        checks = record(look_before(plan, problem) if preflight else NOT_MADE, CHECKS)
        if store is None:
            about = about_run(plan, problem, task, noise, withhold) | {"checks": checks}
            about |= {} if shared is None else {"branched": shared.about}
            store = Store.create(folder, plan, about)
        else:
            store.record_checks(checks)
    store.origin = origin
    if shared is not None:
        shared.write(store)
    return OpenedRun(store, plan, problem, exists or shared is not None)


def _same_plan(plan: Plan | None, store: Store | None, task: str | None, problem: Problem | None) -> Plan:
    if store is None:
        if plan is None:
            raise UserError("the folder holds no run to resume, and no plan was given to start one; give a plan")
        return plan
    kept = store.plan()
    if plan is None or plan == kept:
        return kept
    problem = load_task(task) if task is not None else problem
    if problem is None or settled(plan, problem) != kept:
        raise UserError(f"{store.folder} holds a run of another plan; resume it without a plan, or name another --out")
    return kept


ENGINES = ("auto", "inprocess", "processes", "flower")


class ClosableEngine(Engine, Protocol):
    """An engine that its user has to close."""

    def close(self) -> None: ...


# Parameters times samples times rounds. Training of about this size takes as long as starting the workers: seconds.
WORKERS_PAY_FROM = 1e10


def check_engine(name: str, plan: Plan, device: str, deployment: bool = False) -> None:
    """Refuse an engine or device that cannot play the plan, before anything is written."""
    if name not in ENGINES:
        raise UserError(f"--engine {name}: choose among {', '.join(ENGINES)}")
    if name == "processes" and plan.threads != 1:
        raise UserError(
            f"--engine processes: its workers have one thread each, but the plan has threads = {plan.threads}; set it "
            "to 1, or use --engine inprocess"
        )
    if name == "flower" and find_spec("flwr") is None:
        raise UserError("--engine flower: Flower is not installed; pip install 'lindt[flower]'")
    if name == "flower" and plan.early_stop.patience:
        fix = "on Flower the server cannot restore the v_i of the best round on the nodes; set it to 0"
        raise PlanError("early_stop.patience", plan.early_stop.patience, fix)
    if name == "flower" and device != "cpu":
        raise UserError("--device: on Flower each node has its own device; set it with --node-config 'device=\"cuda\"'")
    threat = plan.environment.threat
    if deployment and omniscient(threat) is not None:
        fix = "its attackers see all updates, which is possible only in a simulation; leave out --superlink"
        raise PlanError("environment.threat", kind_of(threat), fix)
    check_device(device)


def check_device(device: str, named: str = "--device") -> None:
    """Refuse a device that this machine does not have; `named` is the option or argument that the user gave."""
    if device not in ("cpu", "cuda"):
        raise UserError(f"{named} {device}: choose among cpu, cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{named} cuda: this machine or this build of torch does not support cuda; use cpu")


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
    samples = sum(len(problem.data[i][0]) for i in problem.checked) / len(problem.checked)
    answers = plan.environment.participation.wanted(len(problem.data)) * plan.rounds
    work = initial_weights(problem, plan).w_P.numel() * samples * answers * plan.training.epochs
    return (os.cpu_count() or 1) > 1 and work > WORKERS_PAY_FROM
