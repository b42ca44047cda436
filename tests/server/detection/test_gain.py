"""The test of gains: wealth and errors to check by hand, the level under exact nulls, resume, changing answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lindt.errors import PlanError, UserError
from lindt.protocols import Detection, DetectionState, Evidence, GainReport, Paired
from lindt.runs.replay import replay
from lindt.runs.schema import DETECTION, fits
from lindt.runs.store import detection_from, detection_table
from lindt.server.detection.divergence import Delta
from lindt.server.detection.gain import Gain, _paired, _trimmed, critical, look_before, warning_look_before
from lindt_experiments.detectors.nulls import Null, rates, simulate

Round = dict[int, GainReport]


def pair(mean: float, square: float | None = None) -> Paired:
    return Paired(mean, abs(mean) if square is None else square)


def report(mean: float, samples: int = 100, square: float | None = None, **more: Any) -> GainReport:
    return GainReport(samples, private=pair(mean, square), equal_age=pair(mean, square), **more)


def judged(
    detection: Detection, rounds: Sequence[Round], clients: int, planned: int | None = None
) -> list[DetectionState]:
    """The state after each round."""
    state, states = detection.begin(), []
    for r, reports in enumerate(rounds, 1):
        state = detection.judge(state, Evidence(r, None, frozenset(reports), clients, planned, reports))
        assert state is not None
        states.append(state)
    return states


def everyone(mean: float, clients: int = 10, **more: Any) -> Round:
    return {i: report(mean, **more) for i in range(clients)}


def test_the_wealth_after_three_reports() -> None:
    """Bets of 0 until two rounds are known; then -mu / (var + mu^2), at most 0.9."""
    states = judged(Gain(start=1), [{0: report(-0.5)}, {0: report(0.25)}, {0: report(-0.2)}], 1)
    # mu = -0.125, mean square 0.15625: a bet of 0.8. 1 + 0.8 * 0.2 = 1.16
    assert [s.numbers["private.hurts.wealth"] for s in states] == pytest.approx([0, 0, math.log(1.16)])
    assert [s.numbers["private.helps.wealth"] for s in states] == [0, 0, 0]
    states = judged(Gain(start=1), [{0: report(-0.5)}] * 3, 1)
    assert states[-1].numbers["private.hurts.wealth"] == pytest.approx(math.log(1.45))  # 2 is cut to 0.9
    states = judged(Gain(start=1), [{0: report(0.5)}] * 3, 1)
    assert states[-1].numbers["private.helps.wealth"] == pytest.approx(math.log(1.45))
    assert states[-1].numbers["private.hurts.wealth"] == 0


def test_a_bet_is_on_the_change_of_a_client_and_the_mean_of_all() -> None:
    """Clients at -0.4 and 0.2 that stay as they are: every bet is on their mean, -0.1, whoever reports."""
    low, high = {0: report(-0.4)}, {1: report(0.2)}
    states = judged(Gain(start=3), [low, high, low, low, high], 2)
    # In rounds 3 and 4: x = -0.1 with b = 1 + 0.3. Then a bet of min(0.1 / 0.01, 0.9 / 1.3).
    assert states[-1].numbers["private.hurts.sum"] == pytest.approx(-0.3)
    assert states[-1].numbers["private.hurts.wealth"] == pytest.approx(math.log1p(0.9 / 1.3 * 0.1))


@settings(max_examples=60, deadline=None)
@given(
    means=st.lists(st.floats(-1, 1), min_size=1, max_size=6),
    last=st.lists(st.floats(-1, 1), min_size=6, max_size=6),
    past=st.floats(-1, 1),
)
def test_a_bet_cannot_lose_everything(means: list[float], last: list[float], past: float) -> None:
    rounds = [everyone(past, 6), dict(enumerate(map(report, last))), dict(enumerate(map(report, means)))]
    numbers = judged(Gain(start=1), [rounds[0], *rounds], 6)[-1].numbers
    assert all(math.isfinite(numbers[f"private.{side}.wealth"]) for side in ("hurts", "helps"))


def test_the_wealth_is_a_fair_game_over_all_draws_of_a_round() -> None:
    """With a mean gain of 0 the mean of the wealth over every pair of clients that may report is at most 1."""
    gains, seen = [0.6, -0.2, -0.3, -0.1], [-0.3, -0.5, 0.1, -0.4]
    rounds = [dict(enumerate(map(report, seen)))] * 2
    after = []
    for i in range(4):
        for j in range(i):
            states = judged(Gain(start=1), [*rounds, {i: report(gains[i]), j: report(gains[j])}], 4)
            after.append(
                math.exp(states[-1].numbers["private.hurts.wealth"] - states[-2].numbers["private.hurts.wealth"])
            )
    assert len(set(after)) > 1  # there was a bet
    assert sum(after) / len(after) <= 1 + 1e-12


def test_the_error_counts_each_sample_once() -> None:
    """Two clients with 4 samples each: d of -1, 0, 0, 1 and d of -1, -1, 0, 0."""
    estimate = _paired([(4, pair(0.0, 0.5)), (4, pair(-0.5, 0.5))], missing=0.0, noise=0.0)
    assert (estimate.gain, estimate.clients, estimate.samples) == (-0.25, 2, 8)
    pooled = (4 * 0.5 + 4 * 0.5 + 1) / 9
    parts = [(0.5 + pooled / 4) / 4, (0.25 + pooled / 4) / 4]
    assert estimate.error == pytest.approx(math.sqrt(sum(parts)) / 2)
    noisy = _paired([(4, pair(0.0, 0.5)), (4, pair(-0.5, 0.5))], missing=0.0, noise=0.02)
    assert noisy.error**2 == pytest.approx(estimate.error**2 + 2 * 0.02 / 4)
    # Half of the clients are missing: half of the variance of a mean of two, 0.125 / 2, comes on top.
    half = _paired([(4, pair(0.0, 0.5)), (4, pair(-0.5, 0.5))], missing=0.5, noise=0.0)
    assert half.error**2 == pytest.approx(estimate.error**2 + 0.5 * 0.125 / 2)


def test_a_client_whose_samples_all_agree_is_not_certain() -> None:
    assert _paired([(3, pair(-1.0))], missing=0.0, noise=0.0).error == pytest.approx(1 / 3)
    assert _paired([(1, pair(-1.0))], missing=0.0, noise=0.0).error == pytest.approx(1)
    assert not _paired([(4, pair(-1.0))], missing=0.0, noise=0.0).clear(-1, 0.05)  # 1 of 16 by chance
    assert _paired([(6, pair(-1.0))], missing=0.0, noise=0.0).clear(-1, 0.05)
    assert _paired([(9, pair(0.0, 0.0))], missing=0.0, noise=0.0).error > 0


@pytest.mark.parametrize(("level", "freedom"), [(0.05, 10), (0.01, 10), (0.025, 30), (0.001, 100)])
def test_the_critical_value_is_that_of_student(level: float, freedom: float) -> None:
    from scipy.stats import t

    assert critical(level, freedom) == pytest.approx(t.isf(level, freedom), rel=0.01)


def test_four_looks_up_to_the_planned_end_and_all_of_alpha_is_not_spent() -> None:
    assert [look_before(20, 80, r) for r in (34, 35, 49, 50, 65, 79, 80)] == [0, 35, 35, 50, 65, 65, 80]
    assert [look_before(20, None, r) for r in (29, 30, 40, 59, 60, 100)] == [0, 30, 40, 40, 60, 100]
    assert [warning_look_before(r) for r in (7, 8, 11, 12, 16, 23, 24, 100)] == [0, 8, 8, 12, 16, 16, 24, 96]
    left = [s.numbers.get("private.hurts.left", 0.05) for s in judged(Gain(), [everyone(0.0)] * 80, 10, 80)]
    assert [left[r - 1] for r in (34, 35, 50, 65)] == pytest.approx([0.05 * 0.95**k for k in range(4)])
    assert left[-1] == pytest.approx(0.05 * 0.95**3 * 0.05)


@pytest.mark.parametrize(("gain", "state"), [(-0.3, "hurts"), (0.3, "helps"), (0.0, "undecided")])
def test_a_clear_gain_is_decided_at_the_first_look(gain: float, state: str) -> None:
    states = judged(Gain(), [everyone(gain)] * 80, 10, 80)
    assert [s.verdict.state for s in states[:20]] == ["too early"] * 20
    assert {s.verdict.state for s in states[20:34]} == {"undecided"}
    assert {s.verdict.state for s in states[34:]} == {state}
    assert states[-1].verdict.since == (35 if gain else None)
    assert states[-1].verdict.gain == pytest.approx(gain)
    assert (states[-1].verdict.clients, states[-1].verdict.samples) == (10, 1000)
    assert states[-1].warning == (8 if gain < 0 else None)


def test_without_a_planned_end_the_test_starts_in_round_20() -> None:
    states = [s.verdict.state for s in judged(Gain(), [everyone(-0.3)] * 40, 10)]
    assert states == ["too early"] * 20 + ["undecided"] * 9 + ["hurts"] * 11


def test_a_short_run_is_not_judged_by_a_w_that_has_hardly_left_its_start() -> None:
    assert judged(Gain(), [everyone(-0.5)] * 5, 10, 5)[-1].verdict.state == "too early"


def test_needed_is_the_number_of_samples_that_decides() -> None:
    few = judged(Gain(), [everyone(-0.04, samples=10, square=0.4)] * 80, 10, 80)[-1].verdict
    assert few.state == "undecided"
    assert few.needed is not None
    assert few.needed > few.samples
    each = math.ceil(few.needed * 1.05 / 10)
    assert judged(Gain(), [everyone(-0.04, samples=each, square=0.4)] * 80, 10, 80)[-1].verdict.state == "hurts"
    each = int(few.needed / 1.5 / 10)
    assert judged(Gain(), [everyone(-0.04, samples=each, square=0.4)] * 80, 10, 80)[-1].verdict.state == "undecided"
    assert judged(Gain(), [everyone(0.0)] * 80, 10, 80)[-1].verdict.needed is None


def test_few_samples_do_not_decide_however_many_rounds() -> None:
    """The same three samples in 500 rounds: the e-process is certain, the paired test is not."""
    states = judged(Gain(), [{0: report(-1 / 3, samples=3, square=1 / 3)}] * 500, 1, 500)
    assert states[-1].numbers["private.hurts.peak"] > 20
    assert {s.verdict.state for s in states} == {"too early", "undecided"}
    assert states[-1].warning is None


def test_clients_that_never_report_widen_the_error() -> None:
    rounds = [{i: report(-0.15 if i % 2 else 0.05) for i in range(10)}] * 80
    assert judged(Gain(), rounds, 10, 80)[-1].verdict.state == "hurts"
    missing = judged(Gain(), rounds, 1000, 80)[-1].verdict
    assert missing.state == "undecided"
    assert missing.clients == 10


def test_old_reports_are_left_out() -> None:
    rounds = [everyone(-0.3)] * 10 + [{0: report(0.1)}] * 20
    clients = [s.verdict.clients for s in judged(Gain(), rounds, 10)]
    assert clients[18] == 10
    assert clients[19] == 1


def test_a_verdict_changes_when_the_gain_does() -> None:
    states = judged(Gain(), [everyone(-0.3)] * 60 + [everyone(0.3)] * 140, 10, 200)
    said = [s.verdict.state for s in states]
    # Looks at 50 + 37.5 k: 88, 125, 163, 200. The first is after the change.
    assert "hurts" not in said
    assert said[-1] == "helps"
    states = judged(Gain(), [everyone(-0.3)] * 100 + [everyone(0.3)] * 100, 10, 200)
    said = [s.verdict.state for s in states]
    assert said[87:100] == ["hurts"] * 13
    assert said[100:124] == ["undecided"] * 24  # the estimate left its side, and no look was made since
    assert said[124:] == ["helps"] * 76
    assert states[-1].verdict.since == 125


def test_after_a_decision_the_opposite_process_restarts() -> None:
    states = judged(Gain(), [everyone(0.02)] * 60 + [everyone(-0.3)] * 28, 10, 200)
    assert (states[-1].verdict.state, states[-1].verdict.since) == ("hurts", 88)
    assert states[-2].numbers["private.helps.sum"] != 0
    names = ("rounds", "sum", "squares", "peak")
    assert [states[-1].numbers[f"private.helps.{name}"] for name in names] == [0, 0, 0, 0]
    assert states[-1].numbers["private.helps.wealth"] <= 0


def test_a_round_without_reports_changes_nothing() -> None:
    full = [everyone(-0.1)] * 30
    states = judged(Gain(), [*full, {}, {}], 10, 80)
    assert states[-1] == states[-3]


def test_a_look_in_a_round_without_reports_is_made_in_the_next_one() -> None:
    rounds = [everyone(-0.3)] * 34 + [{}, {}] + [everyone(-0.3)] * 3
    assert [s.verdict.state for s in judged(Gain(), rounds, 10, 80)][33:] == ["undecided"] * 3 + ["hurts"] * 3


def test_the_last_planned_look_is_made_without_reports_too() -> None:
    rounds = [everyone(-0.05, square=0.4)] * 79
    assert judged(Gain(), [*rounds, {}], 10, 80)[-1].verdict.state == "hurts"


@pytest.mark.parametrize("combine", ["mean", "median", "sum"])
def test_no_reports_at_all_end_undecided(combine: Literal["mean", "median", "sum"]) -> None:
    states = judged(Gain(combine=combine), [{}] * 80, 10, 80)
    assert states[-2].verdict.state == "too early"
    assert (states[-1].verdict.state, states[-1].verdict.clients) == ("undecided", 0)
    assert states[-1].verdict.gain is None
    assert (states[-1].warning, states[-1].recovery, states[-1].recovered) == (None, None, None)


def test_the_sum_keeps_nothing_of_a_client_and_says_what_it_does_not_cover() -> None:
    rounds = [{0: report(-0.4), 1: report(0.2)}] * 80
    other = [{0: report(-0.1, samples=7, square=0.9), 1: report(-0.1, samples=3)}] * 80
    state, same = judged(Gain(combine="sum"), rounds, 2, 80)[-1], judged(Gain(combine="sum"), other, 2, 80)[-1]
    assert state.reports == {}
    assert state.verdict == same.verdict  # equal sums, equal numbers of reports
    assert state.numbers == pytest.approx(same.numbers)
    assert state.verdict.state == "hurts"
    assert state.verdict.gain == pytest.approx(-0.1)
    assert (state.verdict.error, state.verdict.samples, state.verdict.needed) == (None, 0, None)
    assert "not on new data" in Gain(combine="sum").promise
    assert "new data of these clients" in Gain().promise


def test_a_quarter_of_liars_moves_the_mean_and_not_the_median() -> None:
    rounds = [everyone(0.1, 20) | {i: report(-1.0, square=1.0, samples=10**6) for i in range(5)}] * 80
    assert judged(Gain(), rounds, 20, 80)[-1].verdict.gain == pytest.approx(-0.175)
    assert "hurts" not in {s.verdict.state for s in judged(Gain(), rounds, 20, 80)}  # the middle half is above 0
    states = judged(Gain(combine="median"), rounds, 20, 80)
    assert {s.verdict.state for s in states} == {"too early", "undecided", "helps"}
    assert states[-1].verdict.gain == pytest.approx(0.1)


def test_a_quarter_of_liars_decides_by_the_mean_where_the_others_gain_nothing() -> None:
    """What `combine = "median"` is for: with a middle half just below 0 the default is misled."""
    lies = {i: report(-1.0, square=1.0) for i in range(5)}
    rounds = [everyone(-0.01, 20) | {i: report(0.02) for i in range(5, 9)} | lies] * 80
    honest = [everyone(-0.01, 20) | {i: report(0.02) for i in range(5, 9)} | {i: report(0.02) for i in range(5)}] * 80
    assert judged(Gain(), honest, 20, 80)[-1].verdict.state == "undecided"
    assert judged(Gain(), rounds, 20, 80)[-1].verdict.gain < -0.2
    assert judged(Gain(combine="median"), rounds, 20, 80)[-1].verdict.state != "hurts"


def test_the_middle_half_of_the_clients() -> None:
    estimate = _trimmed([(8, pair(x)) for x in (-1.0, 0.0, 0.1, 0.2)])
    assert estimate.gain == pytest.approx(0.05)  # of 0 and 0.1
    # 0, 0, 0.1, 0.1 around 0.05, and one more at a distance of 1 that counts a quarter
    assert estimate.error**2 == pytest.approx((4 * 0.05**2 + 0.25) / 3 * 4 / 2**2)


def test_recovery_is_answered_while_reports_carry_it_and_then_stays() -> None:
    plain = [everyone(-0.3)] * 40
    adapted = [everyone(-0.3, adapted=pair(0.3), adapted_private=pair(0.01, 0.4))] * 20
    worse = [everyone(-0.3, adapted=pair(-0.2), adapted_private=pair(-0.5))] * 20
    states = judged(Gain(), plain + adapted + plain[:20], 10, 80)
    assert states[39].recovery is None
    assert states[39].recovered is None
    assert states[40].recovery is not None
    assert states[40].recovery.state == "too early"
    first, last = states[59], states[-1]
    assert first.recovery is not None
    assert (first.recovery.state, first.recovery.since) == ("helps", 51)
    assert first.recovered is not None
    assert first.recovered.state == "undecided"
    assert (last.recovery, last.recovered) == (first.recovery, first.recovered)
    assert last.verdict.state == "hurts"
    end = judged(Gain(), plain + worse, 10, 60)[-1]
    assert end.recovery is not None
    assert end.recovery.state == "hurts"
    assert end.recovered is not None
    assert end.recovered.state == "hurts"


def saved(state: DetectionState) -> DetectionState:
    """Through the checkpoint's table and JSON."""
    return detection_from(json.loads(json.dumps(detection_table(state), sort_keys=True, allow_nan=False)))


@pytest.mark.parametrize("combine", ["mean", "median", "sum"])
def test_a_resumed_test_goes_on_bit_by_bit(combine: Literal["mean", "median", "sum"]) -> None:
    rounds = list(simulate(Null(rounds=40, gain=-0.15, drift=0.1), seed=3))
    for r in range(25, 33):
        rounds[r] = {i: replace(said, adapted=pair(0.2), adapted_private=pair(0.1)) for i, said in rounds[r].items()}
    detection = Gain(combine=combine)
    states = judged(detection, rounds, 20, 40)
    state = detection.begin()
    for r, reports in enumerate(rounds, 1):
        assert state is not None
        shuffled = dict(reversed(reports.items()))
        state = detection.judge(saved(state), Evidence(r, None, frozenset(), 20, 40, shuffled))
        assert state == states[r - 1]
        assert fits(detection_table(states[r - 1]), DETECTION)
    assert states[-1].recovery is not None
    assert "hurts" in {s.verdict.state for s in states} or combine != "mean"


def test_replay_reads_the_lines_of_a_run() -> None:
    rounds = [everyone(-0.3, adapted=pair(0.1))] * 40
    lines = [
        {"round": r, "reports": [{"client": i, **asdict(said)} for i, said in reports.items()]}
        for r, reports in enumerate(rounds, 1)
    ]
    assert replay(Gain(), lines, 10, 40) == judged(Gain(), rounds, 10, 40)
    with pytest.raises(UserError, match="does not use reports"):
        replay(Delta(), lines, 10)
    with pytest.raises(UserError, match="round 1 has no reports"):
        replay(Gain(), [{"round": 1}], 10)


@pytest.mark.parametrize("name", ["alpha", "start", "noise", "panel"])
def test_a_field_out_of_its_range_is_named(name: str) -> None:
    with pytest.raises(PlanError, match=name):
        Gain(**{name: -1})


@pytest.mark.parametrize("case", [Null(samples=6), Null(reporting=20, drift=0.05)], ids=["constant", "drifting"])
def test_a_true_gain_of_0_is_seldom_called_hurtful(case: Null) -> None:
    """At alpha = 0.2, so that few simulations show a level that does not hold: 0.36 would be three errors away."""
    (row,) = rates(Gain(alpha=0.2), [replace(case, rounds=40)], runs=60)
    assert row.hurts_ever.low <= 0.2
    assert row.warned.low <= 0.2
    assert row.hurts_ever.share <= 0.36


def test_a_clearly_negative_gain_is_found() -> None:
    (row,) = rates(Gain(), [Null(rounds=40, gain=-0.2)], runs=20)
    assert row.hurts_at_end.share >= 0.95
    assert row.helps_ever.share == 0
    assert row.delay is not None
    assert row.delay <= 40
