"""What the rules of server/updates.py do to answers over Flower, beside the cases of test_engine_flower.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from small_apps import arrays, heard, pushing
from test_engine_flower import P, asked_in, only, play, put, quick, raw, told

from lindt.flower import NFLDetector

APART = pushing([3, 4], [-3, -4], [0, 0])
ZERO = {"w": [0.0, 0.0]}


def for_another(content: RecordDict) -> None:
    """Client 3's node answers for everyone."""
    for client in range(6):
        if client != 3:
            content[f"reply-{client}"] = ConfigRecord({"about": json.dumps({"client": client, "round": 1, "size": 10})})
            content[f"weights-{client}"] = ArrayRecord({**content.array_records["weights-3"], "w": raw(torch.ones(P))})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(w=raw(torch.full((P,), float("inf")))), "NaN or infinity"),
        (put(w=raw(torch.full((P,), 1e30))), "norm of its update is above 1e+18"),
        (put(w=raw(torch.zeros(P, dtype=torch.int32), dtype="<i4")), "one vector of <f4"),
        (put(counts=raw(torch.zeros(1, dtype=torch.int64), dtype="<i8")), "do not fit"),
        (put(floats=raw(torch.zeros(2))), "do not fit"),
        (told(size=-1), "size = -1: it is not a whole number"),
        (told(fault="x" * 10**5), "failed: xxx"),
        (put(w=raw(torch.full((P,), 1e-40))), None),
        (for_another, None),
    ],
)
def test_an_answer_is_refused_by_rule_or_taken_as_it_is(
    change: Callable[[RecordDict], None], reason: str | None, tmp_path: Path
) -> None:
    plan = quick(5)
    asked = next(r for r in range(1, 6) if 3 in asked_in(plan)[r - 1])
    store, _ = play(replace(plan, rounds=asked), tmp_path, only(asked, change))
    line = store.rounds()[asked - 1]
    assert [refusal["client"] for refusal in line["refused"]] == ([3] if reason else [])
    assert set(line["answered"]) == set(line["asked"]) - ({3} if reason else set())
    if reason:
        assert reason in line["refused"][0]["reason"]
        assert len(line["refused"][0]["reason"]) <= 300


@pytest.mark.parametrize("claim", [float("inf"), float("nan"), -3.0, 2**41, [1, 2]])
def test_a_claimed_number_of_samples_that_would_spoil_a_strategys_mean_is_refused(claim: float | list[int]) -> None:
    grid = FakeGrid(APART, 3)
    liar = min(grid.contexts)

    def claims(message: Message, context: object) -> Message:
        metrics = MetricRecord({"num-examples": claim, "train_loss": 1.0})
        return Message(RecordDict({"arrays": arrays(w=[100.0, 0.0]), "metrics": metrics}), reply_to=message)

    grid.faults[liar] = claims
    detector = NFLDetector(FedAvg(fraction_evaluate=0.0), 1.0, 5)
    with heard() as said:
        result = detector.start(grid, arrays(**ZERO), num_rounds=2)
    assert any(f"refused node {liar}: its " in text for text in said)
    assert np.isfinite(result.arrays["w"].numpy()).all()
    assert detector.seen is not None
    assert detector.seen.delta == pytest.approx(2.5)  # (-3, -4) and (0, 0) around (-1.5, -2)


@pytest.mark.parametrize("claim", [0, 0.0])
def test_updates_of_no_examples_are_refused_and_the_run_goes_on(claim: float) -> None:
    """FedAvg divides by the sum of the examples: with zeros only it ended the run with ZeroDivisionError."""
    pushed = pushing([3, 4], [-3, -4], [0, 0])

    def app(message: Message, context: Context) -> Message:
        reply = pushed(message, context)
        if message.content["config"]["server-round"] == 2:
            reply.content["metrics"]["num-examples"] = claim
        return reply

    detector = NFLDetector(FedAvg(), 1.0, 5)
    with heard() as said:
        result = detector.start(FakeGrid(app, 3), arrays(w=[1.0, 2.0]), num_rounds=3)
    assert sum("round 2: refused node" in text and "num-examples is 0" in text for text in said) == 3
    assert sorted(result.train_metrics_clientapp) == sorted(result.evaluate_metrics_clientapp) == [1, 3]
    assert result.arrays["w"].numpy().tolist() == [1.0, 2.0]
    assert (detector.state.count, detector.seen is not None) == (2, True)


def test_one_update_of_no_examples_is_refused_and_the_others_count() -> None:
    app = pushing([3, 4], [-3, -4], [0, 0], sizes=(0, 10, 10))
    detector = NFLDetector(FedAvg(), 1.0, 5)
    result = detector.start(FakeGrid(app, 3), arrays(**ZERO), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [-1.5, -2.0]
    assert detector.seen is not None
    assert detector.seen.delta == pytest.approx(2.5)  # (-3, -4) and (0, 0) around (-1.5, -2)


@pytest.mark.parametrize(("sent", "reason"), [(1e6, "more than 1000 times"), (-1000.0, "never below 0")])
def test_statistics_that_cannot_be_are_refused_before_the_strategy_sees_them(
    sent: float, reason: str, tmp_path: Path
) -> None:
    """Four clients with BatchNorm; one of them sends its weights with variances that would spoil everyone's model."""

    def app(message: Message, context: object) -> Message:
        i = context.node_config["partition-id"]  # type: ignore[attr-defined]
        statistics = {"bn.running_mean": [0.0], "bn.running_var": [sent if i == 2 else 1.0 + i]}
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": arrays(w=[1.0, 2.0], **statistics), "metrics": metrics}), reply_to=message)

    start = {"w": [0.0, 0.0], "bn.running_mean": [0.0], "bn.running_var": [1.0]}
    detector = NFLDetector(FedAvg(fraction_evaluate=0.0), 1.0, 5, folder=tmp_path)
    with heard() as said:
        result = detector.start(FakeGrid(app, 4), arrays(**start), num_rounds=1)
    assert any("its buffer bn.running_var" in text and reason in text for text in said)
    assert result.arrays["bn.running_var"].numpy() == pytest.approx([(1 + 2 + 4) / 3])
    (line,) = [json.loads(text) for text in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(line["answered"]) == 3
    assert line["refused"][0]["reason"].startswith("its buffer bn.running_var")
    assert line["buffer_div"] == pytest.approx((4 / 3 + 1 / 3 + 5 / 3) / 3)
