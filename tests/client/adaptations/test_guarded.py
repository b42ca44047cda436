"""Guarded prediction: weights by hand, no choice that saw what it is tested on, and nobody left with a broken model."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import context

from lindt.client.adaptations.base import GlobalOnly
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.guarded import (
    Guarded,
    GuardedPredictor,
    bounded_values,
    fitting_rule,
    mixed,
    mixture_weights,
)
from lindt.data.examples import Rows, stratified
from lindt.errors import PlanError, UserError
from lindt.plan.problem import Accuracy
from lindt.protocols import Context

ALL_OF_8 = math.sqrt(2 * math.log(2) / 8) * 8  # 8 hits against 0, times the strength for two models and 8 samples
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


def test_the_fewer_samples_the_more_each_says() -> None:
    """3 of 3 hits against 0 are sqrt(2 ln 2 / 3) * 3 = 2.04: 88%; 8 of 8 against 5 are 1.25: 78%."""
    assert mixture_weights(torch.tensor([[1.0] * 3, [0.0] * 3]))[0].item() == pytest.approx(0.8849, abs=1e-4)
    eight = torch.tensor([[1.0] * 8, [1.0] * 5 + [0.0] * 3])
    assert mixture_weights(eight)[0].item() == pytest.approx(0.7771, abs=1e-4)
    assert mixture_weights(torch.ones(1, 4)).tolist() == [1.0]


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
    assert ctx.notes["weight/private"] == pytest.approx(1 / (1 + math.exp(-ALL_OF_8)))
    assert "weight/global" not in ctx.notes  # the adapted model is w itself: it counts once
    assert torch.equal(predict(V.take(torch.arange(8))[0]).argmax(-1), Y)


@pytest.mark.parametrize(("inner", "before"), [(Dual(), []), (FineTuneHead(epochs=1), [8])])
def test_w_runs_once_for_the_global_and_the_adapted_model(inner: Dual | FineTuneHead, before: list[int]) -> None:
    """Also on V_i; and the outputs are, to the bit, those of the three models called one by one."""
    shared, alone = (nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)).eval() for _ in range(2))
    ctx, x = ctx_with(alone), V.take(torch.arange(8))[0]
    private = inner.begin(ctx, nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 2)))
    calls: list[int] = []
    shared.register_forward_hook(lambda _module, _inputs, output: calls.append(len(output)))
    predict = Guarded(inner).predictor(ctx, shared, private)
    assert calls == [*before, 8, 1]  # FB's features; V_i; a sample that shows the form of the outputs
    assert isinstance(predict, nn.Module)
    adapted = inner.predictor(ctx_with(alone), shared, private)
    calls.clear()
    with torch.no_grad():
        found = predict(x)
        assert calls == [8]
        expected = mixed([shared(x), adapted(x), alone(x)], predict.get_buffer("weights_M"))
        assert torch.equal(found, expected)
        assert not torch.equal(shared(x), adapted(x))


def test_without_validation_data_the_models_count_alike() -> None:
    ctx = ctx_with(Says(right(Y >= 0)), validation=None)
    Guarded(GlobalOnly()).predictor(ctx, Says(right(Y < 0)), None)
    assert ctx.notes == pytest.approx({"weight/adapted": 0.5, "weight/private": 0.5})


def test_without_a_private_model_the_rest_goes_on() -> None:
    shared = Says(right(Y >= 0))
    assert Guarded(GlobalOnly()).predictor(ctx_with(None), shared, None) is shared


def test_a_client_too_small_for_validation_data_predicts_as_alone() -> None:
    """With 4 samples it cannot see that w is wrong, which with equal weights would outvote P_i."""
    alone, few = Says(right(Y >= 0)), Rows(V.x, V.y, torch.arange(4))
    for inner in (GlobalOnly(), FineTune(epochs=1)):
        ctx = replace(ctx_with(alone, validation=None), train=few)
        assert Guarded(inner).predictor(ctx, Says(right(Y < 0, sure=9.0)), None) is alone
    without = replace(ctx_with(None, validation=None), train=few)
    assert isinstance(Guarded(FineTune(epochs=1)).predictor(without, Says(right(Y < 0)), None), nn.Module)


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
    assert torch.allclose(
        found, mixed(outputs, torch.tensor([0.0, 4 * math.sqrt(2 * math.log(2) / 4)]).softmax(0)), atol=1e-6
    )


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


def test_the_rule_follows_the_form_of_outputs_and_labels() -> None:
    """Classes in another dimension than the last: a softmax over the last one would mix steps, not classes."""
    classes, steps = torch.zeros(8, dtype=torch.long), torch.zeros(8, 5, dtype=torch.long)
    assert fitting_rule("probabilities", torch.zeros(8, 3), classes) == "probabilities"
    assert fitting_rule("probabilities", torch.zeros(8, 5, 3), steps) == "probabilities"
    assert fitting_rule("probabilities", torch.zeros(8, 3, 5), steps) == "outputs"
    assert fitting_rule("probabilities", torch.zeros(8), classes) == "outputs"
    assert fitting_rule("probabilities", torch.zeros(8, 1), classes) == "outputs"
    assert fitting_rule("probabilities", torch.zeros(8, 3), torch.zeros(8, 3)) == "outputs"
    assert fitting_rule("pick", torch.zeros(8, 3, 5), steps) == "pick"


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": ("global",)},
        {"members": ("adapted", "adapted")},
        {"members": ("mine",)},
        {"combine": "vote"},
        {"strength": -1.0},
        {"adaptation": Guarded()},
        {"tuning_rate": 0.0},
        {"tuning_epochs": 0},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        Guarded(**wrong)  # type: ignore[arg-type]


def test_a_loop_of_ones_own_by_hand() -> None:
    """One model is right on all 8 samples, one on none: e^3.33 to 1, as in a federation."""
    x = V.take(torch.arange(8))[0]
    models = {"w": Says(right(Y < 0)), "alone": Says(right(Y >= 0))}
    predictor = GuardedPredictor(models, (x, Y))
    share = 1 / (1 + math.exp(-ALL_OF_8))
    assert predictor.weights == pytest.approx({"w": 1 - share, "alone": share})
    expected = mixed([right(Y < 0), right(Y >= 0)], torch.tensor([1 - share, share]))
    assert torch.allclose(predictor(x), expected, atol=1e-6)
    assert predictor.cost == "2 models (32 weights, 0.0 MB) and a forward pass of each; clients send nothing more"
    assert GuardedPredictor(models, None).weights == pytest.approx({"w": 0.5, "alone": 0.5})


def test_other_models_with_the_same_weights() -> None:
    """What was right on all samples keeps its weight, whatever it says after training on them."""
    models = {"w": Says(right(Y < 0)), "alone": Says(right(Y >= 0))}
    predictor = GuardedPredictor(models, (V.take(torch.arange(8))[0], Y))
    again = predictor.refitted({"alone": models["w"], "w": models["alone"]})
    assert again.weights == predictor.weights
    x = V.take(torch.arange(8))[0]
    assert torch.equal(again(x).argmax(-1), 1 - Y)
    assert torch.equal(predictor(x).argmax(-1), Y)  # unchanged
    with pytest.raises(PlanError, match="give one model for each of alone, w"):
        predictor.refitted({"w": models["w"]})
    before = predictor.weights
    again.weights_M.fill_(0.5)
    again.half().register_forward_hook(lambda *_: torch.zeros(8, 2))
    assert (predictor.weights, predictor.weights_M.dtype) == (before, torch.float64)  # the two share nothing
    assert torch.equal(predictor(x).argmax(-1), Y)


def test_weights_are_chosen_without_v_and_predictions_are_made_with_it() -> None:
    """P_i is right on no sample of V_i before it trains on them, and on all after: it keeps its small weight."""
    ctx = replace(ctx_with(Says(right(Y < 0))), whole=V, private_on_whole=lambda: Says(right(Y >= 0, sure=9.0)))
    shared, x = Says(right(Y >= 0, sure=0.1)), V.take(torch.arange(8))[0]
    small = 1 / (1 + math.exp(ALL_OF_8))
    given_back = Guarded(GlobalOnly()).predictor(ctx, shared, None)
    assert ctx.notes["weight/private"] == pytest.approx(small)
    of_w, of_P = right(Y >= 0, sure=0.1).softmax(-1), right(Y >= 0, sure=9.0).softmax(-1)
    assert torch.allclose(given_back(x).exp(), (1 - small) * of_w + small * of_P, atol=1e-6)
    held_out = Guarded(GlobalOnly()).predictor(replace(ctx, whole=None), shared, None)
    assert torch.allclose(held_out(x).exp(), (1 - small) * of_w + small * right(Y < 0).softmax(-1), atol=1e-6)


def test_what_is_reported_on_v_never_comes_from_models_that_trained_on_it() -> None:
    def never() -> nn.Module:
        raise AssertionError("the P_i that has trained on V_i was asked for V_i")

    ctx = replace(ctx_with(Says(right(Y < 0))), whole=V, private_on_whole=never)
    assert Guarded(GlobalOnly()).held_out_outputs(ctx, Says(right(Y >= 0)), None).shape == (8, 2)
    first, shared = Rows(V.take(torch.arange(8))[0], Y, torch.arange(4)), nn.Linear(1, 2)
    tuned = Guarded(GlobalOnly(), members=("adapted", "tuned"), tuning_rate=0.01)
    given = [replace(ctx, train=first, whole=whole, generator=torch.Generator().manual_seed(0)) for whole in (V, None)]
    with torch.no_grad():
        back, held = (tuned.held_out_outputs(one, shared, None) for one in given)
    assert torch.equal(back, held)


def test_the_member_tuned_is_w_after_its_epochs_and_is_tuned_anew_on_all_data() -> None:
    """With one member more; on V_i it has trained on D_i without V_i (here: without its second half)."""
    shared = nn.Linear(1, 2)
    first = Rows(V.take(torch.arange(8))[0], Y, torch.arange(4))
    ctx = replace(ctx_with(None), train=first, whole=V, private_on_whole=lambda: None)
    guarded = Guarded(GlobalOnly(), members=("adapted", "tuned"), tuning_rate=0.01, tuning_epochs=2)
    predict = guarded.predictor(ctx, shared, None)
    assert sum(ctx.notes[f"weight/{name}"] for name in ("adapted", "tuned")) == pytest.approx(1)
    generator = torch.Generator().manual_seed(0)
    again = replace(ctx, generator=generator)
    without = FineTune(rate=0.01, epochs=2).predictor(again, shared, None)
    whole = FineTune(rate=0.01, epochs=2).predictor(replace(again, train=V), shared, None)
    x = V.take(torch.arange(8))[0]
    with torch.no_grad():
        assert not torch.equal(without(x), whole(x))
        weights = torch.tensor([ctx.notes["weight/adapted"], ctx.notes["weight/tuned"]])
        assert torch.allclose(predict(x), mixed([shared(x), whole(x)], weights), atol=1e-5)


def test_the_weight_of_the_tuned_member_is_that_of_the_one_that_has_not_trained_on_v() -> None:
    """Tuned on the samples of class 0 alone it is right on 4 of 8, as w is; tuned on all of them on all 8."""
    y = torch.tensor([0] * 4 + [1] * 4)
    whole, shared = Rows(torch.eye(2)[y], y, torch.arange(8)), nn.Linear(2, 2)
    with torch.no_grad():
        shared.weight.zero_(), shared.bias.copy_(torch.tensor([1.0, 0.0]))
    ctx = replace(ctx_with(None), train=replace(whole, rows=torch.arange(4)), validation=whole, whole=whole)
    guarded = Guarded(GlobalOnly(), members=("adapted", "tuned"), combine="pick", tuning_rate=0.5, tuning_epochs=20)
    guarded.predictor(ctx, shared, None)
    assert ctx.notes == {"weight/adapted": 0.5, "weight/tuned": 0.5}
    backwards = replace(ctx, train=whole, notes={})
    guarded.predictor(backwards, shared, None)
    assert backwards.notes["weight/tuned"] == pytest.approx(1 / (1 + math.exp(-ALL_OF_8 / 2)))


def test_a_model_that_gives_nan_is_left_out() -> None:
    """With a weight of nearly 0 it would still make every prediction NaN."""
    x, broken = V.take(torch.arange(8))[0], Says(torch.full((8, 2), math.nan))
    predictor = GuardedPredictor({"w": broken, "alone": Says(right(Y >= 0))}, (x, Y))
    assert (predictor.left_out, predictor.weights) == (("w",), {"alone": 1.0})
    assert torch.equal(predictor(x).argmax(-1), Y)
    with pytest.raises(UserError, match="outputs of all models on the validation data hold NaN or infinity"):
        GuardedPredictor({"w": broken}, (x, Y))


def test_a_model_that_overflows_beside_the_validation_data_takes_no_part_there() -> None:
    """w of an attacker: right on V_i, where |x| < 1, and infinite on the other half of the clients' samples."""
    huge, alone = (nn.Linear(1, 2, bias=False) for _ in range(2))
    with torch.no_grad():
        huge.weight.copy_(torch.tensor([[-3e38], [3e38]]))
        alone.weight.copy_(torch.tensor([[-1.0], [1.0]]))
    x = torch.tensor([[-4.0], [-0.5], [0.5], [4.0]])
    y = (x[:, 0] > 0).long()
    predictor = GuardedPredictor({"w": huge, "alone": alone}, (x[1:3], y[1:3]))
    assert predictor.weights == {"w": 0.5, "alone": 0.5}
    found = predictor(x)
    assert torch.equal(found.argmax(-1), y)
    assert torch.allclose(found[[0, 3]].exp(), alone(x[[0, 3]]).softmax(-1))  # P_i alone, not half of it
    for combine in ("outputs", "pick"):
        both = GuardedPredictor({"w": huge, "alone": alone}, (x[1:3], y[1:3]), combine=combine)  # type: ignore[arg-type]
        assert torch.equal(both(x)[[0, 3]], alone(x[[0, 3]]))
        assert torch.equal(both(x).argmax(-1), y)
    assert predictor.refitted({"w": Says(torch.full((9, 2), math.nan)), "alone": alone})(x.abs()).isfinite().all()
    nothing = mixed([torch.tensor([[math.nan, 0.0]])] * 2, torch.tensor([0.5, 0.5]))
    assert nothing.isnan().all()  # no model has a prediction: none is made up


def test_a_mask_of_minus_infinity_is_a_prediction() -> None:
    masked, other = torch.tensor([[0.0, -math.inf]]), torch.tensor([[0.0, math.log(3)]])
    found = mixed([masked, other], torch.tensor([0.5, 0.5])).exp()
    assert found.tolist() == [pytest.approx([0.5 + 0.125, 0.375])]
    assert mixed([masked, other], torch.tensor([0.9, 0.1]), "pick") is not other
    assert torch.equal(mixed([masked, other], torch.tensor([0.9, 0.1]), "pick"), masked)


@pytest.mark.parametrize("metric", [Accuracy(), Loss()], ids=["bounded", "unbounded"])
def test_a_w_without_finite_outputs_has_the_lowest_score(metric: Accuracy | Loss) -> None:
    """All of the client's labels are 0, which is what argmax makes of NaN; minus infinity less itself is NaN."""
    x, y, samples = V.take(torch.arange(8))[0], torch.zeros(8, dtype=torch.long), torch.arange(8)
    ctx = replace(context(Rows(x, y, samples)), validation=Rows(x, y, samples), metric=metric)
    right_on_all = Says(torch.tensor([[2.0, 0.0]]).expand(8, 2))
    for broken in (math.nan, math.inf):
        ctx.notes.clear()
        told = replace(ctx, private_model=lambda: right_on_all)
        predict = Guarded(GlobalOnly()).predictor(told, Says(torch.full((8, 2), broken)), None)
        assert told.notes["weight/private"] == pytest.approx(1 / (1 + math.exp(-ALL_OF_8)))
        assert torch.equal(predict(x).argmax(-1), y)


def test_a_regression_of_ones_own_mixes_outputs() -> None:
    x, targets = torch.arange(8.0).reshape(8, 1), torch.full((8, 1), 5.0)
    models = {"low": Says(torch.full((8, 1), 4.0)), "high": Says(torch.full((8, 1), 6.0))}
    predictor = GuardedPredictor(models, (x, targets), metric=Squares())
    assert predictor.weights == pytest.approx({"low": 0.5, "high": 0.5})  # equally far
    assert torch.allclose(predictor(x), targets)


class Squares(Loss):
    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        return -(outputs_nC - y_n).square().flatten()


X = torch.arange(8.0).reshape(8, 1)


def says(*values: float) -> Says:
    """One output per sample: the same for all 8, or one value for each."""
    return Says(torch.tensor(values).reshape(-1, 1).expand(8, 1))


def test_a_plain_function_is_a_metric_and_a_sample_counts_by_the_models_beaten() -> None:
    """Targets 5; errors 1, 1 and 4. The equal ones beat one of two others and tie: 3/4 a sample. The last: 0.

    So h is 6, 6 and 0 for 8 samples, at a strength of sqrt(2 ln 3 / 8).
    """
    models = {"low": says(4.0), "high": says(6.0), "far": says(9.0)}
    predictor = GuardedPredictor(models, (X, torch.full((8, 1), 5.0)), metric=lambda out, y: -(out - y).abs()[:, 0])
    odds = math.exp(6 * math.sqrt(2 * math.log(3) / 8))
    share = odds / (2 * odds + 1)
    assert predictor.weights == pytest.approx({"low": share, "high": share, "far": 1 - 2 * share})
    with torch.no_grad():
        assert torch.allclose(predictor(X), torch.full((8, 1), 10 * share + 9 * (1 - 2 * share)))


def test_one_large_error_does_not_decide() -> None:
    """ "mostly" is nearer on 7 of 8 samples, and 100 off on one: 7 won and 1 lost, whatever the size of the errors."""
    models = {"mostly": says(*[0.0] * 7, 100.0), "never": says(1.0)}
    predictor = GuardedPredictor(models, (X, torch.zeros(8)), metric=lambda out, y: -(out[:, 0] - y).square())
    odds = math.exp((7 - 1) * math.sqrt(2 * math.log(2) / 8))
    assert predictor.weights["mostly"] == pytest.approx(odds / (odds + 1))


def test_a_metric_with_bounds_counts_by_the_sum_of_its_values() -> None:
    """1/4 against 3/4 on each of 8 samples: 2 against 6."""

    class Share(Loss):
        bounded = True

        def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
            return 1 - (outputs_nC[:, 0] - y_n).abs()

    predictor = GuardedPredictor({"a": says(0.75), "b": says(0.25)}, (X, torch.zeros(8)), metric=Share())
    odds = math.exp((6 - 2) * math.sqrt(2 * math.log(2) / 8))
    assert predictor.weights["b"] == pytest.approx(odds / (odds + 1))


REGRESSION = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
CLASSES = {"a": nn.Linear(1, 2), "b": nn.Linear(1, 3)}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (([nn.Linear(1, 2)], (X, Y)), "models: it is of type list; give a dict of models by name, such as {"),
        (({"a": torch.relu}, None), "models['a']: it is of type builtin_function_or_method; give an nn.Module"),
        (({"a.b": nn.Linear(1, 2)}, None), """models: module name can't contain ".", got: a.b; give another name"""),
        ((REGRESSION, (X[:0], Y[:0])), "validation: it has no samples; give held-out samples, or None for equal"),
        ((CLASSES, (X, Y)), "the outputs of 'a' have shape (8, 2), those of 'b' (8, 3); give models with outputs of"),
        ((REGRESSION, (X, X)), "validation: its targets are floats, and Accuracy compares classes; give metric=, a"),
        ((REGRESSION, (X, X[:, 0])), "validation: its targets are floats, and Accuracy compares classes; give metric"),
        ((REGRESSION, (X, Y)), "validation: the model has one output per sample, and Accuracy compares the outputs"),
        ((REGRESSION, (X, X), "mse"), "metric: it is of type str; give metric=, a function of outputs and targets"),
        ((REGRESSION, (X, X), lambda out, y: -(out - y).abs()), "returned shape (8, 1) for 8 samples; return one"),
        ((REGRESSION, (X, X), lambda out, y: out[:, 3]), "metric: it does not take outputs of shape (8, 1) and target"),
    ],
)
def test_a_users_mistake_is_one_sentence(given: tuple[Any, ...], complaint: str) -> None:
    models, validation, *metric = given
    with pytest.raises(UserError, match=re.escape(complaint)) as raised:
        GuardedPredictor(models, validation, **dict(zip(["metric"], metric, strict=False)))
    assert "\n" not in str(raised.value)


def test_models_of_different_outputs_are_named_without_validation_data_too() -> None:
    predictor = GuardedPredictor(CLASSES, None)
    with pytest.raises(UserError, match=r"the outputs of 'a' have shape \(8, 2\), those of 'b' \(8, 3\)"):
        predictor(X)
    with pytest.raises(UserError, match="models: it is of type list; give a dict of models by name"):
        predictor.refitted([*CLASSES.values()])  # type: ignore[arg-type]


def test_a_module_dict_of_models_is_taken() -> None:
    models = nn.ModuleDict({"w": Says(right(Y < 0)), "alone": Says(right(Y >= 0))})
    assert GuardedPredictor(models, (X, Y)).refitted(models).weights["alone"] > 0.9  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"models": {}}, {"combine": "vote"}, {"strength": -1.0}])
def test_a_predictor_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        GuardedPredictor(**{"models": {"w": Says(right(Y >= 0))}, "validation": None, **wrong})  # type: ignore[arg-type]
