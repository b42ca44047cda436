"""The honest (epsilon, delta) of Eq. 4, against the closed forms it must reproduce."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lindt.environment.budget import MEANINGFUL, Budget, budget
from lindt.errors import PlanError

CIFAR: dict[str, Any] = {
    "sigma": 0.001,
    "sensitivity": 2 * 15 / 10,
    "clients": 100,
    "active": 10,
    "rounds": 500,
}
"""The paper's defaults: S = 15, sigma = 0.001, K = 10 of N = 100, 500 rounds."""

# K = N: no sampling, hence the plain Gaussian alone.
EVERYONE: dict[str, Any] = {"sensitivity": 1.0, "clients": 100, "active": 100}


def epsilon_of(**kwargs: Any) -> float:
    found = budget(**kwargs).epsilon_dp
    assert found is not None
    return found


def closed_form(z: float, rounds: int, delta_dp: float) -> float:
    """R Gaussians of multiplier z have Renyi divergence R a / (2 z^2) at order a; dp-accounting converts by
    Canonne, Kamath and Steinke 2020, Prop. 12: epsilon = rdp + log(1 - 1/a) - log(delta a) / (a - 1)."""
    a = 1 + np.geomspace(0.0101, 1e6, 200_000)
    return float(np.min(rounds * a / (2 * z**2) + np.log1p(-1 / a) - np.log(delta_dp * a) / (a - 1)))


@pytest.mark.parametrize("z", [1 / 3000, 0.1, 0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("rounds", [1, 500])
def test_the_gaussian_alone_is_the_closed_form(z: float, rounds: int) -> None:
    found = epsilon_of(sigma=z, rounds=rounds, delta_dp=1e-5, **EVERYONE)
    expected = closed_form(z, rounds, 1e-5)
    assert expected * (1 - 1e-9) <= found <= expected * 1.001


@pytest.mark.parametrize(("z", "rounds"), [(0.5, 1), (1.0, 1), (4.0, 1), (1.0, 500), (20.0, 500), (0.01, 500)])
def test_it_never_promises_more_than_the_exact_gaussian(z: float, rounds: int) -> None:
    """R Gaussians of multiplier z are one of z / sqrt(R), whose epsilon is known (Balle and Wang 2018)."""
    import dp_accounting

    if not hasattr(dp_accounting, "get_epsilon_gaussian"):
        pytest.skip("dp-accounting before 0.6 has no exact epsilon to compare with")
    exact = dp_accounting.get_epsilon_gaussian(z / math.sqrt(rounds), 1e-5)
    assert exact <= epsilon_of(sigma=z, rounds=rounds, delta_dp=1e-5, **EVERYONE) <= 1.15 * exact


def test_the_multiplier_is_sigma_over_the_replace_one_sensitivity() -> None:
    """Replacing a client moves the mean of clipped updates by up to 2S/K, from one end to the other."""
    found = budget(**CIFAR)
    assert found.noise_multiplier == pytest.approx(0.001 / 3)
    assert found.delta_dp == pytest.approx(100**-1.1)
    scaled = budget(**{**CIFAR, "sigma": 1.0, "sensitivity": 3000.0})
    assert scaled.epsilon_dp == pytest.approx(found.epsilon_dp)


def test_the_papers_default_is_meaningless_and_says_so() -> None:
    found = budget(**CIFAR)
    assert found.epsilon_dp is not None
    # R / (2 z^2) = 500 * 3000^2 / 2 = 2.25e9 is the limit at order 1, of which order 1.0101 is 1% above.
    assert 2.25e9 < found.epsilon_dp < 2.25e9 * 1.011
    assert found.in_words().startswith("(privacy epsilon = 2.27e+09, privacy delta = 0.00631): no meaningful guarantee")
    assert str(found) == found.in_words()


@pytest.mark.parametrize(
    ("epsilon_dp", "delta_dp", "words"),
    [
        (0.5, 1e-5, "a strong guarantee"),
        (MEANINGFUL, 1e-5, "a moderate guarantee"),
        (MEANINGFUL + 0.01, 1e-5, "no meaningful guarantee"),
        (0.5, 0.08, "no meaningful guarantee"),  # 10 clients: one time in twelve anything may happen
    ],
)
def test_words_follow_the_thresholds(epsilon_dp: float, delta_dp: float, words: str) -> None:
    found = Budget(epsilon_dp, delta_dp, noise_multiplier=1.0, amplified=False, reason="here")
    assert f": {words} here" in found.in_words()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sensitivity": None}, "no known bound"),
        ({"sensitivity": math.inf}, "no known bound"),
        ({"sigma": 0.0}, "no noise"),
        ({"sigma": 0.0, "sensitivity": None}, "no noise"),
        ({"sigma": 1e-200}, "too large for a float"),  # z^2 is 0 in floats
        ({"sigma": 1e-160}, "too large for a float"),  # dp-accounting's own answer to its NaN is epsilon = 0
    ],
)
def test_no_guarantee(change: dict[str, Any], words: str) -> None:
    found = budget(**{**CIFAR, **change})
    assert found.epsilon_dp is None
    assert not found.amplified
    assert found.in_words().startswith("no guarantee: ")
    assert words in found.in_words()


@given(sigma=st.floats(1e-300, 1e300), rounds=st.integers(1, 10**6), more=st.floats(1, 1e3))
@settings(deadline=None)
def test_more_noise_and_fewer_rounds_are_never_worse(sigma: float, rounds: int, more: float) -> None:
    def plain(sigma: float, rounds: int) -> float:
        found = budget(sigma=sigma, rounds=rounds, **EVERYONE).epsilon_dp
        return math.inf if found is None else found

    here = plain(sigma, rounds)
    assert here >= 0
    assert plain(sigma * more, rounds) <= here * (1 + 1e-12)
    assert plain(sigma, int(rounds * more)) >= here * (1 - 1e-12)


def test_sampling_keeps_the_order_too() -> None:
    sampled: dict[str, Any] = {"sensitivity": 1.0, "delta_dp": 1e-6, "active": 10}
    sigmas = [epsilon_of(sigma=s, rounds=100, clients=1000, **sampled) for s in (0.01, 0.5, 1, 2, 8, 300, 1e4)]
    assert sigmas == sorted(sigmas, reverse=True)
    rounds = [epsilon_of(sigma=1.0, rounds=r, clients=1000, **sampled) for r in (0, 1, 10, 100, 1000)]
    assert rounds == sorted(rounds)
    # The same K of more clients: a smaller chance to be asked.
    clients = [epsilon_of(sigma=1.0, rounds=100, clients=n, **sampled) for n in (10, 20, 100, 1000, 10**5)]
    assert clients == sorted(clients, reverse=True)
    assert clients[-1] < clients[0] / 10


def test_the_smaller_account_is_chosen_and_named() -> None:
    """Much noise: sampling helps. Little: the sampled account starts at order 2, twice the plain limit."""
    small: dict[str, Any] = {"sensitivity": 1.0, "clients": 1000, "rounds": 100, "delta_dp": 1e-4}
    noisy = budget(sigma=1.0, active=10, **small)
    assert noisy.amplified
    assert noisy.epsilon_dp is not None
    assert noisy.epsilon_dp < closed_form(1.0, 100, 1e-4) / 10
    assert "sampling rate 10/1000" in noisy.in_words()
    assert "nobody learns which 10 of them were" in noisy.in_words()

    quiet = budget(sigma=0.01, active=10, **small)
    assert not quiet.amplified
    assert quiet.epsilon_dp == pytest.approx(closed_form(0.01, 100, 1e-4), rel=1e-3)
    assert "nobody learns" not in quiet.in_words()


def test_sampling_at_order_two_by_hand() -> None:
    """Wang, Balle and Kasiviswanathan 2019, Thm. 27 at order 2, with e = exp(1/z^2):
    rdp = log(1 + q^2 min(4 (e - 1), 2 e)).

    With so many rounds order 2, the smallest, is the best one, so epsilon is that number and nothing else.
    """
    q, rounds, delta_dp = 0.1, 5000, 1e-3
    found = budget(sigma=1.0, sensitivity=1.0, clients=100, active=10, rounds=rounds, delta_dp=delta_dp)
    rdp = math.log(1 + q**2 * min(4 * (math.e - 1), 2 * math.e))
    assert found.amplified
    assert found.epsilon_dp == pytest.approx(rounds * rdp + math.log(1 / 2) - math.log(2 * delta_dp))


def test_over_selection_amplifies_at_the_rate_of_the_clients_asked() -> None:
    """10 of 100 are taken out of 20 asked: by hand at order 2, as above, with q = 20/100. The noise is over 2S/10."""
    rounds, delta_dp = 5000, 1e-3
    settings: dict[str, Any] = {"sigma": 1.0, "sensitivity": 1.0, "clients": 100, "rounds": rounds}
    found = budget(**settings, active=10, asked=20, delta_dp=delta_dp)
    rdp = math.log(1 + 0.2**2 * min(4 * (math.e - 1), 2 * math.e))
    # The plain account is R / (2 z^2) = 2500 and more at order 1: below 5000 * 0.197 = 985 it is not.
    assert found.amplified
    assert found.epsilon_dp == pytest.approx(rounds * rdp + math.log(1 / 2) - math.log(2 * delta_dp))
    assert "sampling rate 20/100" in found.in_words()
    assert budget(**settings, active=10, asked=10) == budget(**settings, active=10)
    everyone = budget(**settings, active=10, asked=100)
    assert not everyone.amplified
    assert everyone.epsilon_dp == budget(**settings, active=100).epsilon_dp


def test_before_the_first_round_nothing_is_spent() -> None:
    found = budget(**{**CIFAR, "rounds": 0})
    assert found.epsilon_dp == 0
    assert "before the first round" in found.in_words()


@pytest.mark.parametrize("clients", [1, 2, 3, 66, 100, 10**6])
def test_the_default_delta_is_below_one_in_n(clients: int) -> None:
    found = budget(sigma=1.0, sensitivity=1.0, clients=clients, active=clients, rounds=1)
    assert 0 < found.delta_dp < 1 / clients


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sigma", -1.0),
        ("sigma", math.nan),
        ("sigma", math.inf),
        ("sensitivity", 0.0),
        ("sensitivity", math.nan),
        ("clients", 0),
        ("active", 0),
        ("active", 101),
        ("asked", 9),
        ("asked", 101),
        ("rounds", -1),
        ("delta_dp", 0.0),
        ("delta_dp", 0.01),
        ("delta_dp", math.nan),
    ],
)
def test_what_cannot_be_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"^{field} = "):
        budget(**{**CIFAR, field: value})


def test_the_accountant_is_imported_only_when_asked() -> None:
    """It takes over a second: `lindt --help` must not pay for it."""
    import lindt.environment.budget as module

    assert not {"dp_accounting", "rdp", "np"} & set(vars(module))
