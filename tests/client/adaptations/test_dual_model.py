"""Sec. 4.1: Eq. 8 and 9 on numbers to check by hand, and the dual model that hooks build from two plain ones."""

from __future__ import annotations

import copy
import math
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu
from torch.nn.utils.parametrizations import spectral_norm

from lindt.client.adaptations.dual import Per, Scale, attach, default_points, intertwine, score
from lindt.errors import PlanError, UserError
from lindt.plan.models import Cnn, Linear, Lstm, SmallCnn

SCALES: list[Scale] = ["paper", "sqrt_d", "cosine"]
PERS: list[Per] = ["sample", "step"]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def two(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A global and a local model with weights of their own, without dropout."""
    torch.manual_seed(0)
    return build().eval(), build().eval()


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


# Eq. 8 and 9


@pytest.mark.parametrize(
    ("scale", "projection"),
    [("paper", 11 / 5), ("sqrt_d", 11 / 5 / math.sqrt(2)), ("cosine", 11 / 5 / math.sqrt(5))],
)
def test_score_and_attach_of_one_vector(scale: Scale, projection: float) -> None:
    L, G = torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 2.0]])  # L.G = 11, ||L|| = 5, ||G|| = sqrt(5)
    s = sigmoid(projection)
    for per in PERS:  # a vector is a sequence's only step
        assert score(G, L, per, scale).tolist() == [[pytest.approx(s, rel=1e-6)]]
        assert attach(G, L, per, scale).tolist() == [
            [pytest.approx(s * 1 + (1 - s) * 3, rel=1e-6), pytest.approx(s * 2 + (1 - s) * 4, rel=1e-6)]
        ]


@pytest.mark.parametrize(
    ("scale", "projections"), [("paper", [1, 2]), ("sqrt_d", [1 / math.sqrt(2), 2 / math.sqrt(2)]),
                               ("cosine", [1 / math.sqrt(82), 2 / math.sqrt(85)])]
)  # fmt: skip
def test_a_sequence_has_one_score_a_step(scale: Scale, projections: list[float]) -> None:
    L, G = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]), torch.tensor([[[1.0, 9.0], [9.0, 2.0]]])
    found = score(G, L, "step", scale)
    assert found.shape == (1, 2, 1)
    assert found.flatten().tolist() == pytest.approx([sigmoid(p) for p in projections], rel=1e-6)


@pytest.mark.parametrize(
    ("scale", "projection"), [("paper", 11 / 5), ("sqrt_d", 11 / 5 / 2), ("cosine", 11 / 5 / math.sqrt(167))]
)
def test_a_sample_has_one_score_whatever_its_shape(scale: Scale, projection: float) -> None:
    L, G = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]), torch.tensor([[[1.0, 9.0], [9.0, 2.0]]])
    found = score(G, L, "sample", scale)
    assert found.shape == (1, 1, 1)
    assert found.item() == pytest.approx(sigmoid(projection), rel=1e-6)


def test_contradiction_keeps_the_local_one_and_agreement_takes_the_global_one() -> None:
    L = torch.tensor([[2.0, 0.0]])
    assert torch.allclose(attach(torch.tensor([[-50.0, 0.0]]), L), L)
    assert torch.allclose(attach(torch.tensor([[50.0, 7.0]]), L), torch.tensor([[50.0, 7.0]]))
    assert score(torch.tensor([[0.0, 9.0]]), L).item() == 0.5  # orthogonal


def tensors(seed: int, shape: tuple[int, ...], size: float) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return size * torch.randn(shape, generator=draw), size * torch.randn(shape, generator=draw)


shapes = st.sampled_from([(1, 3), (4, 2), (3, 5, 2), (2, 3, 4, 4)])
sizes = st.sampled_from([1e-20, 1e-3, 1.0, 30.0, 1e4])


@given(st.integers(0, 1000), shapes, sizes, st.sampled_from(PERS), st.sampled_from(SCALES))
@settings(max_examples=60, deadline=None)
def test_h_lies_between_and_two_equal_ones_stay_exactly_as_they_are(
    seed: int, shape: tuple[int, ...], size: float, per: Per, scale: Scale
) -> None:
    L, G = tensors(seed, shape, size)
    assert torch.equal(attach(L, L, per, scale), L)
    h = attach(G, L, per, scale)
    assert (h >= torch.minimum(L, G)).all()
    assert (h <= torch.maximum(L, G)).all()


@given(st.integers(0, 1000), shapes, st.sampled_from(PERS), st.sampled_from(SCALES))
@settings(max_examples=40, deadline=None)
def test_a_sample_does_not_see_the_others(seed: int, shape: tuple[int, ...], per: Per, scale: Scale) -> None:
    L, G = tensors(seed, shape, 1.0)
    alone = torch.cat([attach(G[i : i + 1], L[i : i + 1], per, scale) for i in range(shape[0])])
    assert torch.allclose(attach(G, L, per, scale), alone, atol=1e-6)
    L_other, G_other = L.clone(), G.clone()
    L_other[1:], G_other[1:] = 100.0, -100.0
    assert torch.allclose(attach(G_other, L_other, per, scale)[0], attach(G, L, per, scale)[0], atol=1e-6)


@given(st.integers(0, 1000), shapes, st.sampled_from(PERS), st.sampled_from(SCALES))
@settings(max_examples=40, deadline=None)
def test_the_gradient_is_that_of_the_formula(seed: int, shape: tuple[int, ...], per: Per, scale: Scale) -> None:
    """Its backward is written by hand; autograd finds the same from Eq. 8 and 9 as they stand."""
    L, G = (one.double().requires_grad_() for one in tensors(seed, shape, 1.0))
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    by_hand = torch.autograd.grad(attach(G, L, per, scale), [G, L], g)
    s = score(G, L, per, scale)
    for mine, theirs in zip(by_hand, torch.autograd.grad(s * G + (1 - s) * L, [G, L], g), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-12)


def test_half_precision_keeps_its_gradient_finite() -> None:
    L, G = (torch.full((1, 3), size, dtype=torch.float16, requires_grad=True) for size in (3e-4, 1.0))
    for found in torch.autograd.grad(attach(G, L).sum(), [L, G]):
        assert found.isfinite().all()


def test_transforms_of_functions_go_through() -> None:
    L, G = tensors(0, (4, 3), 1.0)
    alone = torch.func.vmap(lambda one, other: attach(one[None], other[None])[0])(G, L)
    assert torch.allclose(alone, attach(G, L), atol=1e-6)
    slope = torch.func.grad(lambda local: attach(G, local).square().sum())(L)
    (wanted,) = torch.autograd.grad(attach(G, L.requires_grad_()).square().sum(), [L])
    assert torch.allclose(slope, wanted, atol=1e-5)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38, 1e-30, 1e-20, 1e-13])
def test_a_dead_layer_scores_one_half_with_a_finite_gradient(tiny: float, per: Per, scale: Scale) -> None:
    L = torch.tensor([[[tiny, 0.0], [0.0, 0.0]]], requires_grad=True)
    G = torch.tensor([[[4.0, 2.0], [1.0, 3.0]]], requires_grad=True)
    assert score(G, L, per, scale).flatten().tolist() == pytest.approx([0.5] * (2 if per == "step" else 1))
    attach(G, L, per, scale).square().sum().backward()
    for tensor in (L, G):
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()
        assert tensor.grad.abs().sum() > 0


@pytest.mark.parametrize("tiny", [1.1e-12, 1e-10, 1e-6])
def test_a_nearly_dead_layer_still_has_a_direction(tiny: float) -> None:
    L = torch.tensor([[tiny, 0.0]], requires_grad=True)
    G = torch.tensor([[1.0, 2.0]])
    found = score(G, L)
    assert found.item() == pytest.approx(sigmoid(1.0), rel=1e-5)
    found.sum().backward()
    assert L.grad is not None
    assert torch.isfinite(L.grad).all()


def test_a_dead_global_layer_is_no_trouble_for_the_cosine() -> None:
    L, G = torch.tensor([[1.0, 2.0]], requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    score(G, L, "sample", "cosine").sum().backward()
    assert L.grad is not None
    assert G.grad is not None
    assert torch.isfinite(L.grad).all()
    assert torch.isfinite(G.grad).all()


# the dual model against forwards written out


def intertwined_cnn(g: Any, v: Any, x: Tensor, scale: Scale = "paper") -> tuple[Tensor, Tensor]:
    """Fig. 5 for the paper's CNN, without a hook."""
    g1 = relu(max_pool2d(g.conv1(x), 2))
    g2 = relu(max_pool2d(g.conv2(g1), 2))
    g3 = relu(g.fc1(g2.flatten(1)))
    g4 = relu(g.fc2(g3))
    h1 = attach(g1, relu(max_pool2d(v.conv1(x), 2)), "sample", scale)
    h2 = attach(g2, relu(max_pool2d(v.conv2(h1), 2)), "sample", scale)
    h3 = attach(g3, relu(v.fc1(h2.flatten(1))), "sample", scale)
    h4 = attach(g4, relu(v.fc2(h3)), "sample", scale)
    return g.fc3(g4), v.fc3(h4)


def intertwined_lstm(g: Any, v: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    g1 = g.lstm1(g.embedding(x))[0]
    g2 = g.lstm2(g1)[0]
    h1 = attach(g1, v.lstm1(v.embedding(x))[0], "step")
    h2 = attach(g2, v.lstm2(h1)[0], "step")
    return g.output(g2[:, -1]), v.output(h2[:, -1])


@pytest.mark.parametrize("scale", SCALES)
def test_the_papers_cnn(scale: Scale) -> None:
    g, v = two(Cnn().build)
    x = torch.randn(3, 3, 32, 32)
    found, wanted = intertwine(g, v, scale=scale)(x), intertwined_cnn(g, v, x, scale)
    assert torch.equal(found[0], wanted[0])
    assert torch.allclose(found[1], wanted[1], atol=1e-6)
    assert torch.equal(found[0], g(x))
    assert not torch.allclose(found[1], v(x), atol=1e-4)  # it is no plain pass


def test_the_lstm() -> None:
    g, v = two(lambda: Lstm(hidden=12).build(9))
    x = torch.randint(9, (4, 7))
    found, wanted = intertwine(g, v)(x), intertwined_lstm(g, v, x)
    assert torch.equal(found[0], wanted[0])
    assert torch.allclose(found[1], wanted[1], atol=1e-6)


def test_the_joint_loss_is_the_sum_and_reaches_both() -> None:
    g, v = two(SmallCnn().build)
    x, y = torch.randn(5, 1, 8, 8), torch.arange(5)
    dual = intertwine(g, v)
    global_output, local_output = dual(x)
    joint = dual.joint_loss(cross_entropy, x, y)
    assert joint.item() == pytest.approx(
        cross_entropy(global_output, y).item() + cross_entropy(local_output, y).item(), rel=1e-6
    )
    of_local = torch.autograd.grad(cross_entropy(dual(x)[1], y), list(g.parameters()), allow_unused=True)
    # L's loss reaches w (no detach) through every layer but G's own logits.
    names = [name for name, _ in g.named_parameters()]
    assert {n for n, grad in zip(names, of_local, strict=True) if grad is None} == {"fc2.weight", "fc2.bias"}
    assert all(grad.abs().sum() > 0 for grad in of_local if grad is not None)


def test_equal_models_intertwine_to_themselves() -> None:
    g, _ = two(SmallCnn().build)
    x = torch.randn(5, 1, 8, 8)
    global_output, local_output = intertwine(g, copy.deepcopy(g))(x)
    assert torch.equal(global_output, local_output)


def test_per_can_be_given_by_name() -> None:
    g, v = two(lambda: Lstm(hidden=6).build(5))
    x = torch.randint(5, (3, 4))
    by_sample = intertwine(g, v, {"lstm1": "sample", "lstm2": "step"})
    assert by_sample.points == {"lstm1": "sample", "lstm2": "step"}
    assert intertwine(g, v).points == {"lstm1": "step", "lstm2": "step"}
    assert not torch.equal(by_sample(x)[1], intertwine(g, v)(x)[1])


def test_watching_keeps_the_mean_score_of_each_point() -> None:
    g, v = two(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)))
    x = torch.randn(6, 2)
    dual = intertwine(g, v)
    dual(x)
    assert dual.scores == {}
    dual.watch = True
    dual(x)
    assert dual.scores == {"0": pytest.approx(score(g[0](x), v[0](x)).mean().item(), rel=1e-6)}  # type: ignore[index]


# hooks, and what can go wrong


class Twice(nn.Module):
    """One ReLU module used after both layers, as many people write it."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.times = times
        self.a, self.b, self.c = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.relu, self.idle = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(self.times):
            h = self.b(self.relu(h))
        return self.c(h)


@pytest.mark.parametrize("per", PERS)
@pytest.mark.parametrize("scale", SCALES)
def test_attaching_can_be_differentiated_twice(scale: Scale, per: Per) -> None:
    """As gradient penalties and Hessians need; torch.autograd.grad gave wrong second derivatives without a word."""
    draw = torch.Generator().manual_seed(0)
    G, L = (torch.randn(2, 3, 4, dtype=torch.float64, generator=draw, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(lambda g, v: attach(g, v, per, scale), (G, L))
    constant = G.detach()
    assert torch.autograd.gradgradcheck(lambda v: attach(constant, v, per, scale), (L,))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"scale": "papers"}, "scale = 'papers': choose among paper, sqrt_d, cosine"),
        ({"position": "middle"}, "position = 'middle': choose among after, before"),
    ],
)
def test_a_misspelt_setting_is_not_taken_for_another(arguments: dict[str, Any], complaint: str) -> None:
    g, v = two(SmallCnn().build)
    with pytest.raises(PlanError, match=complaint):
        intertwine(g, v, **arguments)


def test_a_model_is_not_intertwined_with_itself() -> None:
    model = SmallCnn().build()
    with pytest.raises(UserError, match=r"the same module as global_model; give it weights of its own"):
        intertwine(model, model)


@pytest.mark.parametrize(
    ("models", "point", "how"),
    [
        ((Twice(), Twice()), "relu", "more than once"),
        ((Twice(), Twice()), "idle", "not at all"),
        ((Twice(1), Twice(2)), "relu", "more often in the local"),
        ((Twice(1), Twice(0)), "relu", "not at all in the local"),
        ((Twice(0), Twice(1)), "relu", "not at all"),
    ],
)
def test_a_point_runs_exactly_once(models: tuple[nn.Module, nn.Module], point: str, how: str) -> None:
    with pytest.raises(UserError, match=f"'{point}' ran {how}"):
        intertwine(*models, ["a", point])(torch.randn(3, 2))
    assert hooks_on(models[0]) == hooks_on(models[1]) == 0


def test_shapes_have_to_agree() -> None:
    """Two models with the same modules and weights, and another setting: it shows at the first call."""
    g, v = (nn.Sequential(nn.Linear(2, 4), nn.MaxPool1d(size), nn.Linear(2, 2)) for size in (2, 4))
    with pytest.raises(UserError, match=r"'1'.*\(5, 2\).*\(5, 1\)"):
        intertwine(g, v)(torch.randn(5, 2))
    assert hooks_on(g) == hooks_on(v) == 0


def net(*between: nn.Module, width: int = 4, classes: int = 2, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), *(between or [nn.ReLU()]), nn.Linear(width, classes, bias))


class Renamed(nn.Sequential):
    pass


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (net(nn.Tanh()), "it has module '1' of type Tanh where global_model has module '1' of type ReLU"),
        (net(classes=3), "its '2.weight' is of shape (3, 4), in global_model of shape (2, 4)"),
        (net(width=5), "its '0.weight' is of shape (5, 3), in global_model of shape (4, 3)"),
        (net(bias=False), "its '2.bias' is missing, in global_model of shape (2,)"),
        (nn.Sequential(*net(), nn.Linear(2, 2)), "it has module '3' of type Linear where global_model has no further"),
        (nn.Sequential(*[*net()][:2]), "it has no further module where global_model has module '2' of type Linear"),
        (net(nn.BatchNorm1d(4)), "it has module '1' of type BatchNorm1d where"),
        (Renamed(*net()), "it has the type Renamed where global_model has the type Sequential"),
        (nn.Sequential(OrderedDict(a=nn.Linear(3, 4), b=nn.ReLU(), c=nn.Linear(4, 2))), "it has module 'a' of type Li"),
    ],
)
def test_models_of_another_structure_are_refused_with_the_first_difference(other: nn.Module, complaint: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"local_model: {complaint}") + r".*; give two models of the same st"):
        intertwine(net(), other, ["0"])


def test_buffers_belong_to_the_structure() -> None:
    g, v = (net(nn.BatchNorm1d(4)) for _ in range(2))
    v[1].register_buffer("running_mean", torch.zeros(1))  # type: ignore[index]
    with pytest.raises(UserError, match=r"its '1.running_mean' is of shape \(1,\), in global_model of shape \(4,\)"):
        intertwine(g, v)


def test_what_differs_between_two_models_of_the_same_structure() -> None:
    """Settings; a class defined again, as by a notebook's cell; one module in two places; a cache; no size yet."""
    intertwine(net(nn.Dropout(0.1), nn.ReLU()), net(nn.Dropout(0.5), nn.ReLU()))
    one, again = (type("Net", (nn.Sequential,), {}) for _ in range(2))
    intertwine(one(*net()), again(*net()))
    act = nn.ReLU()
    layers = [[nn.Linear(2, 2) for _ in range(3)] for _ in range(2)]
    (a, b, c), (d, e, f) = layers
    intertwine(nn.Sequential(a, act, b, act, c), nn.Sequential(d, nn.ReLU(), e, nn.ReLU(), f), ["0", "2"])
    g, v = two(net)
    v.register_buffer("cache", torch.zeros(7), persistent=False)
    intertwine(g, v)
    lazy = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 2))
    assert intertwine(lazy, copy.deepcopy(lazy))(torch.zeros(5, 3))[1].shape == (5, 2)
    with_norm = [spectral_norm(nn.Linear(3, 4)) for _ in range(2)]  # each has a class of its own
    intertwine(*(nn.Sequential(first, nn.ReLU(), nn.Linear(4, 2)) for first in with_norm))


@pytest.mark.parametrize("name", ["pool9", "conv1.weight", ""])
def test_a_point_that_does_not_exist(name: str) -> None:
    g, v = two(SmallCnn().build)
    with pytest.raises(PlanError, match=f"points = '{name}'.*conv1.*fc2"):
        intertwine(g, v, ["relu1", name])


def test_a_point_has_to_give_a_tensor() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = Both()

        def forward(self, x: Tensor) -> Tensor:
            return self.both(x)["x"]

    with pytest.raises(UserError, match="'both' returns a dict"):
        intertwine(Odd(), Odd(), ["both"])(torch.randn(2, 2))


def test_a_change_in_place_after_a_point_is_noticed() -> None:
    """Between capture and use a ReLU(inplace=True) would turn G's output into another one, silently."""
    g, v = two(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)))
    x = torch.randn(5, 3)
    with pytest.raises(UserError, match=r"'0'.*in place.*inplace=False"):
        intertwine(g, v, position="before")(x)
    with torch.inference_mode():
        intertwine(g, v)(x)
    h = attach(relu(g[0](x)), relu(v[0](x)))  # type: ignore[index]  # after the activation nothing is amiss
    assert torch.allclose(intertwine(g, v)(x)[1], v[2](h))  # type: ignore[index]


@pytest.mark.parametrize("wrap", [nn.DataParallel])
def test_data_parallel_is_refused_with_advice(wrap: Callable[[nn.Module], nn.Module]) -> None:
    g, v = two(SmallCnn().build)
    for pair in ((wrap(g), v), (g, wrap(v))):
        with pytest.raises(UserError, match=r"DataParallel.*\.module"):
            intertwine(*pair)


def test_hooks_live_for_one_call() -> None:
    g, v = two(SmallCnn().build)
    x = torch.randn(2, 1, 8, 8)
    before = g(x), v(x)
    dual = intertwine(g, v)
    assert hooks_on(g) == hooks_on(v) == 0
    dual(x)
    assert hooks_on(g) == hooks_on(v) == 0
    with pytest.raises(RuntimeError):
        dual(torch.randn(2, 3, 8, 8))  # three channels for one
    assert hooks_on(g) == hooks_on(v) == 0
    assert torch.equal(g(x), before[0])
    assert torch.equal(v(x), before[1])


# default points


def test_default_points_of_the_papers_models() -> None:
    assert default_points(Cnn().build()) == ["relu1", "relu2", "relu3", "relu4"]
    assert default_points(SmallCnn().build()) == ["relu1", "relu2", "relu3"]
    assert default_points(Lstm(hidden=4).build()) == ["lstm1", "lstm2"]
    assert default_points(Cnn().build(), "before") == ["conv1", "conv2", "fc1", "fc2"]
    assert default_points(Linear().build()) == []  # M = 1: m = 1..M-1 is empty


def test_default_points_pass_over_dropout_reshaping_and_embeddings() -> None:
    model = nn.Sequential(
        nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Dropout(), nn.Identity(), nn.Linear(6, 6),
        nn.Dropout(), nn.Linear(6, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6, 2), nn.Softmax(-1),
    )  # fmt: skip
    assert default_points(model) == ["3", "6", "9"]
    assert default_points(model, "before") == ["2", "6", "8"]


def test_a_nested_block_is_one_layer() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert default_points(nn.Sequential(block, nn.ReLU(), copy.deepcopy(block), nn.Linear(4, 2))) == ["1", "2"]


def test_a_model_that_is_no_sequence_has_to_name_its_points() -> None:
    with pytest.raises(PlanError, match=r"Twice has no default attach points; name submodules"):
        intertwine(Twice(), Twice())


# deepcopy, state_dict, torch.compile


def test_a_deepcopy_is_independent() -> None:
    dual = intertwine(*two(SmallCnn().build))
    x = torch.randn(2, 1, 8, 8)
    before = dual(x)[1]
    other = copy.deepcopy(dual)
    assert torch.equal(other(x)[1], before)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    assert torch.equal(dual(x)[1], before)
    assert not other(x)[1].any()


def test_a_state_dict_goes_round() -> None:
    one = intertwine(*two(SmallCnn().build))
    torch.manual_seed(5)
    other = intertwine(SmallCnn().build(), SmallCnn().build())
    x = torch.randn(2, 1, 8, 8)
    assert not torch.equal(one(x)[1], other(x)[1])
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(x)[1], other(x)[1])
    assert set(one.state_dict()) == {
        f"{side}_model.{name}" for side in ("global", "local") for name in SmallCnn().build().state_dict()
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_the_same(backend: str) -> None:
    torch._dynamo.reset()
    dual = intertwine(*two(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))))
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1])
    compiled = torch.compile(dual, backend=backend)
    for _ in range(2):
        found, wanted = compiled(x), dual(x)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, wanted, strict=True))
        grads = [
            torch.autograd.grad(cross_entropy(a, y) + cross_entropy(b, y), list(dual.parameters()))
            for a, b in (found, wanted)
        ]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))
    assert hooks_on(dual) == 0
