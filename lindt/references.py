"""Centralized training: all data pooled, as no federation may. For reference only (Sec. 3.1)."""

from __future__ import annotations

from pathlib import Path

import torch

from lindt.alone import Cache, Lesson
from lindt.data.examples import pool
from lindt.fit import with_threads
from lindt.plan import Plan
from lindt.problem import Problem


def centralized(plan: Plan, problem: Problem, device: str = "cpu", cache: Path | None = None) -> float:
    """The score on everyone's test data of one model trained on everyone's training data."""
    train, test = pool([t for t, _ in problem.data]), pool([t for _, t in problem.data])
    lesson = Lesson("centralized", train, test, plan, problem, torch.device(device))
    metric = problem.metric_for(plan)
    with with_threads(plan.threads):
        outputs = Cache(cache).outputs(lesson)
    return metric.value(metric.tally(outputs, test.labels))
