"""The paper's tables beside ours: what is printed of a few outcomes made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made import made

from lindt_experiments.plans.catalog import EXHIBITS
from lindt_experiments.plans.keys import content_key
from lindt_experiments.plans.scales import plan_for, reduced
from lindt_experiments.queue.gather import Origin
from lindt_experiments.results.outcomes import Outcome
from lindt_experiments.tables.pages import is_current, page_of, write_page
from lindt_experiments.tables.sheets import Sheet, as_markdown, ours, papers
from lindt_experiments.tables.tables import betas


def current(method: str, seed: int = 0, task: str = "cifar", world: str = "nfl", **scores: float) -> Outcome:
    """An outcome of today's plan."""
    key = content_key(plan_for(task, world, method, "cpu", seed))
    return replace(made(task, world, method, seed, **scores), plan=key)


THREE = [current("fedavg", seed, central=50 + seed, local=51 + seed, beta=-20 + seed) for seed in range(3)]


def test_numbers_as_people_read_them() -> None:
    assert ours([]) == "-"
    assert ours([0.5]) == "50.0"
    assert ours([0.5, None]) == "50.0"
    assert ours([0.50, 0.51, 0.52]) == "51.0 ±1.0"
    assert ours([-0.125, 0.125], sign=True) == "+0.0 ±17.7"
    assert (papers(None), papers(7.59, sign=True), papers(-17.83, sign=True)) == ("-", "+7.6", "-17.8")


def test_table_3_has_a_sheet_for_each_task_and_environment() -> None:
    page = page_of(EXHIBITS["table3"], THREE, "cpu", seeds=3)
    assert [sheet.title for sheet in page.sheets] == [
        "Table 3, CIFAR / NFL",
        "Table 3, SHAKE / NFL",
        "Table 3, CIFAR / normal FL",
        "Table 3, SHAKE / normal FL",
    ]
    rows = page.sheets[0].rows
    assert rows[0] == ("FedAvg", "3", "51.0 ±1.0", "55.6", "52.0 ±1.0", "56.2", "-19.0 ±1.0", "-17.8")
    assert rows[3] == ("FB", "0", "-", "-", "-", "81.2", "-", "+7.2")
    # Rows of ours, of which the paper prints nothing.
    titles = ("LINDT, attached before activations (ours)", "LINDT, guarded (ours)")
    assert rows[-2:] == tuple((title, "0", *["-"] * 6) for title in titles)
    assert "87 of 90 runs are missing." in page.remarks
    halves = page_of(EXHIBITS["table3"], THREE, "cpu", seeds=3, task="shake")
    assert len(halves.sheets) == 2
    assert "39 of 39 runs are missing." in halves.remarks


def test_a_row_says_what_is_varied() -> None:
    page = page_of(EXHIBITS["table7"], THREE, "cpu", seeds=1)
    assert [row[0] for row in page.sheets[0].rows[:3]] == [
        "sigma 0.001*, FedAvg",
        "sigma 0.001*, LINDT",
        "sigma 0.003, FedAvg",
    ]
    assert page.sheets[0].rows[0][1] == "3"  # all that is kept


def test_what_another_plan_has_made_is_left_out_and_said() -> None:
    stale = made("cifar", "nfl", "lindt", 0, local=90.0)
    assert not is_current(stale)
    assert not is_current(replace(THREE[0], world="a world that is no more"))
    page = page_of(EXHIBITS["table7"], [THREE[0], stale], "cpu", seeds=1)
    assert page.sheets[0].rows[1][1:3] == ("0", "-")
    assert "9 of 10 runs are missing." in page.remarks
    assert "1 that were kept are of other plans than today's, and left out." in page.remarks


def test_beta_over_private_models_of_other_lengths() -> None:
    alone = [current(f"alone-x{factor}", private=private) for factor, private in (("0.5", 40), ("1", 60), ("2", 70))]
    assert betas(THREE, alone, "alone-x2", "cpu") == pytest.approx([-0.19])  # seed 0 alone has both
    page = page_of(EXHIBITS["private"], [*THREE, *alone], "cpu", seeds=1)
    assert page.sheets[0].rows[0] == ("CIFAR, Mixed*", "1", "40.0", "60.0", "70.0", "74.0")
    assert page.sheets[1].rows[0] == ("CIFAR, Mixed*, FedAvg", "3", "+11.0", "-9.0", "-19.0", "-17.8")
    said = page_of(EXHIBITS["table3"], [*THREE, *alone], "cpu", seeds=1).sheets[0].remarks
    assert said == ("beta of FedAvg: +11.0 against private models of half the epochs, -19.0 of twice.",)


def test_the_ablation_shows_points_in_the_order_of_the_layers() -> None:
    notes = {"score/drop1": 0.75, "score/relu1": 1.0, "gradient/head": 0.5, "gradient/relu1": 0.001}
    lindt = current("lindt", local=80.0, notes=notes)
    page = page_of(EXHIBITS["ablation"], [lindt], "cpu", seeds=1)
    assert page.sheets[0].rows[1] == ("LINDT", "1", "-", "80.0", "-")
    assert page.sheets[1].rows[1] == ("LINDT", "1.00 0.75", "0.001 0.5")
    assert page.sheets[0].rows[2][0] == "after, paper, random"


def test_an_open_choice_is_compared_with_the_default_seed_by_seed() -> None:
    pool = [current("fedavg", seed, world="pool-1", local=60, beta=-10) for seed in (0, 3)]  # no default of seed 3
    rows = page_of(EXHIBITS["choices"], [*THREE, *pool], "cpu", seeds=1).sheets[0].rows
    assert rows[0] == ("the default", "3", "52.0 ±1.0", "-", "71.0 ±0.0", "-", "-19.0 ±1.0")
    # Local 60 - 51 and private 70 - 71, of seed 0.
    assert rows[1] == ("1 backdoor sample (3)", "2", "60.0 ±0.0", "+9.0", "70.0 ±0.0", "-1.0", "-10.0 ±0.0")
    assert rows[2][1:] == ("0", *["-"] * 5)


def test_a_page_is_kept_with_what_made_it(tmp_path: Path) -> None:
    (one, *others), late = THREE, "lindt reproduce table7 --only fedavg"
    page = page_of(EXHIBITS["table7"], [one, *(replace(other, command=late) for other in others)], "cpu")
    path = write_page(page, EXHIBITS["table7"], "cpu", tmp_path, Origin("lindt reproduce table7", "abc", "2026-01-01"))
    assert path == tmp_path / "tables" / "cpu-table7.md"
    text = path.read_text()
    # The runs' own commands, not the last one's, which may have played none of them.
    assert "1 run made by `lindt reproduce made` at commit 0123456789ab, 2021-05-06." in text
    assert "2 runs made by `lindt reproduce table7 --only fedavg` at commit 0123456789ab, 2021-05-06." in text
    assert "27 of 30 runs are missing." in text  # over the three seeds that there are
    assert f"CIFAR at scale cpu: {reduced('cifar', 'cpu')}." in text
    assert "| sigma 0.001*, FedAvg | 3 | 51.0 ±1.0 | 55.6 |" in text


def test_a_page_without_runs_names_the_command(tmp_path: Path) -> None:
    page = page_of(EXHIBITS["table8"], [], "smoke")
    origin = Origin("lindt reproduce table8", "abc", "2026-01-01")
    text = write_page(page, EXHIBITS["table8"], "smoke", tmp_path, origin).read_text()
    assert "Made by `lindt reproduce table8` at commit abc, 2026-01-01." in text


def test_markdown_by_hand() -> None:
    sheet = Sheet("T", ("", "a"), (("x|y", "1"),), ("said",))
    assert (
        as_markdown([sheet], "H", ["made"]) == "# H\n\nmade\n\n## T\n\n|  | a |\n| --- | --: |\n| x/y | 1 |\n\nsaid\n"
    )


def test_client_sizes_need_no_download_at_scale_smoke() -> None:
    page = page_of(EXHIBITS["table8"], [], "smoke", seeds=1)
    (sheet,) = page.sheets
    assert sheet.rows[0] == ("IID", "600 ±0", "600", "0 ±0", "0")
    assert [row[4] for row in sheet.rows] == ["0", "572", "811", "855", "732"]
