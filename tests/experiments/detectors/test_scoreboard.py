"""`lindt reproduce detectors`: plays what is missing, keeps it, replays it; the whole of it at the smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.detectors.recorded import record
from typer.testing import CliRunner

from lindt.cli.main import app
from lindt.errors import UserError
from lindt_experiments.detectors import outcomes, records, scoreboard
from lindt_experiments.detectors.configurations import configurations
from lindt_experiments.detectors.scoreboard import Request, reproduce, to_play
from lindt_experiments.queue import progress
from lindt_experiments.queue.jobs import Job
from lindt_experiments.queue.queue import JobEvent, _next


class Played:
    """In the place of the queue: a record a job, of which every second one is negative."""

    def __init__(self, runs: Path) -> None:
        self.runs, self.keys = runs, list[str]()

    def __call__(
        self, jobs: Sequence[Job], at_once: int, together: int, until: float | None = None
    ) -> Iterator[JobEvent]:
        for number, job in enumerate(jobs):
            made = record(lambda i, r, sign=(-1) ** number: 0.2 * sign, rounds=job.plan.rounds)
            records.write(records.path_of(self.runs, job.key), replace(made, plan=job.key))
            self.keys.append(job.key)
            yield JobEvent("ended", job)


def asked(folder: Path, **fields: bool) -> Request:
    return Request("smoke", 1, 1, folder / "runs", folder / "results", as_json=True, **fields)


def test_what_is_kept_is_not_played_again_and_can_be_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(tmp_path / "runs")
    monkeypatch.setattr(progress, "play_all", played)
    monkeypatch.setattr(scoreboard.null_levels, "measure", lambda *_, **__: None)
    assert reproduce(asked(tmp_path)) == 0
    kept = outcomes.load(tmp_path / "results", "smoke")
    assert len(kept) == len(played.keys) == len(configurations("smoke"))
    assert sum(one.negative for one in kept) == 3
    assert {one.samples for one in kept} == {40}
    assert (tmp_path / "results" / "tables" / "smoke-detectors.md").exists()

    monkeypatch.setattr(scoreboard, "read_all", lambda _: {})
    reproduce(asked(tmp_path))
    assert outcomes.load(tmp_path / "results", "smoke")[0].readings
    assert len(played.keys) == 6
    monkeypatch.setattr(scoreboard.page, "write", lambda *_: Path("page"))
    reproduce(asked(tmp_path, replay=True))
    assert not outcomes.load(tmp_path / "results", "smoke")[0].readings  # today's code was asked
    assert len(played.keys) == 6


def test_again_plays_what_lacks_the_cosine_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played, request = Played(tmp_path / "runs"), asked(tmp_path, again=True)
    monkeypatch.setattr(progress, "play_all", played)
    monkeypatch.setattr(scoreboard.null_levels, "measure", lambda *_, **__: None)
    reproduce(asked(tmp_path))
    for path in (tmp_path / "runs" / "recorded").iterdir():  # two runs from before it was measured
        if played.keys.index(path.name.split(".")[0]) < 2:
            records.write(path, replace(records.read(path), version=1))
    reproduce(asked(tmp_path, replay=True))
    kept = {one.plan: one.cosine for one in outcomes.load(tmp_path / "results", "smoke")}
    assert [kept[key] is None for key in played.keys] == [True, True, False, False, False, False]
    assert not to_play(request.wanted(), asked(tmp_path))

    assert [one.job.key for one in to_play(request.wanted(), request)] == played.keys[:2]
    reproduce(request)
    assert played.keys[6:] == played.keys[:2]
    assert all(one.cosine is not None for one in outcomes.load(tmp_path / "results", "smoke"))
    reproduce(request)
    assert len(played.keys) == 8
    assert request.command.endswith(" --again")


def test_a_record_without_a_line_is_kept_without_playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, played = asked(tmp_path), Played(tmp_path / "runs")
    monkeypatch.setattr(progress, "play_all", played)
    monkeypatch.setattr(scoreboard.null_levels, "measure", lambda *_, **__: None)
    list(played([one.job for one in request.wanted()[:2]], 1, 1))
    assert len(to_play(request.wanted(), request)) == 4
    assert reproduce(request) == 0
    assert len(played.keys) == 6
    assert len(outcomes.load(tmp_path / "results", "smoke")) == 6


def test_a_line_of_another_plan_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, played = asked(tmp_path), Played(tmp_path / "runs")
    monkeypatch.setattr(progress, "play_all", played)
    monkeypatch.setattr(scoreboard.null_levels, "measure", lambda *_, **__: None)
    reproduce(request)
    kept = outcomes.load(tmp_path / "results", "smoke")
    assert scoreboard.current([replace(kept[0], plan="another"), *kept[1:]], "smoke") == kept[1:]


def test_short_runs_share_a_process(tmp_path: Path) -> None:
    jobs = [one.job for one in asked(tmp_path).wanted()]
    assert len({job.group for job in jobs}) == 6
    assert len(_next(jobs, [], 12)) == 6
    assert len(_next(jobs, [], 2)) == 2
    assert _next([replace(job, batch="") for job in jobs], [], 12) == [replace(jobs[0], batch="")]


def test_the_command_line(tmp_path: Path) -> None:
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    said = CliRunner().invoke(app, ["reproduce", "detectors", "--scale", "cpu", "--dry-run", *places])
    assert "runs are left to play" in said.output
    assert "cifar      judged    13 runs" in said.output
    assert "detectors" in CliRunner().invoke(app, ["reproduce", "--list"]).output
    for wrong in (
        ["detectors", "--only", "fedavg"],
        ["table3", "--replay"],
        ["table3", "--again"],
        ["attacks", "--again"],
        ["detectors", "--task", "nothing"],
    ):
        with pytest.raises(UserError):
            CliRunner().invoke(app, ["reproduce", *wrong, *places], catch_exceptions=False)


@pytest.mark.slow
def test_everything_at_scale_smoke(tmp_path: Path) -> None:
    """Six real federations, every detector, the page; then the same again without a round played."""
    places = ("--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"))
    command = [sys.executable, "-m", "lindt.cli", "reproduce", "detectors", "--scale", "smoke", "--json", *places]
    env = os.environ | {"LINDT_CACHE": str(tmp_path / "cache")}
    for played in (6, 0):
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        end = json.loads(done.stdout.splitlines()[-1])
        assert end == {"event": "end", "played": played, "failed": 0}
    kept = outcomes.load(tmp_path / "results", "smoke")
    assert len(kept) == 6
    assert all(one.samples > 0 for one in kept)
    assert {"gain", "gain-median", "warning", "reader"} <= kept[0].readings.keys()
    assert all(len(one.cosine or ()) == one.rounds and None not in (one.cosine or ()) for one in kept)
    page = (tmp_path / "results" / "tables" / "smoke-detectors.md").read_text()
    assert "The judged part: every detector" in page
