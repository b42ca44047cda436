"""The grid of the scoreboard: enough of everything, split by configuration, each plan valid."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lindt.environment.threats import NoThreat
from lindt.errors import UserError
from lindt.plan.problem import problem_for
from lindt.protocols import Detection
from lindt.registry import kind_of
from lindt.server.checks import check
from lindt_experiments.detectors.configurations import (
    ATTACKS,
    SLOW,
    TASKS,
    configurations,
    named,
    part_of,
    seeds_of,
)
from lindt_experiments.plans.keys import content_key

GRID = configurations("cpu")


def test_there_are_enough_of_every_part_and_task() -> None:
    parts = Counter(one.part for one in GRID if one.task in TASKS)
    assert parts["design"] >= 90
    assert parts["judged"] >= 330
    assert parts["stress"] >= 40
    runs = Counter(dict.fromkeys(SLOW, 0))
    for one in GRID:
        runs[one.task] += seeds_of(one, 1)
    assert all(runs[task] >= 12 for task in SLOW)
    assert len(runs) == 7


def test_the_part_follows_from_the_name_of_the_configuration_alone() -> None:
    for one in GRID:
        if one.part != "stress" and one.task in TASKS:
            assert one.part == part_of(one.name)
        if one.task in SLOW:
            assert one.part == "judged"  # nothing is designed on them
    assert {part_of(f"name {i}") for i in range(40)} == {"design", "judged"}


def test_every_axis_is_varied_in_every_task() -> None:
    for task in TASKS:
        plans = [one.base for one in GRID if one.task == task and one.part != "stress"]
        assert len({plan.training.rate for plan in plans}) == 5
        assert {plan.training.epochs for plan in plans} == {1, 5}
        assert len({repr(plan.data.allocation) + plan.data.source for plan in plans}) == 5
        assert len({plan.data.clients for plan in plans}) == 3
        assert len({plan.environment.participation.wanted(100) for plan in plans}) == 3
        attacks = {kind_of(plan.environment.threat) for plan in plans} - {kind_of(NoThreat())}
        assert len(attacks) == len(ATTACKS) == 7
        assert {plan.environment.threat.share for plan in plans} == {0.0, 0.1, 0.25, 0.4}


def test_every_run_is_a_plan_of_its_own_in_which_clients_report() -> None:
    keys = [content_key(one.plan(index)) for one in GRID for index in range(seeds_of(one, 1))]
    assert len(set(keys)) == len(keys)
    for one in GRID:
        detection: Detection = one.base.detection
        assert detection.reports
    assert named("cpu", GRID[3].name).plan(0) == GRID[3].plan(0) != GRID[3].plan(1)


@pytest.mark.parametrize("task", ["digits", "generated", "cancer", "camps"])
def test_the_plans_can_be_played(task: str) -> None:
    """Allocation and threat fit the data, in the configurations of the most clients."""
    for one in GRID:
        if one.task == task and one.base.data.clients == max(TASKS[task].clients):
            plan = replace(one.plan(0), rounds=1)
            check(plan, problem_for(plan))


def test_a_scale_or_name_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UserError, match="smoke and cpu"):
        configurations("paper")
    with pytest.raises(UserError, match="has no such configuration"):
        named("cpu", "nothing")
