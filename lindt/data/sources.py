"""Where samples come from: a name gives a pool of training rows and one of test rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from lindt.seeds import seed_for


@final
@dataclass(frozen=True)
class Pools:
    """All samples before they are allocated to clients; `train` and `test` are row numbers of x and y."""

    x: Tensor
    y: Tensor
    train: Tensor
    test: Tensor
    classes: int
    class_names: tuple[str, ...]
    prepare: Callable[[Tensor], Tensor] | None = None  # of a batch of x, before a model sees it
    roles: Tensor | None = None  # whose sample each row is by nature, where the source knows


def digits(test_share: float, seed: int) -> Pools:
    """scikit-learn's 1,797 images of 8 x 8 pixels in ten classes: inside the package, no download."""
    from sklearn.datasets import load_digits  # slow to import

    bunch = load_digits()
    x = torch.as_tensor(bunch.images, dtype=torch.float32)[:, None] / 16.0
    x = (x - x.mean()) / x.std()
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    train, test = split_by_class(y.numpy(), test_share, seed)
    return Pools(x, y, train, test, 10, tuple("0123456789"))


def split_by_class(y: np.ndarray[tuple[int], np.dtype[np.int64]], share: float, seed: int) -> tuple[Tensor, Tensor]:
    """A test set with `share` of every class."""
    draw = np.random.default_rng(seed_for(seed, "test rows"))
    train: list[int] = []
    test: list[int] = []
    for label in np.unique(y):
        rows = draw.permutation(np.flatnonzero(y == label))
        cut = round(share * len(rows))
        test.extend(int(row) for row in rows[:cut])
        train.extend(int(row) for row in rows[cut:])
    return torch.tensor(sorted(train), dtype=torch.int64), torch.tensor(sorted(test), dtype=torch.int64)


def cifar10(test_share: float, seed: int) -> Pools:
    from lindt.data.cifar10 import cifar10 as load  # it stands on this file

    return load(test_share, seed)


def cifar10_half(test_share: float, seed: int) -> Pools:
    from lindt.data.cifar10 import half_size

    return half_size(test_share, seed)


SOURCES: dict[str, Callable[[float, int], Pools]] = {
    "digits": digits,
    "cifar10": cifar10,
    "cifar10-half": cifar10_half,
}
