"""FB: the head is tuned on cached features, and that is the same as tuning it in place on a frozen base."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.adaptations.fine_tune_head import FineTuneHead, last_layer
from lindt.data.examples import Rows
from lindt.errors import PlanError
from lindt.plan.models import Cnn, Lstm, SmallCnn
from lindt.weights import read_w

torch_rows = torch.Generator().manual_seed(0)
X, Y = torch.randn(150, 6, generator=torch_rows), torch.randint(3, (150,), generator=torch_rows)
DATA = Rows(X, Y, torch.arange(150).flip(0))


def base_and_head() -> nn.Module:
    torch.manual_seed(0)
    layers = {"fc1": nn.Linear(6, 8), "norm": nn.BatchNorm1d(8), "act": nn.Tanh(), "drop": nn.Dropout(0.5)}
    return nn.Sequential(OrderedDict(**layers, fc2=nn.Linear(8, 3))).eval()


@pytest.mark.parametrize("max_norm", [1e9, 0.05])
def test_the_cache_changes_nothing(max_norm: float) -> None:
    adaptation = FineTuneHead(rate=0.05, epochs=4, batch=32)
    found = adaptation.predictor(context(DATA, max_norm=max_norm, seed=7), base_and_head(), None)(X)

    model = base_and_head()  # eval: no dropout, running statistics
    model.fc1.requires_grad_(False)
    model.norm.requires_grad_(False)
    optimiser = torch.optim.SGD(model.fc2.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        for rows in torch.randperm(150, generator=generator).split(32):
            x, y = DATA.take(rows)
            optimiser.zero_grad()
            cross_entropy(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.fc2.parameters(), max_norm)
            optimiser.step()
    assert torch.allclose(found, model(X), atol=1e-5)
    assert not torch.allclose(found, base_and_head()(X), atol=1e-2)


def test_w_stays_as_it_was() -> None:
    model = base_and_head()
    before = copy.deepcopy(model.state_dict())
    adaptation, ctx = FineTuneHead(rate=0.5, epochs=2), context(DATA)
    outputs = model(X)
    assert adaptation.begin(ctx, model) is None
    predict = adaptation.predictor(ctx, model, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(X), outputs)
    assert not torch.equal(predict(X), outputs)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0


def test_only_the_head_learns() -> None:
    """What the tuned model says is linear in the base's features; the bias and weights are the head's."""
    model = base_and_head()
    predict = FineTuneHead(rate=0.5, epochs=3).predictor(context(DATA), model, None)
    features = nn.Sequential(*list(model.children())[:-1])(X)
    design = torch.cat([features, torch.ones(150, 1)], 1).double()
    fitted = torch.linalg.lstsq(design, predict(X).detach().double()).solution
    assert torch.allclose(design @ fitted, predict(X).double(), atol=1e-4)


def test_training_is_fedavgs() -> None:
    model, plain = base_and_head(), base_and_head()
    FineTuneHead().step(context(DATA, rate=0.1), model, None)((X, Y))
    grads = torch.autograd.grad(cross_entropy(plain(X), Y), list(plain.parameters()))
    wanted = torch.cat([(p - 0.1 * g).flatten() for p, g in zip(plain.parameters(), grads, strict=True)])
    assert torch.allclose(read_w(model), wanted, atol=1e-6)


def test_a_bigger_head_can_be_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.ReLU(), nn.Dropout(0.9), nn.Linear(5, 3))).eval()
    predict = FineTuneHead(rate=0.1, epochs=1, head="1").predictor(context(DATA), model, None)
    assert torch.equal(predict(X), predict(X))  # its dropout is off again


def test_last_layer() -> None:
    assert last_layer(Cnn().build()) == "fc3"
    assert last_layer(SmallCnn().build()) == "fc2"
    assert last_layer(Lstm(hidden=4).build()) == "output"
    assert last_layer(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.ReLU())) == "0.1"
    with pytest.raises(PlanError, match="no layer with parameters"):
        last_layer(nn.Sequential(nn.ReLU()))


def test_a_head_that_does_not_exist() -> None:
    with pytest.raises(PlanError, match=r"head = 'fc9'.*fc1.*fc2"):
        FineTuneHead(head="fc9").predictor(context(DATA), base_and_head(), None)


class Backwards(nn.Module):
    """Its layers run in another order than they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(8, 3)
        self.base = nn.Linear(6, 8)
        self.unused = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.base(x))


@pytest.mark.parametrize("head", ["", "base", "unused"])
def test_a_head_that_does_not_give_the_output_is_refused(head: str) -> None:
    """Its 8 features would pass for 8 logits of 3 classes, silently."""
    with pytest.raises(PlanError, match="its output is not the model's output"):
        FineTuneHead(head=head).predictor(context(DATA), Backwards(), None)
    FineTuneHead(head="output", epochs=1).predictor(context(DATA), Backwards(), None)


@pytest.mark.parametrize("field", [{"rate": 0.0}, {"epochs": 0}, {"batch": 0}])
def test_bad_fields_are_named(field: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=next(iter(field))):
        FineTuneHead(**field)  # type: ignore[arg-type]
