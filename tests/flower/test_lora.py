"""The divergence of B A beside that of A and B: by hand, against dense products, and in the metrics of a round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from numpy.typing import NDArray

from lindt.flower import NFLDetector
from lindt.flower.lora import measure_products, product_pairs

A, B = "h.0.attn.lora_A.weight", "h.0.attn.lora_B.weight"
I = np.eye(2)  # noqa: E741  # the field's letter
R = np.diag([2.0, 0.5])


def record(arrays: Mapping[str, Any]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(value, dtype=np.float32)) for name, value in arrays.items()})


def sending(*replies: Mapping[str, Any]) -> Any:
    """Client i replies with the i-th arrays, whatever it is sent."""

    def app(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 10, "acc": 0.5})
        content: dict[str, Any] = {"metrics": metrics}
        if message.metadata.message_type == "train":
            content["arrays"] = record(replies[int(context.node_config["partition-id"])])
        return Message(RecordDict(content), reply_to=message)

    return app


def played(*replies: Mapping[str, Any], sent: Mapping[str, Any] | None = None, **how: Any) -> MetricRecord:
    """The metrics of one round of training."""
    how = {"epsilon": 1.0} | how
    detector = NFLDetector(how.pop("strategy", None) or FedAvg(), **how)
    grid = FakeGrid(sending(*replies), len(replies))
    found = detector.start(grid, record(sent or replies[0]), num_rounds=1).train_metrics_clientapp[1]
    assert isinstance(found, MetricRecord)
    return found


AGREEING = {A: I, B: I}, {A: R @ I, B: I @ np.linalg.inv(R)}  # B A is the identity in both


def test_clients_that_agree_have_no_spread_of_products_however_far_their_factors_lie_apart() -> None:
    found = played(*AGREEING)
    # The factors differ by diag(1, -0.5) and diag(-0.5, 1): each client lies sqrt(2.5) / 2 from their mean.
    assert found["lindt-spread"] == pytest.approx(math.sqrt(2.5) / 2)
    assert found["lindt-delta"] == pytest.approx(math.sqrt(2.5) / 2)
    assert found["lindt-spread-product"] == pytest.approx(0, abs=1e-7)
    # FedAvg's factors are diag(1.5, 0.75) and diag(0.75, 1.5), whose product is 1.125 times the identity.
    assert found["lindt-delta-product"] == pytest.approx(0.125 * math.sqrt(2))


def test_delta_of_the_product_is_zero_where_the_aggregate_has_the_clients_product() -> None:
    factors = [dict(record(AGREEING[1]))] * 3
    found = measure_products(factors, record(AGREEING[0]), noisy=False)
    assert found is not None
    assert found.delta == pytest.approx(0, abs=1e-7)
    assert found.spread == pytest.approx(0, abs=1e-7)


def test_clients_that_disagree_by_hand() -> None:
    """Products I and -I: their mean is 0, and so is that of FedAvg's B; each lies sqrt(2) from it."""
    found = played({A: I, B: I}, {A: I, B: -I})
    assert found["lindt-spread-product"] == pytest.approx(math.sqrt(2))
    assert found["lindt-delta-product"] == pytest.approx(math.sqrt(2))


def dense(arrays: Mapping[str, NDArray[Any]], pairs: list[tuple[str, str]]) -> NDArray[np.float64]:
    parts = [arrays[b].reshape(len(arrays[b]), -1) @ arrays[a].reshape(len(arrays[a]), -1) for a, b in pairs]
    return np.concatenate([part.ravel() for part in parts])


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_distance_of_the_dense_products_over_all_layers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = {
        "m.q.lora_A.default.weight": (3, 5), "m.q.lora_B.default.weight": (4, 3),
        "m.conv.lora_A.weight": (2, 3, 3, 3), "m.conv.lora_B.weight": (6, 2, 1, 1),
        "m.wte.lora_embedding_A": (2, 9), "m.wte.lora_embedding_B": (4, 2),
        "m.head.weight": (2, 2),
    }  # fmt: skip
    models = [{name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(4)]
    *clients, w = [record(model) for model in models]
    pairs = product_pairs(w)
    assert len(pairs) == 3
    *products_K, product = [dense({name: array.numpy() for name, array in one.items()}, pairs) for one in (*clients, w)]
    found = measure_products([dict(client) for client in clients], w, noisy=False)
    assert found is not None
    assert found.delta == pytest.approx(np.mean([np.linalg.norm(p - product) for p in products_K]))
    mean = np.mean(products_K, 0)
    assert found.spread == pytest.approx(np.mean([np.linalg.norm(p - mean) for p in products_K]))


@pytest.mark.parametrize(
    "arrays",
    [
        {"fc.weight": I, "fc.bias": [1.0, 2.0]},  # no adapters
        {B: I},  # A is frozen and stays on the client
        {A: np.ones((3, 2)), B: np.ones((2, 2))},  # the rank is not the same
        {A: I, "h.1.attn.lora_B.weight": I},  # of two layers
    ],
)
def test_without_a_pair_there_is_no_such_metric(arrays: dict[str, Any]) -> None:
    assert not [name for name in played(arrays, arrays) if name.endswith("-product")]


def test_updates_are_added_to_w_before_they_are_multiplied() -> None:
    sent = {A: 3 * I, B: 2 * I}
    updates = [{name: model[name] - sent[name] for name in sent} for model in AGREEING]

    class Adding(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            mean, metrics = super().aggregate_train(server_round, replies)
            assert mean is not None
            return record({name: sent[name] + mean[name].numpy() for name in sent}), metrics

    found = played(*updates, sent=sent, strategy=Adding(), replies="updates")
    assert found["lindt-spread-product"] == pytest.approx(0, abs=1e-6)
    assert found["lindt-delta-product"] == pytest.approx(0.125 * math.sqrt(2), rel=1e-5)


def test_noise_of_the_server_leaves_the_spread_alone() -> None:
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(), noise_multiplier=1.0, clipping_norm=100.0, num_sampled_clients=2
    )
    found = played(*AGREEING, sent={A: 0 * I, B: 0 * I}, strategy=strategy)
    assert "lindt-delta-product" not in found
    assert found["lindt-spread-product"] == pytest.approx(0, abs=1e-7)


def test_a_strategy_may_take_the_arrays_out_of_its_replies() -> None:
    class Taking(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            replies = list(replies)
            found = super().aggregate_train(server_round, replies)
            for reply in replies:
                reply.content["arrays"].clear()
            return found

    assert played(*AGREEING, strategy=Taking())["lindt-spread-product"] == pytest.approx(0, abs=1e-7)


def test_a_product_too_large_for_a_number_is_left_out() -> None:
    huge = dict(record({A: 1e38 * I, B: 1e38 * I}))
    assert measure_products([{name: Array(a.numpy().astype(np.float64) ** 4) for name, a in huge.items()}] * 2,
                            ArrayRecord(huge), noisy=False) is None  # fmt: skip
