"""Appendix C1: who gets which row, and how much of which class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lindt.data import partition as shares
from lindt.data.partition import Balanced, Classes, Dirichlet, Groups, Iid, Partition, Roles, Share, label_counts
from lindt.errors import PlanError, UserError

CIFAR = np.repeat(np.arange(10), 5000), np.repeat(np.arange(10), 1000)
BY_LABEL = [
    Iid(floor=1),
    Classes(1),
    Classes(2),
    Classes(5),
    Groups(classes=(4, 2, 1)),
    Dirichlet(),
    Dirichlet(0.05),
]


def labels(classes: int, train_each: int, test_each: int) -> tuple[Any, Any]:
    return np.repeat(np.arange(classes), train_each), np.repeat(np.arange(classes), test_each)


def sizes(shares: list[Share]) -> Any:
    return np.array([(len(share.train), len(share.test)) for share in shares])


def same(some: list[Share], other: list[Share]) -> bool:
    pairs = zip(some, other, strict=True)
    return all(np.array_equal(a.train, b.train) and np.array_equal(a.test, b.test) for a, b in pairs)


@given(
    scheme=st.sampled_from(BY_LABEL),
    clients=st.integers(1, 12),
    classes=st.integers(5, 8),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_every_row_belongs_to_exactly_one_client_and_everyone_reaches_the_floor(
    scheme: Partition, clients: int, classes: int, seed: int, data: st.DataObject
) -> None:
    # Three times what the owners of a class need, so that the floor is within reach of every draw.
    least = 30 * -(-clients // classes) + 10
    amounts = st.lists(st.integers(least, 2 * least), min_size=classes, max_size=classes)
    train, test = (np.repeat(np.arange(classes), data.draw(amounts)) for _ in range(2))
    try:
        shares = scheme.split(train, test, clients, seed)
    except PlanError as error:
        assume("of the data's" not in str(error))  # too few clients to own every class: tested below
        raise
    assert len(shares) == clients
    np.testing.assert_array_equal(np.sort(np.concatenate([s.train for s in shares])), np.arange(len(train)))
    np.testing.assert_array_equal(np.sort(np.concatenate([s.test for s in shares])), np.arange(len(test)))
    assert sizes(shares)[:, 0].min() >= 2
    assert sizes(shares)[:, 1].min() >= 10
    assert all((np.diff(rows) > 0).all() for share in shares for rows in share)


@pytest.mark.parametrize("scheme", BY_LABEL, ids=str)
def test_the_seed_decides(scheme: Partition) -> None:
    train, test = labels(6, 200, 60)
    again = [scheme.split(train, test, 12, seed) for seed in (7, 7, 8)]
    assert same(again[0], again[1])
    assert not same(again[0], again[2])


def test_iid_clients_get_the_same_amount_and_all_classes() -> None:
    shares = Iid(floor=1).split(*CIFAR, clients=100, seed=0)
    assert set(map(tuple, sizes(shares))) == {(500, 100)}
    assert label_counts(CIFAR[0], [s.train for s in shares], 10).min() > 20


def test_iid_sizes_differ_by_at_most_one_in_sum_too() -> None:
    # 10 = 4 + 3 + 3 train rows; the odd one of 4 test rows goes to another client than the odd train row.
    assert sizes(Iid(floor=1).split(np.zeros(10, int), np.zeros(4, int), 3, seed=0)).tolist() == [
        [4, 1],
        [3, 2],
        [3, 1],
    ]


@pytest.mark.parametrize("per_client", [1, 2, 3, 10])
def test_everyone_holds_k_classes_and_every_class_is_owned_as_often(per_client: int) -> None:
    shares = Classes(per_client).split(*CIFAR, clients=100, seed=3)
    counts_NC = label_counts(CIFAR[0], [s.train for s in shares], 10)
    assert ((counts_NC > 0).sum(axis=1) == per_client).all()
    assert ((counts_NC > 0).sum(axis=0) == 10 * per_client).all()
    tested_NC = label_counts(CIFAR[1], [s.test for s in shares], 10)
    assert (tested_NC[counts_NC == 0] == 0).all()


def test_without_spread_the_owners_of_a_class_share_it_evenly() -> None:
    train, test = labels(2, 100, 40)
    counts_NC = label_counts(train, [s.train for s in Classes(1, spread=0).split(train, test, 4, seed=0)], 2)
    assert sorted(counts_NC.tolist()) == [[0, 50], [0, 50], [50, 0], [50, 0]]


def test_mixed_has_50_30_and_20_clients_of_10_5_and_2_classes() -> None:
    shares = Groups().split(*CIFAR, clients=100, seed=1)
    held_N = (label_counts(CIFAR[0], [s.train for s in shares], 10) > 0).sum(axis=1)
    assert {k: int((held_N == k).sum()) for k in (10, 5, 2)} == {10: 50, 5: 30, 2: 20}
    assert len(set(held_N[:50])) == 3, "the groups are mixed by the seed, not in blocks"


def test_groups_of_another_n_follow_thelargest_remainder() -> None:
    # 50 : 30 : 20 of 7 clients is 3.5 : 2.1 : 1.4, hence 4 : 2 : 1.
    held_N = (label_counts(CIFAR[0], [s.train for s in Groups().split(*CIFAR, 7, 0)], 10) > 0).sum(axis=1)
    assert sorted(held_N.tolist()) == [2, 5, 5, 10, 10, 10, 10]


def testlargest_remainder_by_hand() -> None:
    # 10 rows at 0.46 : 0.34 : 0.20 are 4.6, 3.4, 2.0: the one left over goes to .6.
    counts = shares.largest_remainder(np.array([[0.46], [0.34], [0.20]]), np.array([10]))
    assert counts[:, 0].tolist() == [5, 3, 2]


@pytest.mark.parametrize("scheme", [Classes(10), Classes(2), Groups(), Dirichlet(0.1)], ids=str)
def test_a_clients_train_and_test_data_come_from_one_distribution(scheme: Partition) -> None:
    shares = scheme.split(*CIFAR, clients=100, seed=5)
    train_NC, test_NC = (label_counts(CIFAR[part], [share[part] for share in shares], 10) for part in (0, 1))
    # Test rows are a fifth of train rows, class by class; both are the same share, rounded by less than 1.
    assert np.abs(train_NC - 5 * test_NC).max() < 6


def test_the_floor_raises_train_data_too_and_keeps_the_mix_of_classes() -> None:
    def of(floor: int) -> tuple[Any, Any]:
        shares = Classes(5, floor=floor).split(*CIFAR, clients=100, seed=2)
        return sizes(shares), label_counts(CIFAR[0], [s.train for s in shares], 10)

    (low, low_NC), (high, high_NC) = of(1), of(30)
    raised_N = low[:, 1] < 20
    assert raised_N.sum() > 3
    assert high[:, 1].min() >= 30
    assert (high[raised_N, 0] > 120).all()
    assert (low[raised_N, 0] < 120).all()
    for before, after in zip(low_NC[raised_N], high_NC[raised_N], strict=True):
        assert after.argmax() in np.flatnonzero(before >= 0.7 * before.max())
    unraised_N = low[:, 1] > 200
    assert (high[unraised_N, 0] < low[unraised_N, 0]).all(), "the others pay"


@pytest.mark.parametrize(
    ("scheme", "std"), [(Classes(10), 649), (Classes(5), 757), (Classes(2), 923), (Groups(), 761)], ids=str
)
def test_sizes_spread_as_in_the_papers_table(scheme: Partition, std: int) -> None:
    draws = [sizes(scheme.split(*CIFAR, clients=100, seed=seed)).sum(axis=1).std() for seed in range(12)]
    # A draw spreads by about 110, so the mean of 12 by 32.
    assert abs(np.mean(draws) - std) < 100


def test_dirichlet_grows_even_with_alpha() -> None:
    stds = [sizes(Dirichlet(alpha).split(*CIFAR, 50, seed=0))[:, 0].std() for alpha in (0.05, 1.0, 1000.0)]
    assert stds[0] > 2 * stds[1] > 10 * stds[2]


def test_labels_may_have_gaps() -> None:
    train, test = labels(2, 60, 40)
    shares = Classes(1).split(train * 7, test * 7, 2, seed=0)
    assert sizes(shares).tolist() == [[60, 40], [60, 40]]


def test_roles_keep_their_rows() -> None:
    roles = np.array([5, 5, 9, 9, 5, 9]), np.array([9, 5, 5])
    shares = Roles(floor=1).split(np.zeros(6, int), np.zeros(3, int), 2, seed=0, roles=roles)
    assert [[rows.tolist() for rows in share] for share in shares] == [[[0, 1, 4], [1, 2]], [[2, 3, 5], [0]]]


def test_roles_are_sampled_when_there_are_more_than_clients() -> None:
    roles = np.repeat(np.arange(30), 4), np.repeat(np.arange(30), 2)
    draws = [Roles(floor=1).split(roles[0], roles[1], 5, seed, roles) for seed in (0, 0, 1)]
    assert same(draws[0], draws[1])
    assert not same(draws[0], draws[2])
    owners = [set(roles[0][s.train]) | set(roles[1][s.test]) for s in draws[0]]
    assert all(len(role) == 1 for role in owners)
    assert len(set.union(*owners)) == 5


def test_a_role_too_small_to_be_a_client_is_passed_over() -> None:
    roles = np.array([0, 0, 1, 2, 2, 3, 3]), np.array([0, 1, 2])  # 1 has one train row, 3 no test row
    shares = Roles(floor=1).split(np.zeros(7, int), np.zeros(3, int), 2, 0, roles)
    assert [share.train.tolist() for share in shares] == [[0, 1], [3, 4]]
    with pytest.raises(PlanError, match="clients = 3: take 1 to 2, the usable roles"):
        Roles(floor=1).split(np.zeros(7, int), np.zeros(3, int), 3, 0, roles)


def test_a_role_needs_its_least() -> None:
    roles = np.repeat([0, 1, 2], [8, 9, 20]), np.repeat([0, 1, 2], [1, 1, 2])  # 9, 10 and 22 samples
    shares = Roles(floor=1, least=10).split(roles[0], roles[1], 2, 0, roles)
    assert sizes(shares).tolist() == [[9, 1], [20, 2]]
    with pytest.raises(PlanError, match="clients = 2: no role is large enough"):
        Roles(floor=1, least=23).split(roles[0], roles[1], 2, 0, roles)


def test_a_role_that_drops_out_leaves_the_others_where_they_are() -> None:
    train, test = np.arange(60).repeat(5), np.arange(60).repeat(2)
    fewer = train[train != 17]
    taken = [
        {int(rows[share.train[0]]) for share in Roles(floor=1).split(rows, test, 40, 3, (rows, test))}
        for rows in (train, fewer)
    ]
    assert len(taken[0] & taken[1]) >= 39
    assert 17 not in taken[1]


def test_balanced_deals_the_sampled_roles_evenly() -> None:
    roles = np.repeat([0, 1, 2, 3], [10, 25, 40, 7]), np.repeat([0, 1, 2, 3], [2, 4, 5, 3])
    scheme, by_role = Balanced(floor=2, least=12), Roles(floor=2, least=12)
    shares = scheme.split(roles[0], roles[1], 2, 5, roles)
    owners = by_role.split(roles[0], roles[1], 2, 5, roles)
    train, test = sum(len(share.train) for share in owners), sum(len(share.test) for share in owners)
    assert sizes(shares).tolist() == [[train // 2, test // 2]] * 2
    dealt = np.concatenate([share.train for share in shares])
    assert len(set(dealt)) == len(dealt)
    assert set(dealt) <= set(np.concatenate([share.train for share in owners]))
    assert all(len(set(roles[0][share.train])) == 2 for share in shares)  # everyone has some of both roles
    assert same(shares, scheme.split(roles[0], roles[1], 2, 5, roles))
    assert not same(shares, scheme.split(roles[0], roles[1], 2, 6, roles))


def test_label_counts_by_hand() -> None:
    rows = [np.array([0, 1, 3]), np.array([], dtype=np.int64)]
    assert label_counts(np.array([2, 0, 1, 2]), rows, classes=4).tolist() == [[1, 0, 2, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classes(0), r"per_client = 0: give each client at least 1 class"),
        (lambda: Classes(spread=-1.0), r"spread = -1.0: give a number of at least 0"),
        (lambda: Classes(spread=float("nan")), r"spread = nan: give a number of at least 0"),
        (lambda: Classes(floor=0), r"floor = 0: give at least 1: each client needs a test sample"),
        (lambda: Groups(clients=()), r"clients = \(\): give every group a size above 0"),
        (lambda: Groups(clients=(1, 0, 1)), r"clients = \(1, 0, 1\): give every group a size above 0"),
        (lambda: Groups(classes=(2, 1)), r"classes = \(2, 1\): give one number for each of the 3 groups"),
        (lambda: Groups(classes=(2, 1, 0)), r"classes = \(2, 1, 0\): give each client at least 1 class"),
        (lambda: Dirichlet(0.0), r"alpha = 0.0: give a number above 0"),
        (lambda: Dirichlet(floor=0), r"floor = 0: give at least 1: each client needs a test sample"),
        (lambda: Roles(least=-1), r"least = -1: give 0 samples or more"),
        (lambda: Balanced(floor=0), r"floor = 0: give at least 1: each client needs a test sample"),
    ],
)
def test_what_cannot_be_is_refused_at_once(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("scheme", "clients", "message"),
    [
        (Iid(floor=1), 0, "clients = 0: give at least 1 client"),
        (Iid(floor=1), 46, "clients = 46: 2 training samples each make 92, the data have 90; take fewer clients"),
        (
            Classes(floor=20),
            4,
            "clients = 4: 20 test samples each make 80, the data have 60; take fewer clients",
        ),
        (
            Dirichlet(floor=2),
            31,
            "clients = 31: 2 test samples each make 62, the data have 60; take fewer clients",
        ),
        (Classes(4, floor=1), 5, "per_client = 4: the data have only 3 classes"),
        (Groups(floor=1), 5, r"classes = \(10, 5, 2\): the data have only 3 classes"),
        (Classes(1), 2, "clients = 2: they hold 2 of the data's 3 classes; take more clients or classes per"),
        (
            Classes(1, floor=15),
            4,
            "floor = 15: .* of 4 clients cannot reach it within their classes; lower it",
        ),
    ],
)
def test_what_the_data_cannot_give_is_refused(scheme: Partition, clients: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        scheme.split(*labels(3, 30, 20), clients, seed=0)


def test_roles_must_be_told() -> None:
    with pytest.raises(PlanError, match=r"kind = 'balanced': the data have no roles"):
        Balanced(floor=1).split(np.zeros(4, int), np.zeros(2, int), 1, seed=0)
    with pytest.raises(UserError, match="the data have no roles; choose another partition"):
        Roles(floor=1).split(np.zeros(4, int), np.zeros(2, int), 1, seed=0)
    with pytest.raises(UserError, match=r"\[3, 2\] train and test rows have roles; give one each for \[4, 2\]"):
        Roles(floor=1).split(np.zeros(4, int), np.zeros(2, int), 1, seed=0, roles=(np.zeros(3, int), np.zeros(2, int)))
