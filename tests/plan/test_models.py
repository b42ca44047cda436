"""Appendix C.2: the paper's models, counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lindt.errors import PlanError
from lindt.plan.models import Cnn, Linear, Lstm, Mlp, Model, SmallCnn, parameters_of

CNN = (32 * 3 * 25 + 32) + (64 * 32 * 25 + 64) + (1600 * 512 + 512) + (512 * 128 + 128) + (128 * 10 + 10)
LSTM = 80 * 8 + 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2) + (256 * 80 + 80)
SMALL = (16 * 9 + 16) + (32 * 16 * 9 + 32) + (128 * 64 + 64) + (64 * 10 + 10)


def test_the_papers_counts() -> None:
    assert parameters_of(Cnn().build(10)) == CNN == 940_362
    assert parameters_of(Lstm().build(80)) == LSTM == 819_920
    assert parameters_of(SmallCnn().build(10)) == SMALL == 13_706
    assert parameters_of(Linear(64).build(10)) == 650
    assert parameters_of(Mlp(30, 16).build(2)) == 31 * 16 + 17 * 2


def test_frozen_parameters_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    assert parameters_of(model) == 10


@pytest.mark.parametrize(
    ("recipe", "x", "classes"),
    [
        (Cnn(), torch.zeros(2, 3, 32, 32), 10),
        (SmallCnn(), torch.zeros(2, 1, 8, 8), 7),
        (Lstm(hidden=8), torch.zeros(2, 80, dtype=torch.int64), 80),
        (Linear(64), torch.zeros(2, 1, 8, 8), 4),
        (Mlp(64, 8), torch.zeros(2, 1, 8, 8), 4),
    ],
)
def test_one_output_a_class(recipe: Model, x: torch.Tensor, classes: int) -> None:
    assert recipe.build(classes)(x).shape == (2, classes)


def test_pooling_and_relu_commute() -> None:
    torch.manual_seed(0)
    pooled_first = Cnn().build().eval()
    layers = dict(pooled_first.named_children())
    order = [*layers]
    for a, b in (("pool1", "relu1"), ("pool2", "relu2")):
        i, j = order.index(a), order.index(b)
        order[i], order[j] = b, a
    relu_first = nn.Sequential(*(layers[name] for name in order))
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(pooled_first(x), relu_first(x))


def test_dropout_sits_before_the_later_layers() -> None:
    assert [m.p for m in Cnn().build().modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert [m.p for m in Lstm(hidden=4).build().modules() if isinstance(m, nn.Dropout)] == [0.2, 0.2]
    names = [name for name, _ in Cnn().build().named_children()]
    assert [names[names.index(drop) + 1] for drop in ("drop1", "drop2")] == ["fc2", "fc3"]


def test_the_lstm_reads_the_whole_line() -> None:
    torch.manual_seed(0)
    model = Lstm(hidden=8).build(20).eval()
    x = torch.randint(20, (1, 12))
    other = x.clone()
    other[0, 0] = (x[0, 0] + 1) % 20
    assert not torch.equal(model(x), model(other))


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_is_a_share(dropout: float) -> None:
    for recipe in (Cnn, Lstm):
        with pytest.raises(PlanError, match="dropout"):
            recipe(dropout=dropout)


def test_a_smaller_cnn_for_pictures_of_half_the_side() -> None:
    recipe = Cnn(side=16, kernel=3, channels=(8, 16), units=(32, 12))
    # 16 -> 14 -> 7 -> 5 -> 2: 16 x 2 x 2 = 64 features.
    parts = [3 * 8 * 9 + 8, 8 * 16 * 9 + 16, 64 * 32 + 32, 32 * 12 + 12, 12 * 10 + 10]
    assert parameters_of(recipe.build(10)) == sum(parts)
    assert recipe.build(10)(torch.zeros(2, 3, 16, 16)).shape == (2, 10)
    with pytest.raises(PlanError, match="side"):
        Cnn(side=10)
