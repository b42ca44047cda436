"""What the detector measures in chunks is what a straightforward computation gives; its memory does not grow with K.

Legend: K clients answering, P weights.
"""

from __future__ import annotations

import gc
import math
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import pytest

pytest.importorskip("flwr")

import numpy as np
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy, dp_fixed_clipping

from lindt.flower import NFLDetector, vectors
from lindt.flower.replies import validate_replies
from lindt.protocols import Divergence

SHAPES = {"a.weight": (7, 11), "b.weight": (40, 30), "head.bias": (5,), "head.weight": (5, 40)}
TYPES = {"a.weight": np.float32, "b.weight": np.float32, "head.bias": np.float32, "head.weight": np.float64}
SIZES = [3, 10, 40, 10, 1, 25]  # of the clients
K, S = len(SIZES), 6.0
fixed = flower.DifferentialPrivacyServerSideFixedClipping


def drawn(seed: int, scale: float) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {name: (scale * draw.standard_normal(shape)).astype(TYPES[name]) for name, shape in SHAPES.items()}


W = drawn(99, 1.0)
# Of lengths from 3 to 16: some are clipped at S = 6. All move the same way, too.
MOVED = {i: {n: W[n] + drawn(7, 0.1)[n] + drawn(i, 0.1 + 0.08 * i)[n] for n in SHAPES} for i in range(K)}


def client(message: Message, context: Context) -> Message:
    i = int(context.node_config["partition-id"])
    values = {name: np.asfortranarray(value) if i % 2 else value for name, value in MOVED[i].items()}
    if message.metadata.message_type == "evaluate":
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
    arrays = ArrayRecord({name: Array(value.astype(TYPES[name], order="K")) for name, value in values.items()})
    metrics = MetricRecord({"num-examples": SIZES[i], "train_loss": 1.0 + i})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def vector(values: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.float64(values[name]).reshape(-1) for name in sorted(SHAPES)])


def measured(strategy: Strategy) -> tuple[Divergence, np.ndarray]:
    """What the detector sees in one round, and the new w."""
    detector = NFLDetector(strategy, epsilon=1e9, patience=0)
    np.random.seed(1)
    sent = ArrayRecord({name: Array(value) for name, value in W.items()})
    result = detector.start(FakeGrid(client, K), sent, num_rounds=1)
    assert detector.seen is not None
    return detector.seen, vector({name: array.numpy() for name, array in result.arrays.items()})


def mean_distance(rows: list[np.ndarray], other: np.ndarray) -> float:
    return float(np.mean([np.linalg.norm(row - other) for row in rows]))


def cosine_of(rows: list[np.ndarray]) -> float:
    start = sum(int(np.prod(SHAPES[name])) for name in SHAPES if not name.startswith("head"))
    units = [row[start:] / np.linalg.norm(row[start:]) for row in rows]
    return float(np.mean([units[i] @ units[j] for i in range(K) for j in range(i)]))


@pytest.fixture(params=["one chunk", "many chunks"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        monkeypatch.setattr(vectors, "CHUNK", K * 37)
        monkeypatch.setattr(vectors, "LEAST", 37)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize(
    "strategy",
    [FedAvg, lambda: flower.FedAdam(eta=0.3), lambda: flower.Krum(num_malicious_nodes=1), flower.FedMedian],
)
def test_statistics_are_those_of_the_straightforward_computation(strategy: Callable[[], Strategy]) -> None:
    seen, w = measured(strategy())
    rows, base = [vector(MOVED[i]) for i in range(K)], vector(W)
    far = [float(np.linalg.norm(row - w)) for row in rows]
    assert seen.w_div == pytest.approx(np.mean(far), rel=1e-6)
    assert seen.delta == seen.w_div == seen.clean
    assert seen.median == pytest.approx(np.median(far), rel=1e-6)
    assert seen.spread == pytest.approx(mean_distance(rows, np.mean(rows, 0)), rel=1e-6)
    assert seen.cosine == pytest.approx(cosine_of([row - base for row in rows]), abs=1e-6)
    assert (seen.clipped, seen.noise_norm) == (0.0, 0.0)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("clip_norm", [S, 1e-4])  # at 1e-4 float32 does not hold enough of the clipped update
def test_statistics_under_noise_and_clipping_on_the_server(clip_norm: float) -> None:
    seen, w = measured(fixed(FedAvg(), 0.7, clip_norm, K))
    rows, base = [vector(MOVED[i]) for i in range(K)], vector(W)
    lengths = [float(np.linalg.norm(row - base)) for row in rows]
    clipped = [base + (row - base) * min(1.0, clip_norm / length) for row, length in zip(rows, lengths, strict=True)]
    aggregate = sum(size * row for size, row in zip(SIZES, clipped, strict=True)) / sum(SIZES)
    assert sum(length > clip_norm for length in lengths) > 0
    assert seen.clipped == sum(length > clip_norm for length in lengths) / K
    assert seen.w_div == pytest.approx(mean_distance(rows, w), rel=2e-6)
    assert seen.clean == pytest.approx(mean_distance(rows, aggregate), rel=2e-6)
    if clip_norm == S:
        assert 0 < seen.clipped < 1
        assert seen.noise_norm == pytest.approx(float(np.linalg.norm(w - aggregate)), rel=1e-5)
        assert seen.spread == pytest.approx(mean_distance(clipped, np.mean(clipped, 0)), rel=2e-6)
        assert seen.cosine == pytest.approx(cosine_of([row - base for row in rows]), abs=1e-5)


def test_clients_that_agree_have_a_divergence_of_zero_and_no_rounding() -> None:
    """The expansion of |a - b|^2 would leave the square root of float32's rounding."""

    def alike(message: Message, context: Context) -> Message:
        context = Context(1, context.node_id, {"partition-id": 0}, context.state, {})
        return client(message, context)

    detector = NFLDetector(flower.FedAvg(), epsilon=1e9, patience=0)
    sent = ArrayRecord({name: Array(value) for name, value in W.items()})
    detector.start(FakeGrid(alike, 2), sent, num_rounds=1)  # of 2, a mean without rounding
    assert detector.seen is not None
    assert (detector.seen.w_div, detector.seen.spread) == (0.0, 0.0)


@final
class Near(FedAvg):
    """The mean, moved by a share of the way to the last client."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        arrays, metrics = super().aggregate_train(server_round, replies)
        moved = {n: np.float64(a.numpy()) + self.share * (MOVED[K - 1][n] - a.numpy()) for n, a in arrays.items()}
        return ArrayRecord({n: Array(value.astype(TYPES[n])) for n, value in moved.items()}), metrics


EXACT: dict[str, Callable[[], Strategy]] = {
    "1e-5 from the mean": lambda: Near(1e-5),
    "1e-3 from the mean": lambda: Near(1e-3),
    "momentum": lambda: flower.FedAvgM(server_learning_rate=0.999, server_momentum=0.9),
    "FedAdam": lambda: flower.FedAdam(eta=1e-3),
    "trimmed mean": lambda: flower.FedTrimmedAvg(beta=0.2),
}


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("name", EXACT)
def test_an_aggregate_near_the_mean_is_measured_from_itself(name: str) -> None:
    seen, w = measured(EXACT[name]())
    far = [float(np.linalg.norm(vector(MOVED[i]) - w)) for i in range(K)]
    assert seen.w_div == pytest.approx(np.mean(far), rel=1e-6)
    assert seen.median == pytest.approx(np.median(far), rel=1e-6)


def test_a_pass_over_all_replies_runs_in_two_threads_and_keeps_the_order() -> None:
    both = threading.Barrier(2, timeout=20)

    def work(part: Sequence[int]) -> list[int]:
        both.wait()  # broken where one part runs after the other
        return [value * value for value in part]

    assert vectors.in_parts(work, range(5)) == [[0, 1, 4], [9, 16]]


@pytest.mark.parametrize("count", range(4))
def test_each_item_is_in_one_part(count: int) -> None:
    parts = vectors.in_parts(list, range(count))
    assert [item for part in parts for item in part] == list(range(count))


def test_a_part_is_quiet_about_values_that_are_not_finite_and_passes_errors_on() -> None:
    """A thread does not inherit numpy's settings; warnings are errors here."""
    infinite = np.full(2, np.inf)
    assert all(np.isnan(part).all() for part in vectors.in_parts(lambda part: infinite - infinite, range(2)))
    with pytest.raises(ZeroDivisionError):
        vectors.in_parts(lambda part: 1 // part[0], range(2))


def replies_of(values: list[Any], sizes: list[Any] | None = None) -> list[Message]:
    """Each a reply with an array w, and its size."""
    grid = FakeGrid(client, list(range(1, len(values) + 1)))
    sent = ArrayRecord({"w": Array(np.ones(3, np.float32)), "n": Array(np.zeros(1, np.int64))})
    asked = list(FedAvg().configure_train(1, sent, ConfigRecord(), grid))
    asked.sort(key=lambda message: message.metadata.dst_node_id)
    found = []
    for place, (message, value) in enumerate(zip(asked, values, strict=True)):
        arrays = ArrayRecord({"w": Array(np.asarray(value)), "n": Array(np.zeros(1, np.int64))})
        metrics = MetricRecord({"num-examples": sizes[place] if sizes else 1 + place})
        found.append(Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message))
    return found


GOOD, BAD = [1.5, 2.0, 3.0], [1.0, math.nan, 1.0]
FAULTS: dict[str, tuple[list[Any], list[Any] | None]] = {
    "NaN": ([np.float32(GOOD), np.float32(BAD), np.float32([0, 1, 2])], None),
    "infinity": ([np.float32([1, math.inf, 0]), np.float32(GOOD), np.float32(GOOD)], None),
    "too large": ([np.float32([1e30, 0, 0]), np.float32(GOOD), np.float32([9e17, 9e17, 0])], None),
    "large, and good": ([np.float32([9e17, 0, 0]), np.float32(GOOD), np.float32([0, 6e17, 0])], None),
    "too large for float32": ([np.float64([1e60, 0, 0]), np.float32(GOOD), np.float64([1e17, 0, 0])], None),
    "float16": ([np.float16([6e4, 0, 0]), np.float16(BAD), np.float16(GOOD)], None),
    "two faults": ([np.float32(BAD), np.float32(GOOD), np.float32(GOOD)], [0, 0, 5]),
    "integers": ([np.int32([1, 2, 3]), np.float32(GOOD), np.float32(GOOD)], None),
    "zero update": ([np.float32([1, 1, 1]), np.float32(GOOD), np.float32(BAD)], None),
    "all": ([np.float32(BAD)] * 3, None),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("clipping", ["clients", "server"])
@pytest.mark.parametrize("updates", [False, True])
def test_one_pass_refuses_what_a_look_at_each_array_refuses(name: str, clipping: str, updates: bool) -> None:
    sent = ArrayRecord({"w": Array(np.ones(3, np.float32)), "n": Array(np.zeros(1, np.int64))})
    values, sizes = FAULTS[name]
    replies = replies_of(values, sizes)
    plain = validate_replies(replies, sent, "num-examples", updates=updates)
    found = validate_replies(
        replies,
        sent,
        "num-examples",
        clipping=True,
        clipped_here=clipping == "server",
        updates=updates,
    )
    zero = {1: "its update is zero, and Flower's clipping would divide by its length"}
    expected = zero if name == "zero update" and clipping == "server" and not updates else {}
    assert found.refused == plain.refused | expected
    assert found.nodes == [node for node in plain.nodes if node not in expected]
    if found.nodes:
        base = 0.0 if updates else 1.0
        lengths = [float(np.linalg.norm(np.float64(values[node - 1]) - base)) for node in found.nodes]
        assert found.lengths_K == pytest.approx(lengths, rel=1e-6)


WEIGHTS = 400_000  # P


@pytest.fixture
def _collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A record of Flower's is in a cycle: the one that clipping replaces goes when garbage is collected."""
    clip = dp_fixed_clipping.compute_clip_model_update

    def collect_and_clip(*arguments: Any, **named: Any) -> None:
        gc.collect()
        clip(*arguments, **named)

    monkeypatch.setattr(dp_fixed_clipping, "compute_clip_model_update", collect_and_clip)
    gc.freeze()
    yield
    gc.unfreeze()


def peak_of(
    strategy: Callable[[int], Strategy], clients: int, *, weights: int = WEIGHTS, detects: bool = True
) -> float:
    """How much one aggregation takes above what was there when the replies had come, in vectors of P floats."""
    played = NFLDetector(strategy(clients), replies="weights") if detects else strategy(clients)
    draw, nodes = np.random.default_rng(0), list(range(1, clients + 1))
    tracemalloc.start()
    try:
        arrays = ArrayRecord({"fc.weight": Array(draw.standard_normal(weights, dtype=np.float32))})
        if isinstance(played, NFLDetector):
            _, arrays = played.begin(arrays, 2)
        grid = FakeGrid(client, nodes)
        replies = []
        for message in played.configure_train(1, arrays, ConfigRecord(), grid):
            moved = arrays["fc.weight"].numpy() + draw.standard_normal(weights, dtype=np.float32)
            content = {"arrays": ArrayRecord({"fc.weight": Array(moved)}), "m": MetricRecord({"num-examples": 1})}
            replies.append(Message(RecordDict(content), reply_to=message))
        del message, moved, content
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        played.aggregate_train(1, replies)
        return (tracemalloc.get_traced_memory()[1] - before) / (4 * weights)
    finally:
        tracemalloc.stop()


@pytest.mark.usefixtures("_collected")
@pytest.mark.parametrize(
    "strategy",
    [lambda k: FedAvg(), lambda k: fixed(FedAvg(), 0.1, 1.0, k), lambda k: flower.FedTrimmedAvg(beta=0.0)],
    ids=["FedAvg", "DP", "FedTrimmedAvg"],
)
def test_memory_does_not_grow_with_the_number_of_clients(
    strategy: Callable[[int], Strategy], request: pytest.FixtureRequest
) -> None:
    # Two threads hold their chunks at the same time or one after the other: with a larger P this is a small share.
    few, many = (peak_of(strategy, clients, weights=10 * WEIGHTS) for clients in (4, 12))
    own = 24 if "Trimmed" in request.node.name else 0  # FedTrimmedAvg stacks all clients itself, three times
    assert many - few < 1 + own, (few, many)


@pytest.mark.usefixtures("_collected")
@pytest.mark.parametrize("strategy", [lambda k: FedAvg(), lambda k: fixed(FedAvg(), 0.1, 1.0, k)], ids=["FedAvg", "DP"])
def test_it_adds_at_most_three_vectors_to_the_memory_of_the_strategy(strategy: Callable[[int], Strategy]) -> None:
    """w^0, which is there before the replies, is one of the three. Chunks have a constant size: P is larger here."""
    alone, detects = (peak_of(strategy, 6, weights=10 * WEIGHTS, detects=detects) for detects in (False, True))
    assert detects - alone <= 2, (alone, detects)
