"""Dual's gain reports: V_i that nothing trains on, P_i trained once, and the numbers of the core's client."""

from __future__ import annotations

import json
import math
import random
import secrets
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from fake_grid import FakeGrid
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp.strategy import FedAvg
from safetensors.torch import load
from small_apps import heard
from test_detector_gain import Summing
from test_mod import CLIENTS, bytes_of, context_of, mod, net, ordered, own_app, play, samples
from torch import Tensor, nn

from lindt.client.private_models import held_out_samples
from lindt.engines.inprocess import InProcess
from lindt.errors import PlanError, UserError
from lindt.flower import NFLDetector
from lindt.flower.messages import Visit
from lindt.flower.protocol import instruction_of
from lindt.plan.plan import METHODS, Alone, Method, Plan, Training
from lindt.plan.problem import Problem
from lindt.protocols import GainReport, Paired, Task
from lindt.server.detection.gain import Gain
from lindt.server.recovery import OnEvidence
from lindt.server.updates import unpack_report
from lindt.weights import first_model, initial_weights


@pytest.fixture(scope="module")
def grid() -> FakeGrid:
    return play(own_app([]), rounds=1, epsilon=1e9)


def asked(grid: FakeGrid, w: nn.Module, round: int = 1, kind: str = "train", **instruction: Any) -> Message:
    given = {"reports": True, "recovering": False} | instruction
    return ordered(grid, kind, ArrayRecord(w.state_dict()), round, **given)


def reported(reply: Message) -> GainReport | None:
    return unpack_report(json.loads(str(reply.content["lindt"]["gain"]))) if "lindt" in reply.content else None


def always(label: int) -> nn.Module:
    """Gives this label to every sample."""
    model = net()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        model[2].bias[label] = 1.0
    return model


def test_a_report_by_hand(grid: FakeGrid, tmp_path: Path) -> None:
    """w says 1 and P_i, which does not learn, says 0. Of 8 validation samples 6 are 1: w wins 6 and loses 2."""
    y = torch.tensor([1] * 6 + [0] * 2)
    own = mod(
        tmp_path,
        model=lambda _: always(0),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        validation=lambda _: (torch.randn(8, 2), y),
        private_epochs=3,
        batch=40,
    )
    reply = own_app([own])(asked(grid, always(1)), context_of(grid))
    ones = float((samples(context_of(grid), "train")[1] == 1).double().mean())
    gain = Paired(0.5, 1.0)  # (6 - 2) / 8, and every sample differs
    assert reported(reply) == GainReport(8, gain, gain, first_batch=pytest.approx(ones - 0.25))
    assert len(reply.content["lindt"]["gain"]) < 450


def parity() -> tuple[Plan, Problem, InProcess]:
    """One batch of everything, so that no order of samples matters."""
    contexts = [Context(1, i, {"partition-id": i}, None, {}) for i in range(2)]  # type: ignore[arg-type]
    clients = [(samples(c, "train"), samples(c, "test")) for c in contexts]
    plan = Plan(
        rounds=9,
        training=Training(rate=0.2, decay=1.0, epochs=2, batch=1000, max_norm=1e6),
        alone=Alone(epochs=30),
        method=Method(adaptation=METHODS["lindt"].adaptation, recovery=OnEvidence()),
        detection=Gain(),
    )
    problem = Problem(clients, net)
    return plan, problem, InProcess(plan, problem)


def as_tensors(data: Any) -> tuple[Tensor, Tensor]:
    x, y = data.take(torch.arange(len(data)))
    return x, y


@pytest.mark.parametrize("recovering", [False, True])
def test_the_numbers_are_those_of_the_cores_client(recovering: bool, grid: FakeGrid, tmp_path: Path) -> None:
    plan, problem, engine = parity()
    core, first, shared = engine.clients[0], initial_weights(problem, plan), first_model(problem, plan)
    chosen = core._private_model().epochs
    assert chosen > 4  # so that P_i of equal age is another than the finished one
    train, validation = as_tensors(core.train), as_tensors(core.validation)
    own = mod(
        tmp_path,
        model=lambda _: first_model(problem, plan),
        data=lambda _, split: train if split == "train" else as_tensors(core.test),
        validation=lambda _: validation,
        private_epochs=chosen,
        epochs=2,
        batch=1000,
    )
    app = own_app([own])
    w_P = first.w_P
    for round in (1, 2, 3):
        torch.nn.utils.vector_to_parameters(w_P.clone(), shared.parameters())
        ours = reported(app(asked(grid, shared, round, recovering=recovering), context_of(grid)))
        (reply,) = engine.dispatch([Task("train", "", 0, round, w_P, first.buffers, recovering)])
        assert ours == reply.report
        assert (ours is not None and ours.adapted is not None) is recovering
        assert reply.w is not None
        w_P = reply.w
    assert ours is not None
    assert ours.samples == len(validation[1]) == 12  # three tenths of 40
    assert ours.private != ours.equal_age or recovering


def test_until_the_flag_is_set_not_a_byte_is_changed(tmp_path: Path) -> None:
    def played(mods: list[Any]) -> FakeGrid:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        grid = FakeGrid(own_app(mods), CLIENTS)
        NFLDetector(FedAvg()).start(grid, ArrayRecord(net().state_dict()), num_rounds=1)
        return grid

    bare = played([])
    with_mod = played([mod(tmp_path, private_epochs=3)])
    for plain, mine in zip(bare.received, with_mod.received, strict=True):
        assert bytes_of(plain) == bytes_of(mine)
    trained = [m for m in with_mod.received if m.metadata.message_type == "train"]
    assert all(m.content.keys() == {"arrays", "metrics", "lindt"} for m in trained)


class TestValidationPart:
    def test_half_of_the_test_split_and_beta_is_measured_on_the_other(self, grid: FakeGrid, tmp_path: Path) -> None:
        own, context = mod(tmp_path, private_epochs=2), context_of(grid)
        instruction = instruction_of(asked(grid, net()))
        test, validation, _ = own._held_out(context, instruction)
        assert validation is not None
        (x_t, _), (x_v, _), (x, _) = as_tensors(test), as_tensors(validation), samples(context, "test")
        assert len(x_t) == len(x_v) == 20
        rows = {tuple(row.tolist()) for row in x}
        assert {tuple(row.tolist()) for row in torch.cat([x_t, x_v])} == rows
        again = mod(tmp_path / "other", private_epochs=2)._held_out(context, instruction)[1]
        assert again is not None
        assert torch.equal(as_tensors(again)[0], x_v)  # after a restart the same
        app = own_app([own])
        app(asked(grid, net()), context)
        reply = app(asked(grid, net(), kind="evaluate"), context)
        assert json.loads(str(reply.content["lindt"]["tally"]))["samples"] == 20

    def test_under_the_papers_rule_nothing_is_held_out(self, grid: FakeGrid, tmp_path: Path) -> None:
        app = own_app([mod(tmp_path, private_epochs=2)])
        calm = ordered(grid, "train", ArrayRecord(net().state_dict()), 1, recovering=False)
        assert reported(app(calm, context_of(grid))) is None
        assert not list(tmp_path.rglob("alone.safetensors"))  # trained at the first evaluation
        test = ordered(grid, "evaluate", ArrayRecord(net().state_dict()), 1, recovering=False)
        reply = app(test, context_of(grid))
        assert json.loads(str(reply.content["lindt"]["tally"]))["samples"] == 40

    def test_samples_that_were_trained_on_are_left_out(self, grid: FakeGrid, tmp_path: Path) -> None:
        """A function that forgets its `split`: the model would be tested on what it has learned by heart."""
        context = context_of(grid)
        (x, y), (new_x, new_y) = samples(context, "train"), samples(context, "test")
        mixed = torch.cat([x[:10], new_x[:5]]), torch.cat([y[:10], new_y[:5]])
        with heard() as said:
            app = own_app([mod(tmp_path / "some", validation=lambda _: mixed, private_epochs=2)])
            found = reported(app(asked(grid, net()), context))
        assert found is not None
        assert found.samples == 5
        assert any("10 of 15 validation samples are in the training data too; 5 are left" in text for text in said)
        with heard() as said:
            same = mod(tmp_path / "all", data=lambda c, split: samples(c, "train"), private_epochs=2)
            reply = own_app([same])(asked(grid, net()), context)
        assert reported(reply) is None
        assert any("none is left, so it reports no gain" in text for text in said)
        assert "arrays" in reply.content  # its update counts

    def test_p_i_never_reads_it(self, grid: FakeGrid, tmp_path: Path) -> None:
        """Labels of V_i turned round: w's score on it changes, and P_i's weights do not."""
        kept = []
        for name, turned in (("as is", False), ("turned", True)):
            x, y = samples(context_of(grid), "test")
            own = mod(tmp_path / name, validation=lambda _, y=1 - y if turned else y, x=x: (x, y))
            assert reported(own_app([own])(asked(grid, net()), context_of(grid))) is not None
            (path,) = (tmp_path / name).rglob("alone.safetensors")
            kept.append({k: v for k, v in load(path.read_bytes()).items() if k.startswith("model/")})
        assert kept[0].keys() == kept[1].keys() != set()
        assert all(torch.equal(kept[0][k], kept[1][k]) for k in kept[0])


class TestPrivateModel:
    def test_it_is_trained_once_and_again_when_settings_change(self, grid: FakeGrid, tmp_path: Path) -> None:
        def visit(round: int, session: str = "s", **settings: Any) -> int:
            app = own_app([mod(tmp_path, **({"private_epochs": 2} | settings))])  # a new process has a new app
            assert reported(app(asked(grid, net(), round, session=session), context_of(grid))) is not None
            (path,) = tmp_path.rglob("alone.safetensors")
            return path.stat().st_mtime_ns

        at = visit(1)
        assert visit(2) == visit(3, "another") == at
        assert visit(4, "third", private_epochs=3) != at

    @pytest.mark.parametrize("session", ["s", "another"], ids=["in the session", "after a restart"])
    def test_a_flipped_sign_is_noticed_and_it_is_trained_anew(
        self, grid: FakeGrid, tmp_path: Path, session: str
    ) -> None:
        """The flipped score is a number like any other: the gain reported of it would be false."""
        app, w = own_app([mod(tmp_path, private_epochs=2)]), net()
        before = reported(app(asked(grid, w), context_of(grid)))
        (path,) = tmp_path.rglob("alone.safetensors")
        whole = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(whole[:8], "little")
        about = json.loads(whole[8:header])["validation"]
        whole[header + about["data_offsets"][1] - 1] ^= 0x80  # the sign of the last score
        path.write_bytes(whole)
        with heard() as said:
            after = reported(app(asked(grid, w, session=session), context_of(grid)))
        assert after == before
        assert any("its checksum is wrong); it is set aside as .damaged" in text for text in said)
        assert path.with_suffix(".damaged").read_bytes() == whole
        assert any("trained alone for 2 epochs" in text for text in said)

    def test_one_that_diverges_is_said_and_not_kept(self, grid: FakeGrid, tmp_path: Path) -> None:
        def log_likelihood(output: Tensor, y: Tensor) -> Tensor:
            return output.log_softmax(1)[torch.arange(len(y)), y] * torch.inf

        with heard() as said:
            app = own_app([mod(tmp_path, private_epochs=2, metric=log_likelihood)])
            app(asked(grid, net()), context_of(grid))
        assert any("trained alone to NaN or infinity" in text for text in said)
        assert not list(tmp_path.rglob("alone.safetensors"))

    def test_an_error_in_a_report_leaves_the_training_alone(self, grid: FakeGrid, tmp_path: Path) -> None:
        def failing(output: Tensor, y: Tensor) -> Tensor:
            if len(y) > 2:  # the two samples of the check pass
                raise KeyError("no such class")
            return (output.argmax(1) == y).float()

        app = own_app([mod(tmp_path, private_epochs=1, metric=failing, preflight=False)])
        message, context = asked(grid, net()), context_of(grid)
        visit = Visit.unpack(app(message, context).content["lindt"]["visit"])
        assert (visit.problem, visit.ours, visit.recovers) == ("KeyError: 'no such class'", False, False)
        again = app(asked(grid, net(), 2, recovering=True), context)
        assert Visit.unpack(again.content["lindt"]["visit"]).recovers  # v_i trains even so
        assert "gain" not in again.content["lindt"]

    def test_its_epochs_are_chosen_on_training_data_by_default(self, grid: FakeGrid, tmp_path: Path) -> None:
        """The rule of the core: the latest of the best on a tenth of the training data, then a refit on all."""
        own, context = mod(tmp_path), context_of(grid)
        with heard() as said:
            assert reported(own_app([own])(asked(grid, net()), context)) is not None
        (told,) = [text for text in said if "trained alone" in text]
        epochs = int(told.split()[5])
        assert 1 <= epochs <= Alone().epochs
        (path,) = tmp_path.rglob("alone.safetensors")
        assert load(path.read_bytes())["validation"].shape == (epochs, 20)
        assert held_out_samples(Plan(), 40) == 4

    def test_a_client_that_trains_no_private_model_reports_nothing(self, grid: FakeGrid, tmp_path: Path) -> None:
        reply = own_app([mod(tmp_path, private_epochs=0)])(asked(grid, net()), context_of(grid))
        assert reported(reply) is None
        with pytest.raises(PlanError, match="private_epochs"):
            mod(tmp_path, private_epochs=-1)

    def test_equal_age_is_as_many_epochs_as_w_has_had(self, grid: FakeGrid, tmp_path: Path) -> None:
        own = mod(tmp_path, private_epochs=6, epochs=2)
        app, w = own_app([own]), net()
        found = [reported(app(asked(grid, w, round), context_of(grid))) for round in (1, 2, 3, 4)]
        (path,) = tmp_path.rglob("alone.safetensors")
        kept = load(path.read_bytes())["validation"]
        means = [report.equal_age.mean - found[3].private.mean for report in found if report and found[3]]
        assert means == pytest.approx([float(kept[5].mean() - kept[e].mean()) for e in (1, 3, 5, 5)])


class TestRecovery:
    def test_the_adapted_predictor_is_reported_against_w_and_p_i(self, grid: FakeGrid, tmp_path: Path) -> None:
        own, context, w = mod(tmp_path, private_epochs=2), context_of(grid), net()
        app = own_app([own])
        first = reported(app(asked(grid, w, 1, recovering=True), context))
        assert first is not None
        assert first.adapted == Paired(0.0, 0.0)  # there is no v_i yet: it predicts with w
        assert first.adapted_private == first.private
        for round in range(2, 12):
            last = reported(app(asked(grid, w, round, recovering=True), context))
        assert last is not None
        assert last.adapted is not None
        assert last.adapted_private is not None
        assert last.adapted_private.mean == pytest.approx(last.adapted.mean + last.private.mean)
        assert last.adapted.mean > 0  # w is untrained

    def test_switched_off_the_clients_predict_with_w_again(self, grid: FakeGrid, tmp_path: Path) -> None:
        own, context, w = mod(tmp_path, private_epochs=2), context_of(grid), net()
        own_app([own])(asked(grid, w, 1, recovering=True), context)
        x = samples(context, "test")[0]
        on = own.predictor(asked(grid, w, 1, kind="evaluate", recovering=True), context)(x)
        off = own.predictor(asked(grid, w, 1, kind="evaluate"), context)(x)
        assert torch.equal(off, w(x))
        assert not torch.equal(on, off)


class TestNoise:
    def test_it_has_the_scale_of_the_message_and_comes_from_no_seed(self, grid: FakeGrid, tmp_path: Path) -> None:
        app, w, b = own_app([mod(tmp_path, private_epochs=2)]), net(), 0.05
        exact = reported(app(asked(grid, w), context_of(grid)))
        assert exact is not None
        added: list[float] = []
        torch.manual_seed(3)
        for _ in range(150):  # the same message each time
            noisy = reported(app(asked(grid, w, noise=b), context_of(grid)))
            assert noisy is not None
            assert noisy.samples == exact.samples
            assert noisy.private.square == noisy.equal_age.square == 1.0  # they would tell as much as the means
            assert noisy.first_batch is not None
            assert exact.first_batch is not None
            added += [
                noisy.private.mean - exact.private.mean,
                noisy.equal_age.mean - exact.equal_age.mean,
                noisy.first_batch - exact.first_batch,
            ]
        assert len(set(added)) == len(added) == 450
        # Laplace: the mean is 0, the variance 2 b^2, whose estimate from 450 has a standard error of 11%. Five of them.
        assert abs(float(np.mean(added))) < 5 * math.sqrt(2 / 450) * b
        assert float(np.mean(np.square(added))) == pytest.approx(2 * b * b, rel=0.6)
        assert reported(app(asked(grid, w), context_of(grid))) == exact

    def test_no_generator_of_the_app_is_touched(
        self, grid: FakeGrid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With the system's generator standing still, all numbers move by the same: nothing else is drawn from."""
        monkeypatch.setattr(secrets.SystemRandom, "random", lambda _: 0.75)
        app, w = own_app([mod(tmp_path, private_epochs=2)]), net()
        exact = reported(app(asked(grid, w), context_of(grid)))
        noisy = reported(app(asked(grid, w, noise=0.5, recovering=True), context_of(grid)))
        assert exact is not None
        assert noisy is not None
        assert noisy.adapted is not None
        moved = -0.5 * math.log(2)  # a quarter of the distribution lies beyond it
        assert noisy.private.mean - exact.private.mean == pytest.approx(moved)
        assert noisy.adapted.mean == pytest.approx(moved)  # there is no v_i yet

    @pytest.mark.parametrize("noise", [-0.1, math.nan, math.inf, 1e7, True, "much"])
    def test_a_scale_that_is_none_is_refused(self, noise: Any, grid: FakeGrid, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="lindt-noise"):
            own_app([mod(tmp_path)])(asked(grid, net(), noise=noise), context_of(grid))


class TestPanel:
    def test_a_client_off_it_trains_no_private_model_and_recovers(self, grid: FakeGrid, tmp_path: Path) -> None:
        own, context, w = mod(tmp_path, private_epochs=2), context_of(grid), net()
        app = own_app([own])
        with heard() as said:
            for round in (1, 2):
                reply = app(asked(grid, w, round, panel=False), context)
                assert reply.content.keys() == {"arrays", "metrics"}
            assert "lindt" not in app(asked(grid, w, 2, "evaluate", panel=False), context).content
            app(asked(grid, w, 3, panel=False, recovering=True), context)
            reply = app(asked(grid, w, 3, "evaluate", panel=False, recovering=True), context)
        assert not any("trained alone" in text for text in said)
        assert not list(tmp_path.rglob("alone.safetensors"))
        tally = json.loads(str(reply.content["lindt"]["tally"]))
        assert (tally["samples"], tally["private"]) == (40, None)  # all of the test data: nothing is held out
        instruction = instruction_of(asked(grid, w))
        assert instruction is not None
        assert own._store(instruction, context).rounds() == [3]  # v_i
        # Switched off, w predicts again, as for clients of the panel.
        x = samples(context, "test")[0]
        on = own.predictor(asked(grid, w, 3, "evaluate", panel=False, recovering=True), context)(x)
        off = own.predictor(asked(grid, w, 3, "evaluate", panel=False), context)(x)
        assert torch.equal(off, w(x))
        assert not torch.equal(on, off)

    def test_half_of_the_clients_train_and_report(self, tmp_path: Path) -> None:
        grid = FakeGrid(own_app([mod(tmp_path, private_epochs=2)]), CLIENTS)
        detector = NFLDetector(FedAvg(), detection=Gain(panel=0.5, noise=0.01))
        detector.start(grid, ArrayRecord(net().state_dict()), num_rounds=3)
        trained = [m for m in grid.received if m.metadata.message_type == "train"]
        by_round = [trained[at : at + CLIENTS] for at in range(0, len(trained), CLIENTS)]
        reporting = [{m.metadata.src_node_id for m in one if "lindt" in m.content} for one in by_round]
        assert len(reporting[0]) == CLIENTS // 2
        assert reporting == [reporting[0]] * 3
        names = {str(grid.contexts[node].node_config["partition-id"]) for node in reporting[0]}
        kept = {path.parent.name.removeprefix("client-") for path in tmp_path.rglob("alone.safetensors")}
        assert kept == names
        assert detector.scores is not None
        assert len(detector.scores.clients) == CLIENTS // 2

    def test_a_word_that_is_no_flag_is_refused(self, grid: FakeGrid, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="lindt-panel"):
            own_app([mod(tmp_path)])(asked(grid, net(), panel="yes"), context_of(grid))


def test_two_camps_hurt_and_recover(tmp_path: Path) -> None:
    """From the first message to the end of recovery: the shared model serves neither camp, the dual models do."""
    torch.manual_seed(1)
    grid = FakeGrid(own_app([mod(tmp_path, private_epochs=20)]), CLIENTS)
    detector = NFLDetector(FedAvg(), detection=Summing())
    result = detector.start(grid, ArrayRecord(net().state_dict()), num_rounds=14)
    assert detector.found is not None
    assert detector.found.verdict.state == "hurts"
    assert detector.found.recovery is not None
    assert detector.found.recovery.state == "helps"
    assert detector.state.on
    last = result.evaluate_metrics_clientapp[14]
    assert last["lindt-local"] > last["lindt-central"] + 0.2
    assert all(m.content["lindt"]["gain"] for m in grid.received if m.metadata.message_type == "train")
