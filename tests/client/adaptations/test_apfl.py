"""APFL as in its authors' code, on a model of one weight.

x = 1, y = 0, loss = output^2, eta = 0.1: with w = 1, v = 3, alpha = 0.5
    w  <- 1 - 0.1 * 2 * 1 = 0.8
    mixture at the new w: 0.5 * 0.8 + 0.5 * 3 = 1.9, its gradient 2 * 1.9 * 0.5 = 1.9 in v and in w
    v  <- 3 - 0.1 * 1.9 = 2.81
    alpha <- 0.5 - 0.1 * ((2.81 - 0.8) * (0.5 * 1.9 + 0.5 * 1.9) + 0.02 * 0.5) = 0.1171
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worlds import context

from lindt.client.adaptations.apfl import Apfl
from lindt.data.examples import Rows
from lindt.errors import PlanError
from lindt.plan.file import to_dict
from lindt.plan.models import SmallCnn
from lindt.protocols import Context
from lindt.weights import read_w

BATCH = torch.ones(1, 1), torch.zeros(1, 1)
DATA = Rows(*BATCH, torch.arange(1))


def square(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def weight(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def start(adaptation: Apfl, w: float, v: float, **more: Any) -> tuple[Context, nn.Linear, Any]:
    ctx, shared = context(DATA, loss=square, **more), weight(w)
    private: Any = adaptation.begin(ctx, shared)
    with torch.no_grad():
        private.model.weight.fill_(v)
    return ctx, shared, private


@pytest.mark.parametrize("mix", ["predictions", "weights"])
def test_one_step_by_hand(mix: str) -> None:
    adaptation = Apfl(alpha=0.5, mix=mix)  # type: ignore[arg-type]
    ctx, shared, private = start(adaptation, 1.0, 3.0)
    adaptation.step(ctx, shared, private)(BATCH)
    assert shared.weight.item() == pytest.approx(0.8)
    assert private.model.weight.item() == pytest.approx(2.81)
    assert private.alpha.item() == pytest.approx(0.1171)
    assert ctx.notes == {"alpha": pytest.approx(0.1171)}


def test_v_may_train_on_its_own_loss() -> None:
    """w = 3, v = 1: w <- 2.4; v <- 1 - 0.1 * 2 = 0.8, without the factor alpha. Mixture at the new w and old v: 1.7,
    its gradient in w 1.7; alpha <- 0.5 - 0.1 * ((0.8 - 2.4) * (0.5 * 2 + 0.5 * 1.7) + 0.02 * 0.5) = 0.795"""
    adaptation = Apfl(alpha=0.5, v_loss="own")
    ctx, shared, private = start(adaptation, 3.0, 1.0)
    step = adaptation.step(ctx, shared, private)
    step(BATCH)
    assert (shared.weight.item(), private.model.weight.item()) == (pytest.approx(2.4), pytest.approx(0.8))
    assert private.alpha.item() == pytest.approx(0.795)
    step(BATCH)  # 0.8 - 0.1 * 2 * 0.8
    assert private.model.weight.item() == pytest.approx(0.64)
    assert to_dict(adaptation) == {"kind": "apfl", "alpha": 0.5, "mix": "predictions", "first": "copy", "v_loss": "own"}
    assert "v_loss" not in to_dict(Apfl())  # plans of earlier runs have the same keys


def test_alpha_moves_once_a_round() -> None:
    adaptation = Apfl(alpha=0.5)
    ctx, shared, private = start(adaptation, 1.0, 3.0)
    step = adaptation.step(ctx, shared, private)
    step(BATCH)
    moved = private.alpha.clone()
    w, v, a = shared.weight.item(), private.model.weight.item(), moved.item()
    step(BATCH)
    assert torch.equal(private.alpha, moved)
    w = w - 0.1 * 2 * w
    assert shared.weight.item() == pytest.approx(w)
    assert private.model.weight.item() == pytest.approx(v - 0.1 * 2 * ((1 - a) * w + a * v) * a)
    adaptation.step(ctx, shared, private)(BATCH)  # the next round
    assert not torch.equal(private.alpha, moved)


@pytest.mark.parametrize(("w", "v", "bound"), [(1.0, 30.0, 0.0), (30.0, 0.5, 1.0)])
def test_alpha_stays_within_0_and_1(w: float, v: float, bound: float) -> None:
    adaptation = Apfl(alpha=0.5)
    ctx, shared, private = start(adaptation, w, v)
    adaptation.step(ctx, shared, private)(BATCH)
    assert private.alpha.item() == bound


def test_w_and_v_are_clipped() -> None:
    adaptation = Apfl(alpha=0.5)
    ctx, shared, private = start(adaptation, 1.0, 3.0, max_norm=0.5)
    adaptation.step(ctx, shared, private)(BATCH)
    assert shared.weight.item() == pytest.approx(0.95)
    assert private.model.weight.item() == pytest.approx(2.95)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_prediction_mixes(alpha: float) -> None:
    adaptation = Apfl(alpha=alpha)
    ctx, shared, private = start(adaptation, 2.0, 10.0)
    found = adaptation.predictor(ctx, shared, private)(torch.tensor([[3.0]]))
    assert found.item() == pytest.approx(3 * (2 + alpha * 8))
    assert adaptation.predictor(ctx, shared, None) is shared


def test_mixing_weights_or_predictions_is_the_same_for_a_linear_model_only() -> None:
    def outputs(build: Callable[[], nn.Module], x: Tensor) -> list[Tensor]:
        torch.manual_seed(0)
        shared, drawn = build(), build()
        found = []
        for mix in ("predictions", "weights"):
            adaptation = Apfl(alpha=0.3, mix=mix)  # type: ignore[arg-type]
            private: Any = adaptation.begin(context(DATA), shared)
            private.model.load_state_dict(drawn.state_dict())
            found.append(adaptation.predictor(context(DATA), shared, private)(x))
        return found

    by_predictions, by_weights = outputs(lambda: nn.Linear(4, 3), torch.randn(5, 4))
    assert torch.allclose(by_predictions, by_weights, atol=1e-6)
    by_predictions, by_weights = outputs(SmallCnn().build, torch.randn(5, 1, 8, 8))
    assert not torch.allclose(by_predictions, by_weights, atol=1e-3)


def test_alpha_is_kept_with_v() -> None:
    adaptation = Apfl(alpha=0.5)
    ctx, shared, private = start(adaptation, 1.0, 3.0)
    adaptation.step(ctx, shared, private)(BATCH)
    again: Any = adaptation.begin(ctx, shared)
    assert again.alpha.item() == 0.5
    again.load_state_dict(private.state_dict())
    assert torch.equal(again.alpha, private.alpha)
    assert torch.equal(read_w(again.model), read_w(private.model))


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_alpha_is_a_share(alpha: float) -> None:
    with pytest.raises(PlanError, match="alpha"):
        Apfl(alpha=alpha)
