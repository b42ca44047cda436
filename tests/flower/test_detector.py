"""NFLDetector around FedAvg, with numbers one can check by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")

import numpy as np
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedMedian, Result
from small_apps import arrays, heard, pushing

from lindt.errors import PlanError, UserError
from lindt.flower import NFLDetector
from lindt.server.recovery import QuietRounds

APART = pushing([3, 4], [-3, -4], [0, 0])  # around their mean, 0: distances 5, 5, 0
ZERO = {"w": [0.0, 0.0]}


def start(detector: NFLDetector, app: object, rounds: int = 3, nodes: int = 3) -> tuple[Result, FakeGrid]:
    grid = FakeGrid(app, nodes)
    return detector.start(grid, arrays(**ZERO), num_rounds=rounds), grid


def test_delta_by_hand() -> None:
    result, _ = start(NFLDetector(FedAvg(), epsilon=3.0, patience=1), APART)
    first, second = result.train_metrics_clientapp[1], result.train_metrics_clientapp[2]
    assert first["lindt-w-div"] == first["lindt-delta"] == first["lindt-clean"] == pytest.approx(10 / 3)
    assert (first["lindt-count"], first["lindt-negative"]) == (1, 0)
    assert (second["lindt-count"], second["lindt-negative"]) == (2, 1)  # count > r' = 1
    assert first["train_loss"] == 1.0  # the strategy's own metrics stay


def test_the_aggregate_is_what_delta_is_measured_around() -> None:
    # Weighted by 1, 1 and 2 samples the mean of (3, 4), (-3, -4), (3, 4) is (1.5, 2): distances 2.5, 7.5, 2.5.
    app = pushing([3, 4], [-3, -4], [3, 4], sizes=(1, 1, 2))
    result, _ = start(NFLDetector(FedAvg(), 1.0, 9), app, rounds=1)
    assert result.train_metrics_clientapp[1]["lindt-delta"] == pytest.approx(12.5 / 3)


def moving(**updates: list[list[float]]) -> object:
    """Client i adds updates[name][i] to the array `name`."""

    def app(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": 10})
        if message.metadata.message_type == "evaluate":
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        moved = ArrayRecord()
        for name, array in message.content["arrays"].items():
            moved[name] = Array(array.numpy() + np.array(updates[name.replace(".", "_")][client], np.float32))
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    return app


def measured(first: dict[str, list[float]], app: object) -> float | None:
    detector = NFLDetector(FedAvg(fraction_evaluate=0.0), 1.0, 9)
    result = detector.start(FakeGrid(app, 3), arrays(**first), num_rounds=2)
    assert detector.seen is not None
    told = result.train_metrics_clientapp[2].get("lindt-cosine")
    assert told == detector.seen.cosine
    return detector.seen.cosine


def test_the_cosine_is_of_the_updates_of_the_last_array_and_of_those_of_its_layer() -> None:
    """The last by the order of the model, not by name; from w = 5, where the weights themselves nearly agree."""
    first = {"z.weight": [5.0, 5.0], "a.weight": [5.0, 5.0], "a.bias": [5.0]}
    same = [[1.0, 1.0]] * 3
    # The pairs of the layer's updates (1, 0, 0), (1, 0, 0), (-1, 0, 0) have the cosines 1, -1, -1.
    app = moving(z_weight=same, a_weight=[[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0]], a_bias=[[0.0]] * 3)
    assert measured(first, app) == pytest.approx(-1 / 3)
    # At right angles, if the bias counts.
    app = moving(z_weight=same, a_weight=[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], a_bias=[[0.0], [0.0], [1.0]])
    assert measured(first, app) == pytest.approx(0.0, abs=1e-7)


def test_arrays_without_names_of_layers_have_no_cosine() -> None:
    app = moving(**{"0": [[1.0]] * 3, "1": [[1.0]] * 3})
    assert measured({"0": [5.0], "1": [5.0]}, app) is None


@pytest.mark.parametrize("patience", [0, 1])
def test_the_flag_is_in_every_message(patience: int) -> None:
    detector = NFLDetector(FedAvg(), epsilon=3.0, patience=patience)
    _, grid = start(detector, APART)
    found = [dict(message.content["config"]) for message in grid.sent]
    assert len(found) == 3 * (3 + 3)
    for config in found:
        # NFL is known once round `patience` + 1 is aggregated: its evaluation has the flag already.
        after = config["lindt-round"] > patience + 1
        assert config["lindt-recovering"] in ([True] if after else [True, False])
    trained = [m.content["config"]["lindt-recovering"] for m in grid.of("train")]
    tested = [m.content["config"]["lindt-recovering"] for m in grid.of("evaluate")]
    assert trained == [False] * 3 * (patience + 1) + [True] * 3 * (2 - patience)
    assert tested == [False] * 3 * patience + [True] * 3 * (3 - patience)
    assert len({config["lindt-experiment"] for config in found}) == 1


def test_a_message_without_config_gets_one() -> None:
    class Bare(FedAvg):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> object:
            return [Message(RecordDict({"arrays": arrays}), node, "train") for node in grid.get_node_ids()]

    _, grid = start(NFLDetector(Bare(), 3.0, 5), APART, rounds=1)
    assert [m.content["config"]["lindt-recovering"] for m in grid.of("train")] == [False] * 3


def test_recovery_stops_and_may_start_again() -> None:
    detector = NFLDetector(FedAvg(), epsilon=3.0, patience=0, stop=QuietRounds(1))
    quiet = pushing([1, 1], [1, 1], [1, 1])
    grid = FakeGrid(lambda m, c: (quiet if m.content["config"]["server-round"] == 2 else APART)(m, c), 3)
    detector.start(grid, arrays(**ZERO), num_rounds=4)
    trained = [m.content["config"]["lindt-recovering"] for m in grid.of("train")][::3]
    assert trained == [False, True, False, True]
    assert detector.state.detections == 2


def test_an_update_that_would_poison_the_mean_is_refused_by_name() -> None:
    grid = FakeGrid(APART, 4)
    spoilt = list(grid.contexts)[:3]
    bad = [
        arrays(w=[np.nan, 0.0]),
        arrays(w=[1.0, 2.0, 3.0]),
        arrays(other=[1.0, 2.0]),
    ]

    def sends(record: ArrayRecord) -> object:
        metrics = MetricRecord({"num-examples": 1, "train_loss": 1.0})
        return lambda m, c: Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=m)

    app = pushing([], [], [], [3, 4])
    grid.app = app
    for node, record in zip(spoilt, bad, strict=True):
        grid.faults[node] = sends(record)
    detector = NFLDetector(FedAvg(fraction_evaluate=0.0), 1.0, 5)
    with heard() as said:
        result = detector.start(grid, arrays(**ZERO), num_rounds=1)
    assert result.arrays["w"].numpy().tolist() == [3.0, 4.0]
    refused = [text for text in said if "refused" in text]
    assert len(refused) == 3
    assert any("NaN or infinity in w" in text and str(spoilt[0]) in text for text in refused)
    assert detector.seen is not None
    assert detector.seen.delta == 0.0


def test_a_client_that_fails_is_the_strategys_affair() -> None:
    grid = FakeGrid(APART, 3)

    def fails(message: Message, context: object) -> Message:
        raise RuntimeError("no data today")

    grid.faults[next(iter(grid.contexts))] = fails
    detector = NFLDetector(FedAvg(fraction_evaluate=0.0), 1.0, 5)
    with heard() as said:
        detector.start(grid, arrays(**ZERO), num_rounds=1)
    assert detector.seen is not None
    assert detector.seen.delta == pytest.approx(2.5)  # (-3, -4) and (0, 0)
    assert any("no data today" in text for text in said)


def test_a_round_without_answers_counts_for_nothing() -> None:
    grid = FakeGrid(APART, 3)
    grid.silent = set(grid.contexts)
    detector = NFLDetector(FedAvg(), 1.0, 0)
    detector.start(grid, arrays(**ZERO), num_rounds=2)
    assert (detector.seen, detector.state.count, detector.negative) == (None, 0, False)


def test_weights_are_what_is_learned() -> None:
    """BatchNorm's statistics and counters are no part of w."""
    record = ArrayRecord(
        {
            "bn.running_mean": Array(np.array([100.0], dtype=np.float32)),
            "bn.num_batches_tracked": Array(np.array(7)),
            "w": Array(np.zeros(2, dtype=np.float32)),
        }
    )

    def app(message: Message, context: object) -> Message:
        i = context.node_config["partition-id"]  # type: ignore[attr-defined]
        back = {name: Array(array.numpy()) for name, array in message.content["arrays"].items()}
        back["bn.running_mean"] = Array(np.array([1000.0 * i], dtype=np.float32))
        back["w"] = Array(np.array([[3, 4], [-3, -4]][i], dtype=np.float32))
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": ArrayRecord(back), "metrics": metrics}), reply_to=message)

    detector = NFLDetector(FedAvg(fraction_evaluate=0.0), 1.0, 0)
    detector.start(FakeGrid(app, 2), record, num_rounds=1)
    assert detector.seen is not None
    assert detector.seen.delta == 5.0


def test_one_client_does_not_decide_what_is_measured() -> None:
    """The first of them by id sends whole numbers where the others send floats: it is refused, they are measured."""
    grid = FakeGrid(APART, 3)
    first = min(grid.contexts)

    def whole(message: Message, context: object) -> Message:
        record = ArrayRecord({"w": Array(np.array([7, 7]))})
        metrics = MetricRecord({"num-examples": 10, "train_loss": 1.0})
        return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=message)

    grid.faults[first] = whole
    detector = NFLDetector(FedAvg(fraction_evaluate=0.0), 1.0, 5)
    with heard() as said:
        detector.start(grid, arrays(**ZERO), num_rounds=1)
    assert any(f"refused node {first}: w holds int64, and floats in the other replies" in text for text in said)
    assert detector.seen is not None
    assert detector.seen.delta == pytest.approx(2.5)  # (-3, -4) and (0, 0) around (-1.5, -2)


def test_it_warns_of_a_strategy_that_takes_no_mean_and_names_the_statistic_that_helps() -> None:
    app = pushing([1, 0], [2, 0], [9, 0])
    with heard() as said:
        start(NFLDetector(FedMedian(), 1e9, 1), app)
    (warning,) = [text for text in said if text.startswith("!")]  # once, not every round
    assert "FedMedian does not take the mean" in warning
    assert 'statistic="spread"' in warning
    with heard() as said:
        start(NFLDetector(FedAvg(), 1e9, 1), app)
        start(NFLDetector(FedMedian(), 1e9, 1, statistic="spread"), app)
    assert not [text for text in said if text.startswith("!")]


@pytest.mark.parametrize(("statistic", "watched"), [("delta", 8 / 3), ("spread", 10 / 3)])
def test_the_statistic_is_the_one_asked_for(statistic: str, watched: float) -> None:
    # Around the median 2 the distances are 1, 0, 7; around the mean 4 they are 3, 2, 5.
    app = pushing([1, 0], [2, 0], [9, 0])
    detector = NFLDetector(FedMedian(), epsilon=watched - 0.01, patience=0, statistic=statistic)
    start(detector, app, rounds=1)
    assert detector.seen is not None
    assert detector.seen.watched(statistic) == pytest.approx(watched)
    assert detector.negative


def test_a_users_own_strategy_keeps_its_methods_and_its_start() -> None:
    class Mine(FedAvg):
        note = "mine"
        best = ""

        def start(self, *arguments: object, **named: object) -> Result:
            self.best = f"of {named.pop('colour')}"
            return super().start(*arguments, **named)  # type: ignore[arg-type]

    detector, own = NFLDetector(Mine(), 1.0, 9), FakeGrid(APART, 3)
    result = detector.start(own, arrays(**ZERO), num_rounds=2, colour="blue")
    assert (detector.note, detector.best) == ("mine", "of blue")
    assert result.train_metrics_clientapp[2]["lindt-count"] == 2  # seen by the detector, round by round
    assert all("lindt-round" in m.content["config"] for m in own.sent)
    assert "configure_train" not in vars(detector.strategy)  # the object is as it was
    with pytest.raises(AttributeError):
        detector.nothing  # noqa: B018
    with pytest.raises(TypeError, match="colour"):
        NFLDetector(FedAvg(), 1.0).start(own, arrays(**ZERO), colour="blue")


def test_a_start_with_fewer_arguments_runs_or_is_refused_with_the_lines_that_do() -> None:
    class Short(FedAvg):
        def start(self, num_rounds: int, grid: Grid, initial_arrays: ArrayRecord) -> float:  # type: ignore[override]
            return float(super().start(grid, initial_arrays, num_rounds).arrays["w"].numpy()[0])

    detector, own = NFLDetector(Short(), 1.0, 9), FakeGrid(pushing([3, 4], [6, 8]), 2)
    assert detector.start(own, arrays(**ZERO), num_rounds=2) == 9.0
    for more in ({"timeout": 9.0}, {"colour": "blue"}):
        with pytest.raises(UserError, match=r"start\(\) of Short cannot be called .*detector\.begin\(arrays, rounds\)"):
            detector.start(own, arrays(**ZERO), 2, **more)  # type: ignore[arg-type]


def test_a_loop_of_ones_own() -> None:
    detector, grid = NFLDetector(FedAvg(), 3.0, 0), FakeGrid(APART, 3)
    done, w = detector.begin(arrays(**ZERO), num_rounds=1)
    assert done == 0
    replies = grid.send_and_receive(detector.configure_train(1, w, ConfigRecord(), grid))
    detector.aggregate_train(1, replies)
    assert detector.negative


def test_a_second_start_begins_anew() -> None:
    detector = NFLDetector(FedAvg(), 3.0, 1)
    counts = [start(detector, APART)[0].train_metrics_clientapp[3]["lindt-count"] for _ in range(2)]
    assert counts == [3, 3]


def test_bad_input_is_told_by_name() -> None:
    with pytest.raises(PlanError, match="epsilon"):
        NFLDetector(FedAvg(), epsilon=0)
    with pytest.raises(UserError, match="it has a detector inside it already"):
        NFLDetector(NFLDetector(FedAvg()))
    with pytest.raises(UserError, match="strategy: it is of type str; give a"):
        NFLDetector("fedavg")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no floats"):
        NFLDetector(FedAvg()).start(FakeGrid(APART), ArrayRecord({"t": Array(np.zeros(4, np.uint8))}))
