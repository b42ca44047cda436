"""Messages that anybody may have sent: taken, or refused in words; none hangs the server, ends a run or spoils it."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from untrusted import fed, seeds

from lindt.engines.flower.wire import EngineSession, pack_tasks, unpack_tasks
from lindt.flower import NFLDetector
from lindt.flower.messages import Visit
from lindt.flower.protocol import ClientReport
from lindt.flower.replies import validate_replies
from lindt.flower.vectors import values_of
from lindt.plan.problem import METRICS, MeanOf
from lindt.protocols import ClientTally, Metric, Task
from lindt.server.scores import EXACT, paired_p_value
from lindt.server.updates import failed, unpack_notes, unpack_tally

node, orders = fed("task")
server, answers = fed("reply")


@given(data=orders)
@settings(max_examples=150, deadline=None)
def test_a_node_takes_a_changed_message_or_refuses_it_in_words(data: bytes) -> None:
    node(data)


@given(data=answers)
@settings(max_examples=150, deadline=None)
def test_no_changed_answer_ends_or_spoils_a_round(data: bytes) -> None:
    server(data)


arrays = st.tuples(
    st.sampled_from(["<f4", ">f4", "<f8", "<f2", "<i8", "|u1", "|b1"]), st.lists(st.integers(0, 4), max_size=4)
)


@given(kind=arrays, fortran=st.booleans())
@settings(max_examples=100, deadline=None)
def test_values_are_those_that_numpy_reads(kind: tuple[str, list[int]], fortran: bool) -> None:
    dtype, shape = kind
    values = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    sent = Array(np.asfortranarray(values) if fortran else values)
    found = values_of(sent)
    assert np.array_equal(found, sent.numpy())
    assert found.shape == tuple(sent.shape)
    torch.as_tensor(np.array(found))  # in the machine's own byte order


def odd_array(old: bytes, new: bytes, shape: tuple[int, ...] = (2,)) -> Array:
    good = Array(np.array([1.0, 2.0], dtype=np.float32)).data
    changed = good.replace(old, new)
    changed = (
        changed.replace(b" " * (len(changed) - len(good)) + b"\n", b"\n", 1) if len(changed) > len(good) else changed
    )
    return Array("float32", shape, "numpy.ndarray", changed)


@pytest.mark.parametrize(
    "array",
    [
        odd_array(b"(2,)", b"(999999999999,)", (999999999999,)),
        odd_array(b"(2,)", b"(1000000, 1000000)", (10**6, 10**6)),
        odd_array(b"(2,)", b"(3,)"),
        odd_array(b"<f4", b"|O8"),
        odd_array(b"<f4", b"<U4"),
        odd_array(b"\x01\x00", b"\x03\x00"),
        Array("float32", (2,), "lindt.raw", bytes(8)),
        Array("float32", (2,), "numpy.ndarray", b""),
    ],
)
def test_weights_take_no_memory_for_what_they_claim(array: Array) -> None:
    with pytest.raises(ValueError):
        values_of(array)


TALLY: dict[str, Any] = {
    "samples": 10, "central": [5.0, 10.0], "local": [5.0, 10.0], "private": [5.0, 10.0], "wins": 1, "losses": 1,
    "attack_chances": 0, "attack_central": 0, "attack_local": 0,
}  # fmt: skip


def tally_of(found: Any, metric: Metric = METRICS["accuracy"], size: int = 2) -> ClientTally:
    return unpack_tally(found, metric, (size,), private=found["private"] is not None)


@pytest.mark.parametrize(
    "changes",
    [
        {"wins": 6, "losses": 6},
        {"central": [1.0, -2.0]},  # with another's [1, 2] the federation has no score
        {"local": [11.0, 10.0]},
        {"local": [1e300, 1e308]},
        {"private": [10**400, 1]},
        {"central": [float("nan"), 1.0]},
        {"samples": 0},
        {"attack_chances": 2, "attack_local": 3},
    ],
)
def test_a_tally_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    assert tally_of(TALLY).wins == 1
    with pytest.raises(ValueError):
        tally_of(TALLY | changes)


def test_sums_of_other_metrics() -> None:
    f1, own = METRICS["macro_f1"], MeanOf(lambda x, y: x)
    table = TALLY | {"private": None, "central": [3.0, 1.0, 2.0, 4.0], "local": [3.0, 1.0, 2.0, 4.0]}
    assert tally_of(table, f1, 4).samples == 10
    with pytest.raises(ValueError, match="sums that the metric cannot give"):
        tally_of(table | {"local": [3.0, -1.0, 2.0, 4.0]}, f1, 4)
    table = TALLY | {"private": None, "central": [-7.0, 10.0], "local": [-7.0, 10.0]}
    assert tally_of(table, own).central.tolist() == [-7.0, 10.0]
    with pytest.raises(ValueError, match="sums that the metric cannot give"):
        tally_of(table | {"local": [-7.0, -10.0]}, own)
    for notes in ({"a": 1e308}, {"a": 10**400}, {"a\x1b": 1.0}, {"a": True}, {str(n): 1.0 for n in range(201)}):
        with pytest.raises(ValueError):
            unpack_notes(notes)


def test_who_claims_a_billion_samples_holds_up_nobody() -> None:
    """The exact test of 2^40 samples would take years."""
    start = time.monotonic()
    assert paired_p_value(2**39, 2**39) == 1.0
    assert paired_p_value(2**40, 2**39) == 0.0
    assert time.monotonic() - start < 1
    n = EXACT + 1
    for wins in (n // 2, n // 2 + 50, n // 2 + 98, n // 2 + 130):
        assert paired_p_value(wins, n - wins) == pytest.approx(binomtest(wins, n).pvalue, abs=1e-4)


def report(**changes: Any) -> RecordDict:
    content = RecordDict()
    central, local, private = (torch.tensor([total, 4.0], dtype=torch.float64) for total in (3.0, 3.0, 2.0))
    ClientReport("a", ClientTally(4, central, local, private, 1, 0)).attach(content)
    sent = dict(content.config_records["lindt"])
    table = json.loads(str(sent["tally"]))
    sent["tally"] = json.dumps(table | {name: value for name, value in changes.items() if name in table})
    content["lindt"] = ConfigRecord(sent | {name: value for name, value in changes.items() if name not in table})
    return content


@pytest.mark.parametrize(
    "changes",
    [
        {"wins": 4, "losses": 4},
        {"central": [1e308, 4.0]},
        {"local": [5.0, 4.0]},
        {"local": [5.0, 8.0]},  # of other samples
        {"private": [-1.0, 4.0]},
        {"samples": 2**41},
        {"attack_chances": 1},
        {"percent": False, "central": [1e19, 4.0]},
        {"client": "a\x1b[31m"},
    ],
)
def test_a_report_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    found = ClientReport.detach(report())
    assert found is not None
    assert found.beta == 0.25
    with pytest.raises(ValueError):
        ClientReport.detach(report(**changes))


def play(odd: RecordDict | None, tested: RecordDict | None = None) -> tuple[NFLDetector, Any]:
    """Two honest nodes that push w to (3, 4), and one that sends `odd`, or `tested` when it is asked to evaluate."""

    def app(message: Message, context: Any) -> Message:
        hostile = context.node_config["partition-id"] == 0
        evaluating = message.metadata.message_type == "evaluate"
        metrics = MetricRecord({"num-examples": 1, "accuracy" if evaluating else "train_loss": 1.0})
        content = RecordDict({"metrics": metrics})
        if not evaluating:
            content["arrays"] = seeds.weights(w=[3.0, 4.0])
        given = tested if evaluating else odd
        return Message(given if hostile and given is not None else content, reply_to=message)

    detector = NFLDetector(FedAvg(), 1.0, 5)
    return detector, detector.start(FakeGrid(app, 3), seeds.weights(w=[0.0, 0.0]), num_rounds=2)


METRICS_SENT = MetricRecord({"num-examples": 1, "train_loss": 1.0})


def weighed(**metrics: Any) -> RecordDict:
    return RecordDict({"arrays": seeds.weights(w=[9.0, 9.0]), "metrics": MetricRecord(metrics)})


@pytest.mark.parametrize(
    "odd",
    [
        weighed(**{"num-examples": math.inf, "train_loss": 1.0}),
        weighed(**{"num-examples": math.nan, "train_loss": 1.0}),
        weighed(**{"num-examples": -5, "train_loss": 1.0}),
        weighed(**{"num-examples": [1, 2], "train_loss": 1.0}),
        weighed(train_loss=1.0),
        weighed(**{"num-examples": 1, "other": 1.0}),
        weighed(**{"num-examples": 1, "train_loss": [1.0, 2.0]}),
        RecordDict({"arrays": seeds.weights(w=[9.0, 9.0])}),
        RecordDict({"other": seeds.weights(w=[9.0, 9.0]), "metrics": METRICS_SENT}),
        RecordDict({"arrays": ArrayRecord({"w": odd_array(b"(2,)", b"(999999999999,)")}), "metrics": METRICS_SENT}),
    ],
)  # fmt: skip
def test_one_odd_answer_neither_ends_the_run_nor_counts(odd: RecordDict) -> None:
    """Flower's strategies end it over records and metrics that differ, and weigh by whatever number they are told."""
    _, result = play(odd)
    assert result.arrays["w"].numpy().tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    "tested",
    [
        RecordDict({"metrics": MetricRecord({"num-examples": math.nan, "accuracy": 1.0})}),
        RecordDict({"metrics": MetricRecord({"accuracy": 1.0})}),
        RecordDict({"other": MetricRecord({"num-examples": 1, "accuracy": 1.0})}),
        RecordDict(),
    ],
)
def test_one_odd_evaluation_does_not_end_the_run_either(tested: RecordDict) -> None:
    _, result = play(None, tested)
    assert [record["accuracy"] for record in result.evaluate_metrics_clientapp.values()] == [1.0, 1.0]


def test_what_clients_say_steers_no_terminal_and_no_task_comes_twice() -> None:
    task = Task("train", "ab", 3, 1, seeds.W, seeds.BUFFERS, False)
    assert failed(task, "no\x1b[2J\n way\x00!").fault == "no [2J way !"
    for tasks in ([task, task], [task, Task("train", "ab", 4, 1, seeds.W, seeds.BUFFERS, False), task]):
        with pytest.raises(ValueError, match="has a client twice"):
            unpack_tasks(pack_tasks(tasks, EngineSession("cd")))


def test_of_two_answers_of_one_node_the_first_good_one_counts() -> None:
    def reply(value: float) -> Message:
        content = RecordDict({"arrays": seeds.weights(w=[value, 0.0]), "metrics": METRICS_SENT})
        return Message(content, reply_to=Message(RecordDict(), 7, "train"))

    found = validate_replies([reply(math.nan), reply(5.0), reply(6.0)], seeds.weights(w=[0.0, 0.0]), "num-examples")
    assert [w[0].tolist() for w in found.w_K] == [[5.0, 0.0]]
    assert len(found.passed) == 1
    assert list(found.refused.values()) == ["it was not asked, or replied twice"]


@pytest.mark.parametrize("score", ["eval_acc\n[WARNING] lindt: all is well", "\x1b[2J", "a" * 201])
def test_a_visits_score_cannot_write_lines_of_its_own_into_the_log(score: str) -> None:
    assert Visit.unpack(Visit("7", score="eval_acc, higher is better").pack()).score == "eval_acc, higher is better"
    with pytest.raises(ValueError, match=r"visit\.score"):
        Visit.unpack(Visit("7", score=score).pack())
