"""The allocation of samples to clients: IID, by classes, by groups, Dirichlet, by role, balanced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from lindt.errors import PlanError, UserError, require
from lindt.registry import components_in, register
from lindt.seeds import seed_for

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
MIN_TRAIN = 2  # a private model needs one sample to train on and one to hold out
# A floor is reached in about ten steps; only a floor that needs nearly all test rows takes hundreds.
RAISES = 2000


class Share(NamedTuple):
    """The rows of one client, in ascending order."""

    train: IntArray
    test: IntArray


class LabelPools(NamedTuple):
    """The data "sorted by labels": each row's class as 0..C-1, and the number of rows of each class."""

    train: IntArray
    test: IntArray
    train_sizes: IntArray
    test_sizes: IntArray

    @property
    def classes(self) -> int:
        return len(self.train_sizes)

    @property
    def too_few(self) -> str:
        return f"the data have only {self.classes} classes"


def label_pools(train_labels_n: IntArray, test_labels_n: IntArray) -> LabelPools:
    occurring_C, both = np.unique(np.concatenate([train_labels_n, test_labels_n]), return_inverse=True)
    train, test = both[: len(train_labels_n)], both[len(train_labels_n) :]
    return LabelPools(train, test, *(np.bincount(part, minlength=len(occurring_C)) for part in (train, test)))


def owners(held_N: IntArray, classes: int, seed: int) -> NDArray[np.bool_]:
    """The classes of each client: in random order, each takes the classes with the fewest owners, ties at random."""
    fix = f"they hold {held_N.sum()} of the data's {classes} classes; take more clients or classes per client"
    require(int(held_N.sum()) >= classes, "clients", len(held_N), fix)
    rng = draw_for(seed, "owners")
    owned_NC = np.zeros((len(held_N), classes), dtype=np.bool_)
    for i in rng.permutation(len(held_N)):
        least_owned_first = np.lexsort((rng.random(classes), owned_NC.sum(axis=0)))
        owned_NC[i, least_owned_first[: held_N[i]]] = True
    return owned_NC


def log_normal(owned_NC: NDArray[np.bool_], spread: float, seed: int) -> FloatArray:
    weights_NC = draw_for(seed, "shares").lognormal(0.0, spread, size=owned_NC.shape) * owned_NC
    shares_NC: FloatArray = weights_NC / weights_NC.sum(axis=0)
    return shares_NC


def deal(pools: LabelPools, shares_NC: FloatArray, owned_NC: NDArray[np.bool_], floor: int, seed: int) -> list[Share]:
    """Split training and test rows by one matrix of shares; each owner of a class gets at least one training row."""
    owners_C = owned_NC.sum(axis=0)
    first_NC = owned_NC * (2 * owners_C <= pools.train_sizes) / np.maximum(pools.train_sizes, 1)
    train_NC, test_NC = _counts(pools, shares_NC, first_NC, floor)
    train = _take(pools.train, train_NC, draw_for(seed, "train"))
    test = _take(pools.test, test_NC, draw_for(seed, "test"))
    return [Share(*rows) for rows in zip(train, test, strict=True)]


def _counts(pools: LabelPools, shares_NC: FloatArray, first_NC: FloatArray, floor: int) -> tuple[IntArray, IntArray]:
    """Rows per client and class: the shares first_NC are fixed, the rest is divided by shares_NC.

    All shares of a client below the floor are raised, so that its training data grow too and its mix of classes stays;
    the other clients of each class lose rows in proportion to their shares.
    """
    for _ in range(RAISES):
        dealt_NC = first_NC + (1 - first_NC.sum(axis=0)) * shares_NC
        train_NC = largest_remainder(dealt_NC, pools.train_sizes)
        test_NC = largest_remainder(dealt_NC, pools.test_sizes)
        short_N = (test_NC.sum(axis=1) < floor) | (train_NC.sum(axis=1) < MIN_TRAIN)
        if not short_N.any():
            return train_NC, test_NC
        reached_N = np.minimum(dealt_NC @ pools.test_sizes / floor, dealt_NC @ pools.train_sizes / MIN_TRAIN)
        # By at least 2%: a client's share may be large enough, and rounding may still leave it below the floor.
        raised_N = np.where(short_N, np.maximum(1.02, 1 / np.maximum(reached_N, 1e-12)), 1.0)
        shares_NC = shares_NC * raised_N[:, None]
        shares_NC = shares_NC / shares_NC.sum(axis=0)
    fix = f"{short_N.sum()} of {len(short_N)} clients cannot reach it within their classes; lower it"
    raise PlanError("floor", floor, fix)


def largest_remainder(weights_NC: FloatArray, total_C: IntArray) -> IntArray:
    """Whole numbers in proportion to the weights; each column sums to exactly its total."""
    quota_NC = weights_NC * total_C / weights_NC.sum(axis=0)
    whole_NC: IntArray = np.floor(quota_NC).astype(np.int64)
    rank_NC = np.argsort(np.argsort(whole_NC - quota_NC, axis=0, kind="stable"), axis=0)
    whole_NC += rank_NC < total_C - whole_NC.sum(axis=0)
    return whole_NC


def _take(class_n: IntArray, counts_NC: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Rows drawn at random, counts_NC[i, c] of class c for client i, every row exactly once."""
    ends_CN = counts_NC.cumsum(axis=0)[:-1].T
    pools = (rng.permutation(np.flatnonzero(class_n == c)) for c in range(len(ends_CN)))
    pieces = [np.split(rows, ends) for rows, ends in zip(pools, ends_CN, strict=True)]
    return [np.sort(np.concatenate(mine)) for mine in zip(*pieces, strict=True)]


def occurring(roles_n: IntArray, least: int) -> IntArray:
    ids, times = np.unique(roles_n, return_counts=True)
    return ids[times >= least]


def draw_for(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng(seed_for(seed, "partition", purpose))


def check_amounts(train_n: IntArray, test_n: IntArray, clients: int, floor: int) -> None:
    require(clients >= 1, "clients", clients, "give at least 1 client")
    for least, rows, kind in ((MIN_TRAIN, len(train_n), "training"), (floor, len(test_n), "test")):
        fix = f"{least} {kind} samples each make {clients * least}, the data have {rows}; take fewer clients"
        require(clients * least <= rows, "clients", clients, fix)


ByRole = tuple[IntArray, IntArray] | None  # the role of every train row, the role of every test row


@components_in(__name__)
class Partition(Protocol):
    """The rows of each client. Only `Roles` and `Balanced` use `roles`; the others split by label."""

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]: ...


@register(Partition)
@final
@dataclass(frozen=True)
class Iid:
    """IID: the data are shuffled, and all clients get the same number of samples (sizes differ by at most one)."""

    floor: int = 10

    def __post_init__(self) -> None:
        require_floor(self.floor)

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        check_amounts(train_labels_n, test_labels_n, clients, self.floor)
        train = draw_for(seed, "train").permutation(len(train_labels_n))
        test = draw_for(seed, "test").permutation(len(test_labels_n))
        # The clients with one more test row follow those with one more train row, so that totals differ by at most one.
        odd = len(train) % clients
        starts = [(i, (i - odd) % clients) for i in range(clients)]
        return [Share(np.sort(train[a::clients]), np.sort(test[b::clients])) for a, b in starts]


@register(Partition)
@final
@dataclass(frozen=True)
class Classes:
    """non-IID(k): each client has k = `per_client` classes, with a log-normal(0, `spread`) amount of each.

    The numbers of owners of the classes are as equal as possible. Each client has at least one training sample of each
    of its classes (except where a class has fewer than two samples per owner) and at least `floor` test samples in
    total.
    """

    per_client: int = 2
    spread: float = 2.0
    floor: int = 10

    def __post_init__(self) -> None:
        require(self.per_client >= 1, "per_client", self.per_client, "give each client at least 1 class")
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


@register(Partition)
@final
@dataclass(frozen=True)
class Groups:
    """non-IID(Mixed), the paper's default: groups of 50, 30 and 20 clients hold 10, 5 and 2 classes each.

    `clients` are relative: N clients are divided in these proportions, by largest remainder. The seed decides which
    client is in which group. Everything else is as in `Classes`.
    """

    clients: tuple[int, ...] = (50, 30, 20)
    classes: tuple[int, ...] = (10, 5, 2)
    spread: float = 2.0
    floor: int = 10

    def __post_init__(self) -> None:
        require(min(self.clients, default=0) > 0, "clients", self.clients, "give every group a size above 0")
        fix = f"give one number for each of the {len(self.clients)} groups"
        require(len(self.classes) == len(self.clients), "classes", self.classes, fix)
        require(min(self.classes) >= 1, "classes", self.classes, "give each client at least 1 class")
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


@register(Partition)
@final
@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided among all clients by a Dirichlet(`alpha`) draw. It is not in the paper, but common.

    A client may have no sample of a class, but has at least `floor` test samples in total.
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
        # A small alpha underflows to 0, and a share of 0 cannot be raised to the floor.
        return deal(pools, np.maximum(shares_NC, 1e-12), np.zeros(shares_NC.shape, np.bool_), self.floor, seed)


@register(Partition)
@final
@dataclass(frozen=True)
class Roles:
    """By role: each speaking role is one client; with more roles than clients, a seeded sample of the roles.

    Some rows may not be used: those of roles that are not sampled, and of roles with fewer than 2 train rows, `floor`
    test rows or `least` rows in total, which cannot be clients. Clients are in the order of the role ids.
    """

    floor: int = 10
    least: int = 0  # the paper's is 10,000

    def __post_init__(self) -> None:
        require_floor(self.floor)
        require(self.least >= 0, "least", self.least, "give 0 samples or more")

    def split(
        self, train_labels_n: IntArray, test_labels_n: IntArray, clients: int, seed: int, roles: ByRole = None
    ) -> list[Share]:
        roles = _known("roles", roles, train_labels_n, test_labels_n)
        chosen = self.sampled(roles, clients, seed)
        return [Share(np.flatnonzero(roles[0] == role), np.flatnonzero(roles[1] == role)) for role in chosen]

    def sampled(self, roles: tuple[IntArray, IntArray], clients: int, seed: int) -> IntArray:
        """The roles that take part: the first usable roles in a random order of all roles. So one more or one fewer
        usable role (with shorter windows, for example) does not change the others."""
        both = occurring(np.concatenate(roles), self.least)
        usable = np.intersect1d(occurring(roles[0], MIN_TRAIN), occurring(roles[1], self.floor))
        usable = np.intersect1d(usable, both)
        fix = f"take 1 to {len(usable)}, the usable roles"
        require(
            1 <= clients <= len(usable),
            "clients",
            clients,
            fix if len(usable) else "no role is large enough; lower least or floor",
        )
        order = draw_for(seed, "roles").permutation(1 + int(max(ids.max() for ids in roles)))
        return np.sort(order[np.isin(order, usable)][:clients])


@register(Partition)
@final
@dataclass(frozen=True)
class Balanced:
    """Balanced: the samples of as many roles as clients, shuffled; all clients get the same number of samples.

    The roles are those that `Roles` draws from the same seed. Samples that do not divide evenly are not used.
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
        raise PlanError("kind", kind, "the data have no roles; choose another partition")
    given, needed = [len(ids) for ids in roles], [len(train_n), len(test_n)]
    if given != needed:
        raise UserError(f"partition {kind}: {given} train and test rows have roles; give one each for {needed}")
    return roles


def require_floor(floor: int) -> None:
    require(floor >= 1, "floor", floor, "give at least 1: each client needs a test sample to be scored")


def label_counts(labels_n: IntArray, rows: Sequence[IntArray], classes: int) -> IntArray:
    """Samples per client and class, (N, C): `label_counts(train_labels_n, [s.train for s in shares], 10)`."""
    return np.array([np.bincount(labels_n[mine], minlength=classes) for mine in rows], dtype=np.int64)
