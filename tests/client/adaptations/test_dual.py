"""LINDT's client step (Alg. 2, c12-c13) against the equations written out on plain tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.dual import Dual, v_sections
from lindt.client.adaptations.separate import Separate
from lindt.client.training import Proximal
from lindt.data.examples import Rows
from lindt.errors import PlanError
from lindt.plan.models import Cnn, Lstm, SmallCnn
from lindt.weights import read_w

X = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.3, -2.0], [2.0, 2.0]])
Y = torch.tensor([0, 1, 1, 0])
DATA = Rows(X, Y, torch.arange(4))


def tiny(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def joint_loss(w: list[Tensor], v: list[Tensor]) -> Tensor:
    """Eq. 8-10 for the tiny model, layer by layer and sample by sample, with nothing from the package."""
    total = torch.zeros(())
    for x, y in zip(X, Y, strict=True):
        G = (w[0] @ x + w[1]).clamp(min=0)
        L = (v[0] @ x + v[1]).clamp(min=0)
        score = 1 / (1 + torch.exp(-(L @ G) / L.norm())) if L.any() else torch.tensor(0.5)
        h = score * G + (1 - score) * L
        for logits in (w[2] @ G + w[3], v[2] @ h + v[3]):
            total = total + logits.exp().sum().log() - logits[y]
    return total / len(X)


def stepped(tensors: list[Tensor], grads: tuple[Tensor, ...], rate: float, max_norm: float) -> Tensor:
    norm = torch.cat([g.flatten() for g in grads]).norm().item()
    scale = min(1.0, max_norm / norm)
    return torch.cat([(t - rate * scale * g).flatten() for t, g in zip(tensors, grads, strict=True)]).detach()


@pytest.mark.parametrize("max_norm", [1e9, 0.2, 0.45])
def test_one_step_by_the_equations(max_norm: float) -> None:
    shared, private = tiny(0), tiny(1)
    w = [p.detach().clone().requires_grad_() for p in shared.parameters()]
    v = [p.detach().clone().requires_grad_() for p in private.parameters()]
    grads_w = torch.autograd.grad(joint_loss(w, v), w)
    grads_v = torch.autograd.grad(joint_loss(w, v), v)
    wanted = stepped(w, grads_w, 0.3, max_norm), stepped(v, grads_v, 0.3, max_norm)
    Dual().step(context(DATA, rate=0.3, max_norm=max_norm), shared, private)((X, Y))
    assert torch.allclose(read_w(shared), wanted[0], atol=1e-6)
    assert torch.allclose(read_w(private), wanted[1], atol=1e-6)


def test_the_bounds_of_the_test_above_bind_for_one_for_both_for_none() -> None:
    w, v = ([p.detach().requires_grad_() for p in tiny(seed).parameters()] for seed in (0, 1))
    norms = [
        torch.cat([g.flatten() for g in torch.autograd.grad(joint_loss(w, v), side)]).norm().item() for side in (w, v)
    ]
    assert min(norms) > 0.2
    assert min(norms) < 0.45 < max(norms)


def test_the_locals_loss_reaches_w() -> None:
    """Without the local term w would step otherwise: there is no detach."""
    shared, private, plain = tiny(0), tiny(1), tiny(0)
    ctx = context(DATA, rate=0.3)
    Dual().step(ctx, shared, private)((X, Y))
    grads = torch.autograd.grad(cross_entropy(plain(X), Y), list(plain.parameters()))
    alone = stepped(list(plain.parameters()), grads, 0.3, 1e9)
    # G's own logit layer (the last 8 numbers) is out of L's reach; the layer before the point is not.
    assert torch.allclose(read_w(shared)[-8:], alone[-8:], atol=1e-6)
    assert (read_w(shared)[:9] - alone[:9]).abs().max() > 1e-3


def test_the_penalty_holds_w_and_not_v() -> None:
    def after(penalty: Proximal | None) -> tuple[Tensor, Tensor]:
        shared, private = tiny(0), tiny(1)
        ctx = context(DATA, rate=0.3, penalty=penalty, received=torch.zeros(17))
        Dual().step(ctx, shared, private)((X, Y))
        return read_w(shared), read_w(private)

    free, held = after(None), after(Proximal(mu=0.5))
    assert torch.allclose(held[0], free[0] - 0.3 * 0.5 * read_w(tiny(0)), atol=1e-6)
    assert torch.equal(held[1], free[1])


def test_only_the_head_of_v() -> None:
    shared, private, whole = tiny(0), tiny(1), tiny(1)
    before = read_w(private)
    ctx = context(DATA, rate=0.3)
    Dual(trains="head").step(ctx, shared, private)((X, Y))
    Dual().step(context(DATA, rate=0.3), tiny(0), whole)((X, Y))
    assert torch.equal(read_w(private)[:9], before[:9])
    assert torch.allclose(read_w(private)[9:], read_w(whole)[9:], atol=1e-7)
    assert (read_w(shared) != read_w(tiny(0))).any()
    assert {"gradient/head", "score/1"} == set(ctx.notes)


def test_the_first_v() -> None:
    shared = tiny(0)
    same, drawn = Dual().begin(context(DATA), shared), Dual(first="random").begin(context(DATA), shared)
    assert torch.equal(read_w(same), read_w(shared))
    assert (read_w(drawn) != read_w(shared)).all()


@pytest.mark.parametrize("scale", ["paper", "cosine"])
def test_a_v_that_equals_w_predicts_as_w_does(scale: str) -> None:
    shared = tiny(0)
    predict = Dual(scale=scale).predictor(context(DATA), shared, tiny(0))  # type: ignore[arg-type]
    assert torch.equal(predict(X), shared(X))


def test_prediction_is_the_local_output_of_the_dual() -> None:
    shared, private, adaptation = tiny(0), tiny(1), Dual()
    found = adaptation.predictor(context(DATA), shared, private)(X)
    assert torch.equal(found, adaptation.dual(shared, private)(X)[1])
    assert not torch.allclose(found, private(X))
    assert not torch.allclose(found, shared(X))
    assert adaptation.predictor(context(DATA), shared, None) is shared


def test_notes_are_of_the_rounds_first_batch() -> None:
    shared, private = tiny(0), tiny(1)
    w, v = list(tiny(0).parameters()), list(tiny(1).parameters())
    grads = torch.autograd.grad(joint_loss(w, v), v)  # type: ignore[arg-type]
    G, L = (nn.Sequential(*list(model)[:2])(X) for model in (tiny(0), tiny(1)))
    norms = torch.where(L.norm(dim=1) > 0, L.norm(dim=1), torch.ones(4))
    wanted = {
        "score/1": torch.sigmoid((L * G).sum(1) / norms).mean().item(),
        "gradient/1": torch.cat([g.flatten() for g in grads[:2]]).norm().item(),
        "gradient/head": torch.cat([g.flatten() for g in grads[2:]]).norm().item(),
    }
    ctx = context(DATA, rate=0.3)
    step = Dual().step(ctx, shared, private)
    for _ in range(3):
        step((X, Y))
        assert ctx.notes == {name: pytest.approx(value, rel=1e-4) for name, value in wanted.items()}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.outer = nn.Linear(width, width)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1))
        self.stem = nn.Linear(2, 4)
        self.layer1, self.layer10 = Block(4), Block(4)  # names that begin alike
        self.neck, self.fc = nn.Linear(4, 4), nn.Linear(4, 2)
        self.fc.bias.requires_grad_(False)


def names_in(model: nn.Module, points: list[str]) -> dict[str, list[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {point: [names[id(p)] for p in section] for point, section in v_sections(model, points).items()}


def test_sections_of_v() -> None:
    def both(*layers: str) -> list[str]:
        return [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]

    assert names_in(Cnn().build(), ["relu1", "relu2", "relu3", "relu4"]) == {
        "relu1": both("conv1"), "relu2": both("conv2"), "relu3": both("fc1"), "relu4": both("fc2"),
        "head": both("fc3"),
    }  # fmt: skip
    assert names_in(SmallCnn().build(), ["conv2"]) == {
        "conv2": both("conv1", "conv2"), "head": both("fc1", "fc2")
    }  # fmt: skip
    lstm = names_in(Lstm(hidden=3).build(4), ["lstm1", "lstm2"])
    assert [len(section) for section in lstm.values()] == [5, 4, 2]  # the embedding leads to lstm1
    assert lstm["head"] == both("output")
    assert names_in(Nested(), ["layer10", "layer1"]) == {
        "layer1": ["token", *both("stem", "layer1.inner.0", "layer1.inner.1", "layer1.outer")],
        "layer10": both("layer10.inner.0", "layer10.inner.1", "layer10.outer"),
        "head": [*both("neck"), "fc.weight"],  # a frozen parameter is no part of v
    }


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Dual(scale="papers"), "scale"),  # type: ignore[arg-type]
        (lambda: Dual(position="middle"), "position"),  # type: ignore[arg-type]
        (lambda: Dual(first="zeros"), "first"),  # type: ignore[arg-type]
        (lambda: Dual(trains="none"), "trains"),  # type: ignore[arg-type]
        (lambda: Apfl(mix="logits"), "mix"),  # type: ignore[arg-type]
        (lambda: Apfl(first="zeros"), "first"),  # type: ignore[arg-type]
        (lambda: Separate(first="zeros"), "first"),  # type: ignore[arg-type]
    ],
)
def test_a_misspelt_setting_is_refused_in_python_too(make: Callable[[], object], field: str) -> None:
    """As in a plan file; it was taken for the default, or for the other of two."""
    with pytest.raises(PlanError, match=f"{field} = .*: choose among "):
        make()
