"""Playing what is missing: in which order, what fails, what is taken up again. Tiny plans on the embedded digits."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from lindt.plan.models import Linear
from lindt.plan.plan import Alone, Scoring
from lindt_experiments.plans import scales
from lindt_experiments.plans.catalog import Cell
from lindt_experiments.plans.scales import SIZES, plan_for
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job, jobs_for, resume_jobs, to_play
from lindt_experiments.queue.progress import Bar
from lindt_experiments.queue.queue import _next, play_all
from lindt_experiments.reproduce import Request, dry_run, reproduce
from lindt_experiments.results.outcomes import load

NFL, LINDT, SIGMA, IID = (
    Cell("cifar", "nfl", "fedavg"),
    Cell("cifar", "nfl", "lindt"),
    Cell("cifar", "sigma-0.01", "fedavg"),
    Cell("cifar", "iid", "fedavg"),
)


@pytest.fixture(autouse=True)
def _digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The scale smoke on digits: eight clients, three rounds, softmax regression."""
    tiny = replace(
        SIZES["smoke", "cifar"],
        source="digits",
        model=Linear(),
        rounds=3,
        scoring=Scoring(every=2, last=1),
        alone=Alone(epochs=1),
    )
    monkeypatch.setitem(scales.SIZES, ("smoke", "cifar"), tiny)
    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    plan_for.cache_clear()
    yield
    plan_for.cache_clear()


def jobs(tmp_path: Path, *cells: Cell, seeds: int = 1) -> list[Job]:
    return jobs_for(cells, "smoke", seeds, tmp_path / "runs")


def request(tmp_path: Path, **changes: Any) -> Request:
    # Table 6 by two methods is five plans; FedAvg's are three, in one group of private models.
    given: dict[str, Any] = {"name": "table6", "scale": "smoke", "seeds": 1, "jobs": 2, "only": ("fedavg",)}
    given["console"] = Console(quiet=True)
    given |= {"runs": tmp_path / "runs", "results": tmp_path / "results"}
    return Request(**given | changes)


def worker(job: Job, alone: bool) -> Any:
    return SimpleNamespace(group=job.group, alone=alone)


def test_private_models_are_not_trained_twice_at_the_same_time(tmp_path: Path) -> None:
    nfl, sigma, iid = jobs(tmp_path, NFL, SIGMA, IID)
    assert nfl.group == sigma.group != iid.group
    assert _next([nfl, sigma, iid], [], 1) == [nfl]
    assert _next([sigma, iid], [worker(nfl, alone=True)], 1) == [iid]
    assert _next([sigma], [worker(nfl, alone=True)], 1) == []
    assert _next([sigma, iid], [worker(nfl, alone=False)], 1) == [sigma]
    # Several in one process: only of one group.
    assert _next([nfl, iid, sigma], [], 5) == [nfl, sigma]


def test_what_another_process_plays_is_left_to_it(tmp_path: Path) -> None:
    nfl, iid = jobs(tmp_path, NFL, IID)
    nfl.folder.mkdir(parents=True)
    assert not nfl.busy()
    with (nfl.folder / "lock").open("w") as file:
        assert not nfl.busy()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert nfl.busy()
        assert _next([nfl, iid], [], 1) == [iid]
    assert not nfl.busy()


def test_a_plan_is_one_job_however_many_cells_show_it(tmp_path: Path) -> None:
    normal, attack = Cell("shake", "normal", "fedavg"), Cell("shake", "attack-0", "fedavg")
    (job,) = jobs(tmp_path, normal, attack)
    assert job.cells == (normal, attack)
    assert [job.plan.seed for job in jobs(tmp_path, NFL, seeds=3)] == [0, 1, 2]


def test_runs_are_played_kept_and_not_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(request(tmp_path, as_json=True)) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in told].count("ended") == 3
    first_round = next(n for n, line in enumerate(told) if line["event"] == "round")
    assert [line["event"] for line in told[:first_round]] == ["started"] + ["alone"] * (first_round - 1)
    kept = load(tmp_path / "results")
    assert {(one.world, one.method) for one in kept} == {(w, "fedavg") for w in ("attack-0", "attack-0.1", "nfl")}
    (one,) = [one for one in kept if one.world == "nfl"]
    assert (one.rounds, one.patience, one.scored, one.detected_at) == (3, 1, (2, 3), None)
    assert one.local == pytest.approx(one.local_curve[-1], rel=1e-4)
    assert one.beta == pytest.approx((one.local or 0) - (one.private or 0), abs=2e-5)
    assert one.counted_clients == 6
    assert one.command == "lindt reproduce table6 --scale smoke --seeds 1 --only fedavg"
    page = (tmp_path / "results" / "tables" / "smoke-table6.md").read_text()
    assert f"| attack 20%*, FedAvg | 1 | {100 * (one.central or 0):.1f} | 55.6 |" in page
    assert "| attack 0%, LINDT | 0 | - | 65.2 |" in page
    assert "3 of 6 runs are missing" in page

    before = (tmp_path / "results" / "smoke.jsonl").read_bytes()
    # What is kept is enough: on another machine there are no runs.
    assert reproduce(request(tmp_path, as_json=True, runs=tmp_path / "nothing here")) == 0
    assert '"played": 0' in capsys.readouterr().out
    assert (tmp_path / "results" / "smoke.jsonl").read_bytes() == before
    # A line that is lost comes back from the finished run.
    (tmp_path / "results" / "smoke.jsonl").unlink()
    assert reproduce(request(tmp_path, as_json=True)) == 0
    assert '"played": 0' in capsys.readouterr().out
    assert [one.cell for one in load(tmp_path / "results")] == [one.cell for one in kept]


@pytest.mark.slow
def test_one_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    good, bad, after = jobs(tmp_path, NFL, LINDT, SIGMA)  # softmax regression has nothing to intertwine
    happened = list(play_all([bad, good, after], at_once=1, together=3))
    assert [(events.happening, events.job) for events in happened if events.happening in ("failed", "ended")] == [
        ("failed", bad),
        ("ended", good),
        ("ended", after),
    ]
    (failed,) = [events for events in happened if events.happening == "failed"]
    assert "error: method.adaptation.points" in failed.error


@pytest.mark.slow
def test_closing_stops_the_processes_and_what_was_played_is_taken_up(tmp_path: Path) -> None:
    (job,) = jobs(tmp_path, NFL)
    events = play_all([job], at_once=1)
    assert any(one.happening == "round" for one in events)  # the first; the rest is not asked for
    events.close()
    assert not job.busy()
    origin = Origin("test", "none", "today")
    assert job.played() >= 1
    again = list(play_all(resume_jobs([job], [], "smoke", tmp_path / "results", origin), at_once=1))
    assert again[0].happening == "started"
    assert again[0].round >= 1
    assert again[-1].happening == "ended"
    assert to_play([job], []) == []


def test_a_dry_run_says_what_would_be_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(request(tmp_path, console=Console(width=120)))
    said = capsys.readouterr().out
    assert "cifar-attack-0.1-fedavg-smoke" in said
    assert "0/3" in said
    assert "3 of 3 runs are left to play" in said
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "results").exists()


def test_models_of_other_epochs_are_work_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 clients, 0.7 of one epoch at half, once and twice: 2.8, 5.6 and 11.2; `sigma` shares NFL's own."""
    cells = [Cell("cifar", "nfl", f"alone-x{stretch}") for stretch in ("0.5", "1", "2")]
    half, once, twice, sigma = jobs(tmp_path, *cells, SIGMA)
    assert [job.work.alone for job in (half, once, twice)] == pytest.approx([2.8, 5.6, 11.2])
    assert len({half.models, once.models, twice.models}) == 3
    assert sigma.models == once.models
    dry_run(request(tmp_path, name="private", only=(), worlds=("nfl",), as_json=True))
    told = {
        line["run"]: line["work"] for line in map(json.loads, capsys.readouterr().out.splitlines()) if "run" in line
    }
    for job in (half, once, twice):
        assert told[job.name] == pytest.approx(job.work.alone + job.work.federation)
    progress = Progress(console=Console(quiet=True))
    bar = Bar(progress.console, progress, progress.add_task(""), [half, once, twice, sigma])
    assert [bar.alone[job.key] for job in (half, once, twice, sigma)] == pytest.approx([2.8, 5.6, 11.2, 0])
