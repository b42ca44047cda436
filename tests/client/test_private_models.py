"""Sec. 3.2's references: a model trained alone, its stopping rule and its cache."""

from __future__ import annotations

import copy
import errno
import functools
import os
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lindt.client import private_models
from lindt.client.private_models import PrivateModelCache, PrivateTraining
from lindt.data.examples import Rows, subset
from lindt.errors import PlanError
from lindt.plan.plan import Alone, Plan, Scoring, Training
from lindt.plan.problem import Problem
from lindt.runs.files import seal, unseal
from lindt.seeds import seed_for
from lindt.weights import first_model

N = 24
PLAN = Plan(training=Training(rate=0.3, decay=0.9, batch=4), alone=Alone(epochs=6, patience=2, held_out=0.25))


def data(seed: int, n: int) -> Rows:
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return Rows(torch.randn(n, 3, generator=draw) + 2 * torch.eye(3)[y], y, torch.arange(n))


def build(dropout: float = 0.3, hidden: int = 5) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 3))


def lesson(
    plan: Plan = PLAN,
    *,
    name: str = "client 0",
    train: Rows | None = None,
    test: Rows | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Any = cross_entropy,
    metric: Any = None,
) -> PrivateTraining:
    train, test = train or data(0, N), test or data(1, 10)
    problem = Problem([(train, test)] * 2, model or build(), loss, metric)
    return PrivateTraining(name, train, test, plan, problem, torch.device("cpu"))


def held_out_rows(mine: PrivateTraining, cut: int) -> tuple[Tensor, Tensor]:
    shuffle = torch.Generator().manual_seed(seed_for(mine.seed, "held out"))
    rows = torch.randperm(N, generator=shuffle)
    return rows[:cut], rows[cut:]


def by_hand(mine: PrivateTraining, train: Any, epochs: int) -> list[nn.Module]:
    """The models after each epoch, by torch's own optimiser."""
    model, models = first_model(mine.problem, mine.plan), []
    generator = torch.Generator().manual_seed(seed_for(mine.seed, "batches"))
    torch.manual_seed(seed_for(mine.seed, "dropout"))
    for epoch in range(epochs):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.3 * 0.9**epoch)
        model.train()
        batches = list(torch.randperm(len(train), generator=generator).split(4))
        assert len(batches[-1]) > 1
        for rows in batches:
            x, y = train.take(rows)
            optimiser.zero_grad()
            cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimiser.step()
        models.append(copy.deepcopy(model).eval())
    return models


def best_by_hand(mine: PrivateTraining, models: list[nn.Module], held: Any, patience: int) -> int:
    hits = [int((model(held.x[held.rows]).argmax(1) == held.labels).sum()) for model in models]
    best = 0
    for epoch, found in enumerate(hits):
        if found >= hits[best]:
            best = epoch
        if epoch - best >= patience:
            break
    return best


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_rule_by_hand(seed: int, refit: bool) -> None:
    """Pick the epoch on the held-out quarter; then that very model, or as many epochs on everything."""
    plan = replace(PLAN, seed=seed, alone=replace(PLAN.alone, refit=refit, epochs=8))
    mine = lesson(plan)
    held, rest = held_out_rows(mine, 6)
    models = by_hand(mine, subset(mine.train, rest), 8)
    best = best_by_hand(mine, models, subset(mine.train, held), patience=2)
    if refit:
        models = by_hand(mine, mine.train, best + 1)
    assert torch.allclose(mine.learn().outputs, models[best](mine.test.x), atol=1e-4)


@pytest.mark.parametrize(
    ("scores", "patience", "asked", "best"),
    [
        ([0.3, 0.6, 0.5, 0.5, 0.9, 0.9], 2, 4, 2),  # given up before the better epoch 5
        ([0.3, 0.6, 0.5, 0.5, 0.9, 0.7], 3, 6, 5),
        ([0.3, 0.4, 0.5, 0.6, 0.7, 0.8], 1, 6, 6),
        ([0.5, 0.5, 0.5, 0.4, 0.4, 0.4], 2, 5, 3),  # of equals the latest
        ([0.5, 0.4, 0.4, 0.4, 0.4, 0.4], 4, 5, 1),
        ([float("nan")] * 6, 2, 3, 1),  # a score that is no number never is the best
    ],
)
def test_the_best_epoch_is_kept(
    monkeypatch: pytest.MonkeyPatch, scores: list[float], patience: int, asked: int, best: int
) -> None:
    told: list[float] = []

    def scripted(self: PrivateTraining, model: nn.Module, data: object) -> float:
        told.append(scores[len(told)])
        return told[-1]

    monkeypatch.setattr(PrivateTraining, "_score", scripted)
    mine = lesson(replace(PLAN, alone=Alone(epochs=6, patience=patience, held_out=0.25, refit=False)))
    found = mine.learn().outputs
    assert len(told) == asked
    _, rest = held_out_rows(mine, 6)
    assert torch.allclose(found, by_hand(mine, subset(mine.train, rest), best)[-1](mine.test.x), atol=1e-4)


class Witness(nn.Module):
    """Keeps the first feature of every sample it trains on."""

    def __init__(self, seen: set[float]) -> None:
        super().__init__()
        self.fc, self.seen = nn.Linear(3, 3), seen

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.update(x[:, 0].tolist())
        return self.fc(x)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize(("held_out", "kept"), [(0.25, 6), (0.1, 2), (0.001, 1), (0.999, 23)])
def test_held_out_samples_never_train_unless_it_is_refit(held_out: float, kept: int, refit: bool) -> None:
    seen: set[float] = set()
    rule = Alone(epochs=3, held_out=held_out, refit=refit)
    mine = lesson(replace(PLAN, alone=rule), model=lambda: Witness(seen))
    mine.learn()
    everyone = set(mine.train.x[:, 0].tolist())
    assert len(everyone) == N
    held, _ = held_out_rows(mine, kept)
    assert seen == (everyone if refit else everyone - set(mine.train.x[held, 0].tolist()))
    assert not seen & set(mine.test.x[:, 0].tolist())


def stretched(factor: float) -> Plan:
    return replace(PLAN, alone=replace(PLAN.alone, stretch=factor))


@pytest.mark.parametrize(("factor", "chosen", "trained"), [(0.5, 5, 2), (0.5, 1, 1), (2.0, 3, 6), (1.0, 4, 4)])
def test_half_and_twice_the_chosen_epochs(factor: float, chosen: int, trained: int) -> None:
    mine = lesson(stretched(factor))
    assert torch.allclose(mine.refit(chosen).outputs, by_hand(mine, mine.train, trained)[-1](mine.test.x), atol=1e-4)
    found = mine.learn()
    assert found.epochs == lesson().learn().epochs  # the rule itself is not stretched
    assert torch.equal(found.outputs, mine.refit(found.epochs).outputs)


def test_stretching_needs_the_refit() -> None:
    with pytest.raises(PlanError, match="stretch"):
        Alone(refit=False, stretch=2.0)


def test_it_does_not_matter_when_it_is_asked() -> None:
    """Dropout and first weights draw from torch's global stream: seeded inside, and put back."""
    mine = lesson()
    torch.manual_seed(1)
    first = mine.learn().outputs
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)
    torch.manual_seed(99)
    assert torch.equal(mine.learn().outputs, first)
    assert not first.requires_grad
    early = lesson(replace(PLAN, alone=replace(PLAN.alone, patience=1)))  # stops in the middle of the loop
    torch.manual_seed(1)
    early.learn()
    assert torch.equal(torch.rand(3), after)


# the cache


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every training step."""
    taken: list[int] = []

    def counted(*arguments: Any) -> Any:
        down = Descent(*arguments)

        def step(*more: Any) -> Any:
            taken.append(1)
            return down(*more)

        return step

    Descent = private_models.GradientStep
    monkeypatch.setattr(private_models, "GradientStep", counted)
    return taken


def test_what_is_cached_is_not_trained_again(tmp_path: Path, steps: list[int]) -> None:
    cache = PrivateModelCache(tmp_path / "new" / "folder")
    first = cache.outputs(lesson())
    trained = len(steps)
    assert trained > 0
    assert torch.equal(cache.outputs(lesson()), first)
    assert torch.equal(PrivateModelCache(tmp_path / "new" / "folder").outputs(lesson()), first)
    assert len(steps) == trained
    cache.outputs(lesson(name="client 1"))
    assert len(steps) > trained
    assert len(list((tmp_path / "new" / "folder").rglob("*.safetensors"))) == 2


def test_a_loss_has_the_same_key_in_every_process() -> None:
    """The representation of a partial holds an address, which is another in the next process."""

    def smoothed(output: Tensor, y: Tensor, share: float) -> Tensor:
        return cross_entropy(output, y, label_smoothing=share)

    twin = types.FunctionType(smoothed.__code__, smoothed.__globals__, smoothed.__name__)
    twin.__qualname__ = smoothed.__qualname__
    one, same, other = (functools.partial(f, share=s) for f, s in ((smoothed, 0.1), (twin, 0.1), (smoothed, 0.2)))
    assert repr(one) != repr(same)
    assert lesson(loss=one).key() == lesson(loss=same).key() != lesson(loss=other).key()


def test_a_stretched_lesson_does_not_choose_again(tmp_path: Path, steps: list[int]) -> None:
    cache, batches = PrivateModelCache(tmp_path), N // 4
    chosen = cache.learned(lesson()).epochs
    before = len(steps)
    found = cache.learned(lesson(stretched(2.0)))
    assert len(steps) - before == 2 * chosen * batches
    assert torch.equal(found.outputs, lesson(stretched(2.0)).learn().outputs)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2


def test_files_of_earlier_versions_are_trained_anew_and_said_once(
    tmp_path: Path, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"{lesson().key()}.safetensors").write_bytes(save({"outputs": torch.zeros(10, 3)}))  # not sealed
    wanted = lesson().learn().outputs
    before = len(steps)
    assert torch.equal(PrivateModelCache(tmp_path).outputs(lesson()), wanted)
    assert len(steps) == 2 * before
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path}: its private models are of an earlier version of lindt, and are trained again")
    PrivateModelCache(tmp_path).outputs(lesson(name="client 1"))
    assert len(caplog.messages) == 1


def test_without_a_folder_nothing_is_kept(steps: list[int]) -> None:
    first = PrivateModelCache().outputs(lesson())
    trained = len(steps)
    assert torch.equal(PrivateModelCache().outputs(lesson()), first)
    assert len(steps) == 2 * trained


def kept_file(cache: Path) -> Path:
    (path,) = cache.rglob("*.safetensors")
    return path


def negated(whole: bytes) -> bytes:
    """The sign bit of every output flipped: P_i's best class becomes its worst."""
    tensors, _ = unseal(whole)
    values = tensors["outputs"].numpy().tobytes()
    assert values in whole
    return whole.replace(values, (-tensors["outputs"]).numpy().tobytes())


def sealed_with(**changes: Tensor | None) -> Callable[[bytes], bytes]:
    """The same file with other tensors under a checksum that adds up; None leaves one out."""

    def change(whole: bytes) -> bytes:
        tensors, words = unseal(whole)
        return seal({name: t for name, t in (tensors | changes).items() if t is not None}, words)

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "noise": lambda whole: b"\xff" * len(whole),
    "renamed": lambda whole: whole.replace(b"outputs", b"stuputo"),
    "negated": negated,
    "not sealed": lambda whole: save(unseal(whole)[0]),
    "another key": lambda whole: seal(unseal(whole)[0], {"key": lesson(name="client 1").key()}),
    "NaN": sealed_with(outputs=torch.full((10, 3), torch.nan)),
    "another shape": sealed_with(outputs=torch.zeros(10, 4)),
    "too few samples": sealed_with(outputs=torch.zeros(9, 3)),
    "whole numbers": sealed_with(outputs=torch.zeros(10, 3, dtype=torch.int64)),
    "no epochs": sealed_with(epochs=None),
    "epochs that cannot be": sealed_with(epochs=torch.tensor(99)),
    "epochs in a list": sealed_with(epochs=torch.tensor([1, 2])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_does_not_fit_is_set_aside_and_made_anew(
    tmp_path: Path, steps: list[int], caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    cache = PrivateModelCache(tmp_path)
    wanted = cache.outputs(lesson())
    path = kept_file(tmp_path)
    whole = path.read_bytes()
    damaged = DAMAGE[damage](whole)
    path.write_bytes(damaged)
    trained = len(steps)
    assert torch.equal(cache.outputs(lesson()), wanted)
    assert len(steps) == 2 * trained
    assert path.read_bytes() == whole
    assert path.with_suffix(".damaged").read_bytes() == damaged
    (said,) = caplog.messages
    assert said.startswith(f"{path} does not fit (")
    assert said.endswith("it is renamed to .damaged, and the private model is trained again")
    assert "\n" not in said


def test_parts_for_the_validation_are_checked_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    training = replace(lesson(), validation=data(2, 7))
    cache = PrivateModelCache(tmp_path)
    wanted = cache.learned(training)
    assert wanted.validation_en is not None
    path = kept_file(tmp_path)
    whole = path.read_bytes()
    for change in (
        {"validation": torch.full_like(wanted.validation_en, torch.nan)},
        {"validation": wanted.validation_en[:, :6]},
        {"validation": wanted.validation_en[:0]},
        {"w": torch.zeros(3)},
        {"floats": torch.zeros(3)},
        {"counts": None},
    ):
        caplog.clear()
        path.write_bytes(sealed_with(**change)(whole))
        assert torch.equal(cache.learned(training).outputs, wanted.outputs)
        assert len(caplog.messages) == 1
        assert path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_no_link_is_followed_and_no_pipe_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    cache, victim = PrivateModelCache(tmp_path / "cache"), tmp_path / "victim"
    wanted = cache.outputs(lesson())
    path = kept_file(tmp_path / "cache")
    path.rename(victim)
    kept = victim.read_bytes()
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    assert torch.equal(cache.outputs(lesson()), wanted)
    assert "it is not a plain file" in caplog.text
    assert path.read_bytes() == kept == victim.read_bytes()
    assert not path.is_symlink()


@pytest.mark.parametrize("how", ["a file in the way", "a link", "a full disk"])
def test_a_cache_that_cannot_be_written_is_said_once_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    folder = tmp_path / "cache"
    if how == "a file in the way":
        folder.write_bytes(b"")
    elif how == "a link":
        (tmp_path / "victim").mkdir()
        folder.mkdir()
        (folder / "sealed").symlink_to(tmp_path / "victim")
    else:
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    cache = PrivateModelCache(folder)
    for name in ("client 0", "client 1"):
        assert torch.equal(cache.outputs(lesson(name=name)), lesson(name=name).learn().outputs)
    (said,) = caplog.messages
    assert said.startswith(str(folder))
    assert said.endswith("the run continues without a cache; set LINDT_CACHE to another folder")
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors"] == []


def test_a_model_gone_to_nan_is_not_kept(tmp_path: Path) -> None:
    gone = lesson(loss=scaled_loss(torch.nan))
    assert not torch.isfinite(PrivateModelCache(tmp_path).outputs(gone)).any()
    assert list(tmp_path.rglob("*.safetensors")) == []


class Dropping(nn.Module):
    """Prints as any other, and predicts as any other: only its training shows p."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.fc, self._p = nn.Linear(3, 3), p

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x), self._p, self.training)


class TrainedOtherwise(nn.Module):
    """The same outputs in either mode: only its gradients show the factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.fc, self._factor = nn.Linear(3, 3), factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out.detach() + self._factor * (out - out.detach())


class Doubled(nn.Module):
    """Prints as any other, computes otherwise."""

    def __init__(self, factor: float, frozen: float = 1.0) -> None:
        super().__init__()
        self.fc, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            self.frozen.weight.fill_(frozen)
        self.frozen.requires_grad_(False)
        self._factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self._factor * self.fc(x + self.frozen(x))


def scaled_loss(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: factor * cross_entropy(output, y)


def scaled_metric(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: -factor * cross_entropy(output, y, reduction="none")


def other_data(train: Rows) -> Rows:
    x = train.x.clone()
    x[-1, -1] += 1e-3
    return Rows(x, train.y, train.rows)


VARIANTS: dict[str, Callable[[], PrivateTraining]] = {
    "plain": lesson,
    "one feature of one sample": lambda: lesson(train=other_data(data(0, N))),
    "one label": lambda: lesson(train=Rows(data(0, N).x, data(0, N).y.clone().fill_(0), torch.arange(N))),
    "rows in another order": lambda: lesson(train=Rows(data(0, N).x, data(0, N).y, torch.arange(N).flip(0))),
    "test data": lambda: lesson(test=other_data(data(1, 10))),
    "seed": lambda: lesson(replace(PLAN, seed=1)),
    "name": lambda: lesson(name="client 1"),
    "rate": lambda: lesson(replace(PLAN, training=replace(PLAN.training, rate=0.31))),
    "batch": lambda: lesson(replace(PLAN, training=replace(PLAN.training, batch=5))),
    "rule": lambda: lesson(replace(PLAN, alone=replace(PLAN.alone, patience=3))),
    "refit": lambda: lesson(replace(PLAN, alone=replace(PLAN.alone, refit=False))),
    "stretch, 2": lambda: lesson(stretched(2.0)),
    "stretch, 0.5": lambda: lesson(stretched(0.5)),
    "threads": lambda: lesson(replace(PLAN, threads=2)),
    "dropout": lambda: lesson(model=build(0.4)),
    "width": lambda: lesson(model=build(hidden=6)),
    "forward, 1": lambda: lesson(model=lambda: Doubled(1.0)),
    "forward, 2": lambda: lesson(model=lambda: Doubled(2.0)),
    "dropout, 0.1": lambda: lesson(model=lambda: Dropping(0.1)),
    "dropout, 0.9": lambda: lesson(model=lambda: Dropping(0.9)),
    "gradient, 1": lambda: lesson(model=lambda: TrainedOtherwise(1.0)),
    "gradient, 2": lambda: lesson(model=lambda: TrainedOtherwise(2.0)),
    "frozen weights": lambda: lesson(model=lambda: Doubled(1.0, frozen=2.0)),
    "metric": lambda: lesson(replace(PLAN, scoring=Scoring(metric="macro_f1"))),
    "metric, 2": lambda: lesson(metric=scaled_metric(2.0)),
    "metric, 3": lambda: lesson(metric=scaled_metric(3.0)),
    "loss, 2": lambda: lesson(loss=scaled_loss(2.0)),
    "loss, 3": lambda: lesson(loss=scaled_loss(3.0)),
}


def test_the_key_is_what_decides_the_outputs() -> None:
    keys = {name: make().key() for name, make in VARIANTS.items()}
    assert len(set(keys.values())) == len(keys)
    assert keys == {name: make().key() for name, make in VARIANTS.items()}


def test_the_key_ignores_what_does_not_matter() -> None:
    torch.manual_seed(123)  # the moment
    again = lesson(replace(PLAN, name="another", rounds=7)).key()  # rounds of a federation there is none of
    x, y = data(0, N).x, data(0, N).y
    longer = Rows(torch.cat([x, x]), torch.cat([y, y]), torch.arange(N))  # the same samples in a bigger array
    assert lesson().key() == again == lesson(train=longer).key()
