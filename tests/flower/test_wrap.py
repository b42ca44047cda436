"""wrap(app) and NFLDetector by themselves: scores, states, private models, errors, traffic and refusals."""

from __future__ import annotations

import io
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from apps.federation import CLIENTS, evaluated, tensors, trained
from apps.other_apps import AddUpdates, counting, custom_mods, function_mods, updates, with_functions, zeros
from apps.torch_apps import CASES, Keeping, Transformer, first, net, one_output, personal, private_sgd, transformer
from fake_grid import FakeGrid, over_the_wire
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import FedAvg
from rich.console import Console
from small_apps import heard
from test_wrap_apps import play, two_lines, visits
from torch.nn.functional import binary_cross_entropy_with_logits

from lindt.errors import UserError
from lindt.flower import Dual, LindtMod, NFLDetector, wrap
from lindt.flower.client_app import mods_of, pause, pulled, tries_again
from lindt.flower.dp_sgd import noticing_dp_sgd
from lindt.flower.messages import START, Instruction, Visit, pack_records, unpack_records, without_instruction
from lindt.flower.scoring import Score, compared, score_of
from lindt.flower.vault import LocalModel, ModelVersions, Vault
from lindt.gains import GainReport, Paired
from lindt.report.reading import read_run
from lindt.report.terminal import show
from lindt.report.verdict import verdict
from lindt.server.detection.gain import Gain
from lindt.server.updates import unpack_report


def table(**metrics: Any) -> RecordDict:
    return RecordDict({"metrics": MetricRecord({"num-examples": 20, **metrics})})


class TestScore:
    def test_accuracy_before_loss_before_a_question(self) -> None:
        assert score_of(table(eval_acc=0.5, eval_loss=2.0), None, "num-examples") == Score(0.5, True, 20, 2.0)
        assert score_of(table(eval_loss=2.0), None, "num-examples") == Score(-2.0, False, 20, 2.0)
        for unclear in ({"auc": 0.5}, {"acc": 0.5, "balanced_acc": 0.4}, {"loss": 1.0, "val_loss": 2.0}):
            with pytest.raises(UserError, match="which of them is the score"):
                score_of(table(**unclear), None, "num-examples")
        steps = table(accumulated_steps=3.0, loss=2.0)  # no accuracy
        assert score_of(steps, None, "num-examples") == Score(-2.0, False, 20, 2.0)
        assert score_of(table(auc=0.5, loss=1.0), "auc", "num-examples").value == 0.5
        assert score_of(table(rmse=3.0), "-rmse", "num-examples").value == -3.0
        assert score_of(table(a=3.0, no_error=0.9), lambda m: m["no_error"], "num-examples").value == 0.9
        assert score_of(table(a=3.0, b=4.0), lambda m: m["a"] / m["b"], "num-examples").value == 0.75

    @pytest.mark.parametrize(
        ("metrics", "complaint"),
        [({"acc": math.nan}, "score is nan"), ({"acc": 101.0}, "accuracy is 101"), ({"acc": -0.1}, "accuracy is -0.1")],
    )
    def test_what_is_no_score_is_said(self, metrics: dict[str, float], complaint: str) -> None:
        with pytest.raises(UserError, match=complaint):
            score_of(table(**metrics), None, "num-examples")
        with pytest.raises(UserError, match="'samples', the number of samples"):
            score_of(table(acc=0.5), None, "samples")

    def test_a_loss_of_which_more_would_be_better_is_refused(self) -> None:
        for name in ("eval_loss", "Error-rate"):
            with pytest.raises(UserError, match=f"lower is better: write score='-{name}'"):
                score_of(table(**{name: 0.3}), name, "num-examples")
            assert score_of(table(**{name: 0.3}), f"-{name}", "num-examples").words == f"{name}, lower is better"

    def test_a_share_of_another_name_is_an_accuracy(self) -> None:
        found = score_of(table(hit_rate=0.25), "hit_rate", "num-examples", share=True)
        assert found == Score(0.25, True, 20)
        assert found.words == "hit_rate, higher is better (a share)"
        assert score_of(table(hit_rate=0.25), lambda m: 1 - m["hit_rate"], "num-examples", share=True).share
        for value in (-0.1, 1.1, 25.0):
            with pytest.raises(UserError, match="share=True says that it is a share; it must be from 0 to 1"):
                score_of(table(hit_rate=value), "hit_rate", "num-examples", share=True)
        with pytest.raises(UserError, match="name the score that is a share"):
            wrap(ClientApp(), share=True)
        with pytest.raises(UserError, match=r"score=lambda metrics: 1 - metrics\['error_rate'\]"):
            wrap(ClientApp(), score="-error_rate", share=True)

    def test_two_accuracies_by_hand(self) -> None:
        """Of 10 samples one model has 9 right, the other 8: at most 3 differ."""
        assert compared(Score(0.9, True, 10), Score(0.8, True, 10)) == Paired(pytest.approx(0.1), pytest.approx(0.3))
        assert compared(Score(0.1, True, 10), Score(0.2, True, 10)).square == pytest.approx(0.3)
        assert compared(Score(-1.0, False, 10), Score(-3.0, False, 10)) == Paired(0.5, 1.0)
        assert compared(Score(0.0, False, 10), Score(0.0, False, 10)).mean == 0.0

    def test_the_bound_is_never_below_the_true_square(self) -> None:
        rng = np.random.default_rng(0)
        for _ in range(200):
            first, second = (rng.random(12) < rng.random() for _ in range(2))
            bound = compared(Score(first.mean(), True, 12), Score(second.mean(), True, 12)).square
            assert bound >= np.square(first.astype(float) - second).mean() - 1e-12


def test_a_private_model_pauses_when_neither_score_nor_loss_gets_better() -> None:
    assert not pause([0.5] * 4, [None] * 4, 4)
    assert pause([0.5, 0.6, 0.6, 0.5, 0.6, 0.6], [None] * 6, 6) == "plateau"
    assert not pause([0.5, 0.6, 0.6, 0.5, 0.6, 0.7], [None] * 6, 6)
    # The accuracy stands still, the loss falls by more than a hundredth.
    assert not pause([0.5] * 6, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 6)
    assert pause([0.5] * 6, [1.0, 0.9, 0.8999, 0.8998, 0.8997, 0.8996], 6) == "plateau"
    # Without a loss, or with one that never fell, half of the calls count.
    climbed = [0.1 * n for n in range(10)]
    for losses in ([None] * 20, [1.0] * 20):
        assert not pause(climbed + climbed[-1:] * 8, losses[:18], 20)
        assert pause(climbed + climbed[-1:] * 9, losses[:19], 20) == "plateau"
    assert pause(climbed + climbed[-1:] * 4, [2.0] + [1.0] * 13, 20) == "plateau"
    # 100 calls, and later as many as w has had rounds.
    rising = [float(n) for n in range(100)]
    assert pause(rising, [None] * 100, 100) == "cap"
    assert not pause(rising, [None] * 100, 101)


def test_a_paused_private_model_tries_again_while_w_is_above_it() -> None:
    def again(scores: list[float], rounds: int, w: float, share: bool = True) -> bool:
        return tries_again(scores, [None] * len(scores), rounds, Score(w, share, 10))

    risen = [0.5, 0.6, 0.7, 0.6, 0.6, 0.6, 0.6]
    assert [again(risen, rounds, 0.8) for rounds in (14, 15)] == [False, True]  # half as many calls as rounds
    assert not again(risen, 100, 0.6)
    flat = [0.1, 0.1, 0.15, 0.1, 0.1, 0.1, 0.1]  # one better score may be chance
    assert [again(flat, rounds, 0.1) for rounds in (7, 8)] == [False, True]
    assert not again(flat, 100, 0.05)
    assert not again([1.0] * 6, 100, 1.0)  # it cannot get better
    assert again([1.0] * 6, 100, 1.0, share=False)
    assert not again([0.1 * n for n in range(7)], 100, 1.0)  # it is not on a plateau


def late(flat: int = 10, best: float = 0.95, **more: float) -> ClientApp:
    """Client i adds 1 to coordinate i. Alone, the score is flat in the first calls and then rises to `best`; that of w
    rises from round 1, to 0.8."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        w = msg.content["arrays"]["w"].numpy().copy()
        w[context.node_config["partition-id"]] += 1.0
        return trained(msg, ArrayRecord({"w": Array(w)}), {"num-examples": 4})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        w = msg.content["arrays"]["w"].numpy()
        alone, calls = np.count_nonzero(w) == 1, w.sum()
        score = min(best, 0.1 + max(0.0, calls - flat) / 10) if alone else min(0.8, 0.1 + calls / 20)
        return evaluated(msg, acc=score, num_examples=100, **more)

    return app


class TestAPrivateModelThatLearnsLate:
    """It used to be finished after 6 calls, and federation "helped"."""

    def test_federation_does_not_help_where_it_hurts(self, tmp_path: Path) -> None:
        detector = NFLDetector(FedAvg(fraction_evaluate=0.0), recover=False)
        result = detector.start(FakeGrid(wrap(late(), folder=tmp_path), 4), zeros(), 40)
        found = list(result.train_metrics_clientapp.values())
        assert all(metrics["lindt-verdict"] != 1 for metrics in found)
        assert found[-1]["lindt-gain"] == pytest.approx(-0.15)

    def test_where_w_is_better_it_costs_half_a_call_per_round(self, tmp_path: Path) -> None:
        grid = FakeGrid(wrap(late(flat=0, best=0.5), folder=tmp_path), 4)
        detector = NFLDetector(FedAvg(fraction_evaluate=0.0))
        detector.start(grid, zeros(), 40)
        calls = [visit.calls for visit in visits(grid)]
        assert sum(calls) / 4 == 20
        assert sum(calls[80:]) / 4 <= 10
        assert detector.verdict is not None
        assert detector.verdict.state == "helps"

    def test_the_most_calls_grow_with_the_rounds_and_are_not_called_finished(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("lindt.flower.client_app.MOST_CALLS", 6)
        grid = FakeGrid(wrap(late(flat=0, best=9.0), folder=tmp_path), 2)
        with heard() as said:
            NFLDetector(FedAvg(fraction_evaluate=0.0)).start(grid, zeros(), 9)
        assert [visit.calls for visit in visits(grid)][::2] == [2, 2, 2, 0, 0, 0, 1, 1, 1]
        assert sorted(text for text in said if "its private model" in text) == [
            f"client {client}: its private model stopped after 6 calls, while it still improved" for client in range(2)
        ]

    def test_one_that_never_learned_is_told_by_the_server(self, tmp_path: Path) -> None:
        app = wrap(late(flat=999), folder=tmp_path)
        with heard() as said:
            NFLDetector(FedAvg(fraction_evaluate=0.0)).start(FakeGrid(app, 4), zeros(), 8)
        assert [text for text in said if "without ever improving" in text] == [
            "! round 3: the private model of client 0, 1, 2, 3 paused without ever improving on its first score; until "
            "it does, a gain over it says little"
        ]


def test_v_is_pulled_a_quarter_of_the_way_and_what_has_no_mean_is_w() -> None:
    def record(weight: list[float], count: int, mask: float) -> ArrayRecord:
        return ArrayRecord(
            {"w": Array(np.float32(weight)), "n": Array(np.int64([count])), "m": Array(np.float32([mask]))}
        )

    found = pulled(record([1.0, 3.0], 5, -np.inf), record([3.0, 1.0], 9, -np.inf))
    assert found["w"].numpy().tolist() == [1.5, 2.5]
    assert found["n"].numpy().tolist() == [9]
    assert found["m"].numpy().tolist() == [-np.inf]


def test_records_as_bytes_and_back() -> None:
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(np.float32([1.5, np.nan])), "empty": Array(np.zeros((0, 3)))}),
            "m": MetricRecord({"a": 1, "b": 0.1, "c": [1.0, math.inf]}),
            "c": ConfigRecord({"s": "x", "t": True, "raw": b"\x00\xff", "list": [b"1", b"2"], "none": []}),
        }
    )
    packed = pack_records(content)
    found = unpack_records(packed)
    assert pack_records(found) == packed
    assert found["arrays"]["w"].data == content["arrays"]["w"].data
    assert dict(found["c"]) == dict(content["c"])
    for cut in range(0, len(packed), 7):
        with pytest.raises(ValueError):
            unpack_records(packed[:cut])


def test_a_damaged_model_is_told_with_its_file(tmp_path: Path) -> None:
    versions = ModelVersions(tmp_path)
    order = Instruction("e", "s", 0, 3, 1, True)
    model = LocalModel(zeros(), RecordDict({"head": zeros()}), {"scores": [0.5]})
    versions.write(model, order)
    kept = versions.newest(up_to=3)
    assert kept is not None
    assert (kept.notes, kept.state["head"]["w"].data) == ({"scores": [0.5]}, zeros()["w"].data)
    assert versions.newest(up_to=2) is None
    path = next(tmp_path.glob("*.model"))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"round-000003\.model is damaged"):
        versions.newest(up_to=3)


def test_the_app_sees_the_message_as_it_is_without_us() -> None:
    grid = FakeGrid(lambda m, c: m, 1)
    (node,) = grid.contexts
    for records in ({}, {"config": ConfigRecord()}, {"config": ConfigRecord({"lr": 0.1})}):
        given: Any = {name: ConfigRecord(dict(record)) for name, record in records.items()}
        message = Message(RecordDict({"arrays": zeros(), **given}), dst_node_id=node, message_type="train")
        Instruction("e", "s", 0, 1, 0, False, True).put(message)
        found = without_instruction(message.content)
        assert found.keys() == {"arrays", *records}
        assert all(dict(found[name]) == dict(record) for name, record in records.items())


def test_no_torch_is_imported_for_an_app_without_it() -> None:
    code = (
        "import sys; from flwr.clientapp import ClientApp; from lindt.flower import wrap; "
        "app = wrap(ClientApp()); assert isinstance(app, ClientApp); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_mods_are_found_around_a_function() -> None:
    """Flower keeps them in closures of its own: this fails where it does so no longer."""
    app = function_mods()
    mods, function = mods_of(app._registered_funcs["train.default"])
    assert [type(mod).__name__ for mod in mods] == ["LocalDpMod"]
    assert function.__name__ == "train"


def broken(where: str, error: str = "no such column") -> ClientApp:
    """Its evaluation fails: in an `extra` call, or `always`."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return trained(msg, msg.content["arrays"], {"num-examples": 4})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        if where == "always" or "asked" not in msg.content["config"]:
            raise KeyError(error)
        return evaluated(msg, acc=0.5, num_examples=4)

    return app


class TestErrors:
    def test_one_in_an_extra_call_leaves_the_apps_replies_alone(self, tmp_path: Path) -> None:
        """In a training visit the evaluation's own config is not known before the first evaluation."""
        grid = FakeGrid(wrap(broken("extra"), folder=tmp_path), 2)
        with heard() as said:
            result = NFLDetector(FedAvg()).start(grid, zeros(), 2, evaluate_config=ConfigRecord({"asked": True}))
        assert not any(message.has_error() for message in grid.received)
        assert [visit.problem for visit in visits(grid)] == ["KeyError: 'no such column'"] * 2 + [""] * 2
        assert [m["acc"] for m in result.evaluate_metrics_clientapp.values()] == [0.5, 0.5]
        assert [m["lindt-reports"] for m in result.train_metrics_clientapp.values()] == [0, 2]
        assert any("client 0, 1: no report: KeyError: 'no such column'" in text for text in said)

    def test_an_unwritable_vault_costs_the_report_alone(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        grid = FakeGrid(wrap(broken("never"), folder=tmp_path / "file"), 2)
        grid.app = wrap(with_accuracy(), folder=tmp_path / "file")
        NFLDetector(FedAvg()).start(grid, zeros(), 1)
        assert all("cannot be used (Not a directory)" in visit.problem for visit in visits(grid))
        assert not any(message.has_error() for message in grid.received)

    def test_the_same_mistake_on_every_client_ends_the_first_round(self, tmp_path: Path) -> None:
        def start(app: ClientApp, **settings: Any) -> None:
            grid = FakeGrid(wrap(app, folder=tmp_path / str(len(list(tmp_path.iterdir()))), **settings), 3)
            NFLDetector(FedAvg()).start(grid, zeros(), 2)

        with pytest.raises(UserError, match="all for the same reason: the evaluation's metrics are auc, f1: which"):
            start(with_accuracy("auc", "f1"))
        with pytest.raises(
            UserError, match="all for the same reason: score = 'eval_loss': of a loss or an error lower"
        ):
            start(with_accuracy("eval_loss"), score="eval_loss")
        with pytest.raises(UserError, match="the evaluation's score is 3, but share=True"):
            start(with_accuracy("hits"), score=lambda m: 6 * m["hits"], share=True)
        lonely = with_accuracy()
        del lonely._registered_funcs["evaluate.default"]
        with pytest.raises(UserError, match="the app has no evaluate function; lindt needs"):
            NFLDetector(FedAvg(fraction_evaluate=0.0)).start(FakeGrid(wrap(lonely, folder=tmp_path), 3), zeros(), 2)

    def test_replies_that_are_all_refused_for_one_reason_end_it_too(self) -> None:
        def app(message: Message, context: Context) -> Message:
            return trained(message, ArrayRecord({"w": Array(np.full(9, np.nan))}), {"num-examples": 4})

        with pytest.raises(UserError, match="reply is refused for the same reason: NaN or infinity in w"):
            NFLDetector(FedAvg()).start(FakeGrid(app, 3), zeros(), 2)

    def test_a_reply_with_our_record_is_left_alone(self, tmp_path: Path) -> None:
        app = ClientApp()

        @app.train()
        def train(msg: Message, context: Context) -> Message:
            metrics = {"num-examples": 4}
            return trained(msg, msg.content["arrays"], metrics, lindt=MetricRecord({"mine": 1.0}))

        with heard() as said:
            reply = wrap(app, folder=tmp_path)(sent(FakeGrid(app, 1)), Context(1, 1, {}, RecordDict(), {}))
        assert dict(reply.content["lindt"]) == {"mine": 1.0}
        assert any("has a record 'lindt' of its own" in text for text in said)


def with_accuracy(*names: str) -> ClientApp:
    """Trains nothing, and evaluates to 0.5 under these names."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        return trained(msg, msg.content["arrays"], {"num-examples": 4})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        return evaluated(msg, **dict.fromkeys(names or ("accuracy",), 0.5), num_examples=4)

    return app


def sent(grid: FakeGrid, round: int = 1, kind: str = "train", **more: Any) -> Message:
    """A message of NFLDetector's to the first node."""
    content = RecordDict({"arrays": zeros(), "config": ConfigRecord({"lr": 0.5})})
    message = Message(content, dst_node_id=next(iter(grid.contexts)), message_type=kind)
    Instruction("e", "s", 0, round, 0, **{"recovering": False, "reports": True} | more).put(message)
    return over_the_wire(message)


def climbing() -> ClientApp:
    """w counts the trainings by 0.1 each; the accuracy is w. Config and state must be the visit's own."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        assert {**msg.content["config"], "server-round": 0} == {"lr": 0.5, "server-round": 0}
        w = msg.content["arrays"]["w"].numpy() + 0.1
        count = int(context.state["n"]["n"]) + 1 if "n" in context.state else 1
        context.state["n"] = MetricRecord({"n": count})
        random.random()
        return trained(msg, ArrayRecord({"w": Array(w)}), {"num-examples": 4, "n": count})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        context.state["seen"] = MetricRecord({"seen": 1})
        count = int(context.state["n"]["n"]) if "n" in context.state else 0
        w = float(msg.content["arrays"]["w"].numpy()[0])
        return evaluated(msg, acc=min(w, 0.9) + count / 1000, num_examples=10)

    return app


def gain_of(reply: Message) -> GainReport:
    return unpack_report(json.loads(str(reply.content["lindt"]["gain"])))


class TestOneClientByHand:
    def test_private_model_states_and_generators(self, tmp_path: Path) -> None:
        app = wrap(climbing(), folder=tmp_path)
        grid = FakeGrid(app, 1)
        (context,) = grid.contexts.values()
        random.seed(3)
        reply = app(sent(grid), context)
        drawn = random.random()
        random.seed(3)
        random.random()
        assert random.random() == drawn  # as after the app's own call alone
        # w is 0 with no training in its state; P_i had two calls: 0.2 and two trainings. Of equal age: one of each.
        assert gain_of(reply) == GainReport(
            10, Paired(pytest.approx(-0.101), pytest.approx(0.101)), Paired(pytest.approx(-0.101), pytest.approx(0.101))
        )
        assert dict(context.state["n"]) == {"n": 1}  # of the app's own call
        assert context.state.keys() == {"n"}  # what an extra evaluation writes is forgotten
        assert json.loads(str(reply.content["lindt"]["visit"]))["calls"] == 2
        private = Vault(tmp_path, "e", "0").private.newest(up_to=1)
        assert private is not None
        assert {name: dict(record) for name, record in private.state.items()} == {"n": {"n": 2}}  # P_i's own
        reply = app(sent(grid, 2), context)
        # w is still 0, its state has one training; P_i of equal age has had two calls.
        assert gain_of(reply).equal_age.mean == pytest.approx(0.001 - 0.202)

    def test_recovery_trains_v_with_its_own_state(self, tmp_path: Path) -> None:
        app = wrap(climbing(), folder=tmp_path)
        grid = FakeGrid(app, 1)
        (context,) = grid.contexts.values()
        first_visit = app(sent(grid, 1, recovering=True), context)
        assert gain_of(first_visit).adapted is None  # there is no v_i yet
        vault = Vault(tmp_path, "e", "0")
        v = vault.adapted.newest(up_to=1)
        assert v is not None
        assert v.arrays["w"].numpy()[0] == pytest.approx(0.1)
        assert dict(v.state["n"]) == {"n": 1}
        second = app(sent(grid, 2, recovering=True), context)
        # v_i, 0.1 with one training, against w, 0 with one training.
        assert gain_of(second).adapted is not None
        assert gain_of(second).adapted.mean == pytest.approx(0.1)  # type: ignore[union-attr]
        v = vault.adapted.newest(up_to=2)
        assert v is not None
        assert v.arrays["w"].numpy()[0] == pytest.approx(0.175)  # three quarters of 0.1, and 0.1 more
        assert Visit.unpack(second.content["lindt"]["visit"]).calls == 3
        reply = app(sent(grid, 2, "evaluate", recovering=True), context)
        tally = json.loads(str(reply.content["lindt"]["tally"]))
        # w: 0 and 2 trainings; v_i: 0.15 and 2; P_i: 0.4 and 4, which is chosen.
        assert tally["central"] == [pytest.approx(0.02), 10]
        assert tally["local"] == tally["private"] == [pytest.approx(4.04), 10]
        assert (reply.content["lindt"]["chosen"], reply.content["lindt"]["paired"]) == (True, False)
        choice, arrays = app.chosen(sent(grid, 3, "evaluate", recovering=True), context)  # type: ignore[attr-defined]
        assert (choice, arrays["w"].numpy()[0]) == ("P_i", pytest.approx(0.4))
        assert app.chosen(sent(grid, 3, "evaluate"), context)[0] == "w"  # type: ignore[attr-defined]

    def test_scores_in_training_have_the_config_of_the_last_evaluation(self, tmp_path: Path) -> None:
        app, seen = climbing(), list[dict[str, Any]]()
        inner = app._registered_funcs["evaluate.default"]

        def evaluate(message: Message, context: Context) -> Message:
            seen.append(dict(message.content["config"]))
            return inner(message, context)

        app._registered_funcs["evaluate.default"] = evaluate
        app = wrap(app, folder=tmp_path)
        (context,) = FakeGrid(app, 1).contexts.values()
        grid = FakeGrid(app, 1)
        app(sent(grid, 1), context)
        assert seen == [{"lr": 0.5}] * 3  # no evaluation has come: w, and P_i after each of two calls
        seen.clear()
        message = sent(grid, 1, "evaluate")
        message.content["config"]["samples"] = 7
        app(message, context)
        app(sent(grid, 2), context)
        assert seen == [{"lr": 0.5, "samples": 7}] * 5  # w's own, P_i; then w and P_i twice

    def test_before_its_first_visit_in_recovery_a_client_has_its_private_model(self, tmp_path: Path) -> None:
        app = wrap(climbing(), folder=tmp_path)
        grid = FakeGrid(app, 1)
        (context,) = grid.contexts.values()
        app(sent(grid, 1), context)
        tallies = []
        for recovering in (False, True):
            reply = app(sent(grid, 1, "evaluate", recovering=recovering), context)
            tallies.append(json.loads(str(reply.content["lindt"]["tally"])))
            assert reply.content["lindt"]["chosen"] is recovering
        assert tallies[0]["local"] == tallies[0]["central"] == [pytest.approx(0.01), 10]
        assert tallies[1]["local"] == tallies[1]["private"] == [pytest.approx(2.02), 10]
        assert app.chosen(sent(grid, 2, "evaluate", recovering=True), context)[0] == "P_i"  # type: ignore[attr-defined]

    def test_an_update_in_the_reply_is_added_to_what_was_trained(self, tmp_path: Path) -> None:
        inner = climbing()
        whole = inner._registered_funcs["train.default"]

        def difference(message: Message, context: Context) -> Message:
            before = message.content["arrays"]["w"].numpy()
            reply = whole(message, context)
            reply.content["arrays"] = ArrayRecord({"w": Array(reply.content["arrays"]["w"].numpy() - before)})
            return reply

        inner._registered_funcs["train.default"] = difference
        app = wrap(inner, folder=tmp_path)
        grid = FakeGrid(app, 1)
        (context,) = grid.contexts.values()
        reply = app(sent(grid, 1, replies="updates"), context)
        assert reply.content["arrays"]["w"].numpy()[0] == pytest.approx(0.1)
        private = Vault(tmp_path, "e", "0").private.newest(up_to=1)
        assert private is not None
        assert private.arrays["w"].numpy()[0] == pytest.approx(0.2)  # after two calls from 0

    def test_a_new_session_forgets_what_is_played_again(self, tmp_path: Path) -> None:
        app = wrap(climbing(), folder=tmp_path)
        grid = FakeGrid(app, 1)
        (context,) = grid.contexts.values()
        for r in (1, 2):
            app(sent(grid, r), context)
        message = sent(grid, 2)
        message.content["config"]["lindt-session"] = "t"
        message.content["config"]["lindt-since"] = 1
        app(message, context)
        private = Vault(tmp_path, "e", "0").private.newest(up_to=2)
        assert private is not None
        assert len(private.notes["scores"]) == 4  # two of round 1, two of round 2, once


class TestTheServer:
    def test_w0_is_sent_once_to_those_who_come_later(self, tmp_path: Path) -> None:
        app, seen = wrap(climbing(), folder=tmp_path), []
        grid = FakeGrid(app, 4)
        nodes = list(grid.contexts)
        late = {node: grid.contexts.pop(node) for node in nodes[2:]}
        detector = NFLDetector(FedAvg())
        _, w = detector.begin(zeros(), 4)
        with heard() as said:
            for r in range(1, 5):
                if r == 3:
                    grid.contexts |= late
                messages = detector.configure_train(r, w, ConfigRecord({"lr": 0.5}), grid)
                seen.append({m.metadata.dst_node_id for m in messages if START in m.content["config"]})
                w = detector.aggregate_train(r, grid.send_and_receive(messages))[0] or w
        assert seen == [set(), set(), set(nodes[2:]), set()]
        assert any("round 3: sent w^0 to 2 clients that did not have it, " in text for text in said)
        assert "round 1: of 2 clients 2 are wrapped, 2 report, 0 recover; extra calls of their train " in "".join(
            text for text in said if "round 1" in text
        )
        for i in range(4):
            private = Vault(tmp_path, detector._experiment, str(i)).private.newest(up_to=9)
            assert private is not None
            scores = private.notes["scores"]
            assert scores[0] == pytest.approx(0.101)  # one training from w^0 = 0, not from w

    def test_a_client_that_lost_its_vault_asks_for_w0(self, tmp_path: Path) -> None:
        grid = FakeGrid(wrap(climbing(), folder=tmp_path / "a"), 2)
        detector = NFLDetector(FedAvg())
        _, w = detector.begin(zeros(), 4)
        wants, sends = [], []
        for r in range(1, 5):
            grid.app = wrap(climbing(), folder=tmp_path / ("a" if r == 1 else "b"))
            messages = detector.configure_train(r, w, ConfigRecord({"lr": 0.5}), grid)
            sends.append(sum(START in m.content["config"] for m in messages))
            w = detector.aggregate_train(r, grid.send_and_receive(messages))[0] or w
            wants.append([visit.wants_start for visit in visits(grid)[-2:]])
        assert wants == [[False, False], [True, True], [False, False], [False, False]]
        assert sends == [0, 0, 2, 0]

    @pytest.mark.parametrize("settings", [{}, {"epsilon": 1e-9, "patience": 2}])
    def test_detection_only(self, settings: dict[str, Any], tmp_path: Path) -> None:
        case = CASES["quickstart"]
        detector = NFLDetector(FedAvg(), recover=False, folder=tmp_path / "run", **settings)
        app = wrap(case.app(), folder=tmp_path / "private")
        with heard() as said:
            result, grid = play(case, detector, app, "hurts", 10)
        assert detector.negative
        assert not any(m.content["config"]["lindt-recovering"] for m in grid.sent)
        assert [m["lindt-recovering"] for m in result.train_metrics_clientapp.values()] == [0] * 10
        assert not any(visit.recovers for visit in visits(grid))
        assert sum("NFL suspected" in text for text in said) == 1
        assert any("NFL suspected; detection only, no client recovers" in text for text in said)

    def test_recovery_that_nobody_carries_out_is_said(self) -> None:
        case = CASES["quickstart"]
        with heard() as said:
            play(case, NFLDetector(FedAvg(), 1e-9, 1), case.app(), "hurts", 5)
        assert sum("no client recovers: the last line of the client's file must be" in text for text in said) == 1

    def test_replies_that_may_be_updates_are_refused_until_it_is_said(self, tmp_path: Path) -> None:
        case = CASES["quickstart"]
        with pytest.raises(UserError, match=r'may be updates\. Give NFLDetector\(\.\.\., replies="updates"\)'):
            play(case, NFLDetector(AddUpdates()), wrap(updates(), folder=tmp_path), "hurts", 2)

    def test_updates_and_weights_are_measured_alike(self, tmp_path: Path) -> None:
        def seen(app: ClientApp, **settings: Any) -> Any:
            detector = NFLDetector(settings.pop("strategy"), **settings)
            play(CASES["quickstart"], detector, app, "hurts", 2)
            return detector.seen

        ours = seen(updates(), strategy=AddUpdates(), replies="updates")
        theirs = seen(custom_mods(), strategy=FedAvg())  # the same training, sent as weights
        assert ours.delta == pytest.approx(theirs.delta, rel=1e-4)
        assert ours.w_div == pytest.approx(theirs.w_div, rel=1e-4)
        assert ours.cosine == pytest.approx(theirs.cosine, abs=1e-4)

    def test_a_mask_of_infinity_passes_and_another_does_not(self) -> None:
        arrays = first(Transformer)
        case = CASES["transformer"]
        result, _ = play(case, NFLDetector(FedAvg()), case.app(), "hurts", 2)
        assert np.isneginf(result.arrays["mask"].numpy()).sum() == 28

        def liar(message: Message, context: Context) -> Message:
            reply = transformer()(message, context)
            if context.node_config["partition-id"] == 0 and message.metadata.message_type == "train":
                reply.content["arrays"]["mask"] = Array(np.full((8, 8), np.inf, np.float32))
            return reply

        with heard() as said:
            play(case, NFLDetector(FedAvg()), liar, "hurts", 1)
        assert sum("NaN or infinity in mask" in text for text in said) == 1
        assert arrays["mask"].shape == (8, 8)

    def test_the_score_is_told_once_on_both_sides_and_in_the_folder(self, tmp_path: Path) -> None:
        app = wrap(with_accuracy("hits"), folder=tmp_path / "private", score="hits", share=True)
        with heard() as said:
            detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
            detector.start(FakeGrid(app, 2), zeros(), 4)
        words = "score: hits, higher is better (a share)"
        assert sorted(text for text in said if "score: " in text) == [f"client 0: {words}", f"client 1: {words}", words]
        console = Console(file=io.StringIO(), width=200)
        show(console, read_run(tmp_path / "run"))
        assert f"\n{words}\n" in console.file.getvalue()  # type: ignore[attr-defined]

    def test_the_folder_claims_nothing_clear(self, tmp_path: Path) -> None:
        case = CASES["tabular"]
        detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
        play(case, detector, wrap(case.app(), folder=tmp_path / "private"), "hurts", 10)
        line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1])
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert line["scores"]["beta"] is not None
        assert line["scores"]["clearly_harmed"] is None
        assert line["scores"]["notes"]["chosen on the same data"] == 1.0
        assert summary["clearly_harmed"] is None
        assert "clearly" not in str(verdict(read_run(tmp_path / "run")))


class TestWhatBrokeApps:
    def test_dp_sgd_stays_in_every_call(self, tmp_path: Path) -> None:
        """Recovery used to train without its noise."""
        used: list[float] = []
        case, app = CASES["dp-sgd"], wrap(private_sgd(used), folder=tmp_path)
        detector = NFLDetector(FedAvg())
        result, grid = play(case, detector, app, "hurts", 10)
        assert detector.state.on
        assert result.train_metrics_clientapp[10]["noise_multiplier"] == pytest.approx(1.17)
        assert len(used) == CLIENTS * 10 + sum(visit.calls for visit in visits(grid))

    def test_a_personal_head_is_judged_by_what_it_predicts_with(self, tmp_path: Path) -> None:
        """By bare w it would be at 0.5, flagged and harmed."""
        detector, _, _ = two_lines(CASES["personal head"], tmp_path, "hurts", 6)
        assert detector.scores.central > 0.8

    def test_the_servers_rate_reaches_every_model(self, tmp_path: Path) -> None:
        rates: list[float] = []
        app = personal()
        inner = app._registered_funcs["train.default"]

        def hearing(message: Message, context: Context) -> Message:
            rates.append(float(message.content["config"]["lr"]))
            return inner(message, context)

        app._registered_funcs["train.default"] = hearing
        case = CASES["personal head"]
        strategy = Keeping()
        _, grid = play(case, NFLDetector(strategy), wrap(app, folder=tmp_path), "hurts", 6)
        per_round = [sum(1 + v.calls for v in visits(grid)[r * CLIENTS : (r + 1) * CLIENTS]) for r in range(6)]
        expected = [rate for rate, calls in zip(strategy.rates, per_round, strict=True) for _ in range(calls)]
        assert rates == pytest.approx(expected)
        assert strategy.rates[-1] == pytest.approx(0.05)
        assert strategy.best > 0.7  # its own start() was the one that ran

    def test_client_side_noise_is_on_what_is_sent_and_not_on_v(self, tmp_path: Path) -> None:
        def make(noise: float) -> ClientApp:
            app = ClientApp()

            @app.train(mods=[LocalDpMod(clipping_norm=1.0, sensitivity=noise, epsilon=1.0, delta=1e-5)])
            def train(msg: Message, context: Context) -> Message:
                w = msg.content["arrays"]["w"].numpy() + 3.0
                return trained(msg, ArrayRecord({"w": Array(w)}), {"num-examples": 4})

            @app.evaluate()
            def evaluate(msg: Message, context: Context) -> Message:
                return evaluated(msg, acc=0.5, num_examples=4)

            return app

        app = wrap(make(5.0), folder=tmp_path)
        grid = FakeGrid(app, 1)
        (context,) = grid.contexts.values()
        with heard() as said:
            reply = app(sent(grid, 1, recovering=True), context)
        sent_w = reply.content["arrays"]["w"].numpy()
        assert np.abs(sent_w - 3.0).max() > 0.5  # clipped to length 1, and noisy
        v = Vault(tmp_path, "e", "0").adapted.newest(up_to=1)
        assert v is not None
        assert v.arrays["w"].numpy().tolist() == [3.0] * 9
        visit = Visit.unpack(reply.content["lindt"]["visit"])
        assert (visit.silent, visit.recovers, "gain" in reply.content["lindt"]) == (True, True, False)
        assert any("no report: it adds noise to its updates, and a report would have none" in text for text in said)
        told = app(sent(grid, 2, noise=0.2), context)
        assert "gain" not in told.content["lindt"]  # P_i needs w^0 first
        message = sent(grid, 3, noise=0.2)
        message.content["config"][START] = pack_records(RecordDict({"arrays": zeros()}))
        told = app(message, context)
        assert gain_of(told).private.square == 1.0  # with noise, as the server asked

    def test_with_noise_the_servers_test_hears_of_such_clients(self, tmp_path: Path) -> None:
        case = CASES["quickstart"]
        detector = NFLDetector(FedAvg(), detection=Gain(noise=0.1))
        app = wrap(function_mods(), folder=tmp_path)
        result, _ = play(case, detector, app, "hurts", 2)
        assert [m["lindt-reports"] for m in result.train_metrics_clientapp.values()] == [CLIENTS] * 2
        with heard() as said:
            play(case, NFLDetector(FedAvg()), wrap(function_mods(), folder=tmp_path / "silent"), "hurts", 1)
        assert any(
            f"{CLIENTS} do not report, because their updates have noise and reports would have none" in text
            for text in said
        )


class DPOptimizer:
    """opacus' DPOptimizer in short: it marks the parameters, and its step ends with that of the torch optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        for p in self.params:
            p.summed_grad = None  # type: ignore[attr-defined]

    @property
    def params(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        for p in self.params:
            p.grad = p.grad + torch.randn_like(p)  # type: ignore[operator]
        self.optimizer.step()


def one_step(private: bool) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer: Any = torch.optim.SGD([w], lr=0.1)
    optimizer = DPOptimizer(optimizer) if private else optimizer
    w.sum().backward()
    optimizer.step()


class TestDpSgd:
    """An app whose train function uses opacus reports nothing unless the server asks for noise."""

    @pytest.fixture
    def _opacus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "opacus", ModuleType("opacus"))

    @pytest.mark.usefixtures("_opacus")
    def test_a_step_of_its_optimizer_is_noticed_and_no_other_step(self) -> None:
        for private in (True, False, True):
            with noticing_dp_sgd() as noticed:
                one_step(private)
            assert noticed.dp_sgd == private
        with noticing_dp_sgd() as noticed:
            pass
        one_step(private=True)  # after the block
        assert not noticed.dp_sgd

    def test_an_import_in_the_block_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "opacus", raising=False)
        with noticing_dp_sgd() as noticed:
            one_step(private=True)
        assert not noticed.dp_sgd  # it cannot be opacus
        with noticing_dp_sgd() as noticed:
            monkeypatch.setitem(sys.modules, "opacus", ModuleType("opacus"))
        assert noticed.dp_sgd

    @pytest.mark.usefixtures("_opacus")
    def test_an_error_in_the_train_function_leaves_no_hook(self) -> None:
        from torch.optim import optimizer

        before = dict(optimizer._global_optimizer_pre_hooks)
        with pytest.raises(ValueError, match="of the app"), noticing_dp_sgd():
            raise ValueError("of the app")
        assert dict(optimizer._global_optimizer_pre_hooks) == before

    @pytest.mark.usefixtures("_opacus")
    def test_the_client_reports_nothing_without_noise(self, tmp_path: Path) -> None:
        app = climbing()
        inner, private = app._registered_funcs["train.default"], [True]

        def train(message: Message, context: Context) -> Message:
            one_step(private[0])
            return inner(message, context)

        app._registered_funcs["train.default"] = train
        app = wrap(app, folder=tmp_path)
        (context,) = FakeGrid(app, 1).contexts.values()
        grid = FakeGrid(app, 1)
        with heard() as said:
            reply = app(sent(grid, 1, recovering=True), context)
        visit = Visit.unpack(reply.content["lindt"]["visit"])
        assert (visit.silent, visit.recovers, "gain" in reply.content["lindt"]) == (True, True, False)
        assert [text for text in said if "DP-SGD" in text] == [
            "! client 0: no report: its train function adds noise (DP-SGD by opacus), and a report would have none; "
            "to get reports with noise, give the server NFLDetector(..., detection=Gain(noise=0.1))"
        ]
        scored = app(sent(grid, 1, "evaluate", recovering=True), context)
        assert scored.content["lindt"].keys() == {"visit"}
        assert app.chosen(sent(grid, 2, recovering=True), context)[0] == "v_i"  # type: ignore[attr-defined]
        private[0] = False  # the noise of earlier rounds is still in w
        assert "gain" not in app(sent(grid, 2, recovering=True), context).content["lindt"]
        message = sent(grid, 3, recovering=True, noise=0.2)
        message.content["config"][START] = pack_records(RecordDict({"arrays": zeros()}))
        assert gain_of(app(message, context)).private.square == 1.0  # with noise
        scored = app(sent(grid, 3, "evaluate", recovering=True, noise=0.2), context)
        assert scored.content["lindt"].keys() == {"visit"}  # its scores would have no noise


class TestDoors:
    def test_what_cannot_be_wrapped_is_said(self) -> None:
        with pytest.raises(UserError, match="it is of type str"):
            wrap("app")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="already wrapped"):
            wrap(wrap(ClientApp()))
        with pytest.raises(UserError, match="legacy API"):
            wrap(ClientApp(client_fn=lambda context: None))  # type: ignore[arg-type, return-value]
        with pytest.raises(UserError, match="give score, client_id, folder"):
            wrap(ClientApp(), score="acc", dual=dual())

    def test_the_earlier_name_warns_and_says_the_new_one(self) -> None:
        with pytest.warns(DeprecationWarning, match=r"wrap\(app, dual=Dual\(...\)\)"):
            found = LindtMod(model=lambda _: net(), data=tensors, optimizer=sgd)
        assert isinstance(found, Dual)

    def test_the_dual_model_stands_behind_the_mods_of_a_function(self, tmp_path: Path) -> None:
        app = wrap(with_functions(ClientApp(), [counting]), dual=dual(folder=tmp_path, private_epochs=5))
        result, _ = play(CASES["quickstart"], NFLDetector(FedAvg(), 1e-9, 1), app, "hurts", 5)
        assert result.train_metrics_clientapp[5]["trainings"] == pytest.approx(
            5.0
        )  # the mod sees what the dual model sends
        assert "train_loss" in result.train_metrics_clientapp[5]
        assert len(list(tmp_path.glob("*/client-*/v"))) == CLIENTS


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def dual(**settings: Any) -> Dual:
    return Dual(**{"model": lambda _: net(), "data": tensors, "optimizer": sgd} | settings)


class TestDual:
    def test_the_optimizer_may_see_the_messages_config(self, tmp_path: Path) -> None:
        rates: list[float] = []

        def seeing(params: Any, config: Any) -> torch.optim.Optimizer:
            rates.append(config["lr"])
            return torch.optim.SGD(params, lr=config["lr"])

        case = CASES["quickstart"]
        app = wrap(case.app(), dual=dual(optimizer=seeing, folder=tmp_path))
        play(case, NFLDetector(FedAvg(), 1e-9, 1), app, "hurts", 4)
        assert rates == [0.1] * 2 * CLIENTS * 2  # w and v_i, in two rounds of recovery

    def test_client_side_noise_keeps_it_from_reporting_without_noise(self, tmp_path: Path) -> None:
        """With an error message for the missing noise in both logs; no score of v_i or P_i is sent either way."""
        case, quick = CASES["quickstart"], {"private_epochs": 1, "preflight": False}
        with heard() as said:
            app = wrap(function_mods(), dual=dual(folder=tmp_path / "silent", **quick))
            result, _ = play(case, detector := NFLDetector(FedAvg()), app, "hurts", 1)
        assert result.train_metrics_clientapp[1]["lindt-reports"] == 0
        assert any("client 0: no report: it adds noise to its updates, and a report would have none" in s for s in said)
        assert any(f"{CLIENTS} do not report, because their updates have noise" in text for text in said)
        assert detector.scores is None
        app = wrap(function_mods(), dual=dual(folder=tmp_path / "told", **quick))
        result, _ = play(case, detector := NFLDetector(FedAvg(), detection=Gain(noise=0.1)), app, "hurts", 1)
        assert result.train_metrics_clientapp[1]["lindt-reports"] == CLIENTS
        assert detector.scores is None

    def test_a_loss_that_trains_nothing_is_refused_at_the_first_message(self, tmp_path: Path) -> None:
        case = CASES["tabular"]
        app = wrap(case.app(), dual=dual(model=lambda _: one_output(), folder=tmp_path))
        with pytest.raises(UserError, match="cross entropy of a model with one output is always 0"):
            play(case, NFLDetector(FedAvg(), 1e9), app, "hurts", 1)
        app = wrap(case.app(), dual=dual(loss=binary_cross_entropy_with_logits, folder=tmp_path / "b"))
        with pytest.raises(UserError, match="loss or metric: they fail on outputs"):
            play(CASES["quickstart"], NFLDetector(FedAvg(), 1e9), app, "hurts", 1)

    def test_an_error_in_our_report_leaves_the_users_evaluation(self, tmp_path: Path) -> None:
        def failing(context: Context, split: str) -> Any:
            if split == "test":
                raise OSError("the disk is gone")
            return tensors(context, split)

        case = CASES["quickstart"]
        app = wrap(case.app(), dual=dual(data=failing, folder=tmp_path, private_epochs=1, preflight=False))
        with heard() as said:
            result, _ = play(case, NFLDetector(FedAvg(), 1e9), app, "hurts", 1)
        assert "eval_acc" in result.evaluate_metrics_clientapp[1]
        assert any("no report: OSError: the disk is gone" in text for text in said)
