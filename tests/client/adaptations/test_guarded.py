"""Guarded prediction: weights by hand, no choice that saw what it is tested on, and nobody left with a broken model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.adaptations.base import GlobalOnly
from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.adaptations.guarded import Guarded, GuardedPredictor, bounded_values, mixed, mixture_weights
from lindt.data.examples import Rows, stratified
from lindt.errors import PlanError, UserError
from lindt.plan.problem import Accuracy
from lindt.protocols import Context

Y = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
V = Rows(torch.arange(8.0).reshape(8, 1), Y, torch.arange(8))


class Says(nn.Module):
    """Answers with given logits, by the number of the sample."""

    def __init__(self, logits_nC: Tensor) -> None:
        super().__init__()
        self.logits_nC = nn.Parameter(logits_nC.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.logits_nC[x.flatten().long()]


def right(rows: Tensor, sure: float = 2.0) -> Tensor:
    """Logits that are right on these samples and wrong on the others."""
    said = torch.where(rows, Y, 1 - Y)
    return sure * nn.functional.one_hot(said, 2).float()


class Loss:
    """A metric without bounds: minus the loss of each sample."""

    percent = False

    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return -cross_entropy(outputs_nC, y_n, reduction="none")

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return torch.stack([self.per_sample(outputs_nC, y_n).sum(), torch.tensor(float(len(y_n)))])

    def value(self, tally: Tensor) -> float:
        return float(tally[0] / tally[1])


def ctx_with(alone: nn.Module | None, validation: Rows | None = V) -> Context:
    return replace(context(V), validation=validation, metric=Accuracy(), private_model=lambda: alone)


def test_weights_by_hand() -> None:
    """3 hits against 1 at a strength of 0.5: e^1.5 to e^0.5."""
    weights = mixture_weights(torch.tensor([[1.0, 1, 1, 0], [0, 0, 1, 0]]), 0.5)
    assert weights.tolist() == pytest.approx([math.e / (1 + math.e), 1 / (1 + math.e)])
    assert mixture_weights(torch.zeros(3, 0)).tolist() == pytest.approx([1 / 3] * 3)


def test_mixtures_by_hand() -> None:
    first, second = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[math.log(7), 0.0]])
    weights = torch.tensor([0.25, 0.75])
    found = mixed([first, second], weights).exp()
    assert found.tolist() == [pytest.approx([0.25 * 0.25 + 0.75 * 0.875, 0.25 * 0.75 + 0.75 * 0.125])]
    assert mixed([first, second], weights, "outputs").tolist() == [
        pytest.approx([0.75 * math.log(7), 0.25 * math.log(3)])
    ]
    assert mixed([first, second], weights, "pick") is second


def test_a_metric_without_bounds_counts_samples_won() -> None:
    """Three models, one sample: the best beats both others, the two equal ones beat half of one."""
    outputs = [torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 0.0]])]
    values = bounded_values(Loss(), outputs, torch.tensor([0]))
    assert values.flatten().tolist() == [1.0, 0.25, 0.25]


def test_the_predictor_weighs_by_validation_data() -> None:
    shared, alone = Says(right(Y < 0)), Says(right(Y >= 0))  # never right, always right
    ctx = ctx_with(alone)
    predict = Guarded(GlobalOnly()).predictor(ctx, shared, None)
    assert ctx.notes["weight/private"] == pytest.approx(1 / (1 + math.exp(-0.5 * 8)))
    assert "weight/global" not in ctx.notes  # the adapted model is w itself: it counts once
    assert torch.equal(predict(V.take(torch.arange(8))[0]).argmax(-1), Y)


def test_without_validation_data_the_models_count_alike() -> None:
    ctx = ctx_with(Says(right(Y >= 0)), validation=None)
    Guarded(GlobalOnly()).predictor(ctx, Says(right(Y < 0)), None)
    assert ctx.notes == pytest.approx({"weight/adapted": 0.5, "weight/private": 0.5})


def test_without_a_private_model_the_rest_goes_on() -> None:
    shared = Says(right(Y >= 0))
    assert Guarded(GlobalOnly()).predictor(ctx_with(None), shared, None) is shared


def test_no_sample_chooses_for_itself() -> None:
    """What is predicted for a validation sample does not depend on its label, but on those of the other half."""
    shared, alone = Says(right(Y < 0)), Says(right(Y >= 0))
    guarded, ctx = Guarded(GlobalOnly()), ctx_with(alone)
    before = guarded.held_out_outputs(ctx, shared, None)
    half = stratified(Y, 4, ctx.client)
    other = replace(ctx, validation=Rows(V.take(torch.arange(8))[0], torch.where(half, 1 - Y, Y), torch.arange(8)))
    # The halves are drawn in the order of the labels: keep them as they were.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lindt.client.adaptations.guarded.stratified", lambda *_: half)
        after = guarded.held_out_outputs(other, shared, None)
    assert torch.equal(before[half], after[half])
    assert not torch.allclose(before[~half], after[~half])


def test_held_out_outputs_are_those_of_the_other_half_by_hand() -> None:
    """Each half of four samples gives the private model, which is always right, four hits against none."""
    shared, alone = Says(right(Y < 0)), Says(right(Y >= 0))
    found = Guarded(GlobalOnly()).held_out_outputs(ctx_with(alone), shared, None)
    outputs = [right(Y < 0), right(Y >= 0)]
    assert torch.allclose(found, mixed(outputs, torch.tensor([0.0, 2.0]).softmax(0)), atol=1e-6)


def test_it_trains_as_the_adaptation_inside() -> None:
    shared = Says(right(Y >= 0))
    inner = FineTune(kept=True)
    private = Guarded(inner).begin(context(V), shared)
    assert isinstance(private, Says)
    assert Guarded(GlobalOnly()).begin(context(V), shared) is None


def test_a_regression_is_not_mixed_as_probabilities() -> None:
    """Two targets a sample: the mean of the outputs, 0.5 each without validation data. A softmax would sum to 1."""
    x = torch.arange(8.0).reshape(8, 1)
    targets = Rows(x, torch.full((8, 2), 5.0), torch.arange(8))
    shared, alone = Says(torch.full((8, 2), 2.0)), Says(torch.full((8, 2), 6.0))
    ctx = replace(ctx_with(alone, validation=None), train=targets)
    with torch.no_grad():
        assert torch.equal(Guarded(GlobalOnly()).predictor(ctx, shared, None)(x), torch.full((8, 2), 4.0))


def test_one_output_is_not_mixed_as_probabilities() -> None:
    """A softmax over one output would be 1 for every model."""
    shared, alone = Says(torch.full((8, 1), -1.0)), Says(torch.full((8, 1), 3.0))
    ctx = ctx_with(alone, validation=None)
    with torch.no_grad():
        found = Guarded(GlobalOnly()).predictor(ctx, shared, None)(torch.arange(8.0).reshape(8, 1))
    assert torch.equal(found, torch.full((8, 1), 1.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": ("global",)},
        {"members": ("adapted", "adapted")},
        {"members": ("mine",)},
        {"combine": "vote"},
        {"strength": 0.0},
        {"adaptation": Guarded()},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        Guarded(**wrong)  # type: ignore[arg-type]


def test_a_loop_of_ones_own_by_hand() -> None:
    """One model is right on all 8 samples, one on none: e^4 to 1, as in a federation."""
    x = V.take(torch.arange(8))[0]
    models = {"w": Says(right(Y < 0)), "alone": Says(right(Y >= 0))}
    predictor = GuardedPredictor(models, (x, Y))
    share = 1 / (1 + math.exp(-4))
    assert predictor.weights == pytest.approx({"w": 1 - share, "alone": share})
    expected = mixed([right(Y < 0), right(Y >= 0)], torch.tensor([1 - share, share]))
    assert torch.allclose(predictor(x), expected, atol=1e-6)
    assert predictor.cost == "2 models (32 weights, 0.0 MB) and a forward pass of each, no byte more is sent"
    assert GuardedPredictor(models, None).weights == pytest.approx({"w": 0.5, "alone": 0.5})


def test_a_model_that_gives_nan_is_left_out() -> None:
    """With a weight of nearly 0 it would still make every prediction NaN."""
    x, broken = V.take(torch.arange(8))[0], Says(torch.full((8, 2), math.nan))
    predictor = GuardedPredictor({"w": broken, "alone": Says(right(Y >= 0))}, (x, Y))
    assert (predictor.left_out, predictor.weights) == (("w",), {"alone": 1.0})
    assert torch.equal(predictor(x).argmax(-1), Y)
    with pytest.raises(UserError, match="all give NaN or infinity"):
        GuardedPredictor({"w": broken}, (x, Y))


def test_a_regression_of_ones_own_mixes_outputs() -> None:
    x, targets = torch.arange(8.0).reshape(8, 1), torch.full((8, 1), 5.0)
    models = {"low": Says(torch.full((8, 1), 4.0)), "high": Says(torch.full((8, 1), 6.0))}
    predictor = GuardedPredictor(models, (x, targets), metric=Squares())
    assert predictor.weights == pytest.approx({"low": 0.5, "high": 0.5})  # equally far
    assert torch.allclose(predictor(x), targets)


class Squares(Loss):
    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return -(outputs_nC - y_n).square().flatten()


@pytest.mark.parametrize("wrong", [{"models": {}}, {"combine": "vote"}, {"strength": 0.0}])
def test_a_predictor_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        GuardedPredictor(**{"models": {"w": Says(right(Y >= 0))}, "validation": None, **wrong})  # type: ignore[arg-type]
