"""Every detector over the lines of one run: the same answers as while it was played."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import tiny

from lindt.errors import UserError
from lindt.report.reading import read_run
from lindt.runs.play import run_plan
from lindt.runs.replay import first_alarms, papers_rule, replay
from lindt.server.detection.divergence import Delta
from lindt.server.detection.gain import Gain


def lines(count: int, gain: float, delta: float) -> list[dict[str, object]]:
    pair = {"mean": gain, "square": 1.0}
    report = {"samples": 50, "private": pair, "equal_age": pair, "first_batch": gain}
    return [
        {"round": r, "delta": delta, "reports": [{"client": i, **report} for i in range(10)]}
        for r in range(1, count + 1)
    ]


def test_a_replay_says_what_the_run_said(tmp_path: Path) -> None:
    list(run_plan(tiny(detection=Gain(), rounds=8), tmp_path / "run"))
    run = read_run(tmp_path / "run")
    states = replay(Gain(), run.rounds, 6, 8)
    assert [state.verdict.gain for state in states] == [line["detection"]["verdict"]["gain"] for line in run.rounds]
    assert [state.verdict.state for state in states] == [line["detection"]["verdict"]["state"] for line in run.rounds]


def test_every_detector_calls_a_run_that_is_clearly_worse() -> None:
    alarms = first_alarms(lines(40, gain=-0.5, delta=0.2), 10, 40)
    assert alarms["delta"] == 13  # count > 40 * 25 // 80 = 12
    assert alarms["warning"] == 8  # the first look of the early warning
    assert alarms["gain"] == 18  # a quarter, round 10, and the first look a quarter of the way from there to the end
    assert alarms["fl_guard"] is not None
    assert set(first_alarms(lines(40, gain=0.5, delta=0.0), 10, 40).values()) == {None}


def test_without_reports_only_the_papers_rule_speaks() -> None:
    plain = [{"round": 1, "delta": 0.2}, {"round": 2}, {"round": 3, "delta": 0.2}]
    assert first_alarms(plain, 3, 3) == {"delta": 1}  # 3 * 25 // 80 = 0
    assert papers_rule(80).patience == 25
    with pytest.raises(UserError, match="round 1 has no reports"):
        replay(Gain(), plain, 3)
    with pytest.raises(UserError, match="Delta does not use reports"):
        replay(Delta(), plain, 3)
