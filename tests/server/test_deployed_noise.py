"""Noise on a deployment: no seed gives it back, a round played again draws it anew, and the guarantee says so."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from worlds import Scripted

from lindt.environment import Environment
from lindt.environment.budget import budget
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian, secure_normal
from lindt.plan.plan import METHODS, Alone, Plan, Scoring
from lindt.plan.problem import Problem
from lindt.protocols import Buffers, RecoveryState, Reply
from lindt.runs.about import privacy_budget
from lindt.seeds import seed_for
from lindt.server.federation import play_round
from lindt.server.state import RunState

P, SECRET = 64, 2**61 + 12345
NONE = Buffers(torch.empty(0), torch.empty(0, dtype=torch.int64))
PRIVATE = Environment(Sampled(rate=1.0), privacy=Gaussian(S=10.0, sigma=0.5))
PLAN = Plan(
    rounds=100,
    environment=PRIVATE,
    method=METHODS["fedavg"],
    alone=Alone(private=False),
    scoring=Scoring(every=100, last=1),
)


def step(secret: int | None) -> torch.Tensor:
    """w^1 - w^0 where the three clients' mean is 0: the noise alone."""
    data = [((torch.zeros(2, P), torch.zeros(2, dtype=torch.int64)),) * 2] * 3
    problem = Problem(data, lambda: torch.nn.Linear(P, 1, bias=False))
    sent = [Reply(i, 1, 10, torch.full((P,), value), NONE) for i, value in enumerate((0.25, 0.0, -0.25))]
    start = RunState("", 0, torch.zeros(P), NONE, RecoveryState(), secret)
    return play_round(start, PLAN, problem, Scripted(sent))[0].w


def test_no_seed_of_torch_gives_the_noise_of_a_deployment_back() -> None:
    """torch's generator on the CPU keeps 32 bits of a seed: whoever tries all of them meets the right one."""
    seed = seed_for(SECRET, "noise", 1)

    def noise_of(guess: int) -> torch.Tensor:
        return 0.5 * torch.randn(P, generator=torch.Generator().manual_seed(guess))

    assert torch.equal(noise_of(seed), noise_of(seed & 0xFFFFFFFF))
    assert not torch.equal(step(SECRET), noise_of(seed & 0xFFFFFFFF))
    simulated = PLAN.seed_for("noise", 1) & 0xFFFFFFFF
    assert torch.equal(step(None), noise_of(simulated))  # a simulation is repeated from the plan


def test_a_round_that_is_played_again_has_other_noise() -> None:
    assert not torch.equal(step(SECRET), step(SECRET))
    assert torch.equal(step(None), step(None))


def test_deviates_are_normal_and_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against N(0, 1) as a whole, in the tails and from one to the next. The bytes are fixed here."""
    numbers = count()
    monkeypatch.setattr(os, "urandom", lambda size: hashlib.shake_256(str(next(numbers)).encode()).digest(size))
    n = 400_001
    found = secure_normal(n).double().numpy()
    assert found.shape == (n,)
    assert stats.kstest(found, "norm").pvalue > 0.001
    assert abs(found.mean()) < 4 / np.sqrt(n)
    assert abs(found.var() - 1) < 4 * np.sqrt(2 / n)
    assert abs(stats.kurtosis(found)) < 4 * np.sqrt(24 / n)
    for far in (2.0, 3.0, 4.0):
        expected = n * 2 * stats.norm.sf(far)
        assert abs((np.abs(found) > far).sum() - expected) < 4 * np.sqrt(expected)
    half = n // 2
    for gap in (1, 2, half, half + 1):  # the sine and the cosine of one pair of numbers lie half a block apart
        pairs = found[:-gap] * found[gap:]
        assert abs(pairs.mean()) < 4 / np.sqrt(len(pairs))
        squares = (found[:-gap] ** 2 - 1) * (found[gap:] ** 2 - 1)
        assert abs(squares.mean()) < 4 * 2 / np.sqrt(len(squares))


def test_every_draw_is_new_and_of_any_length() -> None:
    assert secure_normal(0).shape == (0,)
    assert secure_normal(1).dtype == torch.float32
    assert len({float(value) for _ in range(5) for value in secure_normal(7)}) == 35
    noise_P = Gaussian(sigma=0.003).noise(torch.zeros(20_000), None)
    assert noise_P.std().item() == pytest.approx(0.003, rel=0.05)


LINES = [{"answered": list(range(10))}] * 5


def said(**about: Any) -> dict[str, Any]:
    environment = Environment(Sampled(rate=0.1), privacy=Gaussian(S=1.0, sigma=3.0))
    return privacy_budget(replace(PLAN, environment=environment), 100, LINES, buffers=False, about=about)


def test_the_guarantee_names_the_generator_and_a_simulation_has_none() -> None:
    deployed = said(noise="system")
    assert deployed["epsilon"] is not None
    assert "the operating system's cryptographic generator" in deployed["words"]
    for about in ({"noise": "plan"}, {}):  # earlier runs do not say, and had torch's
        simulated = said(**about)
        assert simulated["epsilon"] is None
        assert simulated["words"].startswith("no guarantee: the noise comes from torch's generator")
        assert f"(privacy epsilon = {deployed['epsilon']:.3g}" in simulated["words"]  # what a deployment would have


def test_a_restart_may_have_released_rounds_twice_and_is_paid_for() -> None:
    once, again = said(noise="system", attempts=1), said(noise="system", attempts=2)
    assert once["epsilon"] == said(noise="system")["epsilon"] < again["epsilon"]
    assert "1 restart" in again["words"]


def test_without_noise_there_is_no_word_of_a_generator() -> None:
    plan = replace(PLAN, environment=Environment(Sampled(rate=1.0)))
    found = privacy_budget(plan, 10, LINES, buffers=False, about={})
    assert found["words"] == "no guarantee: no noise is added (sigma = 0)"


def reached(*connected: int | None) -> dict[str, Any]:
    lines = [{"answered": [0, 1]} | ({} if n is None else {"reachable": n}) for n in connected]
    environment = Environment(Sampled(active_clients=2), privacy=Gaussian(S=1.0, sigma=4.0))
    return privacy_budget(replace(PLAN, environment=environment), 100, lines, buffers=False, about={"noise": "system"})


def test_only_clients_that_can_be_reached_amplify() -> None:
    """With 2 of 100 asked sampling hides much, with 2 of the 8 that are connected less, as if 8 were all."""
    everyone, few = reached(None, None, None), reached(8, 8, 8)
    assert "sampling rate 2/100" in everyone["words"]
    assert "sampling rate 2/8" in few["words"]
    by_hand = budget(sigma=4.0, sensitivity=1.0, clients=8, active=2, rounds=3, delta_dp=few["delta"])
    assert everyone["epsilon"] < few["epsilon"] == pytest.approx(by_hand.epsilon_dp)
    # Each round counts as it was.
    mixed = reached(None, None, 8)
    assert everyone["epsilon"] < mixed["epsilon"] < few["epsilon"]
    assert "sampling rate 2/100 to 2/8" in mixed["words"]


def test_who_is_asked_as_a_whole_is_not_sampled() -> None:
    assert "sampling" not in reached(2, 2, 2)["words"]
    assert reached(2, 2, 2)["epsilon"] > reached(8, 8, 8)["epsilon"]


def test_a_round_tells_how_many_could_be_reached_where_it_was_not_everyone() -> None:
    data = [((torch.zeros(2, P), torch.zeros(2, dtype=torch.int64)),) * 2] * 5
    problem = Problem(data, lambda: torch.nn.Linear(P, 1, bias=False))
    sent = [Reply(i, 1, 10, torch.zeros(P), NONE) for i in range(3)]
    start = RunState("", 0, torch.zeros(P), NONE, RecoveryState(), SECRET)
    assert play_round(start, PLAN, problem, Scripted(sent, clients=3))[1].reachable == 3
    assert play_round(start, PLAN, problem, Scripted(sent, clients=5))[1].reachable is None
