"""Appendix C1, client data allocation: which rows of a dataset are whose.

An allocation by label is a matrix shares_NC, client i's share of class c. One matrix splits the training pool
and the test pool, class by class: "every client has the same distributions on its own train and test data".

Legend: N clients, C classes that occur in the data, n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Protocol, final

import numpy as np

from lindt.data.shares import (
    MIN_TRAIN,
    IntArray,
    Share,
    check_amounts,
    deal,
    draw_for,
    label_pools,
    largest_remainder,
    log_normal,
    occurring,
    owners,
)
from lindt.errors import PlanError, UserError, require

ByRole = tuple[IntArray, IntArray] | None  # the role of every train row, the role of every test row


class Partition(Protocol):
    """Who gets which row. Only `Roles` and `Balanced` look at `roles`; the others split by label."""

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]: ...


@final
@dataclass(frozen=True)
class Iid:
    """IID: the data are shuffled and everyone gets the same amount (sizes differ by at most one)."""

    floor: int = 10

    def __post_init__(self) -> None:
        require_floor(self.floor)

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        check_amounts(train_labels_n, test_labels_n, clients, self.floor)
        train = draw_for(seed, "train").permutation(len(train_labels_n))
        test = draw_for(seed, "test").permutation(len(test_labels_n))
        # The odd test rows start where the odd train rows end, so that the sums, too, differ by at most one.
        odd = len(train) % clients
        starts = [(i, (i - odd) % clients) for i in range(clients)]
        return [Share(np.sort(train[a::clients]), np.sort(test[b::clients])) for a, b in starts]


@final
@dataclass(frozen=True)
class Classes:
    """non-IID(k): everyone holds k = `per_client` classes, of each a log-normal(0, `spread`) amount.

    Classes are as evenly owned as possible. Everyone has at least one training sample of each of its classes
    (save of a class with less than two an owner) and at least `floor` test samples in all.
    """

    per_client: int = 2
    spread: float = 2.0
    floor: int = 10

    def __post_init__(self) -> None:
        require(self.per_client >= 1, "per_client", self.per_client, "give everyone at least 1 class")
        require(isfinite(self.spread) and self.spread >= 0, "spread", self.spread, "give a number of at least 0")
        require_floor(self.floor)

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        check_amounts(train_labels_n, test_labels_n, clients, self.floor)
        pools = label_pools(train_labels_n, test_labels_n)
        require(self.per_client <= pools.classes, "per_client", self.per_client, pools.too_few)
        owned_NC = owners(np.full(clients, self.per_client), pools.classes, seed)
        return deal(pools, log_normal(owned_NC, self.spread, seed), owned_NC, self.floor, seed)


@final
@dataclass(frozen=True)
class Groups:
    """non-IID(Mixed), the paper's default: groups of 50, 30 and 20 clients hold 10, 5 and 2 classes each.

    `clients` are relative: N clients are divided in these proportions, by largest remainder. Who is in which
    group comes from the seed. The rest is as in `Classes`.
    """

    clients: tuple[int, ...] = (50, 30, 20)
    classes: tuple[int, ...] = (10, 5, 2)
    spread: float = 2.0
    floor: int = 10

    def __post_init__(self) -> None:
        require(min(self.clients, default=0) > 0, "clients", self.clients, "give every group a size above 0")
        fix = f"give one number for each of the {len(self.clients)} groups"
        require(len(self.classes) == len(self.clients), "classes", self.classes, fix)
        require(min(self.classes) >= 1, "classes", self.classes, "give everyone at least 1 class")
        require(isfinite(self.spread) and self.spread >= 0, "spread", self.spread, "give a number of at least 0")
        require_floor(self.floor)

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        check_amounts(train_labels_n, test_labels_n, clients, self.floor)
        pools = label_pools(train_labels_n, test_labels_n)
        require(max(self.classes) <= pools.classes, "classes", self.classes, pools.too_few)
        sizes = largest_remainder(np.array([self.clients], dtype=np.float64).T, np.array([clients]))[:, 0]
        held_N = draw_for(seed, "groups").permutation(np.repeat(self.classes, sizes))
        owned_NC = owners(held_N, pools.classes, seed)
        return deal(pools, log_normal(owned_NC, self.spread, seed), owned_NC, self.floor, seed)


@final
@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided among all clients by a Dirichlet(`alpha`) draw. Not in the paper; common since.

    A client may well have nothing of a class, but has at least `floor` test samples in all.
    """

    alpha: float = 0.5
    floor: int = 10

    def __post_init__(self) -> None:
        require(isfinite(self.alpha) and self.alpha > 0, "alpha", self.alpha, "give a number above 0")
        require_floor(self.floor)

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        check_amounts(train_labels_n, test_labels_n, clients, self.floor)
        pools = label_pools(train_labels_n, test_labels_n)
        shares_NC = draw_for(seed, "shares").dirichlet(np.full(clients, self.alpha), size=pools.classes).T
        # A small alpha underflows to 0, which no raise towards the floor could lift.
        return deal(pools, np.maximum(shares_NC, 1e-12), np.zeros(shares_NC.shape, np.bool_), self.floor, seed)


@final
@dataclass(frozen=True)
class Roles:
    """By role: each speaking role is one client; with more roles than clients, a seeded sample of the roles.

    It may leave rows unused: those of roles not sampled, and of roles with fewer than 2 train rows, `floor` test
    rows or `least` rows in all, which cannot be a client. Clients are in the order of the role ids.
    """

    floor: int = 10
    least: int = 0  # the paper's is 10,000

    def __post_init__(self) -> None:
        require_floor(self.floor)
        require(self.least >= 0, "least", self.least, "0 samples or more")

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        roles = _known("roles", roles, train_labels_n, test_labels_n)
        chosen = self.sampled(roles, clients, seed)
        return [Share(np.flatnonzero(roles[0] == role), np.flatnonzero(roles[1] == role)) for role in chosen]

    def sampled(self, roles: tuple[IntArray, IntArray], clients: int, seed: int) -> IntArray:
        """The roles that take part: the first usable ones in a drawn order of all, so that a role more or less that is
        usable (with shorter windows, say) leaves the others where they are."""
        both = occurring(np.concatenate(roles), self.least)
        usable = np.intersect1d(occurring(roles[0], MIN_TRAIN), occurring(roles[1], self.floor))
        usable = np.intersect1d(usable, both)
        fix = f"take 1 to {len(usable)}, the usable roles"
        require(1 <= clients <= len(usable), "clients", clients, fix if len(usable) else "no role is large enough")
        order = draw_for(seed, "roles").permutation(1 + int(max(ids.max() for ids in roles)))
        return np.sort(order[np.isin(order, usable)][:clients])


@final
@dataclass(frozen=True)
class Balanced:
    """Balanced: the samples of as many roles as there are clients, shuffled; everyone gets the same amount.

    The roles are those that `Roles` draws from the same seed. What does not divide evenly is left unused.
    """

    floor: int = 10
    least: int = 0  # as in `Roles`

    def __post_init__(self) -> None:
        Roles(self.floor, self.least)

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        roles = _known("balanced", roles, train_labels_n, test_labels_n)
        chosen = Roles(self.floor, self.least).sampled(roles, clients, seed)
        dealt = []
        for pool, purpose in zip(roles, ("train", "test"), strict=True):
            rows = draw_for(seed, purpose).permutation(np.flatnonzero(np.isin(pool, chosen)))
            each = len(rows) // clients
            dealt.append(np.sort(rows[: each * clients].reshape(clients, each), axis=1))
        return [Share(train, test) for train, test in zip(*dealt, strict=True)]


def _known(kind: str, roles: ByRole, train_n: IntArray, test_n: IntArray) -> tuple[IntArray, IntArray]:
    if roles is None:
        raise PlanError("kind", kind, "the data name no role for a row; choose another partition")
    given, needed = [len(ids) for ids in roles], [len(train_n), len(test_n)]
    if given != needed:
        raise UserError(f"partition {kind}: {given} train and test rows have roles; give one each for {needed}")
    return roles


def require_floor(floor: int) -> None:
    require(floor >= 1, "floor", floor, "everyone needs at least 1 test sample to be measured on")


def label_counts(labels_n: IntArray, rows: Sequence[IntArray], classes: int) -> IntArray:
    """Samples per client and class, (N, C): `label_counts(train_labels_n, [s.train for s in shares], 10)`."""
    return np.array([np.bincount(labels_n[mine], minlength=classes) for mine in rows], dtype=np.int64)
