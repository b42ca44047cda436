"""Which engine carries a run: worker processes where they pay, one process for small work."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from lindt.engines.inprocess import InProcess
from lindt.engines.processes.engine import Processes
from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, initial_weights
from lindt.protocols import Engine

ENGINES = ("auto", "inprocess", "processes", "flower")


class ClosableEngine(Engine, Protocol):
    """An engine that somebody has to close."""

    def close(self) -> None: ...


# Parameters times samples times rounds: a worker's start costs seconds, which about this much training takes.
WORKERS_PAY_FROM = 1e10


def check_engine(name: str, plan: Plan, device: str) -> None:
    """Refuse what cannot carry the run, before anything is written."""
    if name not in ENGINES:
        raise UserError(f"--engine {name}: choose among {', '.join(ENGINES)}")
    if name == "processes" and plan.threads != 1:
        raise UserError(f"--engine processes: its workers have one thread each, the plan asks for {plan.threads}")
    if name == "flower" and find_spec("flwr") is None:
        raise UserError("--engine flower: Flower is not installed; pip install 'lindt[flower]'")
    if name == "flower" and device != "cpu":
        raise UserError("--device: on Flower each node names its own, --node-config 'device=\"cuda\"'")
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
