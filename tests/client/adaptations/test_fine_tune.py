"""Fine-tuning: all of w is tuned on the client's data, as a plain loop of SGD would; w itself stays."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.adaptations.fine_tune import FineTune
from lindt.data.examples import Rows
from lindt.errors import PlanError
from lindt.weights import read_w

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(30, 6, generator=GENERATOR), torch.randint(3, (30,), generator=GENERATOR)
DATA = Rows(X, Y, torch.arange(30))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval()


def tuned_by_hand(batches: list[torch.Tensor], rate: float) -> nn.Module:
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=rate)
    for rows in batches:
        optimizer.zero_grad()
        cross_entropy(plain(X[rows]), Y[rows]).backward()
        optimizer.step()
    return plain


def test_tuned_when_it_predicts() -> None:
    shared = model()
    before = copy.deepcopy(shared.state_dict())
    adaptation, ctx = FineTune(rate=0.05, epochs=3), context(DATA, seed=7)
    assert adaptation.begin(ctx, shared) is None
    found = adaptation.predictor(ctx, shared, None)(X)
    generator = torch.Generator().manual_seed(7)
    batches = [rows for _ in range(3) for rows in torch.randperm(30, generator=generator).split(10)]
    assert torch.allclose(found, tuned_by_hand(batches, 0.05)(X), atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in shared.state_dict().items())
    assert not torch.allclose(found, shared(X), atol=1e-2)


def test_it_tunes_where_gradients_are_off() -> None:
    with torch.no_grad():
        found = FineTune(rate=0.05, epochs=1).predictor(context(DATA, seed=7), model(), None)(X)
    assert not torch.allclose(found, model()(X), atol=1e-3)


def test_kept_is_tuned_from_the_received_w_and_beside_it() -> None:
    """The v_i of the last visit is not the start of this one; w steps at the round's rate, v_i at its own."""
    shared, adaptation = model(), FineTune(rate=0.05, kept=True)
    ctx = context(DATA, rate=0.2)
    private = adaptation.begin(ctx, shared)
    assert private is not None
    with torch.no_grad():
        for parameter in private.parameters():
            parameter.fill_(9.0)
    step = adaptation.step(ctx, shared, private)
    batches = [torch.arange(10), torch.arange(10, 30)]
    for rows in batches:
        step((X[rows], Y[rows]))
    assert torch.allclose(read_w(private), read_w(tuned_by_hand(batches, 0.05)), atol=1e-6)
    assert torch.allclose(read_w(shared), read_w(tuned_by_hand(batches, 0.2)), atol=1e-6)
    assert adaptation.predictor(ctx, shared, private) is private
    assert adaptation.predictor(ctx, shared, None) is shared


@pytest.mark.parametrize(("field", "value"), [("rate", 0.0), ("epochs", 0)])
def test_settings_that_cannot_be(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=field):
        FineTune(**{field: value})
