"""Clients that send anything at all: refused by a rule or bounded by one, named in the round's line, never the end."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.plan.plan import METHODS, Alone, Plan, Scoring, reporting_clients
from lindt.plan.problem import Problem
from lindt.protocols import Aggregator, Buffers, ClientTally, GainReport, Paired, RecoveryState, Reply, Task
from lindt.runs.summary import round_line
from lindt.server.aggregation import (
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
    WeightedMean,
)
from lindt.server.detection.gain import Gain
from lindt.server.federation import play_round
from lindt.server.recovery import OnEvidence
from lindt.server.state import RunState
from lindt.server.updates import LONGEST, MOST_SAMPLES

P = 4  # one weight for each of two inputs and two classes
AGGREGATORS: list[Aggregator] = [
    Mean(), WeightedMean(), TrimmedMean(0.2), Median(), Krum(0.2), MultiKrum(0.2), GeometricMedian(), NormBound(),
]  # fmt: skip


def buffers(float_: float = 0.0, count: int = 0) -> Buffers:
    """As of a model with one running mean and one counter."""
    return Buffers(torch.tensor([float_]), torch.tensor([count]))


def good(client: int, round: int, value: float = 1.0) -> Reply:
    return Reply(client, round, 10, torch.full((P,), value), buffers(1.0, round))


class Hostile:
    """Three clients. Clients 0 and 1 are honest; in round 1 `sent` comes besides, or instead of client 2's."""

    def __init__(self, sent: Sequence[Reply], clients: int = 3) -> None:
        self.sent, self.clients = sent, clients

    def available(self) -> Sequence[int]:
        return range(self.clients)

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        if tasks[0].kind == "evaluate":
            return iter(())
        if tasks[0].round > 1:
            return iter([good(task.client, task.round) for task in tasks])
        return iter([*self.sent, good(0, 1), good(1, 1)])

    def forget_after(self, round: int) -> None:
        raise AssertionError("nothing is resumed here")


def world(**changes: Any) -> tuple[Plan, Problem]:
    data = [((torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)),) * 2 for _ in range(3)]
    problem = Problem(data, lambda: torch.nn.Linear(2, 2, bias=False))
    plan = Plan(
        rounds=100, environment=Environment(Sampled(rate=1.0)), alone=Alone(private=False), method=METHODS["fedavg"]
    )
    return replace(plan, scoring=Scoring(every=100, last=1), **changes), problem


def two_rounds(sent: Sequence[Reply], **changes: Any) -> tuple[RunState, list[dict[str, Any]]]:
    """One round with what was sent, and one in which all three behave; and the lines that a run would keep."""
    plan, problem = world(**changes)
    state, lines = RunState("", 0, torch.zeros(P), buffers(), RecoveryState()), []
    for _ in range(2):
        state, result = play_round(state, plan, problem, Hostile(sent))
        lines.append(json.loads(json.dumps(round_line(result), allow_nan=False)))
    assert torch.isfinite(state.w).all()
    return state, lines


def by_client_2(**changes: Any) -> Reply:
    return replace(good(2, 1), **changes)


def filled(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((P,), value, dtype=dtype)


REFUSED = {
    "NaN": (by_client_2(w=filled(math.nan)), "its weights hold NaN or infinity"),
    "one NaN": (by_client_2(w=torch.tensor([0.0, 0.0, 0.0, math.nan])), "its weights hold NaN or infinity"),
    "infinity": (by_client_2(w=filled(math.inf)), "its weights hold NaN or infinity"),
    "minus infinity": (by_client_2(w=filled(-math.inf)), "its weights hold NaN or infinity"),
    "1e30": (by_client_2(w=filled(1e30)), "the norm of its update is above 1e+18"),
    "1e30 in one place": (by_client_2(w=torch.tensor([0.0, 1e30, 0.0, 0.0])), "the norm of its update is above 1e+18"),
    "too short": (by_client_2(w=torch.zeros(P - 1)), "it has 3 weights, the model 4"),
    "too long": (by_client_2(w=torch.zeros(P + 1)), "it has 5 weights, the model 4"),
    "nothing": (by_client_2(w=torch.zeros(0)), "it has 0 weights, the model 4"),
    "a matrix": (by_client_2(w=torch.zeros(2, 2)), "its weights are float32 [2, 2], those of the model float32 [4]"),
    "float64": (by_client_2(w=filled(1, torch.float64)), "its weights are float64 [4]"),
    "float16": (by_client_2(w=filled(1, torch.float16)), "its weights are float16 [4]"),
    "whole numbers": (by_client_2(w=filled(1, torch.int64)), "its weights are int64 [4]"),
    "booleans": (by_client_2(w=filled(1, torch.bool)), "its weights are bool [4]"),
    "complex": (by_client_2(w=filled(1, torch.complex64)), "its weights are complex64 [4]"),
    "no weights": (by_client_2(w=None), "it has no weights, the model 4"),
    "an older round": (by_client_2(round=0), "it is a reply to round 0"),
    "a round to come": (by_client_2(round=2), "it is a reply to round 2"),
    "no samples": (by_client_2(size=0), "its number of samples"),
    "fewer than none": (by_client_2(size=-5), "its number of samples"),
    "half a sample": (by_client_2(size=0.5), "its number of samples"),
    "NaN samples": (by_client_2(size=math.nan), "its number of samples"),
    "true": (by_client_2(size=True), "its number of samples"),
    "2**41 samples": (by_client_2(size=2**41), "its number of samples"),
    "10**5000 samples": (by_client_2(size=10**5000), "its number of samples"),
    "no buffers": (by_client_2(buffers=None), "it has no buffers"),
    "NaN buffer": (by_client_2(buffers=buffers(math.nan)), "its buffers hold NaN or infinity"),
    "infinite buffer": (by_client_2(buffers=buffers(math.inf)), "its buffers hold NaN or infinity"),
    "3e38 buffer": (by_client_2(buffers=buffers(3e38)), "its buffers hold a value above 1e+18"),
    "endless counter": (by_client_2(buffers=buffers(count=2**63 - 1)), "its buffers hold an integer above"),
    "least counter": (by_client_2(buffers=buffers(count=-(2**63))), "its buffers hold an integer above"),
    "two floats": (by_client_2(buffers=Buffers(torch.zeros(2), torch.tensor([0]))), "do not fit"),
    "no counter": (by_client_2(buffers=Buffers(torch.zeros(1), torch.zeros(0).long())), "do not fit"),
    "float64 buffer": (by_client_2(buffers=Buffers(torch.zeros(1).double(), torch.tensor([0]))), "do not fit"),
    "float counter": (by_client_2(buffers=Buffers(torch.zeros(1), torch.zeros(1))), "do not fit"),
    "a failure": (by_client_2(fault="failed: out of memory"), "failed: out of memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name_and_reason_and_the_next_round_goes_on(case: str) -> None:
    sent, reason = REFUSED[case]
    state, (first, second) = two_rounds([sent])
    assert first["answered"] == [0, 1]
    assert (second["answered"], second["refused"]) == ([0, 1, 2], [])
    assert [refusal["client"] for refusal in first["refused"]] == [2]
    assert reason in first["refused"][0]["reason"]
    assert first["w_div"] == 0.0  # the honest two agree, and nothing else was counted
    assert state.w.tolist() == [1.0] * P
    assert (state.buffers.floats_F.tolist(), state.buffers.counts_I.tolist()) == ([1.0], [2])


def test_two_answers_of_one_client_count_once_and_the_first_good_one_at_that() -> None:
    spoilt, whole, again = by_client_2(w=filled(math.nan)), good(2, 1, 7.0), good(2, 1, -7.0)
    _, (first, _) = two_rounds([spoilt, whole, again])
    assert first["answered"] == [0, 1, 2]
    reasons = [refusal["reason"] for refusal in first["refused"]]
    assert reasons == ["its weights hold NaN or infinity", "it was not asked, or replied twice"]
    assert first["w_div"] == pytest.approx(2 * (2 + 2 + 4) / 3)  # around 3: 1, 1 and 7, in four coordinates


def test_who_was_not_asked_is_named_even_when_all_answers_are_in() -> None:
    strangers = [good(99, 1, 5.0), good(-1, 1, 5.0)]

    class Last(Hostile):
        def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
            honest = [good(task.client, task.round) for task in tasks]
            return iter([*honest, *strangers, good(0, 1), replace(good(1, 1), round=0)])

    plan, problem = world()
    start = RunState("", 0, torch.zeros(P), buffers(), RecoveryState())
    state, result = play_round(start, plan, problem, Last([]))
    assert [refusal.client for refusal in result.refused] == [-1, 0, 1, 99]
    assert state.w.tolist() == [1.0] * P


def test_no_answer_at_all_keeps_w() -> None:
    class Silent(Hostile):
        def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
            return iter([])

    plan, problem = world(environment=Environment(Sampled(rate=1.0), privacy=Gaussian()))
    start = RunState("", 0, filled(3.0), buffers(), RecoveryState(count=2))
    state, result = play_round(start, plan, problem, Silent([]))
    assert (state.w.tolist(), state.round, state.recovery.count) == ([3.0] * P, 1, 2)
    assert "w_div" not in round_line(result)


def test_denormals_are_numbers_like_others() -> None:
    state, (first, _) = two_rounds([by_client_2(w=filled(1e-40), buffers=buffers(1e-40, 1))])
    assert first["answered"] == [0, 1, 2]
    assert first["refused"] == []
    assert first["w_div"] == pytest.approx((2 / 3 + 2 / 3 + 4 / 3) / 3)  # around 2/3, in four coordinates
    assert state.w.tolist() == [1.0] * P


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("privacy", [None, Gaussian(S=15.0, sigma=0.0)], ids=["unclipped", "clipped"])
def test_the_longest_that_is_taken_leaves_everything_finite(aggregator: Aggregator, privacy: Gaussian | None) -> None:
    """Two opposite ones: their distance is the largest that can be asked for."""
    far = 0.49 * LONGEST  # in four coordinates
    env = Environment(Sampled(rate=1.0), privacy=privacy or Environment().privacy)
    replies = [good(0, 1, far), good(1, 1, -far), good(2, 1, far)]

    class Far(Hostile):
        def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
            return iter(replies)

    plan, problem = world(environment=env, method=replace(METHODS["fedavg"], aggregator=aggregator))
    start = RunState("", 0, torch.zeros(P), buffers(), RecoveryState())
    state, result = play_round(start, plan, problem, Far([]))
    json.dumps(round_line(result), allow_nan=False)
    assert result.answered == (0, 1, 2)
    assert torch.isfinite(state.w).all()
    if privacy is not None:
        assert float(torch.linalg.vector_norm(state.w)) <= 15.0 * (1 + 1e-6)  # whoever sent what


NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1e-45, 1e-38, 1e18, -1e18, 1e19, 3e38, math.nan, math.inf]),
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(NUMBERS, min_size=P, max_size=P), min_size=1, max_size=3),
    sizes=st.lists(st.integers(-1, 2**41), min_size=3, max_size=3),
    aggregator=st.sampled_from(AGGREGATORS),
    clipped=st.booleans(),
)
def test_whatever_numbers_come_the_line_can_be_kept(
    rows: list[list[float]], sizes: list[int], aggregator: Aggregator, clipped: bool
) -> None:
    privacy = Gaussian(S=1.0, sigma=0.001) if clipped else Environment().privacy
    sent = [Reply(i, 1, sizes[i], torch.tensor(row), buffers(1.0, 1)) for i, row in enumerate(rows)]
    environment = Environment(Sampled(rate=1.0), privacy=privacy)
    _, (first, _) = two_rounds(sent, environment=environment, method=replace(METHODS["fedavg"], aggregator=aggregator))
    assert set(first["answered"]) >= {0, 1}  # whose good answers come after, if what was sent in their name was not


def test_a_claimed_size_outweighs_all_others_unless_it_is_bounded() -> None:
    claim = by_client_2(w=filled(31.0), size=MOST_SAMPLES)
    weighted = replace(METHODS["fedavg"], aggregator=WeightedMean())
    _, (first, _) = two_rounds([claim], method=weighted)
    assert first["w_div"] == pytest.approx(2 * (30 + 30) / 3)  # w is where client 2 is
    bounded = replace(METHODS["fedavg"], aggregator=WeightedMean(most=10))
    _, (first, _) = two_rounds([claim], method=bounded)
    assert first["w_div"] == pytest.approx(2 * (10 + 10 + 20) / 3)  # the plain mean of 1, 1 and 31 is 11


def tally(hits: float, samples: float = 2.0) -> ClientTally:
    sums = torch.tensor([hits, samples], dtype=torch.float64)
    return ClientTally(samples=2, central=sums, local=sums, private=None)


SPOILT = {
    "NaN": Reply(2, 1, 10, tally=tally(math.nan)),
    "infinity": Reply(2, 1, 10, tally=tally(math.inf)),
    "no samples": Reply(2, 1, 10, tally=tally(0.0, 0.0)),
    "three times all of them": Reply(2, 1, 10, tally=tally(6.0)),
    "fewer than none": Reply(2, 1, 10, tally=tally(-1.0)),
    "1e308": Reply(2, 1, 10, tally=tally(1e308)),
    "another round": Reply(2, 0, 10, tally=tally(0.0)),
    "a stranger": Reply(77, 1, 10, tally=tally(0.0)),
    "twice": Reply(1, 1, 10, tally=tally(0.0)),
    "of size 0": Reply(2, 1, 0, tally=tally(0.0)),
    "of size -10": Reply(2, 1, -10, tally=tally(0.0)),
    "no tally": Reply(2, 1, 10),
}


@pytest.mark.parametrize("weighting", ["equal", "size"])
@pytest.mark.parametrize("case", SPOILT)
def test_scores_that_would_spoil_everyones_are_left_out(case: str, weighting: Any) -> None:
    class Judged(Hostile):
        def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
            if tasks[0].kind == "train":
                return iter([good(i, 1) for i in range(3)])
            own = [Reply(i, 1, 10, tally=tally(1.0), notes={"alpha": 0.5, "odd": math.nan}) for i in range(2)]
            return iter([*own, SPOILT[case]])

    plan, problem = world()
    plan = replace(plan, rounds=1, scoring=Scoring(last=1, weighting=weighting))
    start = RunState("", 0, torch.zeros(P), buffers(), RecoveryState())
    _, result = play_round(start, plan, problem, Judged([]))
    found = json.loads(json.dumps(round_line(result), allow_nan=False))["scores"]
    assert [client["client"] for client in found["clients"]] == [0, 1]
    assert (found["central"], found["local"], found["notes"]) == (0.5, 0.5, {"alpha": 0.5})


class Liars:
    """Ten clients that report a gain of 0. Clients 0 and 1 also tell of a recovery that is not on, and spoils all."""

    def __init__(self, liars: Sequence[int] = (0, 1)) -> None:
        self.liars = liars

    def available(self) -> Sequence[int]:
        return range(10)

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        if tasks[0].kind != "train":
            return
        for task in tasks:
            honest, worst = Paired(0.0, 1.0), Paired(-1.0, 1.0)
            own = worst if task.client in self.liars else honest if task.recovering else None
            report = GainReport(20, honest, honest, own, own)
            yield Reply(task.client, task.round, 10, torch.zeros(P), buffers(), report=report)

    def forget_after(self, round: int) -> None: ...


def ten(detection: Gain) -> tuple[Plan, Problem]:
    data = [((torch.zeros(8, 2), torch.zeros(8, dtype=torch.int64)),) * 2 for _ in range(10)]
    plan, _ = world(detection=detection, rounds=40, alone=Alone())
    return plan, Problem(data, lambda: torch.nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize("combine", ["mean", "median", "sum"])
def test_before_recovery_nobody_decides_whether_it_helps(combine: Any) -> None:
    """Two liars of ten would be the only ones that answer the question, and switch recovery off before it is on."""
    plan, problem = ten(Gain(combine=combine))
    plan = replace(plan, method=replace(plan.method, recovery=OnEvidence()))
    state = RunState("", 0, torch.zeros(P), buffers(), RecoveryState(), detection=plan.detection.begin())
    for _ in range(plan.rounds):
        state, result = play_round(state, plan, problem, Liars())
        assert state.detection is not None
        assert (state.detection.recovery, state.detection.recovered) == (None, None)
        assert result.reports == dict.fromkeys(range(10), GainReport(20, Paired(0.0, 1.0), Paired(0.0, 1.0)))
    state = replace(state, recovery=RecoveryState(on=True, detections=1))
    state, result = play_round(state, plan, problem, Liars())
    assert result.reports is not None
    assert [report.adapted for report in result.reports.values()] == [Paired(-1.0, 1.0)] * 2 + [Paired(0.0, 1.0)] * 8


def test_only_the_panel_is_heard() -> None:
    """The rest of the clients, if they were heard, would outvote it."""
    plan, problem = ten(Gain(panel=0.2))
    state = RunState("", 0, torch.zeros(P), buffers(), RecoveryState(), detection=plan.detection.begin())
    _, result = play_round(state, plan, problem, Liars(range(10)))
    assert set(result.reports or ()) == reporting_clients(plan, 10)
    assert len(result.reports or ()) == 2
