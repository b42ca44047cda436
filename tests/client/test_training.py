"""The one training loop: which samples it shows, in what batches, and when it lets the caller stop."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lindt.client.training import OutputCapture, fit, forward_all, prepare_model, seeded
from lindt.data.examples import LocalWork, Rows, as_examples
from lindt.protocols import Batch

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


def test_channels_go_last_only_where_the_model_bears_it() -> None:
    sample = torch.randn(5, 3, 8, 8)
    for model, last in (
        (Viewing(), False),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), True),
    ):
        expected = model(sample)
        prepare_model(model, CPU, sample[:1])
        weights = next(model.parameters())
        assert weights.is_contiguous(memory_format=torch.channels_last) == last
        assert torch.allclose(model(sample), expected, atol=1e-5)
        assert model.training
