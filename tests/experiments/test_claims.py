"""The paper's claims: every one can hold and can fail, and none is called on too little evidence."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from made import against_the_figures, as_in_the_figures, made, metric, papers_own, seeds, turned
from rich.console import Console
from typer.testing import CliRunner

from lindt.cli.main import app
from lindt.errors import UserError
from lindt_experiments import reproduce
from lindt_experiments.claims.claims import (
    CLAIMS,
    Row,
    markdown,
    open_claims,
    overview,
    render,
    report,
    summary,
)
from lindt_experiments.claims.judging import MOST_SEEDS, Interval, interval, judge, seeds_to_decide
from lindt_experiments.results.outcomes import SCALES, Outcome, keep, load

TABLES = {claim.id for claim in CLAIMS if claim.made_by.startswith("table")}
FIGURES = {claim.id for claim in CLAIMS} - TABLES


def rows(outcomes: list[Outcome], scale: str | None = None) -> dict[str, Row]:
    return {row.id: row for row in report(outcomes, scale)}


def verdicts(outcomes: list[Outcome]) -> dict[str, str]:
    return {id: row.verdict for id, row in rows(outcomes).items()}


def test_the_paper_s_own_tables_bear_out_its_claims_but_one() -> None:
    found = verdicts(papers_own())
    # It says "most previous methods": FB has 53.89 on SHAKE in normal FL where FedAvg has 53.42.
    assert {id for id in TABLES if found[id] != "holds"} == {"shake-normal-fb"}
    assert found["shake-normal-fb"] == "fails"


def test_turned_round_they_refute_them() -> None:
    found = verdicts(turned(papers_own()))
    still = {"shake-normal-fb", "cifar-stable-active-ratio", "shake-stable-active-ratio"}  # a range has no direction
    assert {id for id in TABLES if found[id] != "fails"} == still
    assert {found[id] for id in still} == {"holds"}


def test_a_gain_that_depends_on_the_active_ratio_is_not_stable() -> None:
    worlds = ("active-0.9", "active-0.7", "active-0.5", "active-0.3", "nfl")
    outcomes = [made("cifar", world, "lindt", beta=3.0 * k) for k, world in enumerate(worlds)]  # a range of 12
    assert rows(outcomes)["cifar-stable-active-ratio"].verdict == "fails"
    assert "beta's range 12.0: -10.0" in rows(outcomes)["cifar-stable-active-ratio"].numbers


def test_runs_as_in_the_figures_bear_out_what_is_said_of_them() -> None:
    found = verdicts(as_in_the_figures())
    assert {id: found[id] for id in FIGURES} == dict.fromkeys(FIGURES, "holds")


def test_runs_that_behave_otherwise_refute_it() -> None:
    found = verdicts(against_the_figures())
    assert {id: found[id] for id in FIGURES} == dict.fromkeys(FIGURES, "fails")


def test_without_runs_nothing_is_claimed() -> None:
    found = report([])
    assert {row.verdict for row in found} == {"not run"}
    assert len(found) == len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    assert summary(found) == f"0 holds, 0 fails, 0 undecided, {len(CLAIMS)} not run"


def test_the_interval_is_student_s() -> None:
    # 1, 2, 3: mean 2, standard deviation 1, t(0.975, 2) = 4.3027, half a width of 4.3027 / sqrt(3) = 2.4841.
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    assert str(found) == "+2.0 [-0.5, +4.5]"
    assert str(Interval(2.0, 0.0, 0.0, 1)) == "+2.0"


@pytest.mark.parametrize(
    ("differences", "at_least", "verdict"),
    [
        ([], False, "not run"),
        ([2.0], False, "holds"),  # one seed may call 2 points
        ([1.9], False, "undecided"),  # but no less
        ([-1.9], False, "undecided"),
        ([-2.0], False, "fails"),
        ([1.5, 1.5], False, "undecided"),  # under 2 points: 3 seeds, whatever the interval
        ([1.5, 1.5, 1.6], False, "holds"),
        ([1.0, 2.0, 3.0], False, "undecided"),  # [-0.5, +4.5]
        ([10.0, 20.0], False, "undecided"),  # two seeds: 15 +- 63.5
        ([10.0, 10.1], False, "holds"),
        ([-1.0, -1.1, -0.9], False, "fails"),
        ([0.0, 0.0, 0.0], False, "fails"),  # more than nothing was claimed
        ([0.0, 0.0, 0.0], True, "holds"),
        ([0.5, -0.5, 0.4], True, "undecided"),
        ([-1.0, -1.1, -0.9], True, "fails"),
    ],
)
def test_what_may_be_called(differences: list[float], at_least: bool, verdict: str) -> None:
    assert judge(differences, at_least=at_least) == verdict


@pytest.mark.parametrize(
    ("differences", "spread", "needed"),
    [
        ([1.0, 2.0, 3.0], None, 4),  # mean 2, deviation 1: 4.303 / sqrt 3 = 2.48, 3.182 / sqrt 4 = 1.59
        ([1.0], 0.5, 4),  # 4.303 * 0.5 / sqrt 3 = 1.24, 3.182 * 0.5 / sqrt 4 = 0.80
        ([1.0], 0.1, 3),  # a gap under 2 points needs 3 seeds, whatever its deviation
        ([-1.0, -3.0], 0.1, 2),  # as large, and 12.706 * 0.1 / sqrt 2 = 0.9: the usual deviation, not its own of two
        ([0.1, -0.1, 0.05], None, MOST_SEEDS + 1),
        ([1.0], None, None),
    ],
)
def test_how_many_seeds_would_decide(differences: list[float], spread: float | None, needed: int | None) -> None:
    assert seeds_to_decide(differences, spread) == needed


def test_an_undecided_claim_says_how_many_seeds_would_decide_it() -> None:
    fedavg = metric("cifar", "nfl", "fedavg", "beta", [-9.0, -8.0, -10.0])
    apfl, lindt = (
        metric("cifar", "nfl", "apfl", "beta", [1.9]),
        metric("cifar", "nfl", "lindt", "beta", [1.0, 4.0, -2.0]),
    )
    rows = {row.id: row for row in report([*fedavg, *apfl, *lindt])}
    # 1 +- 3: t * 3 / sqrt n is below 1 from 38 seeds on.
    assert (rows["cifar-mended-lindt"].verdict, rows["cifar-mended-lindt"].needed) == ("undecided", "more than 30")
    # The usual deviation is that of LINDT's beta, of five claims: t * 3 / sqrt n is below 1.9 from 13 on.
    assert (rows["cifar-mended-apfl"].verdict, rows["cifar-mended-apfl"].needed) == ("undecided", "13")
    assert rows["cifar-nfl-fedavg"].needed == ""
    assert "0; 13 would decide |" in markdown([*fedavg, *apfl, *lindt], "cpu")
    found = open_claims([*fedavg, *apfl, *lindt], "cpu")
    assert ((("cifar", "nfl", "apfl"),), 13) in found
    assert ((("cifar", "nfl", "lindt"),), MOST_SEEDS + 1) in found
    assert not open_claims(fedavg, "cpu")


def test_differences_are_paired_by_seed() -> None:
    # Seed by seed LINDT is 3 points ahead, though the seeds themselves lie 20 apart.
    ours = metric("cifar", "nfl", "lindt", "local", [63.0, 73.1, 82.9])
    theirs = metric("cifar", "nfl", "apfl", "local", [60.0, 70.0, 80.0])
    row = rows([*ours, *theirs])["cifar-lindt-leads-apfl"]
    assert row.verdict == "holds"
    assert row.numbers == "LINDT 73.0, APFL 70.0: +3.0 [+2.8, +3.2]"
    assert row.seeds == (0, 1, 2)


def test_only_seeds_that_both_have_are_compared() -> None:
    ours = metric("cifar", "nfl", "lindt", "local", [63.0, 73.0])
    row = rows([*ours, made("cifar", "nfl", "apfl", 1, local=70.0)])["cifar-lindt-leads-apfl"]
    assert (row.verdict, row.seeds, row.numbers) == ("holds", (1,), "LINDT 73.0, APFL 70.0: +3.0")


def test_scales_are_never_mixed() -> None:
    outcomes = [made(method="lindt", local=80.0), made(method="apfl", local=70.0, scale="paper")]
    found = report(outcomes)
    assert {row.scale for row in found} == {"cpu", "paper"}
    assert {row.verdict for row in found if row.id == "cifar-lindt-leads-apfl"} == {"not run"}


def test_what_is_missing_is_named_with_the_command_that_runs_it() -> None:
    row = rows([made(method="lindt", local=80.0)])["cifar-lindt-leads-apfl"]
    assert row.numbers == "not run: cifar nfl apfl"
    assert row.command == "lindt reproduce table3 --scale cpu"


def test_a_claim_about_all_holds_only_if_all_were_run_and_fails_by_one() -> None:
    most = [made("cifar", world, "lindt", beta=7.0) for world in ("nfl", "iid", "classes-10", "classes-5")]
    assert rows(most)["cifar-gain-allocation"].verdict == "not run"
    assert "IID: beta +7.0 (holds)" in rows(most)["cifar-gain-allocation"].numbers
    unsure, lost = (made("cifar", "classes-2", "lindt", beta=beta) for beta in (0.5, -3.0))
    assert rows([*most, unsure])["cifar-gain-allocation"].verdict == "undecided"
    assert rows([*most, lost])["cifar-gain-allocation"].verdict == "fails"
    assert rows([*most[:2], lost])["cifar-gain-allocation"].verdict == "fails"
    assert rows([*most[:2], unsure])["cifar-gain-allocation"].verdict == "not run"


def test_shakespeare_without_attackers_is_its_normal_fl_under_either_name() -> None:
    rest = [made("shake", world, "lindt", beta=5.0) for world in ("nfl", "attack-0.33")]
    for name in ("normal", "attack-0"):
        found = rows([*rest, made("shake", name, "lindt", beta=6.0)])
        assert found["shake-gain-share-of-attackers"].verdict == "holds"


def test_delta_is_compared_only_at_the_same_size_and_noise() -> None:
    nfl = made(world="nfl-long", delta=[0.2] * 100)
    for other, why in (
        (made(world="normal-long", delta=[0.01] * 100, noise=2.0), "noise of norm 1.00 and 2.00"),
        (made(world="normal-long", delta=[0.01] * 50, rounds=50), "rounds 100 and 50"),
        (made(world="normal-long", delta=[0.01] * 100, epsilon=0.2), "epsilon 0.1 and 0.2"),
    ):
        for id in ("cifar-delta", "cifar-detection"):
            row = rows([nfl, other])[id]
            assert row.verdict == "undecided"
            assert row.numbers == f"not comparable: {why}"


def test_detection_needs_a_control_that_stays_silent() -> None:
    nfl = made(world="nfl-long", delta=[0.2] * 100)
    assert rows([nfl])["cifar-detection"].verdict == "not run"
    silent, loud = (made(world="normal-long", delta=[value] * 100) for value in (0.05, 0.15))
    row = rows([nfl, silent])["cifar-detection"]
    assert (row.verdict, row.numbers) == ("holds", "NFL fires in round 51 of 100, control stays silent")
    assert rows([nfl, loud])["cifar-detection"].verdict == "fails"


def test_seeds_that_disagree_about_delta_leave_it_undecided() -> None:
    normal = seeds("cifar", "normal-long", "fedavg", {"delta": [0.01] * 100}, {"delta": [0.01] * 100})
    nfl = seeds("cifar", "nfl-long", "fedavg", {"delta": [0.2] * 100}, {"delta": [0.05] * 100})
    row = rows([*normal, *nfl])["cifar-detection"]
    assert row.verdict == "undecided"
    assert row.numbers.startswith("seed 0: NFL fires in round 51 of 100, control stays silent\nseed 1: NFL stays")


def test_rounds_without_an_update_do_not_count() -> None:
    gap = [None if r % 2 else 0.2 for r in range(100)]  # 50 rounds above, and r' is 50: not more than r'
    normal = made(world="normal-long", delta=[0.01] * 100)
    assert "NFL stays silent" in rows([made(world="nfl-long", delta=gap), normal])["cifar-detection"].numbers


def test_a_run_that_never_stopped_shows_no_fall() -> None:
    row = rows([made(world="nfl-long", method="runtime-once", local=80.0, beta=6.0, detected_at=(51,))])[
        "cifar-once-falls-back"
    ]
    assert (row.verdict, row.numbers) == ("undecided", "everyone once at the stop: no seed has it")


def test_the_page_says_what_made_it_and_stays_one_table() -> None:
    text = markdown(as_in_the_figures(), "cpu")
    assert text.startswith("# The paper's claims at scale cpu\n")
    assert "commits 0123456789ab" in text
    assert "of 2021-05-06 to 2021-05-06" in text
    assert "Reduced: everything." in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == len(CLAIMS) + 2
    assert {line.count("|") for line in table} == {6}
    assert "`lindt reproduce table4 --scale cpu`" in text


def test_the_terminal_shows_verdicts_and_lists_what_was_not_run() -> None:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(render(as_in_the_figures()))
    said = console.export_text()
    assert "The paper's claims at scale cpu: " in said
    assert "Delta stays above epsilon in NFL" in said
    assert "not run: cifar-gain-allocation, cifar-falls-skew, cifar-falls-skew-stepwise" in said
    assert "lindt reproduce table4 --scale cpu" in said


def test_the_command_keeps_a_page_of_what_today_s_plans_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome in as_in_the_figures():
        keep(tmp_path, outcome)
    with pytest.raises(
        UserError, match=r"--results .*none: there is no such folder; name the folder of the kept results"
    ):
        CliRunner().invoke(app, ["reproduce", "--claims", "--results", str(tmp_path / "none")], catch_exceptions=False)
    old = CliRunner().invoke(app, ["reproduce", "--claims", "--results", str(tmp_path)], catch_exceptions=False)
    assert f"0 holds, 0 fails, 0 undecided, {len(CLAIMS)} not run" in old.output  # made by no plan of today
    assert not (tmp_path / "claims-cpu.md").exists()
    monkeypatch.setattr(reproduce, "is_current", lambda outcome: True)
    said = CliRunner().invoke(app, ["reproduce", "--claims", "--results", str(tmp_path)], catch_exceptions=False)
    assert "holds" in said.output
    assert (tmp_path / "claims-cpu.md").read_text() == markdown(load(tmp_path), "cpu")
    head = said.output.splitlines()
    assert head[0] == f"The paper's {len(CLAIMS)} claims, by the scale of the runs:"
    assert head[1].split() == ["scale", "holds", "fails", "undecided", "not", "run"]
    rows = report(load(tmp_path), "cpu")
    counts = [sum(row.verdict == verdict for row in rows) for verdict in ("holds", "fails", "undecided", "not run")]
    assert head[2].split() == ["cpu", *map(str, counts)]
    assert head[3].startswith("fails at cpu: ")
    told = CliRunner().invoke(app, ["reproduce", "--claims", "--json", "--results", str(tmp_path)])
    rows = [json.loads(line) for line in told.output.splitlines()]
    assert {row["id"] for row in rows} == {claim.id for claim in CLAIMS}
    assert rows[0]["event"] == "claim"


def test_claims_leave_smoke_out_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome in as_in_the_figures():
        keep(tmp_path, replace(outcome, scale="smoke"))
    monkeypatch.setattr(reproduce, "is_current", lambda outcome: True)

    def judged(*words: str) -> set[tuple[str, bool]]:
        command = ["reproduce", "--claims", "--json", "--results", str(tmp_path), *words]
        lines = CliRunner().invoke(app, command, catch_exceptions=False).output.splitlines()
        return {(row["scale"], row["verdict"] != "not run") for row in map(json.loads, lines)}

    assert judged() == {("cpu", False)}
    assert not (tmp_path / "claims-smoke.md").exists()
    assert ("smoke", True) in judged("--scale", "smoke")
    with pytest.raises(UserError, match="--scale huge: choose among"):
        judged("--scale", "huge")


def test_the_overview_is_at_most_ten_lines_of_80_columns() -> None:
    rows = [row for scale in SCALES for row in report(as_in_the_figures(), scale)]
    failing = [replace(row, verdict="fails") for row in rows]
    for shown in (rows, failing, rows[: len(CLAIMS)]):
        lines = overview(shown)
        assert len(lines) <= 10
        assert max(map(len, lines)) < 80


def test_torch_is_not_imported() -> None:
    code = "import sys, lindt_experiments.claims.claims; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
