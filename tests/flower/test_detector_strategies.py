"""NFLDetector around Flower's own strategies: it changes no byte of their results, and sees through their noise."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable, Iterator

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Result, Strategy
from small_apps import arrays, heard, pushing

from lindt.errors import UserError
from lindt.flower import NFLDetector
from lindt.flower.measure import ProbeStrategy
from lindt.server.detection.divergence import divergence
from lindt.weights import flat

K, P = 8, 40
NAMES = frozenset({"w", "b"})
fixed = flower.DifferentialPrivacyServerSideFixedClipping
adaptive = flower.DifferentialPrivacyServerSideAdaptiveClipping

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(fraction_train=0.75),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.2),
    "FedMedian": lambda: flower.FedMedian(),
    "Krum": lambda: flower.Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3),
    "Bulyan": lambda: flower.Bulyan(num_malicious_nodes=1),
    "FedAdam": lambda: flower.FedAdam(),
    "FedAdagrad": lambda: flower.FedAdagrad(),
    "FedYogi": lambda: flower.FedYogi(),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9),
    "QFedAvg": lambda: flower.QFedAvg(client_learning_rate=0.1),
    "DP fixed": lambda: fixed(FedAvg(), noise_multiplier=0.5, clipping_norm=1.0, num_sampled_clients=K),
    "DP adaptive": lambda: adaptive(FedAvg(), noise_multiplier=0.3, num_sampled_clients=K),
    "DP trimmed": lambda: fixed(flower.FedTrimmedAvg(), 0.5, 1.0, K),
    "DP client-side": lambda: flower.DifferentialPrivacyClientSideFixedClipping(FedAvg(), 0.5, 1.0, K),
    "DP client-side adaptive": lambda: flower.DifferentialPrivacyClientSideAdaptiveClipping(FedAvg(), 0.3, K),
}


@pytest.fixture(autouse=True)
def _collecting_is_cheap() -> Iterator[None]:
    """Bulyan and QFedAvg call the garbage collector for every reply."""
    gc.freeze()
    yield
    gc.unfreeze()


def wandering(message: Message, context: Context) -> Message:
    """Each client and round has an update of its own, the same in every run."""
    i, content = int(context.node_config["partition-id"]), message.content
    if message.metadata.message_type == "evaluate":
        return Message(RecordDict({"m": MetricRecord({"num-examples": 5, "acc": i / 10})}), reply_to=message)
    rng = np.random.default_rng([i, int(content["config"]["server-round"])])
    back = ArrayRecord(
        {
            name: Array(a.numpy() + rng.normal(0, 0.3, a.shape).astype(np.float32))
            for name, a in content["arrays"].items()
        }
    )
    metrics = MetricRecord({"num-examples": 5 + i, "train_loss": 1.0 + i})
    return Message(RecordDict({"arrays": back, "metrics": metrics}), reply_to=message)


def play(strategy: Strategy, name: str, rounds: int = 3) -> tuple[Result, FakeGrid]:
    random.seed(3)
    np.random.seed(3)
    mods = [adaptiveclipping_mod] if "client-side adaptive" in name else []
    mods += [fixedclipping_mod] if name == "DP client-side" else []
    app = ClientApp(mods=mods)
    app.train()(wandering)
    app.evaluate(mods=[])(wandering)
    # Flower's clipping mods refuse evaluation, which carries no norm: it goes past them.
    grid = FakeGrid(lambda m, c: wandering(m, c) if m.metadata.message_type == "evaluate" else app(m, c), K)
    start = ArrayRecord({"w": Array(np.zeros((P // 2, 2), np.float32)), "b": Array(np.ones(3, np.float32))})
    return strategy.start(grid, start, num_rounds=rounds), grid


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_byte_of_the_strategys_result_is_changed(name: str) -> None:
    bare, bare_grid = play(STRATEGIES[name](), name)
    found, grid = play(NFLDetector(STRATEGIES[name](), epsilon=1e9, patience=0), name)
    assert found.arrays.keys() == bare.arrays.keys()
    for key in bare.arrays:
        assert found.arrays[key].data == bare.arrays[key].data
    assert found.evaluate_metrics_clientapp == bare.evaluate_metrics_clientapp
    for round, metrics in bare.train_metrics_clientapp.items():
        rest = {k: v for k, v in found.train_metrics_clientapp[round].items() if not k.startswith("lindt-")}
        assert rest == dict(metrics)
        assert found.train_metrics_clientapp[round]["lindt-delta"] != 0.0
    assert [m.metadata.dst_node_id for m in grid.sent] == [m.metadata.dst_node_id for m in bare_grid.sent]
    sizes = [len(m.content["arrays"]["w"].data) for m in grid.sent]
    assert sizes == [len(m.content["arrays"]["w"].data) for m in bare_grid.sent]


def _vector(record: ArrayRecord) -> torch.Tensor:
    return flat({name: array.numpy() for name, array in record.items() if name in NAMES})


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name.startswith("DP")])
def test_the_noise_of_dp_is_recovered(name: str) -> None:
    detector = NFLDetector(STRATEGIES[name](), epsilon=1e9, patience=0)
    _, grid = play(detector, name, rounds=1)
    silent = STRATEGIES[name]()
    silent.noise_multiplier = 0.0
    clean, _ = play(silent, name, rounds=1)
    noisy, _ = play(STRATEGIES[name](), name, rounds=1)
    w, before_noise = _vector(noisy.arrays), _vector(clean.arrays)
    assert detector.seen is not None
    sent = [_vector(r.content["arrays"]) for r in grid.received if r.content.array_records]
    truth = float((w - before_noise).norm())
    assert detector.seen.noise_norm == pytest.approx(truth, rel=1e-5)
    assert detector.seen.w_div == pytest.approx(divergence(torch.stack(sent), w), rel=1e-5)
    assert detector.seen.delta == pytest.approx(detector.seen.w_div - truth, rel=1e-4)
    assert detector.seen.clean == pytest.approx(divergence(torch.stack(sent), before_noise), rel=1e-4)


def test_clipping_by_hand() -> None:
    """Updates of length 30 and S = 15, all alike: Delta is 15, the spread 0 (docs: no limit of zero)."""
    wrapped = fixed(FedAvg(), noise_multiplier=0.0, clipping_norm=15.0, num_sampled_clients=3)
    detector = NFLDetector(wrapped, 1e9, 1)
    with heard() as said:
        detector.start(FakeGrid(pushing(*[[18, 24]] * 3)), arrays(w=[0.0, 0.0]), num_rounds=5)
    assert detector.seen is not None
    assert detector.seen.delta == pytest.approx(15.0)
    assert detector.seen.spread == pytest.approx(0.0, abs=1e-5)
    assert detector.seen.clipped == 1.0
    (warning,) = [text for text in said if text.startswith("!")]
    assert "100% of the updates are clipped" in warning
    assert 'statistic="spread"' in warning


def test_a_tenth_of_clipped_updates_is_no_reason_to_warn() -> None:
    wrapped = fixed(FedAvg(), noise_multiplier=0.0, clipping_norm=15.0, num_sampled_clients=10)
    app = pushing(*[[1, 0]] * 9, [30, 0])
    with heard() as said:
        NFLDetector(wrapped, 1.0, 99).start(FakeGrid(app, 10), arrays(w=[0.0, 0.0]), num_rounds=3)
    assert not [text for text in said if "clipped" in text]


def test_the_wrong_order_is_refused_with_the_right_one() -> None:
    wrong = fixed(NFLDetector(FedAvg(), 1.0, 9), 0.5, 1.0, 3)
    with pytest.raises(UserError, match=r"NFLDetector\(DifferentialPrivacy\.\.\.\(FedAvg\(\.\.\.\)\)\)"):
        wrong.start(FakeGrid(pushing(*[[1, 1]] * 3)), arrays(w=[0.0, 0.0]), num_rounds=1)
    with pytest.raises(UserError, match="the detector must stand outside"):
        NFLDetector(wrong)
    with pytest.raises(UserError, match="a DP wrapper inside another"):
        NFLDetector(fixed(fixed(FedAvg(), 0.5, 1.0, 3), 0.5, 1.0, 3))


def test_the_dp_wrapper_stays_the_users_own_object() -> None:
    wrapper = adaptive(FedAvg(), noise_multiplier=0.3, num_sampled_clients=K)
    play(NFLDetector(wrapper, 1.0, 9), "DP adaptive")
    assert wrapper.clipping_norm != 0.1  # it has moved
    inner = wrapper.strategy
    again = NFLDetector(wrapper, 1.0, 9)  # taps are not piled up
    assert wrapper.strategy is inner
    assert isinstance(inner, ProbeStrategy)
    assert isinstance(inner.strategy, FedAvg)
    play(again, "DP adaptive", rounds=1)


def test_the_privacy_accountant_counts_as_it_did() -> None:
    config = PrivacyConfig(1e-5, 3, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.NO_AMPLIFICATION)
    counted = []
    for wrap in (lambda s: s, lambda s: NFLDetector(s, 1.0, 9)):
        wrapper = fixed(FedAvg(), 1.0, 1.0, 3, accountant=RdpAccountant(config))
        wrap(wrapper).start(FakeGrid(pushing([1, 0], [0, 1], [1, 1])), arrays(w=[0.0, 0.0]), num_rounds=2)
        counted.append(wrapper.privacy_spent())
    assert counted[0] == counted[1]
    assert counted[0].num_releases == 2


def test_a_wrapper_around_dp_changes_nothing() -> None:
    class Outer(FedAvg):
        """A user's own, around any strategy."""

        def __init__(self, strategy: Strategy) -> None:
            super().__init__()
            self.strategy = strategy

        def aggregate_train(self, server_round: int, replies: object) -> object:
            return self.strategy.aggregate_train(server_round, replies)

        def configure_train(self, *arguments: object) -> object:
            return self.strategy.configure_train(*arguments)

    one = NFLDetector(fixed(FedAvg(), 0.5, 1.0, K), 1.0, 9)
    two = NFLDetector(Outer(fixed(FedAvg(), 0.5, 1.0, K)), 1.0, 9)
    play(one, "DP fixed")
    play(two, "DP fixed")
    assert one.seen is not None
    assert one.seen.noise_norm > 0
    assert one.seen == two.seen


DP: dict[str, Callable[[], Strategy]] = {
    "fixed": lambda: fixed(FedAvg(), 0.1, 1.0, 3),
    "adaptive": lambda: adaptive(FedAvg(), 0.1, 3),
}


@pytest.mark.parametrize("name", DP)
@pytest.mark.parametrize("second", ["nobody", "errors", "zero updates"])
def test_a_round_without_a_valid_answer_does_not_end_a_private_run(second: str, name: str) -> None:
    """Flower's wrappers divide by the number of answers, and by the length of each update."""
    moved, still = pushing(*[[3, 4]] * 3), pushing(*[[0, 0]] * 3)

    def app(message: Message, context: Context) -> Message:
        if message.content["config"]["server-round"] != 2:
            return moved(message, context)
        if second == "errors":
            raise RuntimeError("no data today")
        return still(message, context)

    class Grid(FakeGrid):
        def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
            messages = list(messages)
            quiet = second == "nobody" and messages[0].content["config"]["server-round"] == 2
            return [] if quiet else super().send_and_receive(messages, timeout=timeout)

    detector = NFLDetector(DP[name](), 1.0, 5)
    result = detector.start(Grid(app, 3), arrays(w=[1.0, 2.0]), num_rounds=3)
    assert sorted(result.train_metrics_clientapp) == [1, 3]
    assert detector.seen is not None


@pytest.mark.parametrize("name", DP)
def test_one_client_that_returns_w_unchanged_does_not_end_a_private_run(name: str) -> None:
    detector, grid = NFLDetector(DP[name](), 1.0, 5), FakeGrid(pushing([3, 4], [0, 0], [3, 4]), 3)
    with heard() as said:
        detector.start(grid, arrays(w=[1.0, 2.0]), num_rounds=2)
    assert sum("its update is zero" in text for text in said) == 2
