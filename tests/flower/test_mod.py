"""Dual on a real ClientApp: nothing changes until the flag is set, then the dual model trains and predicts."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from fake_grid import FakeGrid, over_the_wire
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import FedAvg, FedProx
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lindt.client.adaptations.dual import intertwine
from lindt.client.training import initial_private
from lindt.errors import PlanError, UserError
from lindt.flower import Dual, NFLDetector
from lindt.flower.messages import Visit
from lindt.flower.replies import load_arrays

CLIENTS = 4
SHAPES = {"0.weight": (16, 2), "0.bias": (16,), "2.weight": (2, 16), "2.bias": (2,)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))


def samples(context: Context, split: str) -> tuple[Tensor, Tensor]:
    """Two camps that disagree: the sign of the second feature counts for one, against for the other."""
    i = int(context.node_config["partition-id"])
    x = torch.randn(80, 2, generator=torch.Generator().manual_seed(i))
    y = (x @ torch.tensor([0.3, 1.0 if i % 2 else -1.0]) > 0).long()
    return (x[:40], y[:40]) if split == "train" else (x[40:], y[40:])


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2)


def own_app(mods: list[Any]) -> ClientApp:
    """As a user would have written it; it draws from every global generator."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (x, y) = net(), samples(context, "train")
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer = sgd(model.parameters())
        for rows in torch.randperm(40).split(10):
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": 40, "drawn": random.random() + float(np.random.rand())})
        return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, (x, y) = net(), samples(context, "test")
        # Takes the arrays out of the message, as it may.
        model.load_state_dict(message.content["arrays"].to_torch_state_dict(keep_input=False))
        accuracy = float((model(x).argmax(1) == y).float().mean())
        metrics = MetricRecord({"num-examples": 40, "acc": accuracy, "drawn": random.random()})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def mod(folder: Path, **settings: Any) -> Dual:
    given = {"model": lambda _: net(), "data": samples, "optimizer": sgd, "batch": 10, "folder": folder}
    return Dual(**given | settings)


def play(app: ClientApp, rounds: int = 6, epsilon: float = 0.01, patience: int = 2, strategy: Any = None) -> FakeGrid:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    grid = FakeGrid(app, CLIENTS)
    detector = NFLDetector(strategy or FedAvg(), epsilon, patience)
    detector.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds)
    grid.detector = detector  # type: ignore[attr-defined]
    return grid


def bytes_of(message: Message) -> dict[str, Any]:
    """All that a message says, apart from what lindt says."""
    found: dict[str, Any] = {}
    for name, record in message.content.items():
        for key, value in record.items():
            if not key.startswith("lindt-") and name != "lindt":
                found[f"{name}/{key}"] = value.data if isinstance(record, ArrayRecord) else value
    return found


@pytest.mark.parametrize("private_epochs", [0, 3])
def test_until_the_flag_is_set_not_a_byte_is_changed(private_epochs: int, tmp_path: Path) -> None:
    bare = play(own_app([]), epsilon=1e9)
    with_mod = play(own_app([mod(tmp_path, private_epochs=private_epochs)]), epsilon=1e9)
    assert len(bare.received) == len(with_mod.received) == 6 * 2 * CLIENTS
    for plain, mine in zip(bare.received, with_mod.received, strict=True):
        assert bytes_of(plain) == bytes_of(mine)
        if plain.metadata.message_type == "train" or not private_epochs:
            assert plain.content.keys() == mine.content.keys()
    assert not list(tmp_path.rglob("round-*.safetensors"))


def test_then_the_dual_model_trains_and_predicts(tmp_path: Path) -> None:
    grid = play(own_app([mod(tmp_path, private_epochs=30)]), rounds=14)
    detector = grid.detector  # type: ignore[attr-defined]
    assert detector.negative
    assert detector.scores is not None
    assert detector.scores.local > 0.85 > detector.scores.central  # each camp is served; the shared model serves none
    assert detector.scores.beta is not None
    assert len(list(tmp_path.glob("*/client-*/v"))) == CLIENTS


def test_w_travels_as_it_came_and_v_never(tmp_path: Path) -> None:
    grid = play(own_app([mod(tmp_path)]))
    trained = [m for m in grid.received if m.metadata.message_type == "train"]
    for before, after in zip(trained[:CLIENTS], trained[-CLIENTS:], strict=True):
        assert after.content.array_records.keys() == {"arrays"}
        sizes = {name: len(array.data) for name, array in after.content["arrays"].items()}
        assert sizes == {name: len(array.data) for name, array in before.content["arrays"].items()}
        assert {name: array.shape for name, array in after.content["arrays"].items()} == SHAPES
        assert after.content["metrics"].keys() == {"num-examples", "train_loss"}


def ordered(grid: FakeGrid, kind: str, arrays: ArrayRecord, round: int, **instruction: Any) -> Message:
    config = {
        "experiment": "exp",
        "session": "s",
        "since": 0,
        "round": round,
        "keep": 0,
        "recovering": True,
    } | instruction
    template = grid.of(kind)[0]
    message = over_the_wire(template)
    message.content["arrays"] = arrays
    for name, value in config.items():
        message.content["config"][f"lindt-{name}"] = value
    return over_the_wire(message)


@pytest.fixture(scope="module")
def grid() -> FakeGrid:
    return play(own_app([]), rounds=1)


def context_of(grid: FakeGrid) -> Context:
    return next(iter(grid.contexts.values()))


def test_one_round_by_hand(grid: FakeGrid, tmp_path: Path) -> None:
    """One batch of everything, plain SGD: w and v are those of one step down the joint loss (Eq. 10)."""
    torch.manual_seed(2)
    shared = net()
    sent = ArrayRecord(shared.state_dict())
    app, context = own_app([mod(tmp_path, batch=40)]), context_of(grid)
    reply = app(ordered(grid, "train", sent, 1), context)
    private = initial_private(shared, "copy")
    optimizer = sgd([*shared.parameters(), *private.parameters()])
    intertwine(shared, private).joint_loss(cross_entropy, *samples(context, "train")).backward()
    optimizer.step()
    back = load_arrays(net(), reply.content["arrays"])
    for mine, theirs in zip(shared.parameters(), back.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    predict = mod(tmp_path, batch=40).predictor(ordered(grid, "evaluate", sent, 1), context)
    x = samples(context, "test")[0]
    fresh = load_arrays(net(), sent)
    torch.testing.assert_close(predict(x), intertwine(fresh, private)(x)[1])


def test_v_goes_on_from_round_to_round_through_restarts(grid: FakeGrid, tmp_path: Path) -> None:
    torch.manual_seed(3)
    first, second, context = net(), net(), context_of(grid)  # w as received in the two rounds
    private = initial_private(first, "copy")

    def play_round(round: int, w: nn.Module) -> Message:
        app = own_app([mod(tmp_path, batch=40)])  # a new process has a new app
        return app(ordered(grid, "train", ArrayRecord(w.state_dict()), round), context)

    play_round(1, first)
    replies = [play_round(2, second) for _ in range(2)]  # the second time after the server has lost it
    assert bytes_of(replies[0]) == bytes_of(replies[1])
    for w in (
        load_arrays(net(), ArrayRecord(first.state_dict())),
        load_arrays(net(), ArrayRecord(second.state_dict())),
    ):
        optimizer = sgd([*w.parameters(), *private.parameters()])
        intertwine(w, private).joint_loss(cross_entropy, *samples(context, "train")).backward()
        optimizer.step()
        private.zero_grad()
    sent, x = ArrayRecord(second.state_dict()), samples(context, "test")[0]
    predict = mod(tmp_path).predictor(ordered(grid, "evaluate", sent, 2), context)
    torch.testing.assert_close(predict(x), intertwine(second, private)(x)[1])


def test_a_v_i_of_other_data_is_set_aside_and_the_server_is_told(grid: FakeGrid, tmp_path: Path) -> None:
    rows, w, context = [40], ArrayRecord(net().state_dict()), copy.copy(context_of(grid))

    def fewer(context: Context, split: str) -> tuple[Tensor, Tensor]:
        x, y = samples(context, split)
        return x[: rows[0]], y[: rows[0]]

    def note(round: int, session: str, **order: Any) -> str:
        app = own_app([mod(tmp_path, data=fewer)])
        reply = app(ordered(grid, "train", w, round, session=session, since=round - 1, **order), context)
        return Visit.unpack(reply.content["lindt"]["visit"]).note if "lindt" in reply.content else ""

    home = tmp_path / "exp" / "client-0"
    assert [note(1, "a"), note(2, "a"), note(3, "b")] == [""] * 3
    assert not (home / "aside").exists()
    rows[0] = 30
    assert note(4, "c") == "number of examples changed; its models are set aside and trained again"
    assert sorted(path.name for path in (home / "aside").rglob("round-*")) != []
    context.node_config = context.node_config | {"num-partitions": 9}
    assert "node_config changed" in note(5, "d", recovering=False)  # said also where nobody recovers any longer


def test_the_users_optimizer_is_the_one_that_steps(grid: FakeGrid, tmp_path: Path) -> None:
    made: list[int] = []

    def adam(params: Any) -> torch.optim.Optimizer:
        params = list(params)
        made.append(len(params))
        return torch.optim.Adam(params, lr=0.01)

    app = own_app([mod(tmp_path, optimizer=adam, batch=40)])
    sent = ArrayRecord(net().state_dict())
    reply = app(ordered(grid, "train", sent, 1), context_of(grid))
    assert made == [4, 4]  # one for w, one for v
    moved = reply.content["arrays"]["0.bias"].numpy() - sent["0.bias"].numpy()
    assert np.abs(moved).max() == pytest.approx(0.01, rel=1e-3)  # Adam's first step is the rate itself


def test_epochs_may_come_from_the_context(grid: FakeGrid, tmp_path: Path) -> None:
    context = context_of(grid)
    sent = ArrayRecord(net().state_dict())
    twice = own_app([mod(tmp_path / "a", epochs=lambda c: 2)])(ordered(grid, "train", sent, 1), context)
    once = own_app([mod(tmp_path / "b", epochs=2)])(ordered(grid, "train", sent, 1), context)
    assert bytes_of(twice) == bytes_of(once)


def test_fedprox_keeps_its_hold_on_w(tmp_path: Path) -> None:
    loose = play(own_app([mod(tmp_path / "a")]), strategy=FedProx(proximal_mu=0.001), patience=0)
    tight = play(own_app([mod(tmp_path / "b")]), strategy=FedProx(proximal_mu=4.0), patience=0)
    assert tight.detector.seen.w_div < loose.detector.seen.w_div / 2  # type: ignore[attr-defined]


def test_beta_is_reported_by_each_client(grid: FakeGrid, tmp_path: Path) -> None:
    app, context = own_app([mod(tmp_path, private_epochs=5)]), context_of(grid)
    sent = ArrayRecord(net().state_dict())
    reply = app(ordered(grid, "evaluate", sent, 1, recovering=False), context)
    metrics = reply.content["metrics"]
    x, y = samples(context, "test")
    accuracy = float((load_arrays(net(), sent)(x).argmax(1) == y).float().mean())
    assert metrics["lindt-central"] == metrics["lindt-local"] == pytest.approx(accuracy)
    assert metrics["lindt-beta"] == pytest.approx(metrics["lindt-local"] - metrics["lindt-private"])
    assert metrics["lindt-private"] > 0.8
    assert reply.content["lindt"]["client"] == "0"
    (kept,) = tmp_path.rglob("alone.safetensors")
    at = kept.stat().st_mtime_ns
    again = own_app([mod(tmp_path, private_epochs=5)])(
        ordered(grid, "evaluate", sent, 2, recovering=False), context
    )  # after a restart
    assert kept.stat().st_mtime_ns == at  # it trains alone once
    assert again.content["metrics"]["lindt-private"] == metrics["lindt-private"]


def mirrored(context: Context, split: str) -> tuple[Tensor, Tensor]:
    """As many samples, of which others are right."""
    x, y = samples(context, split)
    return -x, y


def doubled(_: Context) -> nn.Module:
    """The same structure with other first weights."""
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return model


@pytest.mark.parametrize(
    "changed",
    [
        {"data": mirrored},
        {"data": lambda c, s: mirrored(c, s) if s == "test" else samples(c, s)},
        {"model": lambda _: nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))},
        {"model": doubled},
        {"loss": lambda output, y: 2 * cross_entropy(output, y)},
        {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)},
        {"batch": 20},
        {"private_epochs": 4},
        {"metric": lambda output, y: -cross_entropy(output, y, reduction="none")},
    ],
    ids=["data", "test data", "structure", "weights", "loss", "rate", "batch", "epochs", "metric"],
)
def test_a_client_trains_alone_anew_where_something_changed(
    changed: dict[str, Any], grid: FakeGrid, tmp_path: Path
) -> None:
    sent, context = ArrayRecord(net().state_dict()), context_of(grid)

    def written(**settings: Any) -> int:
        app = own_app([mod(tmp_path, **({"private_epochs": 2} | settings))])
        app(ordered(grid, "evaluate", sent, 1, recovering=False), context)
        (kept,) = tmp_path.rglob("alone.safetensors")
        return kept.stat().st_mtime_ns

    at = written()
    assert written() == at
    assert written(**changed) != at


@pytest.mark.parametrize(
    "give",
    [
        lambda x, y: (x.numpy(), y.numpy()),
        lambda x, y: TensorDataset(x, y),
        lambda x, y: DataLoader(TensorDataset(x, y), batch_size=10),
        lambda x, y: [{"img": a, "label": int(b)} for a, b in zip(x, y, strict=True)],
    ],
)
def test_data_in_whatever_form_they_are(give: Callable[..., Any], grid: FakeGrid, tmp_path: Path) -> None:
    sent = grid.sent[0].content["arrays"]
    replies = [
        own_app([mod(tmp_path / str(i), data=lambda c, s, form=form: form(*samples(c, s)))])(
            ordered(grid, "train", sent, 1), context_of(grid)
        )
        for i, form in enumerate([give, lambda x, y: (x, y)])
    ]
    assert bytes_of(replies[0]) == bytes_of(replies[1])


def test_what_is_wrong_is_told_at_the_first_meeting(grid: FakeGrid, tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    context = context_of(grid)
    named = ArrayRecord(Named().state_dict())
    calm = ordered(grid, "train", named, 1, recovering=False)
    with pytest.raises(PlanError, match="points"):
        own_app([mod(tmp_path, model=lambda _: Named())])(calm, context)
    with pytest.raises(UserError, match="must build the federation's model"):
        own_app([mod(tmp_path)])(calm, context)
    nameless = Context(1, 5, {}, RecordDict(), {})
    with pytest.raises(PlanError, match="client_id"):
        own_app([mod(tmp_path)])(calm, nameless)
    with pytest.raises(UserError, match="experiment"):
        own_app([mod(tmp_path)])(ordered(grid, "train", named, 1, experiment="../../etc"), context)
    with pytest.raises(PlanError, match="private_epochs"):
        mod(tmp_path, private_epochs=-1)

    def absent(context: Context, split: str) -> Tensor:
        raise FileNotFoundError(f"no {split}.pt")

    with pytest.raises(
        UserError, match=r"the same reason: .* at the first message \(FileNotFoundError: no train\.pt\)"
    ):
        NFLDetector(FedAvg()).start(FakeGrid(own_app([mod(tmp_path, data=absent)]), 3), ArrayRecord(net().state_dict()))
    assert not list(tmp_path.iterdir())


def test_it_must_be_the_last_mod(grid: FakeGrid, tmp_path: Path) -> None:
    sent = ArrayRecord(net().state_dict())
    message = ordered(grid, "train", sent, 1)
    with pytest.raises(UserError, match="must be the last"):
        own_app([mod(tmp_path), fixedclipping_mod])(message, context_of(grid))
    message.content["config"]["clipping_norm"] = 0.01
    reply = own_app([fixedclipping_mod, mod(tmp_path)])(message, context_of(grid))
    moved = [reply.content["arrays"][name].numpy() - sent[name].numpy() for name in sent]
    assert np.sqrt(sum(np.square(part).sum() for part in moved)) == pytest.approx(0.01, rel=1e-3)


def test_without_a_detector_it_does_nothing(grid: FakeGrid, tmp_path: Path) -> None:
    message = over_the_wire(grid.of("train")[0])
    for name in [name for name in message.content["config"] if name.startswith("lindt-")]:
        del message.content["config"][name]
    own_app([mod(tmp_path)])(message, context_of(grid))
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="no instruction of NFLDetector"):
        mod(tmp_path).predictor(message, context_of(grid))


def test_a_model_that_calls_view_on_pictures(grid: FakeGrid, tmp_path: Path) -> None:
    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 36, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.conv(x)).view(-1, 4 * 36))

    def data(context: Context, split: str) -> tuple[Tensor, Tensor]:
        return torch.randn(20, 3, 8, 8), torch.arange(20) % 2

    sent = ArrayRecord(Pictures().state_dict())
    app = own_app([mod(tmp_path, model=lambda _: Pictures(), data=data, points=["conv"])])
    reply = app(ordered(grid, "train", sent, 1), context_of(grid))
    assert reply.content["metrics"]["num-examples"] == 20
