"""The one training loop: which samples it shows, in what batches, and when it lets the caller stop.

One step of SGD with a clipped gradient: the same as torch's own, a group at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.client import OutputCapture
from lindt.client.training import Proximal, fit, forward_all, global_step, initial_private, prepare_model, sgd_step
from lindt.data.examples import LocalWork, Rows, as_examples
from lindt.plan.models import Lstm, SmallCnn
from lindt.protocols import Batch
from lindt.seeds import seeded
from lindt.weights import read_w

CPU = torch.device("cpu")


def numbered(n: int, start: int = 0) -> Rows:
    """Samples that are their own row numbers, labels their negatives."""
    numbers = torch.arange(start, start + n)
    return Rows(numbers.float()[:, None], -numbers, torch.arange(n))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_an_epoch_shows_every_sample_once(n: int, size: int, seed: int) -> None:
    batches = list(LocalWork(numbered(n), 1).batches(size, generator(seed)))
    seen = torch.cat([x.flatten() for x, _ in batches])
    assert seen.sort().values.tolist() == list(range(n))
    assert all(torch.equal(x.flatten(), -y.float()) for x, y in batches)  # labels go with their samples
    lengths = [len(x) for x, _ in batches]
    assert all(length == size for length in lengths[:-1])
    if n > 1 and size > 1:
        assert 1 not in lengths
        assert lengths[-1] <= size + 1


@pytest.mark.parametrize(
    ("n", "size", "lengths"),
    [(7, 3, [3, 4]), (8, 3, [3, 3, 2]), (6, 3, [3, 3]), (1, 3, [1]), (2, 5, [2]), (3, 1, [1, 1, 1])],
)
def test_a_lone_last_sample_joins_the_batch_before(n: int, size: int, lengths: list[int]) -> None:
    assert [len(x) for x, _ in LocalWork(numbered(n), 1).batches(size, generator())] == lengths


def test_epochs_differ_in_order_and_repeat_with_the_seed() -> None:
    def orders() -> list[list[float]]:
        seen: list[Tensor] = []
        for _ in fit(lambda batch: seen.append(batch[0]), LocalWork(numbered(20), 2), 20, generator(3), CPU):
            pass
        return [x.flatten().tolist() for x in seen]

    first, second = orders()
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))
    assert orders() == [first, second]


def test_it_yields_after_each_epoch_and_the_caller_may_stop() -> None:
    steps: list[Batch] = []
    epochs = fit(steps.append, LocalWork(numbered(6), 5), 2, generator(), CPU)
    assert steps == []  # nothing runs before it is asked for
    assert list(islice(epochs, 2)) == [1, 2]
    assert len(steps) == 6
    assert list(epochs) == [3, 4, 5]
    assert len(steps) == 15


def test_an_attackers_batch_holds_its_own_and_the_mixed_in() -> None:
    work = LocalWork(numbered(14), 1, mixed_in=numbered(50, start=1000), mixed=3, honest=False)
    batches = list(work.batches(10, generator()))
    assert [len(x) for x, _ in batches] == [10, 10]
    for x, y in batches:
        numbers = x.flatten()
        assert (numbers[:7] < 1000).all()
        assert (numbers[7:] >= 1000).all()
        assert torch.equal(numbers, -y.float())
    own = torch.cat([x[:7].flatten() for x, _ in batches])
    assert own.sort().values.tolist() == list(range(14))
    assert batches[0][0][7:].tolist() != batches[1][0][7:].tolist()  # drawn anew


@given(st.integers(1, 30), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_forward_all_keeps_the_order(n: int, batch: int) -> None:
    rows = torch.arange(n).flip(0)
    data = Rows(torch.arange(n).float()[:, None], torch.arange(n), rows)
    assert forward_all(lambda x: 2 * x, data, CPU, batch).flatten().tolist() == [2 * i for i in rows.tolist()]


def test_forward_all_builds_no_graph() -> None:
    weight = torch.ones(1, requires_grad=True)
    assert not forward_all(lambda x: x * weight, numbered(3), CPU).requires_grad


def test_seeded_repeats_and_puts_the_stream_back() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(2)
    torch.manual_seed(1)
    with seeded(7, CPU):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(2), wanted)
    with seeded(7, CPU):
        assert torch.equal(torch.rand(3), inside)
    with seeded(8, CPU):
        assert not torch.equal(torch.rand(3), inside)


def test_the_global_outputs_are_caught_while_the_predictor_runs() -> None:
    """One pass gives both scores; where the global model is not asked once for each sample, nothing is claimed."""
    shared, other = nn.Linear(3, 2), nn.Linear(3, 2)
    data = as_examples((torch.randn(7, 3), torch.zeros(7, dtype=torch.long)))
    device = torch.device("cpu")

    def caught(predict: Callable[[Tensor], Tensor]) -> Tensor | None:
        passing = OutputCapture(shared)
        forward_all(passing.watched(predict), data, device, batch=3)
        return passing.outputs(7)

    one_pass = caught(lambda x: shared(x) + other(x))
    assert one_pass is not None
    assert torch.equal(one_pass, forward_all(shared, data, device, batch=3))
    assert caught(other) is None
    assert caught(lambda x: shared(shared(x).sum() + x)) is None
    assert not shared._forward_hooks


class Viewing(nn.Module):
    """As tutorials write it: `view` needs the plain layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4 * 6 * 6, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.conv(x).view(len(x), -1))
        return logits


def test_channels_go_last_only_where_the_model_bears_it_and_has_no_group_norm() -> None:
    sample = torch.randn(5, 3, 8, 8)
    for model, last in (
        (Viewing(), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), True),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 2)), False),
    ):
        expected = model(sample)
        prepare_model(model, CPU, sample[:1])
        weights = next(model.parameters())
        assert weights.is_contiguous(memory_format=torch.channels_last) == last
        assert torch.allclose(model(sample), expected, atol=1e-5)
        assert model.training


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
