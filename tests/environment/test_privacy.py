"""Eq. 4: Clip(., S) and N(0, sigma^2 I), by hand and as properties."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lindt.environment.privacy import Gaussian, NoPrivacy, Privacy
from lindt.errors import PlanError
from lindt.server.aggregation import ClippedUpdates


def clip(privacy: Privacy, updates_KP: torch.Tensor) -> torch.Tensor:
    return ClippedUpdates(updates_KP, privacy.scales(updates_KP)).columns(slice(None))


def test_clipping_by_hand() -> None:
    updates_KP = torch.tensor([[6.0, 8.0], [3.0, 4.0], [0.3, -0.4], [0.0, 0.0]])
    clipped_KP = clip(Gaussian(S=5.0), updates_KP)
    assert clipped_KP.tolist() == [[3.0, 4.0], [3.0, 4.0], updates_KP[2].tolist(), [0.0, 0.0]]
    scales_K = Gaussian(S=5.0).scales(updates_KP)
    assert ClippedUpdates(updates_KP, scales_K).share() == 0.25  # exactly S is not shortened
    assert updates_KP[0].tolist() == [6.0, 8.0]


def test_the_papers_values_are_the_defaults() -> None:
    assert Gaussian() == Gaussian(S=15.0, sigma=0.001)


@given(
    rows=st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=4, max_size=4), min_size=1, max_size=5),
    S=st.floats(0.001, 1000),
)
@settings(max_examples=150, deadline=None)
def test_clipped_norms_are_at_most_s_and_directions_stay(rows: list[list[float]], S: float) -> None:
    updates_KP = torch.tensor(rows, dtype=torch.float32)
    privacy = Gaussian(S=S)
    clipped_KP = clip(privacy, updates_KP)
    norms_K = torch.linalg.vector_norm(updates_KP, dim=1)
    assert (torch.linalg.vector_norm(clipped_KP.double(), dim=1) <= S * (1 + 1e-6)).all()
    for before_P, after_P, norm in zip(updates_KP, clipped_KP, norms_K, strict=True):
        if norm <= S:
            assert before_P.view(torch.int32).equal(after_P.view(torch.int32))  # bit for bit, -0.0 too
        else:
            expected_P = before_P.double() * (S / before_P.double().norm())
            torch.testing.assert_close(after_P.double(), expected_P, rtol=1e-5, atol=1e-30)
    share = ClippedUpdates(updates_KP, privacy.scales(updates_KP)).share()
    assert share == pytest.approx(float((norms_K > S).float().mean()))


def test_a_long_update_is_clipped_to_s_too() -> None:
    """A float32 sum over ten million squares leaves 0.0003 more than S."""
    update_1P = torch.randn(1, 10_000_000, generator=torch.Generator().manual_seed(0))
    assert float(torch.linalg.vector_norm(clip(Gaussian(S=2.0), update_1P), dtype=torch.float64)) <= 2 * (1 + 2e-5)
    few_KP = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1))
    factors_K = Gaussian(S=2.0).scales(few_KP)
    assert factors_K is not None
    assert torch.equal(factors_K, 2 / torch.linalg.vector_norm(few_KP, dim=1))  # short updates: the same bits


def test_noise_is_gaussian_of_the_given_std() -> None:
    P = 200_000
    noise_P = Gaussian(sigma=0.003).noise(torch.zeros(P), seed=1)
    assert noise_P.shape == (P,)
    assert abs(noise_P.mean().item()) < 5 * 0.003 / math.sqrt(P)
    assert noise_P.std().item() == pytest.approx(0.003, rel=5 / math.sqrt(2 * P))
    assert (noise_P.abs() < 0.003).double().mean().item() == pytest.approx(0.6827, abs=0.005)
    assert noise_P.norm().item() == pytest.approx(0.003 * math.sqrt(P), rel=0.01)  # what Eq. 7 takes off


def test_noise_comes_from_its_seed_alone() -> None:
    privacy, like_P = Gaussian(sigma=0.1), torch.zeros(50)
    torch.manual_seed(1)
    first_P = privacy.noise(like_P, 7)
    torch.manual_seed(2)
    state = torch.random.get_rng_state()
    assert torch.equal(privacy.noise(torch.ones(50), 7), first_P)
    assert torch.equal(torch.random.get_rng_state(), state)  # and takes nothing from the global stream
    assert not torch.equal(privacy.noise(like_P, 8), first_P)
    torch.testing.assert_close(Gaussian(sigma=0.2).noise(like_P, 7), 2 * first_P)


def test_a_sigma_of_zero_only_clips() -> None:
    assert not Gaussian(sigma=0.0).noise(torch.ones(5), 7).any()


def test_no_privacy_changes_nothing() -> None:
    updates_KP = torch.tensor([[600.0, 800.0]])
    assert NoPrivacy().scales(updates_KP) is None
    assert ClippedUpdates(updates_KP, NoPrivacy().scales(updates_KP)).share() == 0.0
    assert NoPrivacy().noise(updates_KP[0], 7).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("field", "value"), [("S", 0.0), ("S", -1.0), ("S", math.nan), ("sigma", -0.001), ("sigma", math.nan)]
)
def test_impossible_values_are_refused(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"^{field} = "):
        Gaussian(**{field: value})


def test_updates_that_are_short_enough_are_not_scaled() -> None:
    updates_KP = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert Gaussian(S=5.0).scales(updates_KP) is None
    scales_K = Gaussian(S=4.0).scales(updates_KP)
    assert scales_K is not None
    assert scales_K.tolist() == pytest.approx([0.8, 1.0])
