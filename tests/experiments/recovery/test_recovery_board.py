"""`lindt reproduce recovery`: the cells and their plans, the page by hand, and the whole of it at the smallest size."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lindt.cli.main import app
from lindt.errors import UserError
from lindt.plan.plan import EARLIER_NAMES, METHODS
from lindt.registry import kind_of
from lindt_experiments import boards
from lindt_experiments.boards import GridRequest, reproduce_grid
from lindt_experiments.plans.catalog import EXHIBITS, Cell
from lindt_experiments.plans.keys import content_key
from lindt_experiments.plans.scales import plan_for as evaluated
from lindt_experiments.queue import progress
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job
from lindt_experiments.queue.progress import Played
from lindt_experiments.queue.queue import JobEvent
from lindt_experiments.queue.work import work_of
from lindt_experiments.recovery import outcomes, page
from lindt_experiments.recovery.board import GRID, client_seconds, estimate, exchanged_bytes, seconds_per_unit
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
    played = {EARLIER_NAMES.get(name, name) for name in METHOD_NAMES}
    assert set(METHODS) - played == {"trimmed-mean", "lindt-tm", "lindt-before", "lindt-on-detection", "watch"}
    plans = {cell: plan_for(cell, "cpu", 0) for cell in grid}
    assert len({content_key(plan) for plan in plans.values()}) == len(grid)
    for (world, method), plan in plans.items():
        assert kind_of(plan.method.recovery) == kind_of(METHODS[method].recovery)
        assert plan.detection.reports == method.startswith("guarded")
        assert kind_of(plan.data.allocation) == {"nfl": "groups", "normal": "iid"}.get(world, "dirichlet")
        assert plan.environment.threat.share == (0.2 if world in ("nfl", "dirichlet-attacked") else 0)
    assert {cell.world for cell in cells("paper")} == {"nfl", "normal"}


def test_table_3_and_the_scoreboard_play_the_same_run_of_the_default_recovery() -> None:
    for world in ("nfl", "normal"):
        assert Cell("cifar", world, page.OURS) in EXHIBITS["table3"].cells
        for scale in ("cpu", "paper"):
            row = evaluated("cifar", world, page.OURS, scale, 1)
            assert content_key(row) == content_key(plan_for(RecoveryCell(world, page.OURS), scale, 1))
            assert row.detection.reports


def test_the_work_of_a_run_and_the_time_left_by_hand(tmp_path: Path) -> None:
    """NFL at `cpu`: a round has four honest clients and one attacker of 5 epochs; five rounds score 50 clients.

    guarded-all: 4 * 2.3 epochs, 5 reports of 0.2, four of them in recovery with 0.2 and 5 epochs of tuning, 5 of the
    attacker; a client is scored in 2 * 0.2 for the dual model and 2 * 5 epochs of tuning.
    """
    found = {name: work_of(plan_for(RecoveryCell("nfl", name), "cpu", 0)) for name in ("fedavg", "guarded-all")}
    assert found["fedavg"].federation == pytest.approx(100 * (4 + 5) + 5 * 50 * 0.1)
    assert found["guarded-all"].federation == pytest.approx(100 * (9.2 + 1 + 20.8 + 5) + 5 * 50 * 10.4)
    assert found["guarded-all"].alone == 2 * found["fedavg"].alone == 2 * 50 * 40 * 0.7
    kept = [replace(made(RecoveryCell("nfl", "fedavg"), scale="cpu"), seconds=185.0),
            replace(made(RecoveryCell("nfl", "fedavg"), seed=1, scale="cpu"), seconds=370.0)]  # fmt: skip
    outcomes.keep(tmp_path / "results", "cpu", kept)
    asked = GridRequest(GRID, "cpu", 3, 2, tmp_path / "runs", tmp_path / "results", ("fedavg",), ("nfl",))
    assert seconds_per_unit(asked) == pytest.approx(0.3)  # 0.2 and 0.4
    wanted = asked.wanted()
    told = estimate(asked, asked.to_play(wanted), len(wanted))
    assert "1 of 3 runs are left to play, 2,325 units of work, about 0.1 hours with --jobs 2" in told


def test_what_a_method_has_to_send() -> None:
    """The smoke model: fc3 has 8 * 10 + 10 weights, which FedPer keeps."""
    fedavg, fedper = (exchanged_bytes(plan_for(RecoveryCell("nfl", name), "smoke", 0)) for name in ("fedavg", "fedper"))
    assert fedavg - fedper == 2 * 4 * 90


def test_seconds_of_a_client_by_hand() -> None:
    """Two plain rounds of 4 s and 6 s with 2 clients each; a scored one of 9 s: 9 - 2 * 2.5 = 4 s for 8 clients."""
    lines = [{"round": n, "answered": [0, 1], "scores": {} if n < 3 else {"local": 1}} for n in (1, 2, 3)]
    assert client_seconds(lines, {1: 4.0, 2: 6.0, 3: 9.0}, 8) == (2.5, 0.5)
    assert client_seconds(lines[2:], {3: 9.0}, 8) == (None, None)


def test_the_page_by_hand(tmp_path: Path) -> None:
    """Two seeds: t is 12.706 with one degree of freedom, so 10 and 12 points give 11 -+ 12.706 * 1."""
    kept = [
        *(
            made(RecoveryCell("nfl", "fedper"), (0.2, 0.0, top), seed, central=None)
            for seed, top in enumerate((0.4, 0.46))
        ),
        *(made(RecoveryCell("nfl", "guarded"), (0.1, -0.1, 0.3), seed) for seed in (0, 1)),
        made(RecoveryCell("nfl", "fedavg"), (-0.1, -0.3, -0.2), clearly=2),
    ]
    path = page.write(kept, "smoke", tmp_path / "results")
    assert path == tmp_path / "results" / "tables" / "smoke-recovery.md"
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
            for line in path.read_text().splitlines() if line.startswith("| `")}  # fmt: skip
    assert list(rows) == ["`fedavg`", "`fedper`", "`guarded`"]
    assert rows["`fedper`"][:4] == ["-", "71.0 [58.3, 83.7]", "+21.0 [+8.3, +33.7]", "+11.0 [-1.7, +23.7]"]
    assert rows["`fedper`"][5] == "100% (54-100)"  # 0.025 ** (1 / 6) = 0.541
    assert rows["`guarded`"][1:4] == ["60.0 [60.0, 60.0]", "+10.0 [+10.0, +10.0]", "-"]
    assert rows["`guarded`"][5] == "67% (22-96)"
    assert rows["`fedavg`"][1:5] == ["30.0", "-20.0", "-30.0", "-20.0"]  # one seed: no interval
    assert rows["`fedavg`"][6:] == ["2 of 3 (9.4-99.2%)", "0", "-30.0", "-", "0.25", "0.50", "8", "1"]
    (said,) = page.conclusions(kept)
    assert "highest local accuracy fedper, 71.0" in said
    assert "no client clearly worse off with fedper, guarded" in said
    assert said.endswith("above guarded by the interval: none.")
    text = path.read_text()
    assert "| NFL: no client clearly worse off | 0 of 6 | yes |" in text
    assert "| NFL: at most 2.5% of the clients worse off | 2 of 6 | no |" in text
    assert "less FedAvg's is not below 0 | - | - |" in text
    assert "Not decided yet: 3 of 60 cells are played" in text


def test_a_goal_about_an_interval_needs_two_seeds(tmp_path: Path) -> None:
    """0.1 points below FedAvg on each of two seeds; then 0.1 and 0.3 below, whose interval reaches above 0."""
    fedavg = [made(RecoveryCell("normal", "fedavg"), (0.0, 0.0, 0.0), seed) for seed in (0, 1)]
    for below, met in ([(0.001,), "one seed"], [(0.001, 0.001), "no"], [(0.001, 0.003), "yes"]):
        ours = [made(RecoveryCell("normal", "guarded"), (-x, -x, -x), seed) for seed, x in enumerate(below)]
        text = page.write([*fedavg, *ours], "smoke", tmp_path / "results").read_text()
        (row,) = (line for line in text.splitlines() if "less FedAvg's is not below 0" in line)
        assert row.endswith(f"| {met} | - | - |"), row


def test_no_client_clearly_worse_off_is_a_goal_in_every_world(tmp_path: Path) -> None:
    kept = [made(RecoveryCell(world, "guarded-all"), clearly=world == "dirichlet") for world in WORLDS]
    lines = page.write(kept, "smoke", tmp_path / "results").read_text().splitlines()
    found = [line for line in lines if "no client clearly worse off" in line and line.startswith("| ")]
    assert found == [
        "| NFL: no client clearly worse off | - | - | 0 of 3 | yes |",
        "| normal FL: no client clearly worse off | - | - | 0 of 3 | yes |",
        "| Dirichlet(0.1): no client clearly worse off | - | - | 1 of 3 | no |",
        "| Dirichlet(0.1) with attackers: no client clearly worse off | - | - | 0 of 3 | yes |",
    ]
    assert {"guarded", "guarded-all"} <= {cell.method for cell in cells("paper")}


def test_a_run_with_another_reference_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guarded run whose gains are over a P_i without V_i has another plan. FedAvg's run holds out no V_i."""

    def with_reference(cell: RecoveryCell, with_validation: bool) -> RecoveryOutcome:
        plan = plan_for(cell, "smoke", 0)
        plan = replace(plan, alone=replace(plan.alone, with_validation=with_validation))
        return replace(made(cell), plan=content_key(plan))

    cell, plain = RecoveryCell("nfl", "guarded"), RecoveryCell("nfl", "fedavg")
    earlier, present = with_reference(cell, False), with_reference(cell, True)
    assert GRID.current([earlier, present], "smoke") == [present]
    assert with_reference(plain, False) == with_reference(plain, True)
    assert GRID.current([with_reference(plain, False)], "smoke") == [with_reference(plain, True)]
    results = tmp_path / "results"
    outcomes.keep(results, "smoke", [earlier, with_reference(plain, True)])
    console = Console(record=True, width=200, file=io.StringIO())
    monkeypatch.setattr(boards, "play", lambda *_: Played(0, 0))
    asked = GridRequest(GRID, "smoke", 1, 1, tmp_path / "runs", results, console=console)
    assert reproduce_grid(asked) == 0
    assert "1 stored runs are of earlier plans; they are left out" in console.export_text()
    text = (results / "tables" / "smoke-recovery.md").read_text()
    assert "\n| `fedavg` |" in text
    assert "\n| `guarded` |" not in text


def test_the_kept_page_is_written_from_the_kept_lines(tmp_path: Path) -> None:
    results = Path(__file__).parents[3] / "results"
    kept = GRID.current(outcomes.load(results, "cpu"), "cpu")
    complete = len({one.cell for one in kept}) == len(cells("cpu"))
    (tmp_path / "docs").mkdir()
    written = page.write(kept, "cpu", tmp_path / "results")
    assert page.path_of(results, "cpu", complete).read_text() == written.read_text()


def test_a_method_that_beats_ours_is_named_with_its_interval() -> None:
    """Differences of 10.0 and 10.4 points; 12.706 * 0.2 is 2.5. On one seed there is no interval."""
    cell = RecoveryCell("normal", "ditto")
    ours = [made(RecoveryCell("normal", "guarded"), seed=seed) for seed in (0, 1)]
    ditto = [made(cell, (0.2, 0.0, top), seed) for seed, top in enumerate((0.4, 0.412))]
    (said,) = page.conclusions([*ours, *ditto])
    assert said.endswith("above guarded by the interval: ditto +10.2 [+7.7, +12.7].")
    (said,) = page.conclusions([*ours, ditto[0]])
    assert said.endswith("interval: none; above it on one seed, without an interval: ditto +10.0.")
    (said,) = page.conclusions([*ours, *(made(cell, (0.2, -0.1, 0.2), seed) for seed in (0, 1))])
    assert said.endswith("above guarded by the interval: none.")


def board(local: dict[str, float], clearly: dict[str, int], seeds: int = 3) -> list[RecoveryOutcome]:
    """Every cell; in NFL the gains of `local`, and with odd seeds a hundredth more. Clearly worse off in one world."""
    return [
        made(cell, tuple([local.get(cell.method, 0.1) * (cell.world == "nfl") + 0.01 * (seed % 2)] * 3), seed,
             clearly=clearly.get(cell.method, 1) * (cell.world == "dirichlet"))
        for cell in cells("smoke") for seed in range(seeds)
    ]  # fmt: skip


def test_the_rule_of_the_default() -> None:
    """The best is passed over if it leaves clients clearly worse off anywhere."""
    kept = board({"ditto": 0.4, "guarded": 0.3, "fedrep": 0.2}, {"guarded": 0, "fedrep": 0})
    assert page.default(kept, "smoke").endswith(
        "(3 seeds of every method): 0 clients clearly worse off with fedrep, guarded; the highest local accuracy in "
        "NFL of these has guarded, 80.3; its difference to LINDT is +20.0 [+20.0, +20.0]: the default is guarded."
    )
    assert "has ditto" in page.default(board({"ditto": 0.4, "guarded": 0.3}, {"ditto": 0, "guarded": 0}), "smoke")
    tied = page.default(board({"guarded": 0.1}, {"guarded": 0}), "smoke")
    assert tied.endswith("its difference to LINDT, +0.0 [+0.0, +0.0], is not above 0 by an interval: guarded stays.")
    assert "guarded stays" in page.default(board({"guarded": 0.3}, {"guarded": 0}, seeds=1), "smoke")
    without = [one for one in kept if one.cell != ("normal", "fedavg")]
    assert page.default(without, "smoke") == (
        "Not decided yet: 59 of 60 cells are played, and no seed has all of them."
    )


def test_the_docs_wait_for_every_cell(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    every = [made(cell, scale="cpu") for cell in cells("cpu")]
    assert page.write(every[1:], "cpu", tmp_path / "results").parent.name == "tables"
    assert page.write(every, "cpu", tmp_path / "results") == tmp_path / "docs" / "recovery-scoreboard.md"


def test_what_is_kept_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []

    def play_all(jobs: Sequence[Job], at_once: int, together: int, until: float | None) -> Iterator[JobEvent]:
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
    # Every gain is over the same private models, whether a method holds out a V_i or not; stored with four digits.
    for world in WORLDS:
        alone = {one.method: [a - b for a, b in zip(one.locals, one.betas, strict=True)]
                 for (where, _), one in kept.items() if where == world}  # fmt: skip
        for method, found in alone.items():
            assert found == pytest.approx(alone["fedavg"], abs=2e-4), (world, method)
    text = (tmp_path / "results" / "tables" / "smoke-recovery.md").read_text()
    assert all(f"## {page.title(world)}\n" in text for world in WORLDS)
    assert "By these runs (1 seed of every method)" in text
