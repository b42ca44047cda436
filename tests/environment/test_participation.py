"""Who answers: the paper's counts, everyone equally often, and draws that come from names."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lindt.environment.participation import MANY, Drawn, Sampled, Shuffle, choose_attackers, drawn
from lindt.errors import PlanError
from lindt.seeds import seed_for


@pytest.mark.parametrize(
    ("N", "share", "attackers", "K", "attacking"),
    [(100, 0.20, 20, 10, 2), (66, 0.16, 11, 6, 1)],  # Appendix C.1: CIFAR-10 and Shakespeare
)
def test_the_papers_counts(N: int, share: float, attackers: int, K: int, attacking: int) -> None:
    hostile = choose_attackers(share, N, seed_for(0, "attackers"))
    assert len(hostile) == attackers
    assert hostile <= set(range(N))
    sampled = Sampled(rate=0.1)
    assert sampled.wanted(N) == K
    for r in range(1, 101):
        active = sampled.active(seed_for(0, "active", r), range(N), hostile)
        assert len(set(active)) == len(active) == K
        assert len(hostile.intersection(active)) == attacking


@pytest.mark.parametrize(
    ("rate", "N", "K"), [(0.1, 100, 10), (0.29, 100, 29), (0.1, 66, 6), (1.0, 7, 7), (0.5, 3, 1), (0.57, 100, 57)]
)
def test_k_is_the_floor_of_rate_times_n(rate: float, N: int, K: int) -> None:
    assert Sampled(rate).wanted(N) == K


def test_a_given_k_goes_before_the_rate() -> None:
    assert Sampled(rate=0.1, active_clients=3).wanted(10) == 3
    assert len(Sampled(rate=1.0, active_clients=3).active(0, range(10), frozenset())) == 3


def test_over_selection_asks_more_and_wants_as_many() -> None:
    sampled = Sampled(rate=0.1, over_select=5)
    assert sampled.wanted(100) == 10
    hostile = frozenset(range(20))
    active = sampled.active(1, range(100), hostile)
    assert len(set(active)) == 15
    assert len(hostile.intersection(active)) == 3  # 20% of those asked
    assert len(Sampled(rate=0.9, over_select=50).active(1, range(10), frozenset())) == 10  # never more than N


def test_fewer_than_k_available_are_all_asked() -> None:
    sampled = Sampled(active_clients=4)
    assert sorted(sampled.active(0, [1, 5, 8], frozenset({5}), 10)) == [1, 5, 8]
    assert len(sampled.active(0, [0, 1, 4, 5, 8], frozenset({5}), 10)) == 4
    assert Sampled(rate=0.5).active(0, [], frozenset(), 10) == []


def test_k_comes_from_n_and_not_from_who_is_connected() -> None:
    assert len(Sampled(rate=0.5).active(0, range(6), frozenset(), 10)) == 5
    assert Sampled(rate=0.2).active(0, range(2), frozenset(), 10) != []  # a fifth of those two would be nobody


def test_more_than_n_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^active_clients = 11: there are 10 clients; give 10 or fewer"):
        Sampled(active_clients=11).active(0, range(10), frozenset())


@given(N=st.integers(2, 3000))
@settings(max_examples=60, deadline=None)
def test_a_rate_too_low_is_refused_with_one_that_works(N: int) -> None:
    with pytest.raises(PlanError, match=r"^rate = 1e-06: .* is 0; raise it to ") as caught:
        Sampled(rate=1e-6).wanted(N)
    assert Sampled(rate=float(caught.value.fix.rpartition(" ")[2])).wanted(N) >= 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate", 0.0), ("rate", 1.01), ("rate", float("nan")), ("active_clients", -1), ("over_select", -1)],
)
def test_impossible_values_are_refused(field: str, value: float) -> None:
    with pytest.raises(PlanError, match=f"^{field} = "):
        Sampled(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("attackers", [frozenset(), frozenset({1, 5, 9, 13}), frozenset(range(20))])
def test_everyone_is_asked_about_equally_often(attackers: frozenset[int]) -> None:
    rounds, N, K = 2000, 20, 5
    times = Counter(
        i for r in range(rounds) for i in Sampled(rate=0.25).active(seed_for(7, "active", r), range(N), attackers)
    )
    expected, variance = rounds * K / N, rounds * (K / N) * (1 - K / N)
    assert sum(times.values()) == rounds * K
    assert max(abs(times[i] - expected) for i in range(N)) < 4.5 * variance**0.5
    assert sum((times[i] - expected) ** 2 / variance for i in range(N)) < 45  # chi-square of 19: p < 0.001


def test_no_place_in_the_order_is_the_attackers() -> None:
    """With over-selection the first K count, so an attacker must not always come first."""
    places = Counter(
        Sampled(active_clients=4).active(seed_for(7, "active", r), range(8), frozenset({0, 1})).index(i)
        for r in range(800)
        for i in (0, 1)
        if i in Sampled(active_clients=4).active(seed_for(7, "active", r), range(8), frozenset({0, 1}))
    )
    assert set(places) == {0, 1, 2, 3}
    assert all(abs(count - 200) < 60 for count in places.values())  # 800 places, std 12


@given(
    ids=st.sets(st.integers(0, 500), min_size=1, max_size=40),
    rate=st.floats(0.05, 1.0),
    over=st.integers(0, 5),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_a_draw_depends_on_its_seed_and_on_who_is_there_not_on_their_order(
    ids: set[int], rate: float, over: int, seed: int, data: st.DataObject
) -> None:
    attackers = frozenset(data.draw(st.sets(st.sampled_from(sorted(ids)))))
    sampled = Sampled(max(rate, 1 / len(ids)), over_select=over)
    listed = data.draw(st.permutations(sorted(ids)))
    active = sampled.active(seed, listed, attackers)
    assert active == sampled.active(seed, sorted(ids), attackers)
    assert len(set(active)) == len(active) == min(sampled.wanted(len(ids)) + over, len(ids))
    assert set(active) <= ids
    assert all(type(i) is int for i in active)
    share = len(attackers) / len(ids) * len(active)
    assert abs(len(attackers.intersection(active)) - share) <= 0.5 + 1e-9


def test_another_seed_draws_others() -> None:
    drawn = {tuple(Sampled().active(seed_for(0, "active", r), range(100), frozenset())) for r in range(50)}
    assert len(drawn) == 50


def test_attackers_are_the_same_for_a_whole_run() -> None:
    assert choose_attackers(0.2, 100, 3) == choose_attackers(0.2, 100, 3)
    assert choose_attackers(0.2, 100, 3) != choose_attackers(0.2, 100, 4)
    assert choose_attackers(0.0, 100, 3) == frozenset()


def test_seeds_come_from_names() -> None:
    by_hand = int(hashlib.sha256(b"5/noise/12").hexdigest()[:16], 16) // 2
    assert seed_for(5, "noise", 12) == by_hand < 2**63
    assert len({seed_for(s, name, r) for s in range(5) for name in ("noise", "active") for r in range(50)}) == 500


@pytest.mark.parametrize("N", [2, 3, 5, 16, 17, 1000, 4097])
def test_a_shuffle_is_a_bijection_and_its_places_are_the_inverse(N: int) -> None:
    order = Shuffle(N, seed=3)
    clients = order.at(np.arange(N))
    assert sorted(clients.tolist()) == list(range(N))
    assert [order.place(int(client)) for client in clients] == list(range(N))
    with pytest.raises(ValueError, match="is not in 0 to"):
        order.at(np.array([N]))


def test_a_shuffle_is_uniform() -> None:
    """Over seeds each client is equally often at the first places, and so is each pair (chi-square, 5 deviations)."""
    N, seeds, count = 10, 2000, 3
    draws = [tuple(drawn(N, count, seed)) for seed in range(seeds)]
    for size, cells in ((1, 10), (2, 45)):
        found = Counter(frozenset(some) for draw in draws for some in combinations(draw, size))
        expected = seeds * math.comb(count, size) / cells
        chi = sum((found[frozenset(cell)] - expected) ** 2 / expected for cell in combinations(range(N), size))
        assert chi < cells + 5 * math.sqrt(2 * cells)


def test_a_million_clients_are_drawn_without_a_list_of_them() -> None:
    N, K = 1_000_000, 1000
    hostile = choose_attackers(0.2, N, seed=1)
    assert len(hostile) == 200_000
    sampled, met = Sampled(active_clients=K), Counter[int]()
    tracemalloc.start()
    for r in range(20):
        active = sampled.active(seed_for(0, "active", r), range(N), hostile, N)
        assert active == sampled.active(seed_for(0, "active", r), range(N), hostile, N)
        assert len(set(active)) == K
        assert sum(i in hostile for i in active) == 200
        met.update(i // (N // 10) for i in active)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2e6  # bytes: a list of N has 8 million
    assert all(abs(met[tenth] - 2000) < 5 * math.sqrt(1800) for tenth in range(10))
    assert sampled.active(1, range(N), frozenset(), N) != sampled.active(2, range(N), frozenset(), N)


def test_of_many_clients_the_roles_are_sets_of_the_same_kind() -> None:
    """A difference, an intersection and equality give what frozensets give; of up to MANY they are frozensets."""
    hostile, plain = drawn(20, 6, seed=4), frozenset(drawn(20, 6, seed=4))
    assert len(plain) == 6
    assert hostile == plain
    assert frozenset(range(20)) - hostile == frozenset(hostile.others) == frozenset(range(20)) - plain
    assert hostile & {0, 1, 2, 3} == plain & {0, 1, 2, 3}
    assert isinstance(choose_attackers(0.2, MANY, 0), frozenset)
    assert isinstance(choose_attackers(0.2, MANY + 1, 0), Drawn)
