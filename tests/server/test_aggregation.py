"""How the server joins updates: hand numbers, symmetries, and the sensitivity that privacy rests on."""

from __future__ import annotations

import weakref
from typing import Any, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lindt.errors import PlanError
from lindt.protocols import Aggregator, BoundedSensitivity
from lindt.registry import component, kinds
from lindt.server.aggregation import (
    ClippedUpdates,
    Krum,
    Mean,
    Median,
    MultiKrum,
    TrimmedMean,
    WeightedMean,
    krum_scores,
)
from lindt.server.detection.divergence import Distances, divergence, measure

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


@pytest.mark.parametrize("aggregator", [*ALL, Krum(), MultiKrum()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(("K", "P"), [(1, 5), (3, 1023), (10, 4099), (33, 3071)])
def test_the_step_has_the_bits_of_the_aggregate_of_a_clipped_copy_and_the_noise(
    aggregator: Aggregator, K: int, P: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(K * P)
    updates_KP, scales_K = torch.randn(K, P, generator=draw), torch.rand(K, generator=draw)
    sizes_K, whole_KP = torch.randint(1, 500, (K,), generator=draw), updates_KP * scales_K[:, None]
    clipped_KP, noise_P = ClippedUpdates(updates_KP, scales_K), torch.randn(P, generator=draw)
    expected_P = aggregator(whole_KP, sizes_K) + noise_P
    for values in (K, 1031 * K, 2**20):
        monkeypatch.setattr("lindt.server.aggregation.AT_A_TIME", values)
        assert torch.equal(clipped_KP.step(aggregator, sizes_K, noise_P, Distances(K)), expected_P)
        unclipped_P = aggregator(updates_KP, sizes_K) + noise_P
        assert torch.equal(ClippedUpdates(updates_KP).step(aggregator, sizes_K, noise_P, Distances(K)), unclipped_P)
    assert torch.equal(clipped_KP.columns(slice(1, 4)), whole_KP[:, 1:4])


@pytest.mark.parametrize("kind", sorted(kinds(Aggregator)))
def test_an_aggregator_says_whether_it_joins_each_coordinate_by_itself(kind: str) -> None:
    """In one half of the coordinates clients 0 to 2 are near one another, in the other half clients 2 to 4."""
    aggregator, sizes_K = component(Aggregator, kind), torch.tensor([1, 2, 3, 4, 5])
    near_K = torch.tensor([0.0, 1.0, 3.0, 100.0, 220.0])
    halves = [near_K[:, None].expand(5, 64) + 1, near_K.flip(0)[:, None].expand(5, 64) + 1]
    by_halves_P = torch.cat([aggregator(half_KC, sizes_K) for half_KC in halves])
    same = torch.allclose(aggregator(torch.cat(halves, 1), sizes_K), by_halves_P)
    assert same is getattr(aggregator, "by_coordinate", False)


def test_multi_krum_in_blocks_is_the_mean_of_the_trusted_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    updates_KP = torch.randn(9, 3000, generator=torch.Generator().manual_seed(0))
    trusted = krum_scores(updates_KP, 2).argsort(stable=True)[:7].sort().values
    monkeypatch.setattr("lindt.server.aggregation.AT_A_TIME", 9)
    assert torch.equal(MultiKrum(0.2)(updates_KP, torch.ones(9)), updates_KP[trusted].mean(0))


@final
class Alive(TorchDispatchMode):
    """The most tensors returned by operators that were in use at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.made += [weakref.ref(one) for one in (found if isinstance(found, tuple | list) else [found])]
        self.made = [one for one in self.made if one() is not None]
        self.most = max(self.most, len(self.made))
        return found


@pytest.mark.parametrize("aggregator", [TrimmedMean(0.2), Median(), MultiKrum()], ids=lambda one: type(one).__name__)
def test_parts_are_not_kept_between_blocks(aggregator: Aggregator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lindt.server.aggregation.AT_A_TIME", 9)
    with Alive() as alive:
        aggregator(torch.randn(9, 50_000), torch.ones(9))  # 195 blocks
    assert 0 < alive.most < 20


@final
class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operator returns in memory of its own."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.given, self.values = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else [found]:
            if isinstance(one, Tensor) and one.untyped_storage().data_ptr() != self.given:
                self.values = max(self.values, one.untyped_storage().nbytes() // 4)
        return found


@pytest.mark.parametrize("aggregator", ALL)
@pytest.mark.parametrize("clips", [False, True])
def test_a_round_makes_no_second_stack(aggregator: Aggregator, clips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    K, P = 20, 50_000
    monkeypatch.setattr("lindt.server.aggregation.AT_A_TIME", P)
    updates_KP, noise_P = torch.ones(K, P), torch.zeros(P)
    with Largest(updates_KP) as largest:
        clipped_KP = ClippedUpdates(updates_KP, torch.full((K,), 0.5) if clips else None)
        clipped_KP.step(aggregator, torch.ones(K), noise_P, Distances(K))
    assert P <= largest.values < 3 * P  # sorting a block returns its indices too, of 8 bytes each


@pytest.mark.parametrize("aggregator", [Mean(), Median(), Krum()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("apart", [1.0, 1e-3])
def test_the_step_measures_what_the_definition_says(
    aggregator: Aggregator, clips: bool, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against differences in float64; `apart`: clients that nearly agree, of which inner products lose the digits."""
    monkeypatch.setattr("lindt.server.aggregation.AT_A_TIME", 300 * 6)
    draw = torch.Generator().manual_seed(3)
    updates_KP = torch.randn(2000, generator=draw) + apart * torch.randn(6, 2000, generator=draw)
    scales_K, noise_P = torch.rand(6, generator=draw), 0.1 * torch.randn(2000, generator=draw)
    noise_P[:1000] = 0.0  # blocks without noise, and blocks with it
    clipped_KP, distances = ClippedUpdates(updates_KP, scales_K if clips else None), Distances(6)
    step_P = clipped_KP.step(aggregator, torch.ones(6), noise_P, distances)
    found, whole_KP = distances.divergence(clipped_KP.share(), None), clipped_KP.columns(slice(None)).double()
    aggregate_P = aggregator(whole_KP.float(), torch.ones(6)).double()
    expected = [
        torch.linalg.vector_norm(rows_KP - centre_P, dim=1).mean().item()
        for rows_KP, centre_P in (
            (updates_KP.double(), aggregate_P + noise_P),
            (updates_KP.double(), aggregate_P),
            (whole_KP, whole_KP.mean(0)),
        )
    ]
    assert [found.w_div, found.clean, found.spread] == pytest.approx(expected, rel=1e-6)
    assert found.noise_norm == pytest.approx(float(noise_P.double().norm()), rel=1e-7)
    again = measure(clipped_KP, step_P, noise_P, clipped_KP.share())
    for name in ("delta", "clean", "spread", "median", "noise_norm"):  # of which step - noise is rounded
        assert getattr(again, name) == pytest.approx(getattr(found, name), rel=1e-4 if apart < 1 else 1e-6)


def test_distances_of_millions_of_weights_keep_their_digits() -> None:
    """A sum in float32 over all of them is 0.0003 too small."""
    P = 10_000_000
    updates_KP = torch.randn(2, P, generator=torch.Generator().manual_seed(0))
    expected = float(torch.linalg.vector_norm(updates_KP, dim=1, dtype=torch.float64).mean())
    assert measure(ClippedUpdates(updates_KP), torch.zeros(P), torch.zeros(P), 0.0).w_div == pytest.approx(
        expected, rel=1e-6
    )
    assert divergence(updates_KP, torch.zeros(P)) == pytest.approx(expected, rel=1e-9)


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
