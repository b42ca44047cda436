"""Tables of numbers inside scikit-learn."""

from __future__ import annotations

import torch

from lindt.data.sources import breast_cancer


def test_breast_cancer_is_standardised_and_split_by_class() -> None:
    pools = breast_cancer(0.5, 0)
    assert pools.x.shape == (569, 30)
    assert torch.allclose(pools.x.mean(0), torch.zeros(30), atol=1e-4)
    assert torch.allclose(pools.x.std(0), torch.ones(30), atol=1e-4)
    assert pools.y[pools.test].bincount().tolist() == [106, 178]
    assert not set(pools.train.tolist()) & set(pools.test.tolist())
