"""`lindt reproduce attacks`: the cells and their plans, the page by hand, and the whole of it at the smallest size."""

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
from lindt.environment.threats import Threat
from lindt.errors import UserError
from lindt.plan.plan import attackers_of
from lindt.plan.problem import problem_for
from lindt.protocols import Aggregator
from lindt.registry import kind_of, kinds
from lindt.server.checks import check
from lindt_experiments.attacks import outcomes, page
from lindt_experiments.attacks.board import GRID
from lindt_experiments.attacks.grid import ATTACKS, METHOD_NAMES, GridCell, cells, plan_for
from lindt_experiments.attacks.outcomes import AttackOutcome
from lindt_experiments.boards import GridRequest, reproduce_grid
from lindt_experiments.plans.keys import content_key, private_group
from lindt_experiments.queue import progress
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job
from lindt_experiments.queue.queue import JobEvent


def made(
    cell: GridCell, beta: float, seed: int = 0, success: float | None = None, scale: str = "smoke"
) -> AttackOutcome:
    return AttackOutcome(
        *cell,
        scale=scale,
        seed=seed,
        plan=content_key(plan_for(cell, scale, seed)),
        rounds=3,
        beta=beta,
        clearly_harmed=2,
        counted_clients=6,
        attack_central=success,
        attack_local=success,
        recovering_from=None,
        command="",
        commit="",
        date="2026-11-18",
        seconds=1.0,
    )


def test_every_attack_on_digits_meets_every_robust_aggregator_and_three_recoveries() -> None:
    grid = cells("cpu")
    assert len(grid) == len(set(grid)) == 14 * 7 * 3
    plans = [plan_for(cell, "cpu", 0) for cell in grid]
    assert len({content_key(plan) for plan in plans}) == len(grid)
    threats = {kind_of(plan.environment.threat) for plan in plans}
    assert threats == {name for name in kinds(Threat) if name not in ("until", "next_character")}
    aggregators = {kind_of(plan.method.aggregator) for plan in plans}
    assert aggregators == set(kinds(Aggregator)) - {"weighted_mean"}
    assert {kind_of(plan.method.recovery) for plan in plans} == {"never", "on_evidence", "always"}
    assert all(plan.detection.reports for plan in plans)  # every client holds out a V_i, also where nothing recovers
    given_back = {cell.method for cell, plan in zip(grid, plans, strict=True) if plan.alone.with_validation}
    assert given_back == {"on_evidence"}  # as page.REFERENCE says
    assert len({private_group(plan) for plan in plans}) == 1  # private models are trained once a seed


def test_three_of_twelve_attack_and_the_aggregators_know_how_many() -> None:
    plan = plan_for(GridCell("min_max", "multi_krum", "fedavg"), "cpu", 0)
    assert len(attackers_of(plan, 20)) == 5
    active = plan.environment.participation.active(0, range(20), attackers_of(plan, 20), 20)
    assert (len(active), len(attackers_of(plan, 20) & set(active))) == (12, 3)
    assert plan.method.aggregator.share == 0.25  # type: ignore[attr-defined]


@pytest.mark.parametrize("attack", ATTACKS)
def test_each_plan_fits_its_data(attack: str) -> None:
    plan = plan_for(GridCell(attack, "median", "lindt"), "cpu", 1)
    check(plan, problem_for(plan))


def test_a_cell_is_the_mean_over_seeds_and_the_worst_stands_first() -> None:
    bad, good = GridCell("inner_product", "mean", "lindt"), GridCell("sybils", "mean", "lindt")
    found = page.means([made(good, 0.1, success=0.5), made(bad, -0.4), made(bad, -0.2, seed=1)])
    assert [one.cell for one in found] == [bad, good]
    assert (found[0].beta, found[0].seeds, found[0].words) == (pytest.approx(-0.3), 2, "-30.0, 2/6")
    assert found[0].spread == pytest.approx(0.1414, abs=1e-4)
    assert found[1].words == "+10.0, 2/6 (50%)"


def test_an_unfinished_grid_gives_no_advice_and_stays_out_of_the_docs(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    every = [made(cell, -0.01 * number, scale="cpu") for number, cell in enumerate(cells("cpu"))]
    part = page.write(every[:-1], "cpu", tmp_path / "results")
    assert part == tmp_path / "results" / "tables" / "cpu-attacks.md"
    assert "**293 of 294 cells are played.** The best defence is not known before the others are." in part.read_text()
    assert "The worst attack on each aggregator" not in part.read_text()
    whole = page.write(every, "cpu", tmp_path / "results")
    assert whole == tmp_path / "docs" / "attacks.md"
    text = whole.read_text()
    assert "All 294 cells are played, each with 1 seed or more." in text
    assert "| `lindt` | -275.0 (`min_max`)" in text  # the last cell of the mean: number 275 of 0 to 293
    others = part.read_text()  # the tables that are not on the page
    assert others.index("| `min_max` | `krum` | `lindt` | -293.0 |") < others.index(
        "| `min_max` | `krum` | `on_evidence` |"
    )
    both = text + others
    assert all(both.count(f"## {sheet.title}\n") == 1 for sheet in page.sheets(page.means(every), len(every)))


def test_the_advice_is_the_aggregator_that_leaves_the_fewest_clients_worse_off(tmp_path: Path) -> None:
    """Of the default recovery: multi_krum harms one client under sybils, the median none but has a lower beta."""
    (tmp_path / "docs").mkdir()
    every = [made(cell, -0.5 if cell.aggregator == "median" else -0.1, scale="cpu") for cell in cells("cpu")]
    spared = {("median", None): 0, ("multi_krum", None): 0, ("multi_krum", "sybils"): 1}
    kept = []
    for one in every:
        harmed = spared.get((one.aggregator, one.attack), spared.get((one.aggregator, None), 2))
        kept.append(replace(one, clearly_harmed=harmed if one.method == "on_evidence" else 0))
    text = page.write(kept, "cpu", tmp_path / "results").read_text()
    assert "**Advice: `median` with the default recovery.** Under its worst attack 0 of 6 benign clients" in text
    assert "| `multi_krum` | -10.0 |" in text
    assert "| 1 (`sybils`) | 1 of 84 (1.2%) |" in text  # 14 attacks with 6 clients each
    assert "together 141 of 588 (24.0%) are clearly worse off" in text  # 1, and 2 in 14 cells of five aggregators


def test_what_is_kept_is_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[str] = []

    def play_all(jobs: Sequence[Job], at_once: int, together: int, until: float | None) -> Iterator[JobEvent]:
        for job in jobs:
            played.append(job.name)
            yield JobEvent("ended", job)

    def outcome_of(cell: GridCell, job: Job, scale: str, origin: Origin) -> AttackOutcome:
        return made(cell, -0.1, job.plan.seed)

    monkeypatch.setattr(progress, "play_all", play_all)
    grid = replace(GRID, outcome_of=outcome_of)
    places = (tmp_path / "runs", tmp_path / "results")
    some = GridRequest(grid, "smoke", 1, 1, *places, methods=("lindt",), worlds=("sybils",), as_json=True)
    assert reproduce_grid(some) == 0
    assert len(played) == 2
    assert reproduce_grid(GridRequest(grid, "smoke", 2, 1, *places, as_json=True)) == 0
    assert len(played) == len(set(played)) == 36
    assert reproduce_grid(GridRequest(grid, "smoke", 2, 1, *places, as_json=True)) == 0
    assert len(played) == 36
    kept = outcomes.load(tmp_path / "results", "smoke")
    assert len(kept) == 36
    assert GRID.current(kept, "smoke") == kept
    path = outcomes.path_of(tmp_path / "results", "smoke")
    path.write_text(path.read_text().replace(kept[0].plan, "another", 1))
    assert len(GRID.current(outcomes.load(tmp_path / "results", "smoke"), "smoke")) == 35
    path.write_text('{"attack": "sybils"}\n')
    with pytest.raises(UserError, match="line 1: not the fields of a run under attack"):
        outcomes.load(tmp_path / "results", "smoke")


def test_the_command_says_how_long_it_takes(tmp_path: Path) -> None:
    places = ["--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results")]
    command = ["reproduce", "attacks", "--scale", "cpu", "--seeds", "3", "--jobs", "2", "--dry-run", *places]
    said = CliRunner().invoke(app, command).output
    assert "882 of 882 runs are left to play, about 51 minutes with --jobs 2" in said
    assert "attacks" in CliRunner().invoke(app, ["reproduce", "--list"]).output
    for wrong in (["--task", "cifar"], ["--replay"], ["--world", "flip"], ["--only", "apfl"], ["--scale", "paper"]):
        with pytest.raises(UserError, match=wrong[0]):
            CliRunner().invoke(app, ["reproduce", "attacks", *wrong, *places], catch_exceptions=False)


@pytest.mark.slow
def test_the_grid_at_scale_smoke(tmp_path: Path) -> None:
    """18 real federations and the page; then the same again without a round played."""
    places = ("--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"))
    command = [sys.executable, "-m", "lindt.cli", "reproduce", "attacks", "--scale", "smoke", "--json", *places]
    env = os.environ | {"LINDT_CACHE": str(tmp_path / "cache")}
    for played in (18, 0):
        done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout.splitlines()[-1]) == {"event": "end", "played": played, "failed": 0}
    kept = {one.cell: one for one in outcomes.load(tmp_path / "results", "smoke")}
    assert set(kept) == set(cells("smoke"))
    betas = {method: kept["inner_product", "mean", method].beta for method in METHOD_NAMES}
    harmless = kept["no_threat", "mean", "fedavg"].beta
    assert betas["fedavg"] is not None
    assert harmless is not None
    assert betas["fedavg"] < harmless
    assert kept["sybils", "mean", "lindt"].attack_local is not None
    assert kept["no_threat", "mean", "lindt"].recovering_from == 1
    assert "The worst 18 cells" in (tmp_path / "results" / "tables" / "smoke-attacks.md").read_text()
