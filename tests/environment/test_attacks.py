"""Attacks beside the paper's: what each reports, by hand, and that a whole run bears them."""

from __future__ import annotations

import pytest
import torch
from worlds import tiny

from lindt.data.examples import LocalWork, Rows
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import (
    AdditiveNoise,
    Backdoor,
    Colluding,
    FreeRider,
    LabelFlip,
    ModelReplacement,
    SignFlip,
    Threat,
    Until,
)
from lindt.errors import PlanError
from lindt.plan.file import from_dict, to_dict
from lindt.plan.problem import problem_for
from lindt.server.federation import begin, federate

UPDATE = torch.tensor([3.0, -4.0])  # of length 5
WORK = LocalWork(Rows(torch.arange(4.0)[:, None], torch.tensor([0, 1, 2, 9]), torch.arange(4)), epochs=1)
ALL: list[Threat] = [SignFlip(), AdditiveNoise(), FreeRider(), Colluding(), LabelFlip(), ModelReplacement()]


def test_what_they_report_by_hand() -> None:
    assert SignFlip(factor=2.0).report(UPDATE, 7, 1).tolist() == [-6.0, 8.0]
    assert ModelReplacement(5.0).report(UPDATE, 7, 1).tolist() == [15.0, -20.0]
    assert ModelReplacement(5.0, SignFlip()).report(UPDATE, 7, 1).tolist() == [-15.0, 20.0]
    assert LabelFlip().report(UPDATE, 7, 1) is UPDATE


def test_noise_is_as_long_as_said_and_another_for_each_client() -> None:
    long = torch.ones(10_000)  # of length 100
    noise = AdditiveNoise(factor=3.0).report(long, 7, 1) - long
    assert float(torch.linalg.vector_norm(noise)) == pytest.approx(300.0, rel=0.03)
    assert not torch.equal(noise, AdditiveNoise(factor=3.0).report(long, 8, 1) - long)


def test_colluders_agree_on_the_direction_whoever_and_whenever_and_keep_their_own_length() -> None:
    one, other = Colluding().report(UPDATE, 7, 1), Colluding().report(3 * UPDATE, 8, 5)
    assert other.tolist() == pytest.approx((3 * one).tolist())
    assert float(torch.linalg.vector_norm(one)) == pytest.approx(5.0)
    elsewhere = Colluding(agreed=1).report(UPDATE, 7, 1)
    assert abs(float(torch.cosine_similarity(one, elsewhere, dim=0))) < 0.999


def test_labels_are_flipped_for_training_and_that_is_their_goal() -> None:
    _, y = LabelFlip().corrupt(WORK, None, 1).data.take(torch.arange(4))
    assert y.tolist() == [9, 8, 7, 0]
    assert LabelFlip().goal(torch.tensor([0, 9])).tolist() == [9, 0]
    assert LabelFlip(classes=3).goal(torch.tensor([0, 1, 2])).tolist() == [2, -1, 0]


def test_a_free_rider_does_not_train() -> None:
    assert FreeRider().corrupt(WORK, None, 1).epochs == 0


def test_replacement_is_its_inner_attack_but_louder_and_may_end() -> None:
    inner = Backdoor(share=0.3, per_batch=2)
    found = ModelReplacement(4.0, inner)
    assert (found.share, found.per_batch) == (0.3, 2)
    assert found.goal(torch.tensor([4, 0])).tolist() == inner.goal(torch.tensor([4, 0])).tolist()
    ending = Until(last_round=3, threat=found)
    assert ending.report(UPDATE, 7, 3).tolist() == [12.0, -16.0]
    assert ending.report(UPDATE, 7, 4) is UPDATE


@pytest.mark.parametrize("threat", ALL)
def test_a_run_with_each_is_written_and_read_as_a_plan(threat: Threat) -> None:
    plan = tiny(environment=Environment(Sampled(rate=1.0), threat))
    assert from_dict(to_dict(plan)) == plan


@pytest.mark.parametrize("threat", ALL)
def test_rounds_go_on_and_attackers_are_never_refused(threat: Threat) -> None:
    plan = tiny("apfl", rounds=2, environment=Environment(Sampled(rate=1.0), threat))
    for state, result in federate(plan):
        assert len(result.answered) == 6
        assert torch.isfinite(state.w).all()


def test_free_riders_hold_the_mean_back_and_sign_flippers_turn_it() -> None:
    """Six clients, two of them attackers: the step is 4/6 and (4 - 2)/6 of the benign sum, were all benign alike."""
    steps = {}
    for name, threat in {"none": FreeRider(share=0.0), "riders": FreeRider(0.34), "flippers": SignFlip(0.34)}.items():
        plan = tiny(rounds=1, environment=Environment(Sampled(rate=1.0), threat))
        before = begin(plan, problem_for(plan)).w
        (after, _), *_ = federate(plan)
        steps[name] = after.w - before
    along = {name: float(step @ steps["none"] / (steps["none"] @ steps["none"])) for name, step in steps.items()}
    assert along["flippers"] < along["riders"] < 1.0
    # What riders take away once, flippers take away twice.
    assert torch.allclose(steps["none"] - steps["flippers"], 2 * (steps["none"] - steps["riders"]), atol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda: SignFlip(factor=0.0), "factor"),
        (lambda: FreeRider(share=1.0), "share"),
        (lambda: LabelFlip(classes=1), "classes"),
        (lambda: Colluding(agreed=-1), "agreed"),
        (lambda: ModelReplacement(factor=-1.0), "factor"),
    ],
)
def test_bad_settings_name_the_field(wrong: object, field: str) -> None:
    with pytest.raises(PlanError, match=field):
        wrong()  # type: ignore[operator]
