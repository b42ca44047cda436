"""FL-GUARD's recovery: two steps by hand on a model of one weight, and w as FedAvg trains it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from worlds import context, tiny

from lindt.client.adaptations.fl_guard import FlGuard
from lindt.client.training import Proximal
from lindt.data.examples import Rows
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS
from lindt.server.federation import federate


class Weight(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def squares(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).square().mean()


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


X, Y = torch.ones(1, 1), torch.full((1, 1), 3.0)
DATA = Rows(X, Y, torch.arange(1))


def by_hand(w: float, v: float, rate: float, mu: float = 0.0, received: float = 0.0) -> tuple[float, float, float]:
    """l(u) = (u - 3)^2: one batch, for w, v and the pull."""
    slope_w, slope_v = 2 * (w - 3) + mu * (w - received), 2 * (v - 3)
    side = math.copysign(1, (v - w) * slope_v) if v != w and slope_v else 0.0
    pull = sigmoid((v - 3) ** 2 - (w - 3) ** 2) * sigmoid(side)
    w, v = w - rate * slope_w, v - rate * slope_v
    share = 2 * rate * pull / (1 + 2 * rate * pull)
    return w, v + share * (w - v), pull


@pytest.mark.parametrize(("w", "v"), [(1.0, 0.5), (2.0, 4.0), (1.0, 1.0), (0.0, 2.0)])
def test_two_batches_by_hand(w: float, v: float) -> None:
    shared, private = Weight(w), Weight(v)
    ctx = context(DATA, loss=squares, rate=0.1)
    step = FlGuard().step(ctx, shared, private)
    pulls = []
    for _ in range(2):
        step((X, Y))
        w, v, pull = by_hand(w, v, 0.1)
        pulls.append(pull)
        assert shared.w.item() == pytest.approx(w, rel=1e-6)
        assert private.w.item() == pytest.approx(v, rel=1e-6)
    assert ctx.notes["pull"] == pytest.approx(sum(pulls) / 2, rel=1e-6)


def test_a_penalty_moves_w_and_is_no_part_of_the_pull() -> None:
    shared, private = Weight(1.0), Weight(0.5)
    ctx = context(DATA, loss=squares, rate=0.1, penalty=Proximal(mu=4.0), received=torch.tensor([0.0]))
    FlGuard().step(ctx, shared, private)((X, Y))
    w, v, pull = by_hand(1.0, 0.5, 0.1, mu=4.0)
    assert [shared.w.item(), private.w.item(), ctx.notes["pull"]] == pytest.approx([w, v, pull], rel=1e-6)


def test_w_is_fedavgs_bit_for_bit() -> None:
    plan = replace(tiny("fl-guard"), model=SmallCnn(), environment=Environment(Sampled(rate=1.0)))
    mine = [state.w for state, _ in federate(plan)]
    theirs = [state.w for state, _ in federate(replace(plan, method=METHODS["fedavg"]))]
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
