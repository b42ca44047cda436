"""`lindt reproduce recovery`: the cells and their plans, the page by hand, and the whole of it at the smallest size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lindt.cli.main import app
from lindt.errors import UserError
from lindt.plan.plan import METHODS
from lindt.registry import kind_of
from lindt_experiments.boards import GridRequest, reproduce_grid
from lindt_experiments.plans.keys import content_key
from lindt_experiments.queue import progress
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job
from lindt_experiments.queue.queue import JobEvent
from lindt_experiments.recovery import outcomes, page
from lindt_experiments.recovery.board import GRID, client_seconds, exchanged_bytes
from lindt_experiments.recovery.cells import METHOD_NAMES, WORLDS, RecoveryCell, cells, plan_for
from lindt_experiments.recovery.outcomes import RecoveryOutcome


def made(
    cell: RecoveryCell,
    betas: tuple[float, ...] = (0.1, -0.1, 0.3),
    seed: int = 0,
    central: float | None = 0.5,
    clearly: int = 0,
    scale: str = "smoke",
) -> RecoveryOutcome:
    """Every client alone has 0.5."""
    mean = sum(betas) / len(betas)
    return RecoveryOutcome(
        *cell,
        scale=scale,
        seed=seed,
        plan=content_key(plan_for(cell, scale, seed)),
        rounds=6,
        central=central,
        local=0.5 + mean,
        beta=mean,
        median_gain=sorted(betas)[1],
        worst_tenth=min(betas),
        locals=tuple(0.5 + beta for beta in betas),
        betas=betas,
        harmed=sum(beta < 0 for beta in betas),
        clearly_harmed=clearly,
        clearly_better=0,
        attack_local=None,
        train_seconds=0.25,
        score_seconds=0.5,
        bytes=8000,
        command="",
        commit="",
        date="2026-11-18",
        seconds=1.0,
    )


def test_every_method_in_four_worlds() -> None:
    grid = cells("cpu")
    assert len(grid) == len(set(grid)) == 4 * len(METHOD_NAMES)
    assert set(METHODS) - set(METHOD_NAMES) == {"trimmed-mean", "lindt-tm", "lindt-before", "runtime", "watch"}
    plans = {cell: plan_for(cell, "cpu", 0) for cell in grid}
    assert len({content_key(plan) for plan in plans.values()}) == len(grid)
    for (world, method), plan in plans.items():
        assert kind_of(plan.method.recovery) == kind_of(METHODS[method].recovery)
        assert plan.detection.reports == method.startswith("guarded")
        assert kind_of(plan.data.allocation) == {"nfl": "groups", "normal": "iid"}.get(world, "dirichlet")
        assert plan.environment.threat.share == (0.2 if world in ("nfl", "dirichlet-attacked") else 0)
    assert {cell.world for cell in cells("paper")} == {"nfl", "normal"}


def test_what_a_method_has_to_send() -> None:
    """The smoke model: fc3 has 8 * 10 + 10 weights, which FedPer keeps."""
    fedavg, fedper = (exchanged_bytes(plan_for(RecoveryCell("nfl", name), "smoke", 0)) for name in ("fedavg", "fedper"))
    assert fedavg - fedper == 2 * 4 * 90


def test_seconds_of_a_client_by_hand() -> None:
    """Two plain rounds of 4 s and 6 s with 2 clients each; a scored one of 9 s: 9 - 2 * 2.5 = 4 s for 8 clients."""
    lines = [{"round": n, "answered": [0, 1], "scores": {} if n < 3 else {"local": 1}} for n in (1, 2, 3)]
    assert client_seconds(lines, {1: 4.0, 2: 6.0, 3: 9.0}, 8) == (2.5, 0.5)
    assert client_seconds(lines[2:], {3: 9.0}, 8) == (None, None)


def test_the_bootstrap_draws_groups_and_members() -> None:
    assert page.bootstrap([(0.2, 0.2), (0.2, 0.2, 0.2)]) == pytest.approx((0.2, 0.2))
    low, high = page.bootstrap([(0.0,), (1.0,)])  # of two groups: 0, 1/2 or 1
    assert (low, high) == (0.0, 1.0)
    low, high = page.bootstrap([(0.0, 1.0) * 200])
    assert (low, high) == (pytest.approx(0.45, abs=0.01), pytest.approx(0.55, abs=0.01))  # 1.96 * 0.5 / sqrt(400)


def test_the_page_by_hand(tmp_path: Path) -> None:
    kept = [
        made(RecoveryCell("nfl", "fedper"), (0.2, 0.0, 0.4), central=None),
        made(RecoveryCell("nfl", "guarded"), (0.1, -0.1, 0.3)),
        made(RecoveryCell("nfl", "fedavg"), (-0.1, -0.3, -0.2), clearly=2),
    ]
    path = page.write(kept, "smoke", tmp_path / "results")
    assert path == tmp_path / "results" / "tables" / "smoke-recovery.md"
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
            for line in path.read_text().splitlines() if line.startswith("| `")}  # fmt: skip
    assert list(rows) == ["`fedavg`", "`fedper`", "`guarded`"]
    # Every client is 10 points above guarded: so is each mean of a bootstrap.
    assert rows["`fedper`"][:2] == ["-", "70.0"]
    assert rows["`fedper`"][2].startswith("+20.0 (")
    assert rows["`fedper`"][3] == "+10.0 (+10.0 to +10.0)"
    assert rows["`fedper`"][4] == "100% (29-100)"  # 0.025 ** (1 / 3) = 0.292
    assert rows["`guarded`"][3] == "-"
    assert rows["`guarded`"][4] == "67% (9-99)"
    assert rows["`fedavg`"][5] == "2 of 3 (9.4-99.2%)"
    assert rows["`fedavg`"][6:] == ["-30.0", "-", "0.25", "0.50", "8", "1"]
    (said,) = page.conclusions(kept)
    assert "highest local accuracy fedper, 70.0" in said
    assert "nobody clearly worse off with fedper, guarded" in said
    assert "above guarded by the interval: fedper." in said


def test_a_method_without_a_gain_over_ours_is_not_said_to_beat_it() -> None:
    kept = [made(RecoveryCell("normal", "ditto"), (0.2, -0.1, 0.2)), made(RecoveryCell("normal", "guarded"))]
    assert page.conclusions(kept)[0].endswith("above guarded by the interval: none.")


def test_the_docs_wait_for_every_cell(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    every = [made(cell, scale="cpu") for cell in cells("cpu")]
    assert page.write(every[1:], "cpu", tmp_path / "results").parent.name == "tables"
    assert page.write(every, "cpu", tmp_path / "results") == tmp_path / "docs" / "recovery-scoreboard.md"


def test_what_is_kept_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []

    def play_all(jobs: Sequence[Job], at_once: int, together: int) -> Iterator[JobEvent]:
        for job in jobs:
            played.append(job.name)
            yield JobEvent("ended", job)

    def outcome_of(cell: RecoveryCell, job: Job, scale: str, origin: Origin) -> RecoveryOutcome:
        return made(cell, seed=job.plan.seed)

    monkeypatch.setattr(progress, "play_all", play_all)
    grid = replace(GRID, outcome_of=outcome_of)
    places = (tmp_path / "runs", tmp_path / "results")
    some = GridRequest(grid, "smoke", 2, 1, *places, methods=("ditto",), worlds=("nfl",), as_json=True)
    assert reproduce_grid(some) == 0
    assert len(played) == 2
    every = 2 * 4 * len(METHOD_NAMES)
    assert reproduce_grid(GridRequest(grid, "smoke", 2, 1, *places, as_json=True)) == 0
    assert len(played) == len(set(played)) == every
    assert reproduce_grid(GridRequest(grid, "smoke", 2, 1, *places, as_json=True)) == 0
    assert len(played) == every
    kept = outcomes.load(tmp_path / "results", "smoke")
    assert GRID.current(kept, "smoke") == kept
    path = outcomes.path_of(tmp_path / "results", "smoke")
    path.write_text('{"world": "nfl"}\n')
    with pytest.raises(UserError, match="line 1: not the fields of a run of the scoreboard of recovery"):
        outcomes.load(tmp_path / "results", "smoke")


def test_the_command(tmp_path: Path) -> None:
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    command = ["reproduce", "recovery", "--scale", "cpu", "--seeds", "5", "--dry-run", *places]
    runs = 5 * 4 * len(METHOD_NAMES)
    assert f"{runs} of {runs} runs are left to play" in CliRunner().invoke(app, command).output
    assert "recovery" in CliRunner().invoke(app, ["reproduce", "--list"]).output
    for wrong in (["--task", "cifar"], ["--replay"], ["--world", "flip"], ["--only", "watch"], ["--scale", "tiny"]):
        with pytest.raises(UserError, match=wrong[0]):
            CliRunner().invoke(app, ["reproduce", "recovery", *wrong, *places], catch_exceptions=False)


@pytest.mark.slow
def test_the_board_at_scale_smoke(tmp_path: Path) -> None:
    """Real federations of every method and the page; then the same again without a round played."""
    places = ("--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"))
    command = [sys.executable, "-m", "lindt.cli", "reproduce", "recovery", "--scale", "smoke", "--json", *places]
    env = os.environ | {"LINDT_CACHE": str(tmp_path / "cache")}
    for played in (len(cells("smoke")), 0):
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout.splitlines()[-1]) == {"event": "end", "played": played, "failed": 0}
    kept = {one.cell: one for one in outcomes.load(tmp_path / "results", "smoke")}
    assert set(kept) == set(cells("smoke"))
    for (world, method), one in kept.items():
        assert (one.central is None) == (method in ("fedper", "fedrep"))
        assert len(one.betas) == len(one.locals) > 0
        assert (one.attack_local is None) == (world in ("normal", "dirichlet"))
        assert one.train_seconds
    text = (tmp_path / "results" / "tables" / "smoke-recovery.md").read_text()
    assert all(f"## {words.capitalize()}" in text for words in WORLDS.values())
