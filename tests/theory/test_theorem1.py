"""Theorem 1 where its premise can be watched, and what it does not say.

If g_max goes to zero at every local step, Delta falls below any epsilon and stays there. The premise needs
a problem that one model can solve for every label: separable data, on which gradient descent of softmax
regression drives the gradient of each label to zero. The federation is that of test_proposition1.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from test_proposition1 import Federation, gaussian, one_thread  # noqa: F401 (a fixture: takes effect by name)
from torch import Tensor

from lindt.server.detection.divergence import delta_of, divergence

EPSILON = 0.1  # the paper's
ROUNDS = 300

# Four clients who see the labels in very different shares, one of them never the third.
CONFLICTING = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.6, 0.4, 0.0]], dtype=torch.float64)


@dataclass(frozen=True)
class History:
    """What the server and the clients see, round by round; `w_div_clean` is around the mean before noise."""

    delta: list[float]
    w_div_clean: list[float]
    g_max: list[float]  # the largest over the clients and their local steps
    gradient_term: list[float]  # of the bound of Proposition 1


def samples(seed: int, *, separable: bool) -> Tensor:
    """Three labels in four features: around three corners far apart, or all from the same cloud."""
    generator = torch.Generator().manual_seed(seed)
    cloud_YMD = 0.5 * torch.randn(3, 6, 4, generator=generator, dtype=torch.float64)
    if separable:
        return cloud_YMD + 3 * torch.eye(3, 4, dtype=torch.float64)[:, None, :]
    cloud_YMD[..., 3] = 1  # a constant feature: without it the bias of a client towards its labels has no weight
    return cloud_YMD


def fedavg(x_YMD: Tensor, p_KY: Tensor, sigma: float, seed: int) -> History:
    """Algorithm 1 with the noise of Eq. 4, everyone active, T = 3 full-batch steps, no clipping."""
    fed = Federation(x_YMD, p_KY, eta=0.5, steps=3)
    w_P = torch.zeros(fed.weights, dtype=torch.float64)
    history = History([], [], [], [])
    for r in range(ROUNDS):
        paths_KTP = fed.local(w_P)
        w_KP, noise_P = paths_KTP[:, -1], gaussian(fed.weights, sigma, 1000 * seed + r)
        mean_P = w_KP.mean(0)
        w_P = mean_P + noise_P
        history.delta.append(delta_of(w_KP, w_P, noise_P))
        history.w_div_clean.append(divergence(w_KP, mean_P))
        history.g_max.append(float(fed.g_max(paths_KTP[:, :-1]).max()))
        history.gradient_term.append(fed.gradient_term(paths_KTP))
    return history


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sigma", [0.0, 0.01])
def test_where_the_gradients_vanish_delta_does(sigma: float, seed: int) -> None:
    """Premise and conclusion side by side, from the r' that the bound itself names.

    With constant noise w walks at random, and the premise need not hold for ever; with a sigma this small,
    against margins that grow, it holds as far as is looked here. The last test has the other case.
    """
    seen = fedavg(samples(seed, separable=True), CONFLICTING, sigma, seed)
    # The premise: at 1 / r, the rate known for separable data.
    assert seen.g_max[0] > 1
    assert max(seen.g_max[-100:]) < 0.01
    assert max(seen.g_max[-100:]) < 0.5 * max(seen.g_max[50:100])

    assert seen.delta[0] > EPSILON
    for epsilon in (EPSILON, 0.05):
        patience = 1 + max(r for r, term in enumerate(seen.gradient_term) if term > epsilon)
        assert patience < 250
        assert max(seen.delta[patience:]) <= epsilon
    assert max(seen.delta[-100:]) < 0.005


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("sigma", [0.0, 0.01])
def test_where_they_do_not_delta_stays(sigma: float, seed: int) -> None:
    """The control: labels that no model can tell apart, in clients who meet them in conflicting shares."""
    seen = fedavg(samples(seed, separable=False), CONFLICTING, sigma, seed)
    assert min(seen.g_max) > 0.5
    assert min(seen.delta) > 3 * EPSILON


def test_delta_vanishes_among_identical_clients_whatever_they_learn() -> None:
    """No converse: the same hopeless labels, in equal shares. Delta measures disagreement, not failure."""
    equal_KY = torch.full((4, 3), 1 / 3, dtype=torch.float64)
    seen = fedavg(samples(0, separable=False), equal_KY, 0.0, 0)
    assert min(seen.g_max) > 0.5
    assert max(seen.delta) == 0


@pytest.mark.parametrize("seed", range(2))
def test_large_noise_hides_what_delta_should_show(seed: int) -> None:
    """No converse, again: noise of norm n compresses a divergence of a to about sqrt(a^2 + n^2) - n.

    The control's clients are as far apart as ever, yet Delta is silent. This is why `clean` is logged too.
    """
    seen = fedavg(samples(seed, separable=False), CONFLICTING, 3.0, seed)
    assert min(seen.g_max[-100:]) > 0.5
    assert max(seen.delta) < EPSILON < min(seen.w_div_clean)


def test_large_noise_breaks_the_premise() -> None:
    """On separable data too: w wanders off, now and then a label is lost, and its gradient is back."""
    seen = fedavg(samples(0, separable=True), CONFLICTING, 1.0, 0)
    assert max(seen.g_max[-100:]) > 0.5
