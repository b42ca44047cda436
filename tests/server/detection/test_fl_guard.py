"""FL-GUARD's rule on numbers to check by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from lindt.errors import PlanError
from lindt.protocols import DetectionState, Evidence, GainReport, Paired
from lindt.runs.store import detection_from, detection_table
from lindt.server.detection.fl_guard import FlGuard

NONE = Paired(0.0, 0.0)


def saved(state: DetectionState) -> DetectionState:
    """Through the checkpoint's table and JSON."""
    return detection_from(json.loads(json.dumps(detection_table(state))))


def judged(
    detection: FlGuard, rounds: Sequence[Sequence[float | None]], planned: int | None = None
) -> list[DetectionState]:
    state, states = detection.begin(), []
    for r, gains in enumerate(rounds, 1):
        reports = {i: GainReport(8, NONE, NONE, first_batch=gain) for i, gain in enumerate(gains)}
        assert state is not None
        state = detection.judge(saved(state), Evidence(r, None, frozenset(), 3, planned, reports))
        assert state is not None
        states.append(state)
    return states


def test_the_mean_of_the_last_c_medians_is_counted() -> None:
    """The means of two medians: -0.3, -0.1, 0.1, 0.1, -0.2. The last is the third negative one."""
    medians = [-0.3, 0.1, 0.1, 0.1, -0.5, -0.1, 0.9]
    states = judged(FlGuard(c=2, nr=2), [[-1.0, m, 1.0] for m in medians])
    assert [s.verdict.gain for s in states] == pytest.approx([-0.3, -0.1, 0.1, 0.1, -0.2, -0.3, 0.4])
    said = [s.verdict.state for s in states]
    assert said == ["too early", "too early", "undecided", "undecided", "hurts", "hurts", "hurts"]
    assert states[-1].verdict.since == 5  # an alarm stays
    assert states[-1].verdict.clients == 3


@pytest.mark.parametrize(("planned", "alarm"), [(500, 51), (80, 9), (5, 2), (None, 51)])
def test_c_and_nr_are_a_tenth_of_the_rounds(planned: int | None, alarm: int) -> None:
    states = judged(FlGuard(), [[-0.1]] * 60, planned)
    assert [s.verdict.state == "hurts" for s in states].index(True) + 1 == alarm


def test_a_healthy_federation_is_undecided_and_never_helped() -> None:
    assert judged(FlGuard(), [[0.5, 0.4]] * 30, 80)[-1].verdict.state == "undecided"


def test_rounds_without_reports_do_not_count() -> None:
    states = judged(FlGuard(c=2, nr=1), [[-0.1], [], [None], [-0.1]])
    assert states[2] == states[0]
    assert states[3].verdict.since == 4
    assert judged(FlGuard(), [[]] * 10, 10)[-1].verdict.state == "undecided"


@pytest.mark.parametrize("name", ["c", "nr"])
def test_a_negative_number_of_rounds_is_named(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        FlGuard(**{name: -1})
