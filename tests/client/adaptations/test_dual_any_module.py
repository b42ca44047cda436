"""LINDT on other people's models: a ResNet with BatchNorm and a transformer, trained through whole rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

from lindt.client.adaptations.dual import Dual
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.errors import PlanError
from lindt.plan.plan import Alone, Method, Plan, Scoring, Training
from lindt.plan.problem import Problem
from lindt.protocols import Buffers, Reply, Task
from lindt.server.federation import federate
from lindt.server.state import RoundResult, RunState
from lindt.weights import first_model, write

CLIENTS, SIGMA = 3, 0.003


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)  # fires twice; the block fires once

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.block1, self.block2 = Residual(4), Residual(4)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = relu(self.norm(self.stem(x)))
        return self.fc(self.block2(self.block1(h)).mean((2, 3)))


class Transformer(nn.Module):
    """Each row of the image is a token."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(8, 12))
        self.embed = nn.Linear(8, 12)
        layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.encoder(self.embed(x[:, 0]) + self.place).mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "resnet": (ResNet, ("block1", "block2")),
    "transformer": (Transformer, ("encoder.layers.0", "encoder.layers.1")),
}


def clients() -> list[tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """Stripes across or down; the clients call the same picture by different names, 0 and 1 or 1 and 2 ..."""
    draw = torch.Generator().manual_seed(0)
    stripes = torch.tensor([1.0, -1.0]).repeat(4)
    pictures = torch.stack([stripes[:, None].expand(8, 8), stripes.expand(8, 8)])

    def some(n: int, client: int) -> tuple[Tensor, Tensor]:
        kind = torch.arange(n) % 2
        return pictures[kind][:, None] + 0.3 * torch.randn(n, 1, 8, 8, generator=draw), kind + client

    return [(some(21 + 4 * i, i), some(12, i)) for i in range(CLIENTS)]


def plan(points: tuple[str, ...], rounds: int = 3, rate: float = 1.0, every: int = 1) -> Plan:
    return Plan(
        rounds=rounds,
        training=Training(rate=0.1, batch=5, epochs=2),
        environment=Environment(participation=Sampled(rate=rate), privacy=Gaussian(S=2.0, sigma=SIGMA)),
        method=Method(adaptation=Dual(points=points)),
        alone=Alone(private=False),
        scoring=Scoring(every=every, last=1),
    )


class Overheard:
    """An engine that keeps what passes through it."""

    def __init__(self, engine: InProcess) -> None:
        self.engine, self.heard = engine, list[tuple[Task, Reply]]()

    def available(self) -> Sequence[int]:
        return self.engine.available()

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        for task, reply in zip(tasks, self.engine.dispatch(tasks), strict=True):
            self.heard.append((task, reply))
            yield reply

    def forget_after(self, round: int) -> None:
        self.engine.forget_after(round)

    def replies(self, kind: str, round: int) -> list[Reply]:
        found = [reply for task, reply in self.heard if (task.kind, task.round) == (kind, round)]
        return sorted(found, key=lambda reply: reply.client)  # as the server takes them


def surprise(outputs: Tensor, y: Tensor) -> Tensor:
    """One number a sample that tells any two models apart."""
    return -cross_entropy(outputs, y, reduction="none")


Run = tuple[list[tuple[RunState, RoundResult]], Overheard]


def play(name: str, rounds: int = 3, rate: float = 1.0, every: int = 1) -> Run:
    build, points = MODELS[name]
    problem = Problem(clients(), build, metric=surprise)
    mine = plan(points, rounds, rate, every)
    engine = Overheard(InProcess(mine, problem))
    return list(federate(mine, problem=problem, engine=engine)), engine


played = cache(play)


@pytest.mark.parametrize("name", MODELS)
def test_the_dual_learns_what_one_global_model_cannot(name: str) -> None:
    """Three clients name the same pictures differently: w alone is at a loss, w with v_i is not."""
    build, points = MODELS[name]
    mine = plan(points, rounds=5, every=5)
    last = list(federate(mine, clients=clients(), model=build, metric=surprise))[-1][1]
    assert last.scores is not None
    assert last.scores.central < -1.0  # worse than guessing between a client's own two names: log 1/2 = -0.69
    assert last.scores.local > last.scores.central + 0.4
    notes = last.scores.notes
    assert set(notes) == {f"{kind}/{point}" for kind in ("score", "gradient") for point in (*points, "head")} - {
        "score/head"
    }
    assert all(0 < notes[f"score/{point}"] <= 1 for point in points)
    assert notes["gradient/head"] > 0


def test_a_milder_scale_lets_the_blocks_of_v_learn() -> None:
    """The paper's score saturates on hundreds of features after ReLU; divided by sqrt(d) it does not."""
    mine = plan(MODELS["resnet"][1], rounds=1)
    softer = replace(mine, method=Method(adaptation=Dual(points=MODELS["resnet"][1], scale="sqrt_d")))
    notes = []
    for each in (mine, softer):
        ((_, result),) = federate(each, clients=clients(), model=ResNet)
        assert result.scores is not None
        notes.append(result.scores.notes)
    for block in ("block1", "block2"):
        assert notes[0][f"score/{block}"] > 0.999
        assert notes[1][f"score/{block}"] < 0.9
        assert notes[0][f"gradient/{block}"] < 1e-3 < notes[1][f"gradient/{block}"]


@pytest.mark.parametrize("name", MODELS)
def test_twice_the_same(name: str) -> None:
    first, second = played(name)[0], play(name)[0]
    for (one, _), (other, _) in zip(first, second, strict=True):
        assert torch.equal(one.w, other.w)
        assert torch.equal(one.buffers.floats_F, other.buffers.floats_F)


@pytest.mark.parametrize("name", MODELS)
def test_every_client_has_a_v_of_its_own(name: str) -> None:
    _, engine = played(name)
    kept = [engine.engine.versions.read(client, 3)[0] for client in range(CLIENTS)]
    names = set(first_model(Problem(clients(), MODELS[name][0]), Plan()).state_dict())
    for i in range(CLIENTS):
        assert set(kept[i]) == names
        assert all(torch.isfinite(tensor).all() for tensor in kept[i].values())
        for other in kept[:i]:
            # Before the last point a score near 1 may leave v nothing to learn; the head always learns.
            assert (kept[i]["fc.weight"] != other["fc.weight"]).all()


@pytest.mark.parametrize("name", MODELS)
def test_before_its_first_v_a_client_predicts_with_w(name: str) -> None:
    runs, engine = play(name, rounds=2, rate=0.34)  # K = 1 of 3
    treated: set[int] = set()
    for _, result in runs:
        treated |= set(result.answered)
        for reply in engine.replies("evaluate", result.round):
            assert reply.tally is not None
            same = torch.equal(reply.tally.local, reply.tally.central)
            assert same == (reply.client not in treated)
    assert 0 < len(treated) < CLIENTS


def test_buffers_travel_averaged_and_without_noise() -> None:
    runs, engine = played("resnet")
    before = Buffers(torch.cat([torch.zeros(4), torch.ones(4)] * 5), torch.zeros(5, dtype=torch.int64))
    for state, result in runs:
        replies = engine.replies("train", result.round)
        floats = torch.stack([r.buffers.floats_F for r in replies if r.buffers])
        counts = torch.stack([r.buffers.counts_I for r in replies if r.buffers])
        assert floats.shape == (CLIENTS, 40)  # 5 BatchNorms of 4 channels: a mean and a variance each
        assert torch.equal(state.buffers.floats_F, floats.mean(0))
        assert torch.equal(state.buffers.counts_I, counts.amax(0))
        trained_from = [t.buffers for t, _ in engine.heard if (t.kind, t.round) == ("train", result.round)]
        assert all(torch.equal(b.floats_F, before.floats_F) for b in trained_from)
        assert all((row != before.floats_F).all() for row in floats)  # every client's data moved them
        variances = state.buffers.floats_F.view(5, 2, 4)[:, 1]
        assert torch.isfinite(state.buffers.floats_F).all()
        assert (variances > 0).all()
        before = state.buffers
    # The largest client has 29 samples: 6 batches of 5, 2 epochs, 3 rounds.
    assert runs[-1][0].buffers.counts_I.tolist() == [6 * 2 * 3] * 5


def test_the_noise_is_on_w() -> None:
    """w's change minus the mean of the clipped updates is the plan's noise, of the right size."""
    runs, engine = played("resnet")
    before = engine.replies("train", 1)
    start = next(task.w for task, _ in engine.heard if task.kind == "train")
    updates = torch.stack([r.w - start for r in before if r.w is not None])
    clipped = torch.stack([u * min(1.0, 2.0 / u.norm().item()) for u in updates])
    noise = runs[0][0].w - start - clipped.mean(0)
    assert noise.std().item() == pytest.approx(SIGMA, rel=0.15)
    assert abs(noise.mean().item()) < 4 * SIGMA / len(noise) ** 0.5


def test_w_and_its_buffers_make_the_model_that_is_scored() -> None:
    """The global model rebuilt from what the server holds scores what the clients report."""
    runs, engine = played("resnet")
    state, result = runs[-1]
    model = ResNet()
    write(model, state.w, state.buffers)
    model.eval()
    for reply, (_, (x, y)) in zip(engine.replies("evaluate", result.round), clients(), strict=True):
        assert reply.tally is not None
        assert reply.tally.central[0].item() == pytest.approx(surprise(model(x), y).sum().item(), rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_scoring_leaves_training_alone(name: str) -> None:
    """Evaluating puts modules in evaluation mode; the next round has to train as if it had not happened."""
    (scored, heard), (unscored, unheard) = played(name), play(name, every=3)
    assert torch.equal(scored[-1][0].w, unscored[-1][0].w)
    for client in range(CLIENTS):
        one, other = (engine.engine.versions.read(client, 3)[0] for engine in (heard, unheard))
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_v_trains_in_training_mode_whatever_came_before() -> None:
    """BatchNorm in v counts its batches only while it trains: all of them, in every round."""
    _, engine = played("resnet")
    for client, steps in enumerate([4, 5, 6]):  # 21 samples are 4 batches: a lone last one joins
        kept, _ = engine.engine.versions.read(client, 3)
        assert kept["norm.num_batches_tracked"].item() == 3 * 2 * steps  # v copied w^0, which had seen none


def test_points_that_do_not_suit_the_model_are_refused_before_training() -> None:
    with pytest.raises(PlanError, match=r"method.adaptation.points.*'block7'.*block1"):
        next(federate(plan(("block7",)), clients=clients(), model=ResNet))
    with pytest.raises(PlanError, match="ResNet has no default attach points"):
        next(federate(plan(()), clients=clients(), model=ResNet))


def test_a_model_may_name_its_own_points() -> None:
    def build() -> nn.Module:
        model = ResNet()
        model.attach_points = ("block1", "block2")  # type: ignore[assignment]
        return model

    named, found = plan(("block1", "block2"), rounds=1), plan((), rounds=1)
    (one,) = federate(named, clients=clients(), model=ResNet)
    (other,) = federate(found, clients=clients(), model=build)
    assert torch.equal(one[0].w, other[0].w)


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf")])
def test_a_v_that_is_spoiled_is_not_kept(spoiled: float) -> None:
    mine, data = plan(MODELS["resnet"][1], rounds=2), clients()
    data[1][0][0][3, 0, 0, 0] = spoiled  # one value of client 1's training pictures
    problem = Problem(data, ResNet)
    engine = InProcess(mine, problem)
    *_, (_, result) = federate(mine, problem=problem, engine=engine, preflight=False)  # it would refuse the value
    assert [engine.versions.rounds(client) for client in range(CLIENTS)] == [[1, 2], [], [1, 2]]
    assert [refusal.client for refusal in result.refused] == [1]
