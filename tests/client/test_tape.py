"""A tape plays what was recorded, on other numbers and with the same bits; what it cannot play it is not made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout, mse_loss

from lindt.client.training import record


def taped(work: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> list[Tensor] | None:
    """Recorded on other numbers of the same shapes, then played on these."""
    others = [torch.rand_like(one).requires_grad_(one.requires_grad) for one in inputs]
    tape = record(lambda: work(*others), others)
    return None if tape is None else tape.play(inputs)


def test_by_hand() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    found = taped(lambda a, b: [a + b, (a * b).sum()], a, b)
    assert found is not None
    assert [one.tolist() for one in found] == [[11.0, 22.0], 50.0]


def test_an_input_may_be_a_result() -> None:
    found = taped(lambda a: [a, a * 2], torch.tensor([3.0]))
    assert found is not None
    assert [one.tolist() for one in found] == [[3.0], [6.0]]


def test_gradients_are_operators_like_others() -> None:
    """d/dw of (w x - 1)^2 at w = 2, x = 3 is 2 * 5 * 3."""

    def slope(x: Tensor, w: Tensor) -> Sequence[Tensor]:
        return torch.autograd.grad((w * x - 1).square().sum(), [w])

    (found,) = taped(slope, torch.tensor([3.0]), torch.tensor([2.0], requires_grad=True)) or [None]
    assert found is not None
    assert found.tolist() == [30.0]
    assert not found.requires_grad


def test_lists_options_several_results_and_changes_in_place() -> None:
    def work(a: Tensor, b: Tensor) -> Sequence[Tensor]:
        both = torch.cat([a, b, a])
        values, places = both.sort(descending=True)
        other = torch.zeros(3, dtype=torch.float64)
        other[1:].add_(values[:2])
        return values, places, other

    found = taped(work, torch.tensor([1.0, 5.0]), torch.tensor([3.0]))
    assert found is not None
    assert [one.tolist() for one in found] == [[5.0, 5.0, 3.0, 1.0, 1.0], [1, 4, 2, 0, 3], [0.0, 5.0, 5.0]]
    assert found[2].dtype == torch.float64


def test_the_transposed_of_the_transposed_is_the_matrix() -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    found = taped(lambda m: [m.t().t(), m.t(), m.t().t().t() @ m], matrix)
    assert found is not None
    assert found[0].tolist() == matrix.tolist()
    assert found[0].stride() == matrix.stride()
    assert found[1].tolist() == matrix.T.tolist()
    assert found[2].tolist() == (matrix.T @ matrix).tolist()


def test_chance_is_drawn_anew_from_the_same_stream() -> None:
    ones = torch.ones(1000)
    tape = record(lambda: [dropout(ones, 0.5)], [ones])
    assert tape is not None
    torch.manual_seed(3)
    played = [*tape.play([ones]), *tape.play([ones])]
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(played[0], dropout(ones, 0.5))
    assert torch.equal(played[1], dropout(ones, 0.5))
    assert torch.equal(after, torch.rand(1))
    assert not torch.equal(*played)


def test_the_work_itself_is_done_once() -> None:
    a = torch.tensor([1.0])
    assert record(lambda: [a.add_(1)], [a]) is not None
    assert a.tolist() == [2.0]


FOREIGN = torch.ones(2)


@pytest.mark.parametrize(
    "work",
    [
        lambda a: [a * float(a.sum())],
        lambda a: [a * 2 if a.sum() > 0 else a],
        lambda a: [a[a > 0]],
        lambda a: [a + FOREIGN],
        lambda a: [a + torch.tensor(1.0)],
        lambda a: [a + torch.rand(2, generator=torch.Generator())],
        lambda a: [FOREIGN],
        lambda a: [torch.add(a, a, out=torch.empty(2))],
    ],
    ids=["a value", "a choice", "a shape", "another tensor", "a new tensor", "a generator", "a result", "an option"],
)
def test_what_may_be_otherwise_the_next_time_is_refused(work: Callable[[Tensor], Sequence[Tensor]]) -> None:
    assert taped(work, torch.ones(2)) is None


def test_one_tensor_given_twice_is_refused() -> None:
    a = torch.ones(2)
    assert record(lambda: [a + a], [a, a]) is None


def test_a_refused_work_is_done_all_the_same() -> None:
    a = torch.tensor([1.0, 2.0], requires_grad=True)
    done: list[Tensor] = []

    def work() -> Sequence[Tensor]:
        done.extend(torch.autograd.grad(mse_loss(a * a.sum().item(), torch.zeros(2)), [a]))
        return done

    assert record(work, [a]) is None
    assert done[0].tolist() == [9.0, 18.0]  # d/da of the mean of (3 a)^2
