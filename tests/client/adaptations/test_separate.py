"""The ablation without attaching: w as in FedAvg, v as if it trained alone, and nothing between them."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import nn
from worlds import context

from lindt.client.adaptations.base import GlobalOnly
from lindt.client.adaptations.separate import Separate
from lindt.data.examples import Rows
from lindt.weights import read_w

X = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.3, -2.0], [2.0, 2.0]])
Y = torch.tensor([0, 1, 1, 0])
DATA = Rows(X, Y, torch.arange(4))


def model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.mark.parametrize("max_norm", [1e9, 0.1])
def test_each_steps_as_if_the_other_were_not_there(max_norm: float) -> None:
    shared, private = model(0), model(1)
    plain = [copy.deepcopy(shared), copy.deepcopy(private)]
    ctx = context(DATA, rate=0.3, max_norm=max_norm)
    step = Separate().step(ctx, shared, private)
    alone = [GlobalOnly().step(ctx, one, None) for one in plain]
    for _ in range(3):
        step((X, Y))
        for one in alone:
            one((X, Y))
    assert torch.allclose(read_w(shared), read_w(plain[0]), atol=1e-6)
    assert torch.allclose(read_w(private), read_w(plain[1]), atol=1e-6)


@pytest.mark.parametrize("first", ["copy", "random"])
def test_it_begins_as_told_and_predicts_with_v(first: Literal["copy", "random"]) -> None:
    shared, ctx = model(0), context(DATA)
    private = Separate(first).begin(ctx, shared)
    assert torch.equal(read_w(private), read_w(shared)) == (first == "copy")
    assert Separate().predictor(ctx, shared, model(1))(X).equal(model(1)(X))
    assert Separate().predictor(ctx, shared, None) is shared
