"""One plan into one folder: begin or resume, play the rounds, keep each on disk, and say what happens.

Events, not callbacks: the command line draws them, tests take a slice, scripts print them.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from lindt.engines.select import ClosableEngine, check_engine, choose_engine
from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, counted_clients, fingerprint, import_task, load_task, problem_for
from lindt.runs.store import Store
from lindt.runs.summary import about_run, summarise_run
from lindt.server.checks import check
from lindt.server.federation import RoundResult, begin, play_rounds, train_privately


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
) -> Iterator[Event]:
    """Run a plan into a folder; with `resume` go on where it stopped. `plan` None means the folder's own.

    `carry` makes an engine that is none of ours to start. With `secret` the server draws its own seed for noise
    and sampling from the operating system and keeps it in its checkpoint only.
    """
    opened = open_run(plan, folder, task=task, resume=resume, engine=engine, device=device)
    if isinstance(opened, RunEnded):
        yield opened
        return
    store, plan, problem = opened.store, opened.plan, opened.problem
    with store.locked():
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
            if saved and saved.w.shape != state.w.shape:
                raise UserError(f"{folder}: its checkpoint has {len(saved.w)} weights, the model {len(state.w)}")
            state = saved or state
            engine_.forget_after(state.round)
            yield RunStarted(store, plan, len(problem.data), state.round)
            counted = len(counted_clients(plan, range(len(problem.data))))
            for client in train_privately(plan, problem, engine_, state):
                yield PrivateModelTrained(client, counted)
            clock = time.perf_counter()
            for after, result in play_rounds(state, plan, problem, engine_):
                now = time.perf_counter()
                line = store.append(after, result, now - clock)
                clock = now
                yield RoundPlayed(result, line)
        finally:
            engine_.close()
        summary = summarise_run(plan, store.rounds(), problem, state.buffers.floats_F.numel() > 0)
        store.finish(summary)
    yield RunEnded(store, summary)


def open_run(
    plan: Plan | None, folder: Path, *, task: str | None, resume: bool, engine: str, device: str
) -> OpenedRun | RunEnded:
    """The folder of a run, begun or taken up once everything has been checked; RunEnded where nothing is left to do."""
    exists = (folder / "plan.toml").exists()
    if exists and not resume:
        raise UserError(f"{folder} holds a run already; name another --out, or continue it with --resume")
    if task:
        import_task(task)  # the folder's plan may name components that the user's module registers
    store = Store.open(folder) if exists else None
    plan = _same_plan(plan, store)
    if store and store.ended:
        return RunEnded(store, store.summary())
    if store and store.about.get("task") != task:
        raise UserError(f"{folder} was run with --task {store.about.get('task')}; give the same to resume it")
    check_engine(engine, plan, device)
    problem = load_task(task) if task else problem_for(plan)
    check(plan, problem)
    if store and task and store.about.get("data") != fingerprint(problem):
        raise UserError(f"--task {task} gives other data than {folder} was begun with; draw them from a fixed seed")
    store = store or Store.create(folder, plan, about_run(plan, problem, task))
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
