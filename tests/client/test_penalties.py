"""FedProx: its value, its gradient, and that it is nothing at mu = 0."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from worlds import context

from lindt.client.adaptations.base import GlobalOnly
from lindt.client.training import NoPenalty, Proximal
from lindt.data.examples import Rows
from lindt.errors import PlanError
from lindt.protocols import Penalty
from lindt.weights import read_w, trainable


def model_at(*weights: float) -> nn.Linear:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weights]))
    return model


def test_the_proximal_term_by_hand() -> None:
    term = Proximal(mu=0.5)(model_at(3.0, 4.0), torch.zeros(2))
    assert term is not None
    assert term.item() == 6.25  # 0.5 / 2 * 25


def test_its_gradient_is_mu_times_the_way_gone() -> None:
    model = model_at(3.0, 4.0)
    term = Proximal(mu=0.5)(model, torch.tensor([1.0, 1.0]))
    assert term is not None
    (gradient,) = torch.autograd.grad(term, trainable(model))
    assert gradient.tolist() == [[1.0, 1.5]]  # 0.5 * (2, 3)


def test_it_is_zero_where_the_client_starts() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    term = Proximal(mu=10.0)(model, read_w(model))
    assert term is not None
    assert term.item() == 0.0
    assert all((g == 0).all() for g in torch.autograd.grad(term, trainable(model)))


def test_frozen_weights_are_not_pulled() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[1].weight.fill_(2.0)
    term = Proximal(mu=1.0)(model, torch.zeros(1))
    assert term is not None
    assert term.item() == 2.0


def test_no_penalty_is_none() -> None:
    assert NoPenalty()(model_at(3.0, 4.0), torch.zeros(2)) is None


@pytest.mark.parametrize("mu", [-0.001, float("nan")])
def test_a_negative_mu_is_refused(mu: float) -> None:
    with pytest.raises(PlanError, match=r"^mu = "):
        Proximal(mu)


def trained(penalty: Penalty, steps: int) -> torch.Tensor:
    """w_i after some steps of FedAvg's client on the same data."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 3, generator=draw), torch.randint(2, (8,), generator=draw)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    ctx = context(Rows(x, y, torch.arange(8)), max_norm=5.0, penalty=penalty, received=read_w(copy.deepcopy(model)))
    step = GlobalOnly().step(ctx, model, None)
    for _ in range(steps):
        step((x, y))
    return read_w(model) - ctx.received_P


def test_proximal_of_zero_is_no_penalty_in_training() -> None:
    assert torch.equal(trained(Proximal(0.0), 5), trained(NoPenalty(), 5))


def test_a_first_step_feels_no_pull_and_later_ones_stay_nearer() -> None:
    assert torch.equal(trained(Proximal(1.0), 1), trained(NoPenalty(), 1))
    assert trained(Proximal(1.0), 20).norm() < 0.8 * trained(NoPenalty(), 20).norm()
