"""Figures over runs whose answer can be told by hand, and the page made of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from experiments.detectors.recorded import outcome

from lindt.errors import UserError
from lindt_experiments.detectors import null_levels, outcomes, page
from lindt_experiments.detectors.judgement import (
    best_cosine,
    best_epsilon,
    goals,
    judge,
    part,
    reader_error,
    with_server_statistics,
    within,
)
from lindt_experiments.detectors.readings import low_cosine, low_recent_cosine

RUNS = [
    outcome("a", -0.10, alarm=10),
    outcome("b", -0.06, alarm=20),
    outcome("c", -0.01),
    outcome("d", 0.08),
    outcome("e", 0.03, alarm=30),
]


def test_detected_false_alarms_and_delay() -> None:
    found = judge(RUNS, "gain")
    assert (found.detected.hits, found.detected.total) == (2, 3)
    assert (found.false.hits, found.false.total) == (1, 2)
    assert found.delay == pytest.approx((10 / 40 + 20 / 40) / 2)
    assert (found.true_then.hits, found.true_then.total) == (2, 3)
    assert found.areas == (1.0,) * 4
    far = judge(within(RUNS, 0.05), "gain")
    assert (str(far.detected.value), far.false.hits, far.false.total) == ("1.0", 0, 1)


def test_an_alarm_is_held_against_the_beta_of_its_own_round() -> None:
    rising = outcome("rising", 0.04, alarm=12, beta_curve=(-0.2, -0.1, 0.03, 0.05))
    assert judge([rising], "gain").true_then.hits == 1
    assert rising.beta_at(40) == 0.05


def test_epsilon_is_chosen_on_the_design_part_alone() -> None:
    design = [outcome("n", -0.1, part="design", delta=(0.5,) * 40), outcome("h", 0.1, part="design", delta=(0.3,) * 40)]
    assert 0.3 <= best_epsilon(design) < 0.5
    full, thresholds = with_server_statistics([*design, outcome("judged", 0.1, delta=(0.45,) * 40)])
    assert thresholds == {"delta-best": best_epsilon(design)}
    assert part(full, "judged")[0].alarm("delta-best") is not None
    assert part(full, "judged")[0].alarm("delta") == 13  # more than 12 of 40 rounds


def test_a_low_cosine_by_hand() -> None:
    """Of 40 rounds more than 12 may not be low; the last tenth is 4 rounds."""
    curve = (*(0.5,) * 10, None, *(0.1,) * 13, *(0.9,) * 16)
    assert low_cosine(curve, 0.2).alarm == 24  # rounds 12 to 24 are low, the thirteenth of them is round 24
    assert low_cosine(curve, 0.1).alarm is None  # 0.1 is not below 0.1
    assert low_cosine(curve[:23] + (0.9,) * 17, 0.2).alarm is None  # twelve low rounds
    # The means of four rounds: 0.5 up to round 10 and, round 11 having none, (0.5, 0.5, 0.1) / 3 = 0.367 in round 12.
    assert low_recent_cosine(curve, 0.4).alarm == 12
    assert low_recent_cosine(curve, 0.2).alarm == 14  # (0.1, 0.1, 0.1): round 11 has none
    assert low_recent_cosine((0.0, 0.9) * 20, 0.2).alarm is None
    # After 5, 10, 20 and 40 rounds, minus the mean of the last four.
    for rule in (low_cosine, low_recent_cosine):
        assert rule(curve, 0.2).evidence == pytest.approx((-0.5, -0.5, -0.1, -0.9))
        assert rule((None,) * 40, 0.2).evidence == (None,) * 4


def test_the_cosines_threshold_is_chosen_on_the_design_part_and_old_runs_have_no_reading() -> None:
    design = [
        outcome("n", -0.1, part="design", cosine=(0.1,) * 40),
        outcome("h", 0.1, part="design", cosine=(0.5,) * 40),
        outcome("old", -0.1, part="design"),
        outcome("no pairs", -0.1, part="design", cosine=(None,) * 40),
    ]
    for rule in (low_cosine, low_recent_cosine):
        assert best_cosine(design, rule) == 0.12  # the lowest that is above 0.1
    judged = [outcome("low", -0.1, cosine=(0.05,) * 40), outcome("high", 0.1, cosine=(0.3,) * 40), outcome("x", -0.2)]
    full, thresholds = with_server_statistics([*design, *judged])
    assert thresholds["cosine"] == thresholds["cosine-recent"] == 0.12
    for name in ("cosine", "cosine-recent"):
        found = judge(part(full, "judged"), name)
        assert (found.detected.hits, found.detected.total, found.false.hits, found.false.total) == (1, 1, 0, 1)
        assert found.areas == (1.0,) * 4
        assert [one.configuration for one in full if name in one.readings] == ["n", "h", "low", "high"]
    # Without healthy runs there is nothing to choose a threshold by, and so no row.
    full, thresholds = with_server_statistics([design[0], *judged])
    assert thresholds.keys() == {"delta-best"}
    assert not any("cosine" in one.readings for one in full)


def test_the_page_says_how_many_runs_have_the_cosine(tmp_path: Path) -> None:
    design = [
        outcome("n", -0.1, part="design", cosine=(0.1,) * 40),
        outcome("h", 0.1, part="design", cosine=(0.5,) * 40),
    ]
    text = page.write([*RUNS, *design, outcome("z", -0.1, cosine=(0.0,) * 40)], "smoke", tmp_path).read_text()
    assert "Only 1 of 6 runs have this row's values, 1 negative and 0 healthy runs: cosine of updates" in text
    assert "| cosine of updates, last layer: low in more than 25 of 80 rounds | 1.000 (0.025-1.000) | - |" in text
    assert "Low is below 0.12 in a round" in text
    assert "The cosine has no row" in page.write(RUNS, "smoke", tmp_path).read_text()


def test_lines_without_a_cosine_stay_as_they_are(tmp_path: Path) -> None:
    outcomes.keep(tmp_path, "smoke", [outcome("old", 0.1), outcome("new", 0.1, cosine=(0.12345, None) * 20)])
    new, old = outcomes.load(tmp_path, "smoke")
    assert (old.cosine, new.cosine) == (None, (0.123, None) * 20)
    path = outcomes.path_of(tmp_path, "smoke")
    text = path.read_text()
    assert [line.count("cosine") for line in text.splitlines()] == [1, 0]
    outcomes.keep(tmp_path, "smoke", [old, new])
    assert path.read_text() == text


def test_goals_say_what_is_not_reached() -> None:
    found = {goal.words: goal.reached for goal in goals(RUNS)}
    assert found["detected where beta is 5 points or more from 0"] is True
    assert found["detected, all"] is False
    assert found["false alarms, all"] is False
    assert found["AUC at half of the rounds"] is True
    assert goals([])[0].reached is None


def test_the_page_and_its_plot(tmp_path: Path) -> None:
    runs = [*RUNS, outcome("design", -0.1, part="design"), outcome("stress-rate-x", 0.2, part="stress")]
    path = page.write(runs, "smoke", tmp_path)
    text = path.read_text()
    assert path == tmp_path / "tables" / "smoke-detectors.md"
    assert "**Not reached**: detected, all 0.667" in text
    assert "| gain, the default | 0.667 (0.094-0.992) | 0.500 (0.013-0.987) |" in text
    assert "3 negative and 2 healthy runs." in text
    assert "Not measured: " in text
    svg = path.with_suffix(".svg").read_text()
    assert "negative runs detected" in svg
    page.write(runs, "smoke", tmp_path)
    assert path.with_suffix(".svg").read_text() == svg  # the same bytes from the same lines


def test_the_error_of_the_reports_by_hand() -> None:
    """Their evidence is the gain with the sign turned: they say -3 and +3 points where beta is -1 and +2."""
    said = {"alarm": None, "state": "helps"}
    runs = [
        outcome("a", -0.01).with_reading("reader", {**said, "evidence": [None, None, None, 0.03]}),
        outcome("b", 0.02).with_reading("reader", {**said, "evidence": [None, None, None, -0.03]}),
        outcome("c", 0.5).with_reading("reader", {**said, "evidence": [None, None, None, None]}),
    ]
    found = reader_error(runs)
    assert found is not None
    assert found == pytest.approx((-0.005, math.sqrt((0.02**2 + 0.01**2) / 2)))
    assert reader_error(runs[2:]) is None


def test_the_page_of_cpu_stands_in_the_docs(tmp_path: Path) -> None:
    assert page.path_of(tmp_path / "results", "cpu") == tmp_path / "results" / "tables" / "cpu-detectors.md"
    (tmp_path / "docs").mkdir()
    assert page.path_of(tmp_path / "results", "cpu") == tmp_path / "docs" / "detectors.md"
    short = page.write(RUNS, "cpu", tmp_path / "results").read_text()
    others = (tmp_path / "results" / "tables" / "cpu-detectors.md").read_text()
    assert "(../results/tables/cpu-detectors.md)" in short
    both = short + others
    assert all(both.count(f"## {sheet.title}\n") == 1 for sheet in page.sheets(RUNS))
    assert (
        "the default test of gains detects 67% of the negative ones, with false alarms in 50% of the healthy" in short
    )


def test_levels_under_the_nulls_are_a_goal_and_a_table(tmp_path: Path) -> None:
    case = {"clients": 20, "reporting": 4, "samples": 8, "rounds": 60, "drift": 0.0, "gain": 0.0}
    row = {"case": case, "runs": 100, "hurts_ever": 7, "hurts_at_end": 2, "warned": 9}
    power = {**row, "case": case | {"gain": -0.1}, "hurts_ever": 80}
    kept = {"alpha": 0.05, "rows": [row, {**row, "case": case | {"drift": 0.2}, "hurts_ever": 1}, power]}
    assert null_levels.worst(kept).hits == 7
    level, found = null_levels.sheets(kept)
    assert (
        found.rows[0][0] == "-10 points, 8 validation samples a client, 4 of 20 clients report, 60 rounds, constant w"
    )
    assert len(level.rows) == 2
    assert level.rows[0][:2] == ("4 of 20 clients report, 60 rounds, constant w", "0.070 (0.029-0.139)")
    assert "**no**" in str(page.sheets(RUNS, kept)[0].rows[-1])


def test_lines_are_kept_and_read_again(tmp_path: Path) -> None:
    outcomes.keep(tmp_path, "smoke", RUNS)
    outcomes.keep(tmp_path, "smoke", [outcome("c", -0.01, alarm=3)])
    found = outcomes.load(tmp_path, "smoke")
    assert [one.configuration for one in found] == ["a", "b", "c", "d", "e"]
    assert found[2].alarm("gain") == 3
    assert found[0].beta_curve == RUNS[0].beta_curve
    broken = outcomes.path_of(tmp_path, "smoke")
    broken.write_text(broken.read_text().replace('"state":"hurts"', '"state":7', 1))
    with pytest.raises(UserError, match=r"line 1, readings, gain, state"):
        outcomes.load(tmp_path, "smoke")
    broken.write_text("{}\n")
    with pytest.raises(UserError, match="not the fields"):
        outcomes.load(tmp_path, "smoke")
