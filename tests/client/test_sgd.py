"""One step of SGD with a clipped gradient: the same as torch's own, a group at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.adaptations.base import global_step, initial_private
from lindt.client.sgd import sgd_step
from lindt.client.training import Proximal
from lindt.data.examples import Rows
from lindt.plan.models import Lstm, SmallCnn
from lindt.weights import read_w


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_by_hand() -> None:
    p = parameter(1.0, 2.0)
    (grads,) = sgd_step((p * torch.tensor([3.0, 4.0])).sum(), 0.1, 100.0, [p])
    assert p.tolist() == pytest.approx([0.7, 1.6])
    assert grads[0] is not None
    assert grads[0].tolist() == [3.0, 4.0]


def test_a_long_gradient_is_clipped_to_the_bound() -> None:
    p = parameter(1.0, 2.0)
    (grads,) = sgd_step((p * torch.tensor([3.0, 4.0])).sum(), 0.1, 2.5, [p])
    assert p.tolist() == pytest.approx([0.85, 1.8])  # by 0.1 * (1.5, 2.0)
    assert grads[0] is not None
    assert grads[0].tolist() == [3.0, 4.0]  # told as it was before clipping


def test_groups_are_clipped_apart_and_all_step_from_one_backward() -> None:
    w, v = parameter(1.0), parameter(2.0)
    sgd_step((30 * w * v).sum(), 1.0, 7.0, [w], [v])  # gradients 60 and 30, each clipped to 7
    assert w.tolist() == pytest.approx([-6.0])
    assert v.tolist() == pytest.approx([-5.0])  # at the old w: 30 * 1, not 30 * -6
    w, v = parameter(1.0), parameter(2.0)
    sgd_step((3 * w + 40 * v).sum(), 1.0, 5.0, [w], [v])
    assert w.tolist() == pytest.approx([-2.0])  # untouched by v's clipping
    assert v.tolist() == pytest.approx([-3.0])
    w, v = parameter(1.0), parameter(2.0)
    sgd_step((3 * w + 4 * v).sum(), 1.0, 1.0, [w, v])  # as one group: norm 5
    assert [*w.tolist(), *v.tolist()] == pytest.approx([1 - 0.6, 2 - 0.8])


def test_what_the_loss_does_not_reach_stays() -> None:
    reached, idle, alone = parameter(1.0), parameter(5.0), parameter(6.0)
    grads = sgd_step(reached.sum(), 0.5, 9.0, [idle, reached], [alone])
    assert (reached.item(), idle.item(), alone.item()) == (0.5, 5.0, 6.0)
    assert grads[0][0] is None
    assert grads[0][1] is not None
    assert grads[1] == [None]


@pytest.mark.parametrize("max_norm", [100.0, 0.5])
def test_parameters_that_share_a_gradient_tensor(max_norm: float) -> None:
    """p + q hands both the very same gradient: scaled in place it would be clipped twice."""
    factor = torch.tensor([1.0, 2.0, 2.0])
    p, q = parameter(0.0, 0.0, 0.0), parameter(0.0, 0.0, 0.0)
    sgd_step(((p + q) * factor).sum(), 1.0, max_norm, [p, q])
    length = min(1.0, max_norm / (3 * 2**0.5))
    for each in (p, q):
        assert each.tolist() == pytest.approx((-length * factor).tolist(), rel=1e-5)
    p, q = parameter(0.0, 0.0), parameter(0.0, 0.0)
    sgd_step((p + q).sum(), 1.0, max_norm, [p, q])  # ... or one number for all its places
    assert p.tolist() == q.tolist() == pytest.approx([-min(1.0, max_norm / 2)] * 2, rel=1e-5)


@pytest.mark.parametrize("max_norm", [1000.0, 0.3])
@pytest.mark.parametrize("recipe", ["cnn", "lstm"])
def test_parity_with_torch(recipe: str, max_norm: float) -> None:
    torch.manual_seed(0)
    if recipe == "cnn":
        ours, x, y = SmallCnn().build(), torch.randn(10, 1, 8, 8), torch.arange(10)
    else:
        ours, x, y = Lstm(hidden=6, dropout=0).build(9), torch.randint(9, (4, 5)), torch.arange(4)
    theirs = copy.deepcopy(ours)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.2)
    for _ in range(3):
        sgd_step(cross_entropy(ours(x), y), 0.2, max_norm, list(ours.parameters()))
        optimiser.zero_grad()
        cross_entropy(theirs(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert (norm > max_norm) == (max_norm < 1)
        optimiser.step()
    assert torch.allclose(read_w(ours), read_w(theirs), rtol=1e-6, atol=1e-7)


def test_the_first_v_is_a_copy_or_random() -> None:
    torch.manual_seed(0)
    shared = SmallCnn().build()
    before = read_w(shared)
    same, drawn = initial_private(shared, "copy"), initial_private(shared, "random")
    assert torch.equal(read_w(same), before)
    assert all((a != b).any() for a, b in zip(drawn.parameters(), shared.parameters(), strict=True))
    with torch.no_grad():
        for p in (*same.parameters(), *drawn.parameters()):
            p.zero_()
    assert torch.equal(read_w(shared), before)  # neither shares a tensor with w


def test_random_reaches_attention_too() -> None:
    torch.manual_seed(0)
    shared = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 2))
    drawn = initial_private(shared, "random")
    assert (drawn[0].self_attn.in_proj_weight != shared[0].self_attn.in_proj_weight).all()  # type: ignore[index]


def test_the_global_step_carries_the_penalty() -> None:
    """mu / 2 * (w - w0)^2 has the gradient mu * (w - w0)."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(3.0)
    x, y = torch.ones(2, 1), torch.zeros(2, 1)
    ctx = context(
        Rows(x, y, torch.arange(2)),
        loss=lambda output, y: (output - y).square().mean(),
        penalty=Proximal(mu=0.5),
        received=torch.tensor([1.0]),
    )
    global_step(ctx, model)((x, y))
    assert model.weight.item() == pytest.approx(3.0 - 0.1 * (2 * 3.0 + 0.5 * (3.0 - 1.0)))
