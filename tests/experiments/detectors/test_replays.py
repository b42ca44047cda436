"""Detectors over records made by hand."""

from __future__ import annotations

import pytest
from experiments.detectors.recorded import record

from lindt.protocols import Decision, Detection, DetectionState, Evidence
from lindt.registry import component
from lindt.runs.replay import states_after
from lindt_experiments.detectors import replays
from lindt_experiments.detectors.readings import delta_reading, moment
from lindt_experiments.detectors.replays import liars_of, perfect_reader, read_all, with_lies

HURT = record(lambda i, r: -0.3)
HELPED = record(lambda i, r: 0.3)


def test_moments() -> None:
    assert [moment(share, 60) for share in (1 / 8, 1 / 4, 1 / 2, 1)] == [7, 15, 30, 60]
    assert moment(1 / 8, 4) == 1


def test_a_replay_judges_round_by_round() -> None:
    states = states_after(component(Detection, "gain"), HURT.evidence())
    assert len(states) == 16
    assert {at for at, _ in states[4].reports.values()} == {5}


def test_every_detector_reads_a_record() -> None:
    hurt, helped = read_all(HURT), read_all(HELPED)
    assert {"gain", "gain-median", "warning", "reader", "lie-1 gain", "lie+1 gain-median"} <= hurt.keys()
    for name in ("gain", "gain-median", "warning", "reader"):
        assert hurt[name].evidence[-1] > 0 > helped[name].evidence[-1]  # type: ignore[operator]


def test_the_perfect_reader_knows_who_is_honest_and_waits_for_the_end() -> None:
    mixed = record(lambda i, r: 0.9 if i == 3 else (0.5 if r < 16 else -0.1), attackers=(3,))
    found = perfect_reader(mixed)
    assert (found.alarm, found.state) == (16, "hurts")
    assert found.evidence == pytest.approx((-0.5, -0.5, -0.5, 0.1))
    assert perfect_reader(HELPED).alarm is None


def test_the_paper_s_rule_scales_its_patience() -> None:
    assert delta_reading([0.2] * 80).alarm == 26  # more than 25
    assert delta_reading([0.2] * 16).alarm == 6  # more than 5
    assert delta_reading([0.1] * 80).alarm is None
    assert delta_reading([0.2] * 25 + [None, 0.0] * 27 + [0.2]).alarm == 80  # gaps and quiet rounds wait
    assert delta_reading([0.0] * 72 + [0.8] * 8).evidence == pytest.approx((0.0, 0.0, 0.0, 0.8))


def test_liars_are_the_attackers_first() -> None:
    run = record(lambda i, r: 0.1, clients=12, attackers=(5,))
    liars = liars_of(run)
    assert 5 in liars
    assert len(liars) == 3
    assert liars == liars_of(run)
    told = with_lies(run, -1.0)
    for before, after in zip(run.rounds, told.rounds, strict=True):
        assert {i for i, report in after.reports.items() if report.private.mean == -1.0} == liars
        assert {i for i, report in after.reports.items() if report == before.reports[i]} == set(range(12)) - liars
    assert told.betas == run.betas


def test_with_more_attackers_than_a_quarter_nobody_else_lies() -> None:
    crowded = record(lambda i, r: 0.1, clients=4, attackers=(0, 1))
    assert not [name for name in read_all(crowded) if name.startswith("lie")]


def test_the_first_alarm_and_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Script:
        """Says "hurts" in rounds 5 to 8 and then "helps"."""

        reports = True

        def begin(self) -> DetectionState:
            return DetectionState()

        def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState:
            word = "hurts" if 5 <= evidence.round <= 8 else "helps"
            return DetectionState(Decision(word, gain=-evidence.round / 100), warning=2 if evidence.round > 1 else None)

    monkeypatch.setattr(replays, "_detections", lambda: {"gain": Script()})
    found = read_all(HURT)
    assert (found["gain"].alarm, found["gain"].state) == (5, "helps")
    assert found["gain"].evidence == pytest.approx((0.02, 0.04, 0.08, 0.16))
    assert (found["warning"].alarm, found["warning"].state) == (2, "hurts")
