"""Tables of numbers inside scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import datasets

from lindt.data.sources import breast_cancer, sklearn_table


def test_breast_cancer_is_standardised_and_split_by_class() -> None:
    pools = breast_cancer(0.5, 0)
    assert pools.x.shape == (569, 30)
    assert torch.allclose(pools.x.mean(0), torch.zeros(30), atol=1e-4)
    assert torch.allclose(pools.x.std(0), torch.ones(30), atol=1e-4)
    assert pools.y[pools.test].bincount().tolist() == [106, 178]
    assert not set(pools.train.tolist()) & set(pools.test.tolist())


@pytest.mark.parametrize(
    ("loader", "file", "header"), [("load_digits", "digits.csv.gz", 0), ("load_breast_cancer", "breast_cancer.csv", 1)]
)
def test_a_table_is_the_one_that_scikit_learn_loads(loader: str, file: str, header: int) -> None:
    """By the file, and by the loader where a version of scikit-learn has no such file."""
    expected = np.column_stack(getattr(datasets, loader)(return_X_y=True))
    assert np.array_equal(sklearn_table(loader, file, header), expected)
    assert np.array_equal(sklearn_table(loader, "moved.csv", header), expected)
