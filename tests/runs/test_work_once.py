"""In one run the plan is parsed once, the model is built for each place that trains, and a round's line is built once.

How often the user's model function is called, which may be slow and is not ours:
2 times by the check before anything is written (the second call shows that it gives a new module each time), 2 times
by the checks before training of a run that begins (two calls from one seed must agree), once for the module in which an
InProcess engine trains, and for each client's private model once for its key in the cache, once to choose the number of
epochs and once to train on all of its data.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import pytest
from typer.testing import CliRunner
from worlds import tiny

from lindt.cli.main import app
from lindt.engines.processes.engine import Processes
from lindt.plan.file import from_dict
from lindt.plan.models import SmallCnn
from lindt.plan.problem import problem_for
from lindt.runs.play import run_plan, workers_pay
from lindt.runs.summary import round_line
from lindt.server.checks import check
from lindt.server.federation import begin
from lindt.weights import initial_weights

PLAN = """
name = "small"
rounds = 3
data = { clients = 6, test_share = 0.9 }
environment = { participation = { kind = "sampled", rate = 0.5 } }
alone = { epochs = 1 }
scoring = { every = 1, last = 1 }
"""
BY_CHECK, BY_PREFLIGHT, BY_ENGINE, BY_PRIVATE_MODEL = 2, 2, 1, 3


@contextmanager
def counted(*functions: Callable[..., Any]) -> Iterator[Counter[str]]:
    """How often each is called in this thread, under whatever name it was imported."""
    codes = {f.__code__: f.__qualname__ for f in functions if isinstance(f, FunctionType)}
    found: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            found[codes[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        yield found
    finally:
        sys.setprofile(before)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "small.toml"
    path.write_text(PLAN)
    return path


def played(*words: str) -> Counter[str]:
    with counted(from_dict, SmallCnn.build, round_line) as found:
        result = CliRunner().invoke(app, ["run", *words, "--engine", "inprocess"])
    assert result.exit_code == 0, result.output
    return found


@pytest.mark.parametrize("flags", [[], ["--json"], ["--seed", "1", "--rounds", "3"]], ids=["drawn", "json", "flags"])
def test_one_run_parses_its_plan_once_and_makes_each_line_once(plan: Path, tmp_path: Path, flags: list[str]) -> None:
    found = played(str(plan), "--out", str(tmp_path / "run"), *flags)
    assert found["from_dict"] == 1
    assert found["round_line"] == 3
    assert found["SmallCnn.build"] == BY_CHECK + BY_PREFLIGHT + BY_ENGINE + 6 * BY_PRIVATE_MODEL


def test_overrides_change_the_one_plan_that_was_parsed(plan: Path, tmp_path: Path) -> None:
    found = played(str(plan), "--out", str(tmp_path / "run"), "--set", "alone.private=false", "--rounds", "2")
    assert found == {"from_dict": 1, "round_line": 2, "SmallCnn.build": BY_CHECK + BY_PREFLIGHT + BY_ENGINE}


def test_trackers_are_given_the_line_that_was_written(plan: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    found = played(str(plan), "--out", str(tmp_path / "run"), "--track", "tensorboard")
    assert (found["from_dict"], found["round_line"]) == (1, 3)


def test_a_resumed_run_parses_its_own_plan_only(plan: Path, tmp_path: Path) -> None:
    from lindt.plan.file import resolve

    events = run_plan(resolve(str(plan)), tmp_path / "run", cache=tmp_path / "cache" / "lindt" / "private")
    while type(next(events)).__name__ != "RoundPlayed":
        pass
    events.close()
    found = played("--out", str(tmp_path / "run"), "--resume")
    assert found["from_dict"] == 1
    assert found["round_line"] == 2
    assert found["SmallCnn.build"] == BY_CHECK + BY_ENGINE + 6  # private models are cached: their keys are left
    assert played("--out", str(tmp_path / "run"), "--resume") == {"from_dict": 1}


def test_a_server_of_worker_processes_builds_one_module_to_compare_problems() -> None:
    plan = tiny(model=SmallCnn())
    problem = problem_for(plan)
    with counted(SmallCnn.build) as found:
        check(plan, problem)
        workers_pay(plan, problem)
        begin(plan, problem)
        Processes(plan, problem).close()
    assert found == {"SmallCnn.build": BY_CHECK + 1}


def test_initial_weights_belong_to_the_plans_seed_and_states_own_their_copy() -> None:
    plan, other = tiny(), tiny(seed=1)
    problem = problem_for(plan)
    first = begin(plan, problem).w
    before = first.clone()
    first.zero_()  # a user may do with a state what they like
    assert begin(plan, problem).w.equal(before)
    assert not initial_weights(problem, other).w_P.equal(before)
    assert initial_weights(problem, plan).w_P.equal(before)
