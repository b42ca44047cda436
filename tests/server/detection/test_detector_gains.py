"""Detector() for loops of one's own: the test of gains, by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from lindt import Detector, GainReport, Paired
from lindt.errors import PlanError, UserError
from lindt.protocols import Decision, DetectionState, Evidence
from lindt.server.detection.detector import GainWarning
from lindt.server.detection.gain import Gain

REPORT = GainReport(10, Paired(-0.2, 0.4), Paired(-0.1, 0.3))


@dataclass
class Listening:
    """Keeps the evidence; says "hurts" while the mean of the round's reports is below 0."""

    heard: list[Evidence] = field(default_factory=list)
    reports = True

    def begin(self) -> DetectionState:
        return DetectionState()

    def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState:
        assert state is not None
        self.heard.append(evidence)
        known = state.reports | {i: (evidence.round, report) for i, report in evidence.reports.items()}
        means = [report.private.mean for _, report in known.values()]
        if not means:
            return state
        gain = math.fsum(means) / len(means)
        verdict = Decision("hurts" if gain < 0 else "helps", evidence.round, gain, 0.1, len(means), 7, 3)
        return DetectionState(verdict, warning=2, reports=known)


def listening(**settings: Any) -> tuple[Detector, list[Evidence]]:
    test = Listening()
    return Detector(detection=test, **settings), test.heard


class TestWithoutGains:
    def test_it_raises_and_names_both_ways_out(self) -> None:
        detector = Detector()
        with pytest.raises(UserError, match=r"pass gains=\[\.\.\.\].* or .*Detector\(epsilon=\.\.\., patience="):
            detector.observe([torch.zeros(2)], torch.zeros(2))
        assert detector.round == 0  # nothing was counted

    @pytest.mark.parametrize("given", [{"patience": 3}, {"statistic": "spread"}, {"counting": "consecutive"}])
    def test_settings_of_the_papers_rule_need_its_epsilon(self, given: dict[str, Any]) -> None:
        with pytest.raises(PlanError, match="give epsilon as well"):
            Detector(**given)

    def test_one_or_the_other(self) -> None:
        with pytest.raises(UserError, match="leave out one of the two"):
            Detector(0.1, detection=Listening())
        with pytest.raises(UserError, match="leave out gains or epsilon"):
            Detector(0.1).observe([torch.zeros(2)], torch.zeros(2), gains=[0.1])


class TestReports:
    def test_a_float_is_a_report_of_the_largest_variance_and_no_early_warning(self) -> None:
        detector, heard = listening()
        detector.observe(gains={"a": -0.25}, samples=40)
        assert heard[0].reports == {0: GainReport(40, Paired(-0.25, 1.0), Paired(0.0, 0.0))}

    def test_a_pair_keeps_its_mean_square(self) -> None:
        detector, heard = listening()
        detector.observe(gains={"a": Paired(-0.25, 0.5)}, samples=40)
        assert heard[0].reports == {0: GainReport(40, Paired(-0.25, 0.5), Paired(0.0, 0.0))}

    def test_without_samples_a_float_counts_as_one(self) -> None:
        detector, heard = listening()
        detector.observe(gains=[0.5, REPORT])
        assert [report.samples for report in heard[0].reports.values()] == [1, 10]

    @pytest.mark.parametrize(("samples", "found"), [({"a": 3, "b": 5}, [3, 5]), ([3, 5], [3, 5]), (4, [4, 4])])
    def test_samples_in_any_form(self, samples: Any, found: list[int]) -> None:
        detector, heard = listening()
        detector.observe(gains={"a": 0.5, "b": np.float32(0.25)}, samples=samples)
        assert [report.samples for report in heard[0].reports.values()] == found

    def test_a_client_keeps_its_number_by_its_name(self) -> None:
        detector, heard = listening(rounds=8, clients=9)
        detector.observe(gains={"b": 0.1, "a": 0.2})
        detector.observe(gains={"a": 0.3, "c": REPORT})
        assert [sorted(evidence.reports) for evidence in heard] == [[0, 1], [1, 2]]
        assert (heard[1].round, heard[1].rounds, heard[1].clients) == (2, 8, 9)
        assert heard[1].reports[2] == REPORT
        assert detector.state is not None
        assert sorted(detector.state.reports) == [0, 1, 2]  # each client's last

    def test_a_list_has_no_names_so_the_round_before_is_forgotten(self) -> None:
        detector, _ = listening()
        detector.observe(gains=[0.1, 0.1, 0.1])
        verdict = detector.observe(gains=[-0.1])
        assert (verdict.clients, verdict.gain) == (1, -0.1)

    def test_points_in_place_of_shares_are_warned_of_once(self) -> None:
        detector = Detector(rounds=30, clients=4)
        with pytest.warns(GainWarning, match=r"gains: 4 of 4 are not in \[-1, 1\]; .* as fractions: 0.05 for five"):
            detector.observe(gains={0: -8.0, 1: 4.0, 2: 3.0, 3: float("nan")}, samples=50)
        detector.observe(gains={0: -8.0, 1: 4.0, 2: 3.0, 3: 2.0}, samples=50)  # an error if it warned again
        Detector(rounds=30).observe(gains={0: -8.0, 1: 0.4}, samples=50)  # one of two may be an attacker
        noisy = Detector(rounds=30, detection=Gain(noise=0.5))
        noisy.observe(gains={0: -8.0}, samples=50)  # noise may leave the bounds

    def test_a_liar_is_clipped_and_nan_counts_for_nothing(self) -> None:
        detector, heard = listening()
        honest = dict.fromkeys("abc", 0.25)
        infinite = GainReport(5, Paired(math.inf, 1), Paired(0, 0))
        detector.observe(gains={"liar": -99.0, "nan": math.nan, "inf": infinite} | honest)
        heard_of = {i: report.private.mean for i, report in heard[0].reports.items()}
        assert heard_of == {0: -1.0, 3: 0.25, 4: 0.25, 5: 0.25}

    @pytest.mark.parametrize(
        ("pair", "complaint"),
        [
            (Paired(-0.3, 0.01), r"Paired\(-0.3, 0.01\) has a second number below mean \*\* 2 = 0.09; .* the variance"),
            (Paired(0.0, -0.5), r"Paired\(0, -0.5\) has a second number below mean"),
            (Paired(3.0, 9.0), r"Paired\(3, 9\) is not in \[-1, 1\]; .* as fractions, 0.05 for five points"),
            (Paired(-1.1, 1.0), r"Paired\(-1.1, 1\) is not in \[-1, 1\]"),
            (Paired(0.5, 1.1), r"Paired\(0.5, 1.1\) is not in \[-1, 1\]"),
            (Paired("a", 1.0), r"Paired\(mean='a', square=1.0\) does not hold two numbers"),  # type: ignore[arg-type]
        ],
    )
    def test_a_pair_of_no_differences_is_refused_and_the_round_is_not_counted(
        self, pair: Paired, complaint: str
    ) -> None:
        """Three clients of mean -0.3 and variance 0.01 were "hurts" with an error of almost 0."""
        detector, heard = listening()
        with pytest.raises(UserError, match=rf"gains\['c'\]: {complaint}"):
            detector.observe(gains={"a": 0.1, "c": pair}, samples=50)
        assert (detector.round, heard) == (0, [])

    def test_a_pair_at_its_bounds_is_taken_and_rounding_is_allowed(self) -> None:
        detector, heard = listening()
        d = torch.full((1000,), 0.3)  # all equal: the mean square is the square of the mean, in single precision
        ends = [Paired(-1.0, 1.0), Paired(0.0, 0.0), Paired(-0.3, 0.09), Paired(1 + 1e-7, 1 + 1e-7)]
        detector.observe(gains=[*ends, Paired(d.mean(), d.square().mean() * (1 - 1e-7))], samples=9)  # type: ignore[arg-type]
        found = [report.private for report in heard[0].reports.values()]
        assert found[:2] == ends[:2]
        assert found[3] == Paired(1.0, 1.0)
        assert (found[4].mean, found[4].square) == (pytest.approx(0.3), pytest.approx(0.09))

    def test_what_a_client_may_have_sent_is_clipped_and_nan_in_a_pair_counts_for_nothing(self) -> None:
        """A client that lies must not stop a server; a mean square that is too small becomes the smallest possible."""
        detector, heard = listening()
        liar = GainReport(9, Paired(-0.3, 0.01), Paired(3.0, 9.0))
        detector.observe(gains={"a": liar, "b": Paired(math.nan, 0.1), "c": Paired(0.1, math.inf)}, samples=9)
        assert heard[0].reports == {0: GainReport(9, Paired(-0.3, pytest.approx(0.09)), Paired(1.0, 1.0))}  # type: ignore[arg-type]

    def test_noise_may_leave_the_bounds(self) -> None:
        noisy = Detector(rounds=30, detection=Gain(noise=0.5))
        noisy.observe(gains={"a": Paired(-1.7, 1.0)}, samples=50)
        assert noisy.state is not None
        assert noisy.state.reports[0][1].private == Paired(-1.0, 1.0)

    def test_a_round_without_reports_is_a_round(self) -> None:
        detector, heard = listening()
        assert detector.observe(gains=[]).round == 1
        assert heard[0].reports == {}

    @pytest.mark.parametrize(
        ("gains", "samples", "complaint"),
        [
            (0.3, None, "gains: it is of type float"),
            ("0.3", None, "gains: it is of type str"),
            (["a"], None, r"gains\[0\]: it is of type str"),
            ([0.3], 0, "number of held-out samples is 0"),
            ([0.3], [1, 2], "it has 2 numbers for 1 gains"),
            ({"a": 0.3}, {"b": 2}, "client 'a' is missing"),
        ],
    )
    def test_what_is_no_gain_is_named(self, gains: Any, samples: Any, complaint: str) -> None:
        with pytest.raises(UserError, match=complaint):
            Detector().observe(gains=gains, samples=samples)


class TestVerdict:
    def test_it_is_the_tests_answer(self) -> None:
        detector, _ = listening()
        verdict = detector.observe(gains={"a": -0.3, "b": 0.1})
        assert (verdict.state, verdict.since, verdict.error, verdict.needed) == ("hurts", 1, 0.1, 3)
        assert verdict.gain == pytest.approx(-0.1)
        assert (verdict.clients, verdict.samples, verdict.warning) == (2, 7, 2)
        assert verdict.negative
        assert detector.negative
        assert (verdict.delta, verdict.w_div) == (None, None)  # clients: the list is empty
        assert not detector.observe(gains={"a": 0.9}).negative  # a verdict can change

    def test_weights_beside_gains_are_measured_and_decide_nothing(self) -> None:
        detector, _ = listening()
        verdict = detector.observe([torch.tensor([300.0, 400.0])], torch.zeros(2), gains=[0.1])
        assert (verdict.delta, verdict.watched, verdict.state, verdict.negative) == (500.0, 500.0, "helps", False)

    def test_the_papers_rule_has_no_state(self) -> None:
        verdict = Detector(0.1, 0).observe([torch.tensor([3.0, 4.0])], torch.zeros(2))
        assert (verdict.delta, verdict.count, verdict.negative, verdict.state) == (5.0, 1, True, None)

    @pytest.mark.parametrize(("gain", "state"), [(-0.3, "hurts"), (0.3, "helps"), (0.0, "undecided")])
    @pytest.mark.parametrize("named", [True, False])
    def test_the_test_of_gains_decides(self, gain: float, state: str, named: bool) -> None:
        """Ten clients of 40 samples: the error of the mean is 1 / sqrt(400) at most, a sixth of 0.3."""
        detector = Detector(rounds=20, clients=10)
        for _ in range(20):
            gains = [gain + 0.02 * (i % 2 or -1) for i in range(10)]
            verdict = detector.observe(gains=dict(enumerate(gains)) if named else gains, samples=40)
        assert (verdict.state, verdict.negative) == (state, state == "hurts")
        assert verdict.gain == pytest.approx(gain)
        assert (verdict.clients, verdict.samples, verdict.warning) == (10, 400, None)

    def test_the_first_rounds_of_a_run_are_too_early(self) -> None:
        assert Detector(rounds=100).observe(gains=[-1.0] * 20, samples=100).state == "too early"


def _states(gain: float, lie: float | None) -> set[str]:
    """The states of 100 rounds of 20 clients with this gain, where client 0 may report a lie in each round."""
    detector, states = Detector(rounds=100, clients=20), set()
    for _ in range(100):
        gains = {i: Paired(gain, 0.3) for i in range(20)} | ({} if lie is None else {0: Paired(lie, 1.0)})
        states.add(detector.observe(gains=gains, samples=50).state)
    return states


@pytest.mark.parametrize(("sign", "state"), [(-1, "hurts"), (1, "helps")])
def test_one_client_that_lies_can_hide_a_gain_and_cannot_turn_it_around(sign: int, state: str) -> None:
    """Of 20 clients one reports +1 or -1: that moves the mean by 5 points, as SECURITY.md says."""
    assert state in _states(sign * 0.04, None)
    assert _states(sign * 0.04, -sign * 1.0) == {"too early", "undecided"}
    # A mean of 4 points to the other side, which the middle half of the clients does not share.
    assert _states(sign * 0.01, -sign * 1.0) == {"too early", "undecided"}
