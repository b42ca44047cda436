"""Attackers that know the honest updates of the round: what they send, by hand, and where the server puts it in."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from torch import Tensor
from worlds import Scripted, tiny

from lindt.cli.comparison import ComparisonGrid
from lindt.engines.processes.engine import Processes
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import NoPrivacy
from lindt.environment.threats import (
    Backdoor,
    InnerProduct,
    LabelFlip,
    LittleIsEnough,
    MinMax,
    ModelReplacement,
    Omniscient,
    SignFlip,
    Sybils,
    Threat,
    Until,
    omniscient,
)
from lindt.errors import PlanError
from lindt.plan.file import from_dict, to_dict
from lindt.plan.plan import METHODS, Plan, attackers_of
from lindt.plan.problem import problem_for
from lindt.protocols import Buffers, Reply
from lindt.runs.play import run_plan
from lindt.server.federation import begin, federate, play_round
from lindt.server.state import RunState

HONEST = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 3.0]])  # mean [2, 1], std [sqrt(2/3), sqrt(2)]
OWN = torch.tensor([[7.0, 7.0], [8.0, 9.0]])  # what two attackers trained
ALL: list[Omniscient] = [InnerProduct(), LittleIsEnough(), MinMax(), Sybils()]


def sent(threat: Omniscient, honest_HP: Tensor = HONEST, own_AP: Tensor = OWN) -> list[float]:
    """The one update that all attackers send."""
    sent_AP = threat.conspire(honest_HP, own_AP)
    assert sent_AP.shape == own_AP.shape
    assert all(torch.equal(row, sent_AP[0]) for row in sent_AP)
    return sent_AP[0].tolist()


def test_inner_product_sends_minus_epsilon_times_the_honest_mean() -> None:
    assert sent(InnerProduct(epsilon=2.0)) == [-4.0, -2.0]
    assert sent(InnerProduct(epsilon=0.5)) == [-1.0, -0.5]


def test_by_default_the_inner_product_of_a_mean_with_the_honest_mean_is_negative() -> None:
    """One attacker beside nine honest clients turns the mean."""
    honest_HP = HONEST.repeat(3, 1)
    sent_AP = InnerProduct().conspire(honest_HP, OWN[:1])
    assert float(torch.cat([honest_HP, sent_AP]).mean(0) @ honest_HP.mean(0)) < 0


def test_little_is_enough_shifts_each_coordinate_by_z_standard_deviations() -> None:
    std = [math.sqrt(2 / 3), math.sqrt(2)]
    assert sent(LittleIsEnough(z=1.5)) == pytest.approx([2 - 1.5 * std[0], 1 - 1.5 * std[1]])
    # n = 5, m = 2: s = floor(5/2 + 1) - 2 = 1 honest client must be farther out, phi(z) = (3 - 1) / 3.
    z = NormalDist().inv_cdf(2 / 3)
    assert sent(LittleIsEnough()) == pytest.approx([2 - z * std[0], 1 - z * std[1]])


@pytest.mark.parametrize(
    ("clients", "attackers", "share"),
    [(50, 12, 24 / 38), (20, 5, 9 / 15), (12, 3, 5 / 9), (10, 2, 1 / 2), (4, 1, 1 / 2), (3, 2, 1 / 2), (4, 3, 1 / 2)],
)
def test_z_is_the_papers_and_never_turns_the_attack_around(clients: int, attackers: int, share: float) -> None:
    """The last three: the paper's z is negative, or a majority needs no honest client; 0 is the mean itself."""
    assert LittleIsEnough().shift(clients, attackers) == pytest.approx(NormalDist().inv_cdf(share))


def test_min_max_goes_as_far_as_the_honest_updates_are_from_each_other() -> None:
    """The farthest two honest are sqrt(10) apart. Along -[0, 1] from [2, 1] the third, [2, 3], is the first to be
    that far away: 2 + gamma = sqrt(10)."""
    far = math.sqrt(10)
    up = torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 3.0]]) - torch.tensor([2.0, 0.0])  # mean [0, 1]
    assert sent(MinMax("unit"), up) == pytest.approx([0.0, 1 - (far - 2)])
    assert max(math.dist(sent(MinMax("unit"), up), row) for row in up.tolist()) == pytest.approx(far)


@pytest.mark.parametrize("perturbation", ["std", "unit", "sign"])
def test_min_max_touches_its_bound_in_each_direction(perturbation: str) -> None:
    threat = MinMax(perturbation)  # type: ignore[arg-type]
    found = sent(threat)
    assert max(math.dist(found, row) for row in HONEST.tolist()) == pytest.approx(math.sqrt(10))
    wanted = {"std": [-math.sqrt(2 / 3), -math.sqrt(2)], "unit": [-2.0, -1.0], "sign": [-1.0, -1.0]}[perturbation]
    moved = [found[0] - 2.0, found[1] - 1.0]
    assert moved[0] * wanted[1] == pytest.approx(moved[1] * wanted[0])
    assert moved[0] < 0 > moved[1]


def test_min_max_without_room_or_direction_is_the_mean() -> None:
    assert sent(MinMax(), HONEST[:1]) == [1.0, 0.0]  # one honest client: no distance
    assert sent(MinMax("std"), HONEST[:1].repeat(3, 1)) == [1.0, 0.0]
    assert sent(MinMax("unit"), torch.tensor([[1.0, 1.0], [-1.0, -1.0]])) == [0.0, 0.0]


def test_sybils_send_what_the_first_of_them_trained() -> None:
    assert sent(Sybils()) == [7.0, 7.0]
    inner = LabelFlip(share=0.3)
    assert (Sybils(inner).share, Sybils(inner).per_batch) == (0.3, 0)
    y = torch.tensor([0, 9])
    assert Sybils(inner).goal(y).tolist() == [9, 0]
    assert Sybils(ModelReplacement(2.0, SignFlip())).report(OWN[0], 7, 1).tolist() == [-14.0, -14.0]


def test_what_knows_the_honest_updates_and_until_when() -> None:
    assert all(omniscient(threat) is threat for threat in ALL)  # type: ignore[arg-type]
    assert omniscient(Backdoor()) is None
    assert omniscient(ModelReplacement()) is None
    ending = Until(3, InnerProduct())
    assert (omniscient(ending, 3), omniscient(ending, 4)) == (InnerProduct(), None)
    assert omniscient(Until(3, Backdoor()), 1) is None


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda: InnerProduct(epsilon=0.0), "epsilon"),
        (lambda: InnerProduct(share=1.0), "share"),
        (lambda: LittleIsEnough(z=-1.0), "z"),
        (lambda: MinMax(share=-0.1), "share"),
        (lambda: Sybils(InnerProduct()), "threat"),
        (lambda: Sybils(Until(3, MinMax())), "threat"),
        (lambda: ModelReplacement(5.0, LittleIsEnough()), "threat"),
    ],
)
def test_wrong_settings_name_the_field(wrong: object, field: str) -> None:
    with pytest.raises(PlanError, match=f"^{field} = "):
        wrong()  # type: ignore[operator]


def everyone(threat: Threat, **changes: object) -> Plan:
    """Six clients, two of them attackers, who all answer; no noise."""
    environment = Environment(Sampled(rate=1.0), threat, NoPrivacy())
    return tiny(**{"rounds": 2, "environment": environment, **changes})


def scripted_round(plan: Plan, order: tuple[int, ...]) -> tuple[RunState, RunState]:
    """A round in which client i's update is i + 1 everywhere, and the replies come in this order."""
    before = begin(plan, problem_for(plan))
    empty = Buffers(before.buffers.floats_F, before.buffers.counts_I)
    replies = [Reply(i, 1, 10, before.w + (i + 1), empty) for i in order]
    return before, play_round(before, plan, problem_for(plan), Scripted(replies, clients=6))[0]


def test_the_server_puts_the_attack_in_the_place_of_the_attackers_updates() -> None:
    """Four honest clients with updates of i + 1, two attackers with -3 times their mean."""
    plan = replace(everyone(InnerProduct(share=0.34, epsilon=3.0)), scoring=replace(tiny().scoring, every=9, last=1))
    attackers = attackers_of(plan, 6)
    assert len(attackers) == 2
    honest = [i + 1 for i in range(6) if i not in attackers]
    mean = sum(honest) / 4
    before, after = scripted_round(plan, (0, 1, 2, 3, 4, 5))
    assert torch.allclose(after.w - before.w, torch.full_like(after.w, (sum(honest) - 2 * 3 * mean) / 6), atol=1e-5)


def test_the_order_of_replies_changes_no_byte() -> None:
    for threat in ALL:
        chosen = replace(
            threat, **({"threat": Backdoor(share=0.34)} if isinstance(threat, Sybils) else {"share": 0.34})
        )  # type: ignore[type-var]
        plan = replace(everyone(chosen), scoring=replace(tiny().scoring, every=9, last=1))  # type: ignore[arg-type]
        found = [scripted_round(plan, order)[1].w for order in list(permutations(range(6)))[::331]]
        assert all(torch.equal(w, found[0]) for w in found)


def test_where_no_honest_update_came_the_attackers_send_what_they_have() -> None:
    plan = replace(everyone(InnerProduct(share=0.34)), scoring=replace(tiny().scoring, every=9, last=1))
    one, other = sorted(attackers_of(plan, 6))
    before, after = scripted_round(plan, (one, other))
    assert torch.allclose(after.w - before.w, torch.full_like(after.w, (one + other) / 2 + 1), atol=1e-5)


def test_the_inner_product_attack_turns_the_step_around_and_clipping_bounds_it() -> None:
    """The first step with no attacker, and with two that know it: opposite directions."""
    steps = {}
    for name, threat in {"none": InnerProduct(share=0.0), "attacked": InnerProduct(share=0.34)}.items():
        plan = everyone(threat, rounds=1)
        (after, _), *_ = federate(plan)
        steps[name] = after.w - begin(plan, problem_for(plan)).w
    assert float(torch.cosine_similarity(steps["none"], steps["attacked"], dim=0)) < -0.5
    clipped = tiny(rounds=1, environment=replace(tiny().environment, threat=InnerProduct(share=0.34, epsilon=1e6)))
    (after, _), *_ = federate(clipped)
    assert float(torch.linalg.vector_norm(after.w - begin(clipped, problem_for(clipped)).w)) < 15.1


@pytest.mark.parametrize("threat", [*ALL, Until(1, MinMax())])
def test_a_resumed_run_has_the_bytes_of_an_uninterrupted_one(threat: Threat, tmp_path: Path) -> None:
    plan = everyone(threat, rounds=3, method=METHODS["apfl"])
    assert from_dict(to_dict(plan)) == plan
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    list(run_plan(plan, whole, engine="inprocess"))
    for event in run_plan(plan, parts, engine="inprocess"):
        if getattr(getattr(event, "result", None), "round", 0) == 2:
            break
    list(run_plan(plan, parts, engine="inprocess", resume=True))
    assert (whole / "rounds.jsonl").read_bytes() == (parts / "rounds.jsonl").read_bytes()


@pytest.mark.slow
def test_worker_processes_give_the_same_bytes() -> None:
    plan = everyone(MinMax(share=0.34))
    problem = problem_for(plan)
    engine = Processes(plan, problem, workers=2)
    try:
        there = [state.w for state, _ in federate(plan, problem=problem, engine=engine)]
    finally:
        engine.close()
    here = [state.w for state, _ in federate(plan, problem=problem)]
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_compare_plays_them_by_name_with_as_many_attackers() -> None:
    base = tiny(environment=Environment(Sampled(rate=1.0), Backdoor(share=0.34)))
    grid = ComparisonGrid.named("fedavg", "median", "inner_product,little_is_enough,min_max,sybils")
    found = dict(grid.plans(base))
    assert list(found) == [
        f"{name}/median/fedavg" for name in ("inner_product", "little_is_enough", "min_max", "sybils")
    ]
    assert {plan.environment.threat.share for plan in found.values()} == {0.34}


def test_a_deployment_refuses_them_before_anything_is_written(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    from lindt.engines.flower.launch import FlowerOptions, run_on_flower

    plan, folder = everyone(Until(2, InnerProduct())), tmp_path / "run"
    deployment = FlowerOptions(superlink="nowhere.example:9093", noise="plan")
    with pytest.raises(PlanError, match=r"environment\.threat = .*simulation"):
        list(run_on_flower(plan, folder, deployment))
    assert not folder.exists()
    begun = run_plan(plan, folder, engine="inprocess")
    next(begun)
    begun.close()  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match=r"environment\.threat = .*simulation"):
        list(run_on_flower(None, folder, deployment, resume=True))
    with pytest.raises(PlanError, match=r"environment\.threat = .*simulation"):
        list(run_plan(None, folder, engine="flower", resume=True, deployment=True))
