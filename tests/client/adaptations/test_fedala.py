"""FedALA: the weights A by hand, the first learning and later ones, and one visit against plain PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.adaptations.fedala import MOST_EPOCHS, FedAla, _Local
from lindt.data.examples import LocalWork, Rows
from lindt.errors import PlanError

torch_data = torch.Generator().manual_seed(3)
X, Y = torch.randn(10, 4, generator=torch_data), torch.randint(3, (10,), generator=torch_data)
DATA = Rows(X, Y, torch.arange(10))


def model(seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def local(seed: int, layers: int = 1, learned: bool = True) -> _Local:
    private = FedAla(layers=layers).begin(context(DATA), model(seed))
    assert isinstance(private, _Local)
    private.learned.fill_(learned)
    return private


class Weight(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def test_one_step_of_the_weight_by_hand() -> None:
    """v = 0, w = 2, A = 1, l(u) = (u - 1)^2, eta = 0.1: A - 0.1 * 2 * (2 - 1) * (2 - 0) = 0.6, so the start is 1.2."""
    one = Rows(torch.ones(1, 1), torch.ones(1, 1), torch.arange(1))
    ctx = context(one, loss=lambda output, y: (output - y).square().mean())
    shared, private = Weight(2.0), _Local(Weight(0.0), 0)
    private.learned.fill_(True)
    FedAla(eta=0.1)._mix(ctx, shared, private)
    assert private.weights[0].tolist() == pytest.approx([0.6])
    assert shared.w.item() == pytest.approx(1.2)
    assert ctx.notes == pytest.approx({"share of w": 0.6})


def test_weights_stay_between_0_and_1() -> None:
    one = Rows(torch.ones(1, 1), torch.full((1, 1), -9.0), torch.arange(1))
    ctx = context(one, loss=lambda output, y: (output - y).square().mean())
    shared, private = Weight(2.0), _Local(Weight(0.0), 0)
    FedAla()._mix(ctx, shared, private)
    assert private.weights[0].tolist() == [0.0]
    assert shared.w.item() == 0.0


def test_a_first_visit_starts_from_w() -> None:
    shared, ctx = model(0), context(DATA)
    private = FedAla().begin(ctx, shared)
    assert isinstance(private, _Local)
    before = copy.deepcopy(shared.state_dict())
    FedAla()._mix(ctx, shared, private)
    assert all(torch.equal(before[name], tensor) for name, tensor in shared.state_dict().items())
    assert not private.learned


def test_the_first_learning_goes_on_until_the_loss_is_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a threshold that no loss reaches it ends after MOST_EPOCHS, by default after 11."""
    seen: list[int] = []

    def loss(output: Tensor, y: Tensor) -> Tensor:
        seen.append(len(y))
        return cross_entropy(output, y)

    def batches(learned: bool) -> int:
        seen.clear()
        FedAla(sample=1.0)._mix(context(DATA, loss=loss), model(0), local(1, learned=learned))
        return len(seen)

    assert batches(learned=True) == 1
    assert batches(learned=False) == 11
    monkeypatch.setattr("lindt.client.adaptations.fedala.STILL", 0.0)
    assert batches(learned=False) == MOST_EPOCHS


@pytest.mark.parametrize("layers", [1, 2])
def test_a_visit_against_plain_pytorch(layers: int) -> None:
    shared, private, ctx = model(0), local(1, layers), replace(context(DATA, rate=0.2, seed=5), batch=4)
    first, second = [p.detach().clone() for p in model(1).parameters()], copy.deepcopy(shared)
    adaptation = FedAla(layers=layers, sample=0.8)
    step = adaptation.step(ctx, shared, private)
    for batch in LocalWork(DATA, 1).batches(4, ctx.generator):
        step(batch)

    generator = torch.Generator().manual_seed(5)
    w = [p.detach().clone() for p in second.parameters()]
    top = range(2, 4) if layers == 1 else range(4)
    A = {i: torch.ones_like(w[i]) for i in top}
    rows = torch.randperm(10, generator=generator)[:8]
    parameters = list(second.parameters())
    for chunk in torch.randperm(8, generator=generator).split(4):
        for i in top:
            parameters[i].data = first[i] + (w[i] - first[i]) * A[i]
        second.zero_grad()
        cross_entropy(second(X[rows[chunk]]), Y[rows[chunk]]).backward()
        for i in top:
            slope = parameters[i].grad
            assert slope is not None
            A[i] = (A[i] - slope * (w[i] - first[i])).clamp(0, 1)
    for i in top:
        parameters[i].data = first[i] + (w[i] - first[i]) * A[i]
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    for chunk in torch.randperm(10, generator=generator).split(4):
        optimizer.zero_grad()
        cross_entropy(second(X[chunk]), Y[chunk]).backward()
        optimizer.step()
    for mine, kept, theirs in zip(shared.parameters(), private.model.parameters(), parameters, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
        assert torch.equal(mine, kept)
    for mine, theirs in zip(private.weights, A.values(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert any(bool((one < 1).any()) for one in A.values())


def test_to_predict_changes_neither_w_nor_v() -> None:
    shared, private = model(0).eval(), local(1)
    before = copy.deepcopy((shared.state_dict(), private.state_dict()))
    predict = FedAla().predictor(context(DATA), shared, private)
    after = (shared.state_dict(), private.state_dict())
    assert all(torch.equal(b[name], a[name]) for b, a in zip(before, after, strict=True) for name in b)
    assert isinstance(predict, nn.Sequential)
    assert torch.equal(predict[0].weight, shared[0].weight)  # lower layers are w's
    assert not torch.equal(predict[2].weight, shared[2].weight)
    assert FedAla().predictor(context(DATA), shared, None) is shared


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"sample": 0.0}, {"sample": 1.1}, {"eta": 0.0}])
def test_settings_that_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError):
        FedAla(**wrong)  # type: ignore[arg-type]
