"""How the server joins updates: hand numbers, symmetries, and the sensitivity that privacy rests on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lindt.errors import PlanError
from lindt.protocols import Aggregator, BoundedSensitivity
from lindt.server.aggregation import Mean, Median, TrimmedMean, WeightedMean

ALL = [Mean(), WeightedMean(), TrimmedMean(0.2), TrimmedMean(0.45), Median()]
FIVE = torch.tensor([[1.0, 50.0], [2.0, 40.0], [3.0, 30.0], [4.0, 20.0], [100.0, -999.0]])
SIZES = torch.tensor([1, 1, 1, 1, 4])


@pytest.mark.parametrize(
    ("aggregator", "expected"),
    [
        (Mean(), [22.0, -171.8]),  # 110 / 5, (140 - 999) / 5
        (WeightedMean(), [51.25, -482.0]),  # (10 + 400) / 8, (140 - 3996) / 8
        (TrimmedMean(0.2), [3.0, 30.0]),  # (2 + 3 + 4) / 3, (20 + 30 + 40) / 3
        (TrimmedMean(0.4), [3.0, 30.0]),  # two go on each side
        (Median(), [3.0, 30.0]),
    ],
)
def test_five_clients(aggregator: Aggregator, expected: list[float]) -> None:
    assert aggregator(FIVE, SIZES).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("aggregator", "expected"),
    [(Mean(), 3.5), (WeightedMean(), 4.875), (TrimmedMean(0.25), 2.5), (Median(), 2.5)],
)
def test_four_clients(aggregator: Aggregator, expected: float) -> None:
    updates_KP = torch.tensor([[8.0], [1.0], [3.0], [2.0]])
    assert aggregator(updates_KP, torch.tensor([4, 2, 1, 1])).item() == expected  # weighted: (32 + 2 + 3 + 2) / 8


@pytest.mark.parametrize("K", [1, 2, 5, 10, 64])
@pytest.mark.parametrize("P", [1, 1023, 2047, 2049, 3071, 4099])
def test_coordinates_at_a_time_give_the_bits_of_all_at_once(K: int, P: int, monkeypatch: pytest.MonkeyPatch) -> None:
    updates_KP = torch.randn(K, P, generator=torch.Generator().manual_seed(K * P))
    ordered_KP, t = updates_KP.sort(dim=0).values, TrimmedMean(0.2).trimmed(K)
    for values in (K, 1031 * K, 2**20):  # of which the first two make pieces
        monkeypatch.setattr("lindt.server.aggregation.AT_A_TIME", values)
        trimmed_P, median_P = TrimmedMean(0.2)(updates_KP, torch.ones(K)), Median()(updates_KP, torch.ones(K))
        assert torch.equal(trimmed_P, ordered_KP[t : K - t].mean(0))
        assert torch.equal(median_P, torch.lerp(ordered_KP[(K - 1) // 2], ordered_KP[K // 2], 0.5))


@pytest.mark.parametrize("aggregator", ALL)
def test_one_client_is_its_own_aggregate_and_two_equal_sizes_meet_halfway(aggregator: Aggregator) -> None:
    assert aggregator(torch.tensor([[3.0, -4.0]]), torch.tensor([7])).tolist() == [3.0, -4.0]
    two = torch.tensor([[1.0, -4.0], [2.0, 8.0]])
    assert aggregator(two, torch.tensor([7, 7])).tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    ("share", "active", "each_side"),
    [
        (0.2, 10, 2),  # the paper's CIFAR-10: 2 attackers of 10
        (0.16, 6, 1),  # its Shakespeare: 1 of 6
        (0.2, 5, 1),
        (0.05, 10, 1),  # max(1, round(0.5))
        (0.01, 100, 1),
        (0.4, 5, 2),
        (0.45, 5, 2),
        (0.49, 100, 49),
        (0.45, 4, 1),  # round gives 2, which would leave nothing
        (0.2, 3, 1),
        (0.2, 2, 0),
        (0.2, 1, 0),
    ],
)
def test_how_many_are_trimmed(share: float, active: int, each_side: int) -> None:
    assert TrimmedMean(share).trimmed(active) == each_side


@pytest.mark.parametrize("share", [0.0, -0.1, 0.5, 1.0, float("nan")])
def test_a_share_that_trims_nothing_or_everything_is_refused(share: float) -> None:
    with pytest.raises(PlanError, match=r"^share = "):
        TrimmedMean(share)


def test_a_trimmed_mean_and_a_median_do_not_follow_one_wild_client() -> None:
    updates_KP = torch.cat([torch.ones(4, 3), torch.full((1, 3), 1e9)])
    for aggregator in (TrimmedMean(0.2), Median()):
        assert aggregator(updates_KP, SIZES).tolist() == [1.0, 1.0, 1.0]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """K updates of 3 weights in [-10, 10], and the clients' sizes."""
    K = draw(st.integers(1, 9))
    value = st.floats(-10, 10, width=32)
    rows = draw(st.lists(st.lists(value, min_size=3, max_size=3), min_size=K, max_size=K))
    sizes = draw(st.lists(st.integers(1, 1000), min_size=K, max_size=K))
    return torch.tensor(rows, dtype=torch.float64), torch.tensor(sizes)


@given(aggregator=st.sampled_from(ALL), given_round=rounds(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_ignores_the_order_moves_with_a_shift_and_stays_within_the_updates(
    aggregator: Aggregator, given_round: tuple[Tensor, Tensor], data: st.DataObject
) -> None:
    updates_KP, sizes_K = given_round
    joined_P = aggregator(updates_KP, sizes_K)
    order = data.draw(st.permutations(range(len(updates_KP))))
    torch.testing.assert_close(aggregator(updates_KP[order], sizes_K[order]), joined_P, rtol=0, atol=1e-12)
    shift_P = torch.tensor(data.draw(st.lists(st.floats(-5, 5), min_size=3, max_size=3)), dtype=torch.float64)
    torch.testing.assert_close(aggregator(updates_KP + shift_P, sizes_K), joined_P + shift_P, rtol=0, atol=1e-12)
    assert (joined_P >= updates_KP.amin(0) - 1e-12).all()
    assert (joined_P <= updates_KP.amax(0) + 1e-12).all()


@given(given_round=rounds())
@settings(max_examples=50, deadline=None)
def test_equal_sizes_make_the_weighted_mean_plain(given_round: tuple[Tensor, Tensor]) -> None:
    updates_KP, _ = given_round
    same_K = torch.full((len(updates_KP),), 17)
    torch.testing.assert_close(WeightedMean()(updates_KP, same_K), Mean()(updates_KP, same_K), rtol=0, atol=1e-12)


@given(given_round=rounds())
@settings(max_examples=50, deadline=None)
def test_the_median_is_the_statistics_median(given_round: tuple[Tensor, Tensor]) -> None:
    updates_KP, sizes_K = given_round
    torch.testing.assert_close(Median()(updates_KP, sizes_K), updates_KP.quantile(0.5, dim=0), rtol=0, atol=1e-12)


def into_ball(updates_KP: Tensor, S: float) -> Tensor:
    norms_K = updates_KP.norm(dim=1, keepdim=True)
    return updates_KP * torch.clamp(S / norms_K.clamp(min=1e-30), max=1.0)


@given(aggregator=st.sampled_from(ALL), given_round=rounds(), S=st.floats(0.1, 20), data=st.data())
@settings(max_examples=200, deadline=None)
def test_sensitivity_bounds_what_one_client_can_move(
    aggregator: Aggregator, given_round: tuple[Tensor, Tensor], S: float, data: st.DataObject
) -> None:
    assert isinstance(aggregator, BoundedSensitivity)
    updates_KP, sizes_K = into_ball(given_round[0], S), given_round[1]
    K = len(updates_KP)
    other_P = torch.tensor(data.draw(st.lists(st.floats(-20, 20), min_size=3, max_size=3)), dtype=torch.float64)
    changed_KP, changed_K = updates_KP.clone(), sizes_K.clone()
    who = data.draw(st.integers(0, K - 1))
    changed_KP[who] = into_ball(other_P[None], S)[0]
    changed_K[who] = data.draw(st.integers(1, 10**6))  # another client may be of another size
    moved = (aggregator(changed_KP, changed_K) - aggregator(updates_KP, sizes_K)).norm().item()
    assert moved <= aggregator.sensitivity(S, K) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("K", [1, 2, 5, 10])
def test_the_means_sensitivity_is_attained(K: int) -> None:
    """From (S, 0) to (-S, 0): 2 S apart, divided by K."""
    updates_KP = torch.zeros(K, 2)
    updates_KP[0, 0] = 15.0
    changed_KP = -updates_KP
    sizes_K = torch.ones(K)
    moved = (Mean()(changed_KP, sizes_K) - Mean()(updates_KP, sizes_K)).norm().item()
    assert moved == pytest.approx(30 / K)
    assert Mean().sensitivity(15.0, K) == pytest.approx(30 / K)


@pytest.mark.parametrize(
    ("aggregator", "K", "before"),
    [
        (Median(), 1, []),
        (Median(), 3, [15.0, -15.0]),  # the one that moves is the median all the way
        (Median(), 2, [0.0]),
        (Median(), 4, [15.0, -15.0, 0.0]),
        (TrimmedMean(0.2), 5, [-15.0, 15.0, 0.0, 0.0]),
        (TrimmedMean(0.2), 2, [0.0]),
    ],
)
def test_the_robust_ones_sensitivity_is_attained_or_nearly(
    aggregator: BoundedSensitivity, K: int, before: list[float]
) -> None:
    """No smaller number would do: one client goes from S to -S and the result moves by at least half the bound."""
    assert isinstance(aggregator, TrimmedMean | Median)
    ends = [
        aggregator(torch.tensor([[value], *([x] for x in before)]), torch.ones(K)).item() for value in (15.0, -15.0)
    ]
    bound = aggregator.sensitivity(15.0, K)
    assert bound / 2 <= ends[0] - ends[1] <= bound + 1e-5


def test_sensitivities_by_hand() -> None:
    assert Mean().sensitivity(15.0, 10) == 3.0
    assert WeightedMean().sensitivity(15.0, 10) == 30.0
    assert TrimmedMean(0.2).sensitivity(15.0, 10) == 5.0  # 30 / (10 - 4)
    assert (Median().sensitivity(15.0, 9), Median().sensitivity(15.0, 10)) == (30.0, 15.0)
