"""Figures over runs whose answer can be told by hand, and the page made of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from experiments.detectors.recorded import outcome

from lindt.errors import UserError
from lindt_experiments.detectors import null_levels, outcomes, page
from lindt_experiments.detectors.judgement import best_epsilon, goals, judge, part, reader_error, with_delta, within

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
    full, epsilon = with_delta([*design, outcome("judged", 0.1, delta=(0.45,) * 40)])
    assert epsilon == best_epsilon(design)
    assert part(full, "judged")[0].alarm("delta-best") is not None
    assert part(full, "judged")[0].alarm("delta") == 13  # more than 12 of 40 rounds


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
