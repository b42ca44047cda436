"""Steps from a tape: bit for bit the steps the long way, and only where nothing but numbers can differ."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import FrozenInstanceError, dataclass, replace
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from worlds import context

from lindt.client import training
from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.base import GlobalOnly
from lindt.client.adaptations.dual import Dual, Intertwined
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.separate import Separate
from lindt.client.training import BEFORE, GradientStep, NoPenalty, Proximal, Tape, recording_key
from lindt.data.examples import Rows
from lindt.plan.models import Cnn, Lstm, SmallCnn
from lindt.protocols import Adaptation, Batch, Context, Penalty, Predictor, Step
from lindt.weights import read_buffers, read_w


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each step from a tape; no tape of another test is left."""
    played: list[int] = []
    play = Tape.play

    def counted(self: Tape, inputs: Any) -> list[Tensor]:
        played.append(len(inputs))
        return play(self, inputs)

    monkeypatch.setattr(Tape, "play", counted)
    monkeypatch.setattr(training, "_KEPT", {})
    return played


def batches(shape: tuple[int, ...], sizes: list[int], classes: int = 10) -> list[Batch]:
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(n, *shape, generator=draw), torch.randint(classes, (n,), generator=draw)) for n in sizes]


def never_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "BEFORE", -1)


Built = Callable[[], nn.Module]


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))


def wide() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 800), nn.Tanh(), nn.Dropout(0.3), nn.Linear(800, 10))


SMALL = Cnn(side=8, kernel=2, channels=(4, 4), units=(16, 8))
CASES: list[tuple[str, Built, Adaptation, Penalty]] = [
    ("w", SMALL.build, GlobalOnly(), NoPenalty()),
    ("proximal", SMALL.build, GlobalOnly(), Proximal(0.3)),
    ("batch norm", normed, GlobalOnly(), NoPenalty()),
    ("wide", wide, GlobalOnly(), NoPenalty()),
    ("dual", SMALL.build, Dual(), NoPenalty()),
    ("dual, cosine", SMALL.build, Dual(scale="cosine", position="before"), Proximal(0.3)),
    ("dual, head", SMALL.build, Dual(trains="head"), NoPenalty()),
    ("dual of batch norms", normed, Dual(), NoPenalty()),
    ("dual, wide", wide, Dual(scale="sqrt_d"), NoPenalty()),
    ("separate", SMALL.build, Separate(), NoPenalty()),
    ("apfl", SMALL.build, Apfl(alpha=0.4), NoPenalty()),
    ("apfl, weights", SMALL.build, Apfl(alpha=0.4, mix="weights"), NoPenalty()),
]


def trained(build: Built, adaptation: Adaptation, penalty: Penalty) -> list[Tensor]:
    """Two clients after one another, each with a first round and a second; a last batch of another size in each."""
    torch.manual_seed(0)
    model = build().to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    found: list[Tensor] = []
    torch.manual_seed(1)
    for client in range(2):
        data = batches((3, 8, 8), [10] * 18 + [4])
        rows = Rows(data[0][0], data[0][1], torch.arange(10))
        ctx = context(rows, max_norm=2.0, penalty=penalty, received=read_w(model) + 0.1 * client)
        private = adaptation.begin(ctx, model)
        for _ in range(2):
            step = adaptation.step(ctx, model, private)
            for batch in data:
                step(batch)
        for module in (model, *([] if private is None else [private])):
            found += [read_w(module), read_buffers(module).floats_F, read_buffers(module).counts_I]
    return [*found, torch.rand(2)]


@pytest.mark.parametrize(("build", "adaptation", "penalty"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_every_method_gives_the_same_bits_from_a_tape(
    build: Built, adaptation: Adaptation, penalty: Penalty, played: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from_tape = trained(build, adaptation, penalty)
    assert len(played) >= 40
    count = len(played)
    never_record(monkeypatch)
    training._KEPT.clear()
    the_long_way = trained(build, adaptation, penalty)
    assert len(played) == count
    assert all(torch.equal(a, b) for a, b in zip(from_tape, the_long_way, strict=True))


def test_fine_tuning_plays_from_a_tape_too(played: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs() -> Tensor:
        torch.manual_seed(0)
        (x, y), *_ = batches((1, 8, 8), [70])
        model = SmallCnn().build().eval()
        tune = FineTuneHead(rate=0.05, epochs=20, batch=10)
        return tune.predictor(context(Rows(x, y, torch.arange(70))), model, None)(x)

    found = outputs()
    assert len(played) == 20 * 7 - 1 - BEFORE - 1
    never_record(monkeypatch)
    training._KEPT.clear()
    assert torch.equal(found, outputs())


def test_a_step_is_recorded_after_some_and_the_first_of_a_client_is_never_played(played: list[int]) -> None:
    model = SmallCnn().build()
    (batch,) = batches((1, 8, 8), [10])

    def visit(steps: int) -> int:
        before, down = len(played), descent(model)
        for _ in range(steps):
            down(batch, 0.1, 5.0)
        return len(played) - before

    assert visit(1 + BEFORE) == 0
    assert visit(3) == 1  # the first, the one that is recorded, and one from the tape
    assert visit(5) == 4


def descent(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy, kind: str | None = "w"
) -> GradientStep:
    return GradientStep(lambda x, y: loss(model(x), y), [[*model.parameters()]], [model], kind)


def test_gradients_come_back_as_sgd_step_gives_them(played: list[int]) -> None:
    model = wide()
    batch, *_ = batches((3, 8, 8), [10])
    down, groups = descent(model), []
    for _ in range(BEFORE + 4):
        before = copy.deepcopy(model)
        torch.manual_seed(0)
        (found,) = down(batch, 0.0, 5.0)
        torch.manual_seed(0)
        groups.append(
            (found, training.sgd_step(cross_entropy(before(batch[0]), batch[1]), 0.0, 5.0, [*before.parameters()]))
        )
    assert played
    for mine, (theirs,) in groups:
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))  # type: ignore[arg-type]


class Moody(nn.Module):
    """A layer of the user's, whose Python may do something else the next time."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(64, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.inner(x)
        return out if self.calls % 2 else -out


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model[1].register_forward_hook(lambda _module, _inputs, output: output * 1.0)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model[1].forward = lambda x: linear(x, model[1].weight)  # type: ignore[method-assign,assignment]
    return model


def watched() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    model[1].weight.register_hook(lambda g: g * 2)
    return model


@pytest.mark.parametrize("build", [lambda: nn.Sequential(nn.Flatten(), Moody()), hooked, patched, watched])
def test_only_plain_layers_are_recorded(build: Built, played: list[int]) -> None:
    model = build()
    (batch,) = batches((1, 8, 8), [10])
    down = descent(model)
    for _ in range(BEFORE + 5):
        down(batch, 0.1, 5.0)
    assert not played


def test_a_loss_of_the_users_own_is_not_recorded(played: list[int]) -> None:
    model = SmallCnn().build()
    data = batches((1, 8, 8), [10] * (BEFORE + 5))
    ctx = context(Rows(*data[0], torch.arange(10)), loss=lambda output, y: cross_entropy(output, y))
    step = GlobalOnly().step(ctx, model, None)
    for batch in data:
        step(batch)
    assert not played


@final
@dataclass(frozen=True)
class Fading:
    """A method whose own loss has a coefficient that falls with the rounds, to 0 in the third."""

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        return None

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        share = max(0.0, 1 - 0.5 * (ctx.round - 1))

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return share * ctx.loss(shared(x), y)

        down = training.gradient_step(ctx, self, loss, (shared, [*shared.parameters()]))

        def step(batch: Batch) -> None:
            down(batch)

        return step

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        return shared


def test_a_loss_whose_coefficient_changes_between_rounds_is_not_recorded(played: list[int]) -> None:
    model = SmallCnn().build()
    data = batches((1, 8, 8), [10] * (BEFORE + 5))
    rows = Rows(*data[0], torch.arange(10))
    moved = []
    for round in (1, 2, 3):
        before = read_w(model)
        step = Fading().step(replace(context(rows), round=round), model, None)
        for batch in data:
            step(batch)
        moved.append(float((read_w(model) - before).norm()))
    assert moved[0] > moved[1] > 0
    assert moved[2] == 0  # the loss is 0
    assert not played


class Wavering(Dual):  # type: ignore[misc]  # what a user may do, although it is final
    """A dual model whose local output is scaled by a number that changes."""

    factor = 1.0

    def dual(self, shared: nn.Module, private: nn.Module) -> Intertwined:
        made = super().dual(shared, private)
        made.register_forward_hook(lambda _module, _inputs, outputs: (outputs[0], self.factor * outputs[1]))
        return made


def test_a_loss_of_the_package_that_runs_code_of_the_users_is_not_recorded(played: list[int]) -> None:
    model, data = SMALL.build(), batches((3, 8, 8), [10] * (BEFORE + 5))
    ctx = context(Rows(*data[0], torch.arange(10)))
    step = Wavering().step(ctx, model, copy.deepcopy(model))
    for batch in data:
        step(batch)
    assert not played


class Growing(Proximal):  # type: ignore[misc]
    """A penalty of the user's that calls itself one of the package's."""

    calls = 0

    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        Growing.calls += 1
        return self.calls * shared.get_parameter("0.bias").square().sum()


def test_a_penalty_of_the_users_is_not_recorded(played: list[int]) -> None:
    data = batches((1, 8, 8), [10] * (BEFORE + 5))
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(64, 10))
    step = GlobalOnly().step(context(Rows(*data[0], torch.arange(10)), penalty=Growing()), model, None)
    for batch in data:
        step(batch)
    assert not played


def test_what_a_loss_reads_of_the_context_cannot_change_within_a_round() -> None:
    """Else a tape would go on with the penalty of the step that was recorded."""
    (batch,) = batches((1, 8, 8), [10])
    ctx = context(Rows(*batch, torch.arange(10)))
    with pytest.raises(FrozenInstanceError):
        ctx.penalty = Proximal(3.0)  # type: ignore[misc]


def test_recurrent_layers_are_not_recorded(played: list[int]) -> None:
    model = Lstm(hidden=4).build(9)
    down = descent(model)
    for _ in range(BEFORE + 5):
        down((torch.randint(9, (3, 5)), torch.randint(9, (3,))), 0.1, 5.0)
    assert not played


@pytest.mark.parametrize("changed", ["structure", "mode", "frozen", "kind", "loss of nothing"])
def test_a_tape_is_for_one_kind_of_step(changed: str, played: list[int]) -> None:
    """Each of these does other operators on the same shapes."""
    (batch,) = batches((1, 8, 8), [10])

    def make(act: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), act, nn.Dropout(0.5), nn.Linear(10, 10))

    first = descent(make(nn.ReLU()))
    for _ in range(BEFORE + 3):
        first(batch, 0.1, 5.0)
    before = len(played)
    assert before
    model = make(nn.Tanh() if changed == "structure" else nn.ReLU())
    if changed == "mode":
        model.eval()
    if changed == "frozen":
        model[1].requires_grad_(False)  # type: ignore[index]
    other = descent(model, kind="other" if changed == "kind" else None if changed == "loss of nothing" else "w")
    if changed == "frozen":
        other = GradientStep(lambda x, y: cross_entropy(model(x), y), [[*model[4].parameters()]], [model], "w")  # type: ignore[index]
    other(batch, 0.1, 5.0)
    other(batch, 0.1, 5.0)
    assert len(played) == before


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


A, B = nn.Linear(3, 3), nn.Linear(3, 3)
TANH = nn.Tanh()


def tied(one: int, other: int) -> nn.Module:
    model = chain(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[one].weight = model[other].weight  # type: ignore[index]
    return model


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SMALL.build(10), Cnn(side=8, kernel=2, channels=(4, 4), units=(16, 8), dropout=0.4).build(10)),
        (nn.AvgPool2d(2, padding=1), nn.AvgPool2d(2, padding=1, count_include_pad=False)),  # which repr does not say
        (nn.MaxPool2d([2, 4]), nn.MaxPool2d([4, 2])),  # type: ignore[arg-type]
        (nn.LeakyReLU(0.1), nn.LeakyReLU(0.2)),
        (nn.LeakyReLU(np.float32(0.1)), nn.LeakyReLU(np.float32(0.2))),  # type: ignore[arg-type]
        (nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)),
        (nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")),
        (nn.Embedding(4, 2), nn.Embedding(4, 2, padding_idx=1)),
        (chain(A, TANH, B, TANH), chain(A, TANH, B)),
        (chain(A, B, A), chain(A, B, B)),
        (chain(chain(A, nn.Tanh(), B), nn.Tanh()), chain(chain(A, nn.Tanh()), B, nn.Tanh())),
        (tied(0, 2), tied(1, 2)),
        (nn.Linear(3, 3), nn.Linear(3, 3, device="meta")),
    ],
)
def test_what_differs_in_more_than_numbers_is_of_another_kind(one: nn.Module, other: nn.Module) -> None:
    kinds = [training._structure([module], [*module.parameters()]) for module in (one, copy.deepcopy(one), other)]
    assert kinds[0] == kinds[1]
    assert hash(kinds[0]) == hash(kinds[1])
    assert kinds[0] != kinds[2]


def test_other_groups_are_of_another_kind(played: list[int]) -> None:
    """The same loss of the same layers, of which once all step and once only the head."""
    model = wide().eval()
    (batch,) = batches((3, 8, 8), [10])
    down = descent(model)
    for _ in range(BEFORE + 3):
        down(batch, 0.1, 5.0)
    before, base = len(played), read_w(model[1])  # type: ignore[index]
    assert before
    head = GradientStep(lambda x, y: cross_entropy(model(x), y), [[*model[4].parameters()]], [model], "w")  # type: ignore[index]
    for _ in range(BEFORE + 4):
        head(batch, 0.1, 5.0)
    assert len(played) == before + 2
    assert torch.equal(read_w(model[1]), base)  # type: ignore[index]


def test_which_losses_have_a_kind() -> None:
    @functools.wraps(cross_entropy)
    def wrapped(output: Tensor, y: Tensor) -> Tensor:
        return 2 * cross_entropy(output, y)

    own = Context.shared_loss  # any function of the package
    assert recording_key(own, cross_entropy, "w") == (cross_entropy, "w")
    assert recording_key(own, wrapped, "w") is None
    assert recording_key(own, functools.partial(cross_entropy, reduction="sum"), "w") is None
    assert recording_key(own, cross_entropy, None) is None
    assert recording_key(own, cross_entropy, Dual(points=["pool1"])) is None  # type: ignore[arg-type]  # no hash
    assert recording_key(own, cross_entropy, Fading()) is None
    assert recording_key(functools.partial(own), cross_entropy, "w") is None

    @functools.wraps(own)
    def disguised(ctx: Context, shared: nn.Module, output: Tensor, y: Tensor) -> Tensor:
        return 2 * own(ctx, shared, output, y)

    assert recording_key(disguised, cross_entropy, "w") is None


@pytest.mark.parametrize("how", ["autocast", "anomaly", "a hook on all modules"])
def test_nothing_is_played_where_more_than_operators_count(how: str, played: list[int]) -> None:
    model = SmallCnn().build()
    (batch,) = batches((1, 8, 8), [10])
    down = descent(model)
    for _ in range(BEFORE + 3):
        down(batch, 0.1, 5.0)
    before = len(played)
    assert before
    with ExitStack() as stack:
        if how == "autocast":
            stack.enter_context(torch.autocast("cpu"))
        elif how == "anomaly":
            stack.enter_context(pytest.warns(UserWarning, match="Anomaly"))
            stack.enter_context(torch.autograd.detect_anomaly())
        else:
            hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
            stack.callback(hook.remove)
            down = descent(model)
        for _ in range(2):
            down(batch, 0.1, 5.0)
    assert len(played) == before


def test_a_compiled_module_is_not_plain() -> None:
    model = SmallCnn().build()
    assert training._plain(model)
    model.compile(backend="eager")
    assert not training._plain(model)
