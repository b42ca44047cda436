"""Playing what is missing: in which order, what fails, what is taken up again. Tiny plans on the embedded digits."""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made import made
from rich.console import Console
from rich.progress import Progress

from lindt.errors import UserError
from lindt.plan.models import Linear, SmallCnn
from lindt.plan.plan import Alone, Scoring
from lindt_experiments.plans import scales
from lindt_experiments.plans.catalog import Cell
from lindt_experiments.plans.scales import SIZES, plan_for
from lindt_experiments.queue import queue
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job, jobs_for, resume_jobs, to_play
from lindt_experiments.queue.progress import Bar
from lindt_experiments.queue.queue import _next, play_all
from lindt_experiments.queue.shared_rounds import _shared
from lindt_experiments.queue.work import Pace, Work
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
    caches = plan_for, _shared
    for kept in caches:
        kept.cache_clear()
    yield
    for kept in caches:
        kept.cache_clear()


def jobs(tmp_path: Path, *cells: Cell, seeds: int = 1) -> list[Job]:
    return jobs_for(cells, "smoke", seeds, tmp_path / "runs")


def request(tmp_path: Path, **changes: Any) -> Request:
    # Table 6 by two methods is five plans; FedAvg's are three, in one group of private models.
    given: dict[str, Any] = {"name": "table6", "scale": "smoke", "seeds": 1, "jobs": 2, "only": ("fedavg",)}
    given["console"] = Console(quiet=True)
    given |= {"runs": tmp_path / "runs", "results": tmp_path / "results"}
    return Request(**given | changes)


def worker(job: Job, alone: bool) -> Any:
    return SimpleNamespace(group=job.group, alone=alone, left=[job])


def test_private_models_are_not_trained_twice_at_the_same_time(tmp_path: Path) -> None:
    nfl, sigma, iid = jobs(tmp_path, NFL, SIGMA, IID)
    assert nfl.group == sigma.group != iid.group
    assert _next([nfl, sigma, iid], [], 1) == [nfl]
    assert _next([sigma, iid], [worker(nfl, alone=True)], 1) == [iid]
    assert _next([sigma], [worker(nfl, alone=True)], 1) == []
    assert _next([sigma, iid], [worker(nfl, alone=False)], 1) == [sigma]
    # Several in one process: only of one group.
    assert _next([nfl, iid, sigma], [], 5) == [nfl, sigma]


def test_runs_with_the_same_first_rounds_wait_for_the_one_that_plays_them(tmp_path: Path) -> None:
    """r' is 1 of 3 rounds."""
    once, fedavg, persisting, lindt = jobs(
        tmp_path, *(Cell("cifar", "nfl-long", name) for name in ("runtime-once", "fedavg", "runtime", "lindt"))
    )
    assert [job.shared.round for job in (once, fedavg, persisting) if job.shared] == [1, 1, 1]
    assert lindt.shared is None  # it recovers from round 1 on
    queue_ = [once, persisting, fedavg, lindt]
    assert _next(queue_, [], 1) == [fedavg]
    playing: Any = SimpleNamespace(group="", alone=False, left=[fedavg])
    assert _next([once, persisting, lindt], [playing], 1) == [lindt]
    assert _next([once], [], 1) == [once]  # no other run plays them
    assert once.task() | {"plan": ""} == {"plan": "", "folder": str(once.folder), "keep": [1], "branch": None}
    kept = fedavg.folder / "kept" / "round-000001.safetensors"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert _next([once, persisting], [playing], 2) == [once, persisting]
    assert once.task()["branch"] == [str(fedavg.folder), 1]
    once.folder.mkdir()
    (once.folder / "plan.toml").touch()
    assert once.task()["branch"] is None  # it was begun


@pytest.mark.slow
def test_the_queue_plays_shared_rounds_once_and_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        scales.SIZES, ("smoke", "cifar"), replace(SIZES["smoke", "cifar"], model=SmallCnn(), epsilon=1e-6)
    )
    plan_for.cache_clear()
    cells = [Cell("cifar", "nfl-long", name) for name in ("runtime-once", "runtime", "fedavg")]
    together = jobs(tmp_path, *cells)
    alone = [replace(job, folder=tmp_path / "alone" / job.name, shared=None) for job in together]
    for found in (together, alone):
        assert [one.happening for one in play_all(found, 2, 3) if one.happening in ("failed", "ended")] == ["ended"] * 3
    for shared, own in zip(together, alone, strict=True):
        about = json.loads((shared.folder / "run.json").read_text())
        assert about.get("branched", {}).get("round") == (None if shared is together[2] else 1)
        for name in ("rounds.jsonl", "summary.json", "plan.toml"):
            assert (shared.folder / name).read_bytes() == (own.folder / name).read_bytes()


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


@pytest.mark.slow
def test_when_time_is_up_runs_are_stopped_to_be_taken_up(tmp_path: Path) -> None:
    """The clock is set so that time is up at the first round: the run is marked as stopped, and goes on."""
    first, second = jobs(tmp_path, NFL, IID)
    until = time.monotonic() + 1000
    told = []
    with pytest.MonkeyPatch.context() as clock:
        for event in play_all([first, second], at_once=1, until=until):
            told.append(event)
            if event.happening == "round":
                clock.setattr(queue.time, "monotonic", lambda: until)
    assert {event.job.key for event in told} == {first.key}  # the second was not begun
    assert told[-1].happening == "round"
    assert json.loads((first.folder / "run.json").read_text())["stopped"] is True
    assert not second.folder.exists()
    again = list(play_all([first, second], at_once=1, until=time.monotonic() + 1000))
    assert again[0].happening == "started"
    assert again[0].round >= 1
    assert [event.job.key for event in again if event.happening == "ended"] == [first.key, second.key]


def test_with_a_time_limit_runs_are_played_in_the_order_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []

    class Done:
        """In the place of a process: it ends at once."""

        alone, group = False, ""

        def __init__(self, batch: list[Job], inbox: Any) -> None:
            begun.extend(job.key for job in batch)
            self.left: list[Job] = []
            inbox.put((self, None))

        def stop(self) -> None: ...

    monkeypatch.setattr(queue, "WorkerProcess", Done)
    found = jobs(tmp_path, NFL, LINDT)
    by_work = [job.key for job in sorted(found, key=lambda job: -(job.work.alone + job.work.federation))]
    assert by_work == [found[1].key, found[0].key]  # LINDT's run is the longer one
    list(play_all(found, 1))
    assert begun == by_work
    begun.clear()
    list(play_all(found, 1, until=time.monotonic() + 1000))
    assert begun == [job.key for job in found]
    begun.clear()
    list(play_all(found, 1, until=time.monotonic()))
    assert begun == []


def test_hours_without_a_name_play_all_runs_in_the_order_of_the_scale(tmp_path: Path) -> None:
    asked = request(
        tmp_path, name="all", seeds=None, hours=1.0, in_order=True, only=("fedavg", "lindt"), worlds=("nfl", "iid")
    )
    assert asked.command == "lindt reproduce --scale smoke --hours 1 --only fedavg,lindt --world nfl,iid"
    assert [job.cells[0] for job in asked.wanted()][:2] == [NFL, LINDT]
    assert {job.plan.seed for job in asked.wanted()} == {0}


def test_hours_of_no_length_are_refused(tmp_path: Path) -> None:
    for hours in (0.0, -1.0, float("nan")):
        with pytest.raises(UserError, match=r"--hours .*: give a number of hours above 0"):
            request(tmp_path, hours=hours)


def test_a_dry_run_says_what_would_be_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(request(tmp_path, console=Console(width=120)))
    said = capsys.readouterr().out
    assert "cifar-attack-0.1-fedavg-smoke" in said
    assert "0/3" in said
    assert "3 of 3 runs are left to play" in said
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "results").exists()


def test_the_pace_is_the_median_of_the_method_or_of_its_task() -> None:
    work = Work(alone=0.0, round=1.0, rounds=100)
    done = [
        made(method=m, seed=s, seconds=t)
        for m, s, t in (("fb", 0, 300), ("fb", 1, 500), ("fb", 2, 9000), ("lindt", 0, 100))
    ]
    pace = Pace((one, work) for one in [*done, made(method="alone-x1", rounds=1, seconds=1e6)])
    assert pace.of("cifar", "fb") == 5.0  # 500 seconds, 100 units
    assert pace.of("cifar", "apfl") == 4.0  # between 3 and 5
    assert pace.of("shake", "fb") is None


def test_a_dry_run_says_how_many_runs_fit_into_the_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = request(
        tmp_path,
        name="all",
        scale="tenth",
        only=(),
        worlds=("nfl", "normal"),
        hours=9.0,
        in_order=True,
        console=Console(width=120),
    )
    dry_run(asked)
    said = " ".join(capsys.readouterr().out.split())
    minutes = [float(one.replace(",", "")) for one in re.findall(r"0/100 ([\d,]+) \w+", said)]
    fit = sum(sum(minutes[: n + 1]) <= 9 * 60 * asked.jobs for n in range(len(minutes)))
    assert 0 < fit < len(minutes)
    assert f"About the first {fit} of them fit into 9 hours." in said


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
