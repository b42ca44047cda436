"""Gradients as two thin matrices: the same numbers as autograd's, and only where they are the whole gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from worlds import context

from lindt.client.adaptations.apfl import Apfl
from lindt.client.sgd import Thin, gradients, norm_of, sgd_step
from lindt.client.training import Proximal
from lindt.data.examples import Rows
from lindt.weights import read_w


def wide(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(400, 330, bias=bias)


def rows(count: int = 5) -> Tensor:
    return torch.randn(count, 400, generator=torch.Generator().manual_seed(1))


def found(loss: Tensor, *parameters: nn.Parameter) -> list[Thin | Tensor | None]:
    """What `gradients` finds; each checked against what autograd says when it is asked for the parameter itself."""
    reference = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    result = gradients(loss, parameters)
    for mine, theirs in zip(result, reference, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            dense = mine.dense() if isinstance(mine, Thin) else mine
            assert torch.allclose(dense, theirs, rtol=1e-5, atol=1e-6)
    return result


def test_by_hand() -> None:
    """g = (1, 2) and (0, 1), x = (1, 0, 3) and (2, 1, 0): g^T x = ((1, 0, 3), (4, 1, 6)), of norm sqrt(63)."""
    thin = Thin(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0, 3.0], [2.0, 1.0, 0.0]]))
    assert thin.dense().tolist() == [[1.0, 0.0, 3.0], [4.0, 1.0, 6.0]]
    assert thin.norm().item() == pytest.approx(63**0.5)
    weights = torch.ones(2, 3)
    thin.add_to(weights, -0.5)
    assert weights.tolist() == [[0.5, 1.0, -0.5], [-1.0, 0.5, -2.0]]
    assert norm_of([torch.tensor([1.0]), thin]).item() == pytest.approx(8.0)


@pytest.mark.parametrize("bias", [True, False])
def test_a_wide_layer_of_a_small_batch_is_thin(bias: bool) -> None:
    layer = wide(bias)
    weights, *others = found(layer(rows()).square().sum(), *layer.parameters())
    assert isinstance(weights, Thin)
    assert weights.g_BO.shape == (5, 330)
    assert torch.equal(weights.x_BI, rows())
    assert all(isinstance(other, Tensor) for other in others)


def test_in_the_middle_of_a_model_and_over_steps_of_a_sequence() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 400), nn.ReLU(), wide(), nn.Tanh(), nn.Linear(330, 2))
    kinds = [type(g) for g in found(model(torch.randn(2, 4, 3)).square().sum(), *model.parameters())]
    assert kinds == [Tensor, Tensor, Thin, Tensor, Tensor, Tensor]


def twice(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x).square().sum() + layer(x + 1).sum()


def transposed_twice(layer: nn.Linear, x: Tensor) -> Tensor:
    turned = layer.weight.t()
    return (x @ turned).square().sum() + (2 * x @ turned).sum()


def penalised(layer: nn.Linear, x: Tensor) -> Tensor:
    term = Proximal(mu=0.5)(layer, torch.zeros(layer.weight.numel() + 330))
    assert term is not None
    return layer(x).square().sum() + term


def as_the_left_factor(layer: nn.Linear, x: Tensor) -> Tensor:
    return (layer.weight @ x.T).square().sum()


def turned_as_the_left_factor(layer: nn.Linear, x: Tensor) -> Tensor:
    return (layer.weight.t() @ torch.ones(330, 2)).square().sum() + 0 * x.sum()


def stretched(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.addmm(layer.bias, x, layer.weight.t(), alpha=3).square().sum()


def scaled_before(layer: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, 2 * layer.weight).square().sum()


@pytest.mark.parametrize(
    "use",
    [twice, transposed_twice, penalised, as_the_left_factor, turned_as_the_left_factor, stretched, scaled_before],
)
def test_any_other_use_has_a_gradient_as_always(use: Callable[[nn.Linear, Tensor], Tensor]) -> None:
    layer = wide()
    (weights,) = found(use(layer, rows()), layer.weight)
    assert isinstance(weights, Tensor)


def test_digits_that_cancel_are_kept() -> None:
    """Rows that are nearly the same, and g whose columns sum to nothing: the norm is a small rest of large terms."""
    generator = torch.Generator().manual_seed(0)
    g, x = torch.randn(5, 330, generator=generator), 100 + 0.01 * torch.randn(5, 400, generator=generator)
    thin = Thin(g - g.mean(0), x)
    expected = (thin.g_BO.double().T @ thin.x_BI.double()).norm().item()
    assert thin.norm().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("first", ["table", "layer"])
def test_an_input_that_steps_too(first: str) -> None:
    """Learned queries: by the time the layer steps, its input may have moved."""
    layer, table = wide(), nn.Parameter(rows())
    expected = torch.autograd.grad(layer(table).square().sum(), [layer.weight, table])
    before = layer.weight.detach().clone()
    groups = [[table, layer.weight]] if first == "table" else [[layer.weight], [table]]
    grads = sgd_step(layer(table).square().sum(), 0.1, 1e9, *groups)
    assert torch.allclose(layer.weight, before - 0.1 * expected[0], atol=1e-4)
    assert all(isinstance(g, Tensor) for group in grads for g in group)


def test_sparse_input_and_half_precision_have_a_gradient_as_always() -> None:
    layer = wide()
    (weights,) = found(layer(rows().to_sparse()).square().sum(), layer.weight)
    assert isinstance(weights, Tensor)
    half = wide().half()
    (weights,) = gradients(half(rows().half()).sum(), [half.weight])
    assert isinstance(weights, Tensor)


def test_weights_that_an_embedding_shares() -> None:
    layer, table = wide(), nn.Embedding(330, 400)
    table.weight = layer.weight
    (weights,) = found(layer(table(torch.arange(4))).square().sum(), layer.weight)
    assert isinstance(weights, Tensor)


def test_a_hook_on_the_weights_is_called() -> None:
    layer = wide()
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    (weights,) = found(layer(rows()).square().sum(), layer.weight)
    assert isinstance(weights, Tensor)


def test_many_rows_and_narrow_layers_are_not_worth_it() -> None:
    layer, narrow = wide(), nn.Linear(400, 300)
    assert isinstance(found(layer(rows(41)).sum(), layer.weight)[0], Thin)  # 41 * 8 = 328 rows' worth
    assert isinstance(found(layer(rows(42)).sum(), layer.weight)[0], Tensor)
    assert isinstance(found(narrow(rows()).sum(), narrow.weight)[0], Tensor)


def test_what_the_loss_does_not_reach() -> None:
    layer, idle = wide(), wide()
    reached, missed = found(layer(rows()).sum(), layer.weight, idle.weight)
    assert isinstance(reached, Thin)
    assert missed is None


def asked_for_bias(loss: Tensor, *parameters: nn.Parameter) -> list[bool]:
    """Whether each convolution in the graph was asked for its bias's gradient; parity is checked on the way."""
    asked: list[bool] = []
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [used for used, _ in node.next_functions]
        if node.name() == "ConvolutionBackward0":
            node.register_hook(lambda inputs, _: asked.append(inputs[2] is not None))
    reference = torch.autograd.grad(loss, parameters, retain_graph=True)
    assert all(asked)
    asked.clear()
    for mine, theirs in zip(gradients(loss, parameters), reference, strict=True):
        assert isinstance(mine, Tensor)
        assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    return asked


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(40, 700, 5), (3, 40, 9)),
        (nn.Conv2d(64, 96, 5, stride=2, padding=1), (3, 64, 8, 7)),
        (nn.Conv2d(64, 96, 5), (64, 8, 7)),  # without a batch
        (nn.Conv2d(128, 256, 5, groups=4), (3, 128, 6, 6)),
        (nn.Conv3d(32, 64, 4), (2, 32, 5, 5, 5)),
        (nn.ConvTranspose2d(64, 96, 5), (3, 64, 4, 4)),
    ],
)
def test_a_convolutions_bias_is_a_sum(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert asked_for_bias(layer(x).square().mean(), *layer.parameters()) == [False]


def test_a_bias_of_two_convolutions_or_with_a_hook_is_left_to_autograd() -> None:
    x = torch.randn(3, 64, 8, 7, generator=torch.Generator().manual_seed(1))
    layer, other = nn.Conv2d(64, 96, 5), nn.Conv2d(64, 96, 5)
    other.bias = layer.bias
    both = layer(x).square().mean() + other(x).mean()
    assert asked_for_bias(both, layer.weight, other.weight, layer.bias) == [True, True]
    doubled = nn.Conv2d(64, 96, 5)
    doubled.bias.register_hook(lambda gradient: 2 * gradient)
    assert asked_for_bias(doubled(x).square().mean(), *doubled.parameters()) == [True]
    small = nn.Conv2d(64, 8, 5)  # too few weights to look at the graph
    assert asked_for_bias(small(x).square().mean(), *small.parameters()) == [True]


@pytest.mark.parametrize("max_norm", [1000.0, 0.3])
def test_descent_in_parity_with_torch(max_norm: float) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Dropout(0.5), nn.Linear(400, 330))
    theirs, y = copy.deepcopy(ours), torch.arange(5)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.2)
    for seed in range(3):
        torch.manual_seed(seed)
        (grads,) = sgd_step(functional.cross_entropy(ours(rows()), y), 0.2, max_norm, list(ours.parameters()))
        assert [type(g) for g in grads] == [Thin, Tensor, Thin, Tensor]
        optimiser.zero_grad()
        torch.manual_seed(seed)
        functional.cross_entropy(theirs(rows()), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        assert (norm > max_norm) == (max_norm < 1)
        optimiser.step()
    assert torch.allclose(read_w(ours), read_w(theirs), rtol=1e-5, atol=1e-6)


def test_apfl_moves_alpha_by_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """alpha's slope needs v's gradient multiplied out: the same alpha whether it was thin or not."""
    x, y = rows(), torch.arange(5)
    alphas = []
    for threshold in (1, 1 << 40):
        monkeypatch.setattr("lindt.client.sgd.WIDE", threshold)
        shared = wide()
        ctx = context(Rows(x, y, torch.arange(5)), rate=0.05, max_norm=10.0)
        method = Apfl(alpha=0.3)
        private = method.begin(ctx, shared)
        with torch.no_grad():
            for parameter in private.parameters():
                parameter.mul_(1.1)
        method.step(ctx, shared, private)((x, y))
        alphas.append(ctx.notes["alpha"])
    assert alphas[0] == pytest.approx(alphas[1], rel=1e-5)
    assert 0 < alphas[0] < 0.29 or 0.31 < alphas[0] < 1  # it moved, and was not cut off
