"""How far one client of K can move what the detector watches: the bounds of docs/detector-under-attack.md.

Legend: K clients, P parameters; the last row is the hostile client's.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lindt.environment.privacy import Gaussian
from lindt.protocols import Aggregator, Divergence
from lindt.server.aggregation import ClippedUpdates, GeometricMedian, Krum, Mean, Median
from lindt.server.detection.divergence import Distances, distances, divergence

INF = float("inf")
ROOM = 1e-4  # of rounding, in float32


def seen(others_KP: Tensor, x_P: Tensor, S: float = INF, join: Aggregator | None = None) -> Divergence:
    sent_KP = torch.cat([others_KP, x_P[None]])
    clipped_KP = ClippedUpdates(sent_KP, Gaussian(S=S).scales(sent_KP))
    found = Distances(len(sent_KP))
    clipped_KP.step(join or Mean(), torch.ones(len(sent_KP)), torch.zeros_like(x_P), found)
    return found.divergence(clipped_KP.share(), None)


def drawn(K: int, seed: int, P: int = 6) -> tuple[Tensor, Tensor]:
    found_KP = torch.randn(K, P, generator=torch.Generator().manual_seed(seed))
    return found_KP[:-1], found_KP[-1]


def test_a_false_alarm_by_hand() -> None:
    # Three clients agree on 0; the fourth sends 8: the mean is 2, the distances 2, 2, 2 and 6.
    others_KP, x_P = torch.zeros(3, 1), torch.tensor([8.0])
    found = seen(others_KP, x_P)
    assert found.delta == found.clean == found.spread == pytest.approx(8 * 2 * 3 / 16)  # 2 (K - 1) / K^2 a unit
    assert found.median == pytest.approx(2.0)  # the mean itself has moved
    # Clipping to 4 moves w by 1 only, but the distance of what was sent is measured as it is: 1, 1, 1 and 7.
    clipped = seen(others_KP, x_P, S=4.0)
    assert (clipped.delta, clipped.spread, clipped.median) == pytest.approx((2.5, 4 * 6 / 16, 1.0))
    # Under the median nothing moves but the client's own distance.
    robust = seen(others_KP, x_P, join=Median())
    assert (robust.delta, robust.median) == pytest.approx((2.0, 0.0))


def test_hiding_by_hand() -> None:
    # At -1, 1 and 3 around their mean 1, the fourth sends that mean: 2, 0, 2 and 0 instead of, say, 2.5, 0.5, 1.5, 1.5.
    others_KP = torch.tensor([[-1.0], [1.0], [3.0]])
    assert seen(others_KP, torch.tensor([3.0])).clean == pytest.approx(6 / 4)
    assert seen(others_KP, torch.tensor([1.0])).clean == pytest.approx(4 / 4)


@settings(max_examples=60, deadline=None)
@given(K=st.integers(2, 12), seed=st.integers(0, 10**6), length=st.floats(0.01, 1e4))
def test_delta_and_spread_of_a_mean_move_by_two_k_minus_one_over_k_squared_a_unit(
    K: int, seed: int, length: float
) -> None:
    others_KP, own_P = drawn(K, seed)
    moved_P = length * drawn(K, seed + 1)[1]
    honest, shaped = seen(others_KP, own_P), seen(others_KP, own_P + moved_P)
    most = 2 * (K - 1) / K**2 * float(torch.linalg.vector_norm(moved_P))
    for name in ("clean", "spread"):
        assert abs(getattr(shaped, name) - getattr(honest, name)) <= most * (1 + ROOM) + ROOM


@settings(max_examples=60, deadline=None)
@given(K=st.integers(2, 12), seed=st.integers(0, 10**6), length=st.floats(0.01, 1e6), S=st.floats(0.5, 4.0))
def test_clipping_bounds_spread_and_median_but_not_delta(K: int, seed: int, length: float, S: float) -> None:
    others_KP, own_P = drawn(K, seed)
    x_P = length * drawn(K, seed + 1)[1]
    honest, shaped = seen(others_KP, own_P, S), seen(others_KP, x_P, S)
    assert abs(shaped.spread - honest.spread) <= 4 * S * (K - 1) / K**2 * (1 + ROOM) + ROOM
    # The step moves by 2 S / K at most, and with it every distance; of the sorted ones the median moves one place.
    sent_KP = torch.cat([others_KP, own_P[None]])
    step_P = ClippedUpdates(sent_KP, Gaussian(S=S).scales(sent_KP)).columns(slice(None)).mean(0)
    order = sorted(distances(others_KP, step_P))
    m, shift = len(order), 2 * S / K + ROOM
    low, high = ((m - 1) // 2, m // 2) if m % 2 else (m // 2 - 1, m // 2)
    if K >= 3:
        assert order[max(low - 1, 0)] - shift <= shaped.median <= order[min(high + 1, m - 1)] + shift
    # Its own distance, less w's step, is all in Delta.
    assert shaped.delta >= (float(torch.linalg.vector_norm(x_P)) - S) / K - ROOM * length


@settings(max_examples=60, deadline=None)
@given(
    K=st.integers(3, 12),
    seed=st.integers(0, 10**6),
    length=st.floats(0, 10),
    join=st.sampled_from([Mean(), Median(), Krum(0.25)]),
)
def test_nobody_hides_more_than_the_others_distance_from_their_middle(
    K: int, seed: int, length: float, join: Aggregator
) -> None:
    others_KP, _ = drawn(K, seed)
    x_P = length * drawn(K, seed + 1)[1]
    middle_P = GeometricMedian()(others_KP, torch.ones(K - 1))
    least = (K - 1) / K * divergence(others_KP, middle_P)
    assert seen(others_KP, x_P, join=join).clean >= least * (1 - 1e-3)


@pytest.mark.parametrize("K", [4, 5, 10])
def test_under_the_median_aggregator_no_length_moves_the_median_statistic_beyond_the_others(K: int) -> None:
    others_KP, _ = drawn(K, 7)
    way_P = drawn(K, 8)[1]
    found = [seen(others_KP, 10.0**power * way_P, join=Median()).median for power in range(1, 9)]
    assert max(found) - min(found) < 1e-3  # once it is the farthest, more length changes nothing
    pairs = [float(torch.linalg.vector_norm(a - b)) for a in others_KP for b in others_KP]
    assert max(found) <= max(pairs) * others_KP.shape[1] ** 0.5
