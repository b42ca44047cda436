"""The arithmetic behind an allocation by label: a matrix shares_NC, rounded to whole rows of both pools.

Legend: N clients, C classes that occur in the data, n rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lindt.errors import PlanError, require
from lindt.seeds import seed_for

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

MIN_TRAIN = 2  # a private model needs one sample to train on and one to hold out
# A floor is reached in about ten raises; only one that takes nearly all test rows needs hundreds.
RAISES = 2000


class Share(NamedTuple):
    """The rows of one client, in ascending order."""

    train: IntArray
    test: IntArray


class LabelPools(NamedTuple):
    """The data "sorted by labels": each row's class as 0..C-1, and how many rows each class has."""

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
    """Who holds which class: in random order everyone takes the least owned ones, at random among equals."""
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
    """Both pools split by one matrix of shares, in which an owner's is at least one training row."""
    owners_C = owned_NC.sum(axis=0)
    first_NC = owned_NC * (2 * owners_C <= pools.train_sizes) / np.maximum(pools.train_sizes, 1)
    train_NC, test_NC = _counts(pools, shares_NC, first_NC, floor)
    train = _take(pools.train, train_NC, draw_for(seed, "train"))
    test = _take(pools.test, test_NC, draw_for(seed, "test"))
    return [Share(*rows) for rows in zip(train, test, strict=True)]


def _counts(pools: LabelPools, shares_NC: FloatArray, first_NC: FloatArray, floor: int) -> tuple[IntArray, IntArray]:
    """Rows per client and class: the shares first_NC are given, the rest is divided by shares_NC.

    Whoever is below the floor has all its shares raised, so that its training data follow and its mix of
    classes stays; the others of each class pay in proportion to what they have.
    """
    for _ in range(RAISES):
        dealt_NC = first_NC + (1 - first_NC.sum(axis=0)) * shares_NC
        train_NC = largest_remainder(dealt_NC, pools.train_sizes)
        test_NC = largest_remainder(dealt_NC, pools.test_sizes)
        short_N = (test_NC.sum(axis=1) < floor) | (train_NC.sum(axis=1) < MIN_TRAIN)
        if not short_N.any():
            return train_NC, test_NC
        reached_N = np.minimum(dealt_NC @ pools.test_sizes / floor, dealt_NC @ pools.train_sizes / MIN_TRAIN)
        # By at least 2%: a client may be due enough and yet lose it to rounding.
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
    require(clients >= 1, "clients", clients, "take at least 1")
    for least, rows, kind in ((MIN_TRAIN, len(train_n), "training"), (floor, len(test_n), "test")):
        fix = f"{least} {kind} samples each make {clients * least}, the data have {rows}; take fewer clients"
        require(clients * least <= rows, "clients", clients, fix)
