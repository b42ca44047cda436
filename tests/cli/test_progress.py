"""What `lindt run` prints while a run goes on."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest
from folders import hurts, line
from rich.console import Console

from lindt.cli import execution
from lindt.cli.execution import ProgressDisplay
from lindt.plan.file import resolve
from lindt.runs.play import PrivateModelTrained, RoundFollowed, RunStarted

BY_DELTA = ("detection=delta", "method=runtime", "method.recovery.patience=25")


def printed(
    lines: list[dict[str, Any]], done: int = 0, rule: tuple[str, ...] = (), width: int = 300, **terminal: Any
) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None, **terminal)
    display = ProgressDisplay(console, "mine")
    store = SimpleNamespace(about={"metric_in_percent": True}, rounds=lambda: lines[:done])
    display.see(RunStarted(cast(Any, store), resolve("digits-control", rule), 20, done))
    for one in lines[done:]:
        display.see(RoundFollowed(one))
    state = display.progress.tasks[-1].fields["state"]
    return [*console.file.getvalue().splitlines(), state]  # type: ignore[attr-defined]


def test_warnings_verdicts_and_effects_are_told_once_each() -> None:
    *told, state = printed(hurts(recovering=True))
    basis = "(two standard errors, 12 clients, 400 validation samples)"
    effect = "what the clients predict with is better than"
    assert told == [
        f"mine, round 2: early warning: gain on validation data -4.0 +- 2.0 points {basis}; no verdict yet",
        "mine, round 2: recovery is on from round 3",
        f"mine, round 4: verdict: federation hurts since round 4, at level 0.05: gain on validation data -8.0 +- 2.0 "
        f"points {basis}",
        f"mine, round 6: {effect} w (+8.0 +- 2.0 points, since round 6)",
        f"mine, round 8: {effect} training alone (+3.0 +- 2.0 points, since round 8)",
    ]
    assert state == "gain -12.0 +- 2.0 points, hurts  local 90.7  recovery on"


def test_in_a_pipe_a_message_is_one_line_however_narrow() -> None:
    lines = hurts(recovering=True)
    assert printed(lines, width=40)[:-1] == printed(lines)[:-1]
    assert len(printed(lines, width=40, force_terminal=True)) > len(printed(lines))  # a terminal wraps between words


@pytest.mark.parametrize(("cost", "times"), [(0.004, "less than 0.1"), (7.94, "7.9")])
def test_the_cost_of_a_private_model_is_never_told_as_zero(cost: float, times: str) -> None:
    console = Console(file=io.StringIO(), width=300, color_system=None)
    display = ProgressDisplay(console, "mine")
    store = SimpleNamespace(about={"metric_in_percent": True}, rounds=list)
    display.see(RunStarted(cast(Any, store), resolve("digits-control"), 20, 0))
    display.see(PrivateModelTrained(0, 20, cost))
    display.see(RoundFollowed(hurts(recovering=True)[0]))
    told = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"training a private model cost {times} times a client's work" in told


def test_a_resumed_run_does_not_repeat_what_was_told() -> None:
    first, *told, _ = printed(hurts(recovering=True), done=7)
    assert first == "mine: resumed after round 7"
    assert [text[:14] for text in told] == ["mine, round 8:"]


def test_a_run_whose_clients_report_nothing_tells_delta() -> None:
    *told, state = printed([line(1)], rule=BY_DELTA)
    assert (told, state) == ([], "Delta 0.200 / epsilon 0.1, count 1 / r' 25  local -  recovery off")


BAR = ("digits-control", "healthy, learns slowly", "a-name-of-a-plan-that-is-as-long-as-forty")


@pytest.mark.parametrize("label", BAR)
@pytest.mark.parametrize("rule", [(), BY_DELTA])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_bar_is_one_line_that_fits_the_terminal(label: str, rule: tuple[str, ...], width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=True)
    display = ProgressDisplay(console, label)
    store = SimpleNamespace(about={"metric_in_percent": True}, rounds=list)
    display.see(RunStarted(cast(Any, store), resolve("digits-control", ["rounds=1000", *rule]), 20, 0))
    for one in [line(1)] if rule else hurts(recovering=True):
        display.see(RoundFollowed(one))
    drawn = Console(width=width, color_system=None, file=io.StringIO())
    drawn.print(display.progress.make_tasks_table(display.progress.tasks))
    (shown,) = drawn.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(shown) <= width
    assert "/1000" in shown
    assert ("Delta 0.200" if rule else "gain -12.0 +- 2.0") in shown
    if len(label) < 16 or width > 80:
        assert ("count 1" if rule else "hurts") in shown


def test_without_a_terminal_a_line_is_printed_every_30_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, *(10.0 * second for second in range(1, 100))])
    monkeypatch.setattr(execution.time, "monotonic", lambda: next(clock))
    console = Console(file=io.StringIO(), width=300, color_system=None)
    with ProgressDisplay(console, "mine").watching() as display:
        store = SimpleNamespace(about={"metric_in_percent": True}, rounds=list)
        display.see(RunStarted(cast(Any, store), resolve("digits-control", ["rounds=20", *BY_DELTA]), 20, 0))
        for number in range(1, 6):
            display.see(RoundFollowed(line(number)))
    state = "Delta 0.200 / epsilon 0.1, count {} / r' 25  local -  recovery off"
    # The run starts at 10 s, rounds end at 20 and 30 s; the line takes the clock's next tick, 40 s, then 50, 60, 70 s.
    told = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert told == [f"mine: round {number}/20, {state.format(number)}" for number in (2, 5)]


def test_the_bar_of_the_private_models_fits_too() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=True)
    display = ProgressDisplay(console, "mine")
    store = SimpleNamespace(about={"metric_in_percent": True}, rounds=list)
    display.see(RunStarted(cast(Any, store), resolve("digits-control"), 20, 0))
    display.see(PrivateModelTrained(0, 20))
    drawn = Console(width=80, color_system=None, file=io.StringIO())
    drawn.print(display.progress.make_tasks_table(display.progress.tasks))
    (shown,) = drawn.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert shown.startswith("each client alone ")
    assert "1/20 private models, for comparison" in shown
