"""Aggregators by distance: hand numbers, an independent implementation (Flower's), and what they promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lindt.errors import PlanError
from lindt.protocols import Aggregator
from lindt.server.aggregation import GeometricMedian, Krum, Median, MultiKrum, NormBound, krum_scores, squared_distances

LINE = torch.tensor([[0.0], [1.0], [2.0], [4.0], [100.0]])
ONES = torch.ones(5)
SHIFTING = [Krum(0.2), MultiKrum(0.2), GeometricMedian()]


def some(K: int, P: int, seed: int) -> Tensor:
    return torch.randn(K, P, generator=torch.Generator().manual_seed(seed))


def test_scores_by_hand() -> None:
    # f = 1: the 5 - 1 - 2 = 2 nearest others. 0: 1 + 4; 1: 1 + 1; 2: 1 + 4; 4: 4 + 9; 100: 96^2 + 98^2.
    assert krum_scores(LINE, 1).tolist() == [5.0, 2.0, 5.0, 13.0, 9216.0 + 9604.0]


def test_krum_takes_the_one_and_multi_krum_the_mean_of_the_trusted() -> None:
    assert Krum(0.2)(LINE, ONES).tolist() == [1.0]
    assert MultiKrum(0.2)(LINE, ONES).tolist() == [1.75]  # (0 + 1 + 2 + 4) / 4
    assert MultiKrum(0.0)(LINE, ONES).tolist() == pytest.approx([21.4])  # nobody is distrusted


@pytest.mark.parametrize(("K", "share", "hostile"), [(10, 0.2, 2), (7, 0.15, 1), (15, 0.4, 6), (5, 0.2, 1)])
def test_krum_median_and_multi_krum_agree_with_flowers(K: int, share: float, hostile: int) -> None:
    aggregate = pytest.importorskip("flwr.server.strategy.aggregate")
    for seed in range(5):
        updates_KP = some(K, 13, seed)
        updates_KP[:hostile] += 3.0
        theirs = [([np.array(row[:6]), np.array(row[6:])], 1) for row in updates_KP.numpy()]
        one = np.concatenate(aggregate.aggregate_krum(theirs, hostile, 0))
        several = np.concatenate(aggregate.aggregate_krum(theirs, hostile, K - hostile))
        middle = np.concatenate(aggregate.aggregate_median(theirs))
        assert Krum(share)(updates_KP, ONES).numpy() == pytest.approx(one)
        assert MultiKrum(share)(updates_KP, ONES).numpy() == pytest.approx(several, abs=1e-6)
        assert Median()(updates_KP, ONES).numpy() == pytest.approx(middle, abs=1e-6)


def test_the_geometric_median_by_hand() -> None:
    corners = torch.tensor([[0.0, 0.0], [4.0, 0.0], [2.0, 12**0.5]])  # equilateral: its centre
    assert GeometricMedian()(corners, ONES[:3]).tolist() == pytest.approx([2.0, 12**0.5 / 3], abs=1e-4)
    assert GeometricMedian()(LINE, ONES).tolist() == pytest.approx([2.0], abs=1e-3)  # on a line: the median
    most = torch.tensor([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [9.0, -5.0], [400.0, 3.0]])
    assert GeometricMedian()(most, ONES).tolist() == pytest.approx([1.0, 1.0], abs=1e-3)  # where most are
    assert GeometricMedian()(torch.ones(4, 3), ONES[:4]).tolist() == pytest.approx([1.0, 1.0, 1.0])


@given(st.integers(4, 12), st.integers(2, 9), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_at_the_geometric_median_the_pulls_of_all_clients_cancel(K: int, P: int, seed: int) -> None:
    updates_KP = some(K, P, seed)
    z_P = GeometricMedian(steps=5000, tolerance=1e-13)(updates_KP, torch.ones(K))
    away_KP = z_P - updates_KP
    lengths_K = torch.linalg.vector_norm(away_KP, dim=1)
    pull = torch.linalg.vector_norm((away_KP / lengths_K.clamp_min(1e-9)[:, None])[lengths_K > 1e-3].sum(0))
    assert pull <= 0.02 + int((lengths_K <= 1e-3).sum())  # at a client itself it pulls with at most 1


def test_the_norm_bound_by_hand() -> None:
    updates_KP = torch.tensor([[3.0, 4.0], [0.0, 5.0], [0.0, 50.0]])  # lengths 5, 5, 50: the last is cut to 5
    assert NormBound()(updates_KP, ONES[:3]).tolist() == pytest.approx([1.0, 14 / 3])
    assert NormBound(2.0)(updates_KP, ONES[:3]).tolist() == pytest.approx([1.0, 19 / 3])  # cut to 10
    assert NormBound()(torch.zeros(3, 2), ONES[:3]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("aggregator", [*SHIFTING, NormBound()])
@given(K=st.integers(5, 12), seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_the_order_of_clients_does_not_matter(aggregator: Aggregator, K: int, seed: int) -> None:
    updates_KP = some(K, 5, seed)  # of fewer than five Krum may find two equally near: it takes the first
    mixed = torch.randperm(K, generator=torch.Generator().manual_seed(seed))
    one, other = aggregator(updates_KP, torch.ones(K)), aggregator(updates_KP[mixed], torch.ones(K))
    assert one.tolist() == pytest.approx(other.tolist(), abs=1e-4)


@pytest.mark.parametrize("aggregator", SHIFTING)
def test_they_move_with_a_shift_and_leave_the_updates_alone(aggregator: Aggregator) -> None:
    updates_KP, shift_P = some(7, 4, 1), torch.tensor([1.0, -2.0, 3.0, 0.5])
    before = updates_KP.clone()
    found = aggregator(updates_KP, ONES)
    assert aggregator(updates_KP + shift_P, ONES).tolist() == pytest.approx((found + shift_P).tolist(), abs=1e-4)
    found += 1
    assert torch.equal(updates_KP, before)


@pytest.mark.parametrize("aggregator", SHIFTING)
def test_one_client_far_away_moves_them_little(aggregator: Aggregator) -> None:
    updates_KP = some(9, 4, 2)
    updates_KP[3] = 1e6
    assert float(torch.linalg.vector_norm(aggregator(updates_KP, torch.ones(9)))) < 3.0


def test_near_updates_keep_their_distance() -> None:
    """Far from zero, where ||a||^2 + ||b||^2 - 2ab has no digits left in float32."""
    updates_KP = torch.full((2, 1000), 1000.0)
    updates_KP[1, 0] += 0.5
    assert squared_distances(updates_KP).tolist() == [[0.0, 0.25], [0.25, 0.0]]


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (lambda: Krum(0.5), "share"),
        (lambda: MultiKrum(-0.1), "share"),
        (lambda: GeometricMedian(steps=0), "steps"),
        (lambda: GeometricMedian(tolerance=0.0), "tolerance"),
        (lambda: NormBound(0.0), "factor"),
    ],
)
def test_bad_settings_name_the_field(wrong: object, field: str) -> None:
    with pytest.raises(PlanError, match=field):
        wrong()  # type: ignore[operator]
