"""What `lindt run` prints while a run goes on."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any, cast

from folders import hurts, line
from rich.console import Console

from lindt.cli.execution import ProgressDisplay
from lindt.plan.file import resolve
from lindt.runs.play import RoundFollowed, RunStarted

BY_DELTA = ("detection=delta", "method=runtime", "method.recovery.patience=25")


def printed(lines: list[dict[str, Any]], done: int = 0, rule: tuple[str, ...] = ()) -> list[str]:
    console = Console(file=io.StringIO(), width=300, color_system=None)
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


def test_a_resumed_run_does_not_repeat_what_was_told() -> None:
    first, *told, _ = printed(hurts(recovering=True), done=7)
    assert first == "mine: resumed after round 7"
    assert [text[:14] for text in told] == ["mine, round 8:"]


def test_a_run_whose_clients_report_nothing_tells_delta() -> None:
    *told, state = printed([line(1)], rule=BY_DELTA)
    assert (told, state) == ([], "Delta 0.200 / epsilon 0.1, count 1 / r' 25  local -  recovery off")
