"""A model as one flat vector, and back: what travels, once each, and what does not."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lindt.protocols import Buffers
from lindt.server.aggregation import Mean, join_buffers
from lindt.weights import last_layer, read_buffers, read_w, trainable, write


class Tied(nn.Module):
    """A character model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5)
        self.output.weight = self.embedding.weight


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))


def filled(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(value)
    return model


def same_state(a: nn.Module, b: nn.Module) -> bool:
    one, two = a.state_dict(), b.state_dict()
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("build", [normed, Tied, lambda: nn.LSTM(2, 3), lambda: nn.Conv2d(1, 2, 3)])
def test_what_is_written_is_what_was_read(build: type[nn.Module]) -> None:
    source, target = build(), filled(build(), 9.0)
    write(target, read_w(source), read_buffers(source))
    assert same_state(source, target)


def test_w_is_in_the_order_of_the_parameters() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.bias.copy_(torch.tensor([5.0, 6.0]))
    assert read_w(model).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_w_is_a_copy() -> None:
    model = nn.Linear(2, 1, bias=False)
    w_P = read_w(model)
    before = w_P.clone()
    filled(model, 7.0)
    assert torch.equal(w_P, before)
    write(model, w_P, read_buffers(model))
    w_P.zero_()
    assert torch.equal(model.weight.detach().flatten(), before)


def test_buffers_read_are_copies() -> None:
    model = nn.BatchNorm1d(2)
    buffers = read_buffers(model)
    filled(model, 3.0)
    assert buffers.floats_F.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert buffers.counts_I.tolist() == [0]


def test_a_tied_parameter_travels_once_and_stays_tied() -> None:
    model = Tied()
    assert read_w(model).numel() == 5 * 3 + 5
    write(model, torch.arange(20.0), read_buffers(model))
    assert model.output.weight is model.embedding.weight
    assert model.output.weight.detach().flatten().tolist() == list(range(15))


def test_a_frozen_parameter_does_not_travel() -> None:
    model = filled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), 1.0)
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    assert len(trainable(model)) == 2
    write(model, torch.tensor([5.0, 6.0, 7.0]), read_buffers(model))
    assert read_w(model).tolist() == [5.0, 6.0, 7.0]
    assert model[0].weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]  # type: ignore[index]


def test_the_last_layer_is_the_end_of_w() -> None:
    two = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 4), nn.Flatten())
    assert last_layer(two) == slice(3 * 2 + 2, 3 * 2 + 2 + 2 * 4 + 4)  # weight and bias
    assert torch.equal(read_w(two)[last_layer(two)], read_w(two[2]))
    assert last_layer(nn.Linear(3, 2)) == slice(0, 8)  # a model of one layer
    assert last_layer(Tied()) == slice(15, 20)  # the tied weight belongs to the embedding, which comes first
    two[2].weight.requires_grad_(False)  # what does not travel does not count
    assert last_layer(two) == slice(8, 12)
    two[2].bias.requires_grad_(False)
    assert last_layer(two) == slice(0, 8)


def test_writing_reaches_no_gradient() -> None:
    model = nn.Linear(1, 1)
    write(model, torch.ones(2), read_buffers(model))
    assert model.weight.requires_grad
    assert model.weight.grad is None


def test_float_buffers_are_averaged_and_counters_take_the_maximum() -> None:
    one, two = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    one.running_mean, two.running_mean = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
    one.running_var, two.running_var = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 4.0])
    one.num_batches_tracked, two.num_batches_tracked = torch.tensor(7), torch.tensor(12)
    joined = join_buffers([read_buffers(one), read_buffers(two)], Mean(), torch.ones(2))
    assert joined.floats_F.tolist() == [2.0, 4.0, 1.5, 2.5]
    assert joined.counts_I.tolist() == [12]
    target = nn.BatchNorm1d(2)
    write(target, read_w(target), joined)
    assert target.running_var is not None
    assert target.running_var.tolist() == [1.5, 2.5]
    assert target.num_batches_tracked == torch.tensor(12)
    assert target.num_batches_tracked.dtype == torch.int64


def test_buffers_weigh_what_they_hold() -> None:
    assert read_buffers(normed()).nbytes == 4 * 4 + 8  # two means, two variances, a counter


def test_a_model_without_buffers_has_empty_ones() -> None:
    model = nn.Linear(2, 1)
    none = read_buffers(model)
    assert (none.floats_F.shape, none.counts_I.shape, none.nbytes) == ((0,), (0,), 0)
    joined = join_buffers([none, none, none], Mean(), torch.ones(3))
    assert joined.floats_F.dtype == torch.float32
    assert joined.counts_I.dtype == torch.int64
    before = copy.deepcopy(model)
    write(model, read_w(model), joined)
    assert same_state(model, before)


@pytest.mark.parametrize(
    ("w", "floats", "counts", "message"),
    [(13, 4, 1, "13 values for 18"), (19, 4, 1, "19"), (18, 3, 1, "3 values for 4"), (18, 4, 0, "0 values for 1")],
)
def test_another_models_weights_are_refused(w: int, floats: int, counts: int, message: str) -> None:
    model = normed()
    assert read_w(model).numel() == 18  # 6 + 2, 2 + 2, 4 + 2
    buffers = Buffers(torch.zeros(floats), torch.zeros(counts, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        write(model, torch.zeros(w), buffers)
