"""A client's samples: rows of shared arrays, datasets, unions; the order asked for is the order given."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import Dataset

from lindt.data.examples import Listed, Pooled, Rows, as_examples, pool, subset
from lindt.errors import UserError
from lindt.plan.problem import Problem
from lindt.protocols import Examples
from lindt.runs.prediction import predict

X = torch.arange(20.0).reshape(10, 2)
Y = torch.arange(10) * 10


def rows(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


class Pairs(Dataset[tuple[Tensor, int]]):
    """Samples start..start+n-1 of X and Y, as a map-style dataset."""

    def __init__(self, start: int, n: int) -> None:
        self.start, self.n = start, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        if not 0 <= row < self.n:
            raise IndexError(row)
        return X[self.start + row], int(Y[self.start + row])


def check_same(found: Examples, wanted: list[int]) -> None:
    """`found` holds the samples `wanted` of X and Y, in that order, whichever way it is asked."""
    assert len(found) == len(wanted)
    assert found.labels.tolist() == Y[wanted].tolist()
    order = torch.arange(len(wanted)).flip(0)
    x, y = found.take(order)
    assert torch.equal(x, X[wanted].flip(0))
    assert torch.equal(y, Y[wanted].flip(0))


def test_rows_share_the_arrays() -> None:
    mine = Rows(X, Y, rows(7, 2, 5))
    check_same(mine, [7, 2, 5])
    assert mine.take(rows(1, 1))[1].tolist() == [20, 20]
    assert mine.x is X


def test_rows_prepare_the_batch_that_is_taken_and_no_more() -> None:
    seen: list[int] = []

    def normalise(x: Tensor) -> Tensor:
        seen.append(len(x))
        return x.float() / 2

    mine = Rows(torch.tensor([[2], [4], [8]], dtype=torch.uint8), Y, rows(2, 0), normalise)
    assert mine.take(rows(0))[0].tolist() == [[4.0]]
    assert seen == [1]
    assert subset(mine, rows(1)).take(rows(0))[0].tolist() == [[1.0]]  # a subset prepares too


def test_listed() -> None:
    check_same(Listed(Pairs(3, 4)), [3, 4, 5, 6])
    assert Listed([(np.ones(2, np.float32), np.int32(4))]).take(rows(0))[1].dtype == torch.int64


def test_a_regressions_targets_stay_floats() -> None:
    mine = Listed([(torch.ones(1), 0.75), (torch.ones(1), 1.5)])
    assert mine.labels.tolist() == [0.75, 1.5]
    assert mine.take(rows(1))[1].tolist() == [1.5]


@pytest.mark.parametrize("mine", [Rows(X, Y, rows(4, 5, 6, 7)), Listed(Pairs(4, 4))])
def test_a_subset_counts_within_the_clients_own(mine: Examples) -> None:
    check_same(subset(mine, rows(3, 0)), [7, 4])
    check_same(subset(subset(mine, rows(3, 0, 1)), rows(2, 0)), [5, 7])


def test_pooled_gives_the_order_asked_for() -> None:
    union = Pooled((Rows(X, Y, rows(9, 0)), Listed(Pairs(4, 3)), Rows(X, Y, rows(1))))
    check_same(union, [9, 0, 4, 5, 6, 1])
    x, y = union.take(rows(5, 2, 0, 4, 2, 1))  # across parts, back and forth, one twice
    assert y.tolist() == [10, 40, 90, 60, 40, 0]
    assert torch.equal(x, X[[1, 4, 9, 6, 4, 0]])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
@settings(max_examples=50, deadline=None)
def test_pooled_is_the_concatenation(lengths: list[int], data: st.DataObject) -> None:
    parts = tuple(Rows(torch.arange(100.0), torch.arange(100), 20 * i + torch.arange(n)) for i, n in enumerate(lengths))
    whole = torch.cat([part.rows for part in parts])
    asked = torch.tensor(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=12)))
    x, y = Pooled(parts).take(asked)
    assert torch.equal(y, whole[asked])
    assert torch.equal(x, whole[asked].float())


def test_pool_of_rows_of_the_same_arrays_is_rows() -> None:
    union = pool([Rows(X, Y, rows(3, 1)), Rows(X, Y, rows(8))])
    assert isinstance(union, Rows)
    assert union.x is X
    check_same(union, [3, 1, 8])


def test_pool_of_different_arrays_keeps_everyones_labels_and_preparation() -> None:
    check_same(pool([Rows(X, Y, rows(3)), Listed(Pairs(5, 2))]), [3, 5, 6])
    relabelled = pool([Rows(X, Y, rows(3)), Rows(X, -Y, rows(3))])
    assert relabelled.labels.tolist() == [30, -30]
    assert relabelled.take(rows(1, 0))[1].tolist() == [-30, 30]
    prepared = pool([Rows(X, Y, rows(3)), Rows(X, Y, rows(3), lambda x: -x)])
    assert prepared.take(rows(0, 1))[0].tolist() == [[6.0, 7.0], [-6.0, -7.0]]


def test_as_examples_takes_what_people_have() -> None:
    check_same(as_examples((X, Y)), list(range(10)))
    check_same(as_examples([X.numpy(), Y.numpy()]), list(range(10)))
    check_same(as_examples(Pairs(2, 5)), [2, 3, 4, 5, 6])
    check_same(as_examples([(X[i], int(Y[i])) for i in range(3)]), [0, 1, 2])
    mine = Rows(X, Y, rows(1))
    assert as_examples(mine) is mine


def test_arrays_become_what_models_and_losses_want() -> None:
    x, y = as_examples((np.eye(3), np.array([0, 1, 2], dtype=np.int32))).take(rows(0, 1, 2))
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    x, y = as_examples((torch.eye(3, dtype=torch.float64), np.array([0.5, 1, 2]))).take(rows(0))
    assert (x.dtype, y.tolist()) == (torch.float64, [0.5])  # a tensor of doubles is meant to be one
    x, _ = as_examples((np.zeros((3, 2), np.uint8), np.arange(3))).take(rows(0))
    assert x.dtype == torch.uint8


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ((X, Y[:9]), "10 samples but 9 labels"),
        (7, "is of type int; give a pair"),
        (None, "NoneType"),
        (iter([(X[0], 0)]), "map-style dataset"),
    ],
)
def test_as_examples_says_what_to_give(given_: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_examples(given_)


# DataFrames and Series.


class Table:
    """As a DataFrame or a Series of pandas, whose rows have names: those of a test part often begin after 0."""

    def __init__(self, values: np.ndarray, kinds: tuple[str, ...] = ("float64",)) -> None:
        self.values, self.shape, self.ndim, self.kinds = values, values.shape, values.ndim, kinds
        self.labels = "a column of this name"

    dtype = property(lambda self: self.kinds[0])
    dtypes = property(lambda self: self.kinds)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, name: object) -> Any:
        raise KeyError(name)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("the view of pandas, which cannot be written to")

    def to_numpy(self, copy: bool = False) -> np.ndarray:
        return self.values.copy() if copy else self.values

    def take(self, rows: object) -> Any:
        raise AssertionError("of pandas, not of Examples")


Table.__module__ = "pandas.core.frame"
X_TABLE, Y_TABLE = Table(X.double().numpy()), Table(Y.numpy())


def test_tables_of_pandas_are_taken_as_arrays() -> None:
    for found in (
        as_examples((X_TABLE, Y_TABLE)),
        as_examples((X.numpy(), Y_TABLE)),
        as_examples((X_TABLE, Y)),
        as_examples([(Table(x.numpy()), y) for x, y in zip(X, Y, strict=True)]),
    ):
        check_same(found, list(range(10)))
    columns = as_examples({"x": Table(X.numpy()), "label": Y_TABLE})
    check_same(columns, list(range(10)))
    before = X_TABLE.values.copy()
    as_examples((Table(X_TABLE.values, ("float64",)), Y)).take(rows(0))[0].zero_()
    assert (X_TABLE.values == before).all()


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (X_TABLE, "a client's data is of type Table; give a pair (x, y), such as (frame.drop(columns='label'), frame["),
        (
            (Table(np.array([[1.0, "a"]], dtype=object), ("str", "float64")), Y[:1]),
            "a Table of pandas with values of float64, str is no array of numbers; number the texts, fill the gaps,",
        ),
        (
            (X[:1], Table(np.array(["a"], dtype=object), ("str",))),
            "a Table of pandas with values of str is no array of",
        ),
    ],
    ids=["alone", "a column of texts", "labels that are texts"],
)
def test_a_table_of_pandas_that_is_no_array_of_numbers_is_refused(given_: object, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        as_examples(given_)


def test_a_clients_training_data_alone_are_told_from_a_pair_of_parts() -> None:
    for part in ((X_TABLE, Y_TABLE), (X, Y_TABLE)):
        with pytest.raises(UserError, match=r"clients\[0\]: it looks like one \(x, y\) without test data"):
            Problem([part, part], lambda: nn.Linear(2, 2))
    with pytest.raises(UserError, match=r"clients\[0\], training data: a client's data is of type Table; give a pair"):
        Problem([(X_TABLE, X_TABLE)] * 2, lambda: nn.Linear(2, 2))


def test_a_table_of_pandas_is_predicted_for() -> None:
    model = nn.Linear(2, 2)
    data = as_examples((X, Y))
    assert torch.equal(predict(model, data, X_TABLE), predict(model, data, X))
