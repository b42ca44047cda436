"""Sources of samples by name. Each gives a pool of training rows and a pool of test rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, TypeVar, cast, final

import numpy as np
import torch
from torch import Tensor

from lindt.errors import require
from lindt.registry import Named, add, components_in, kinds
from lindt.seeds import seed_for


@final
@dataclass(frozen=True)
class Text:
    """How the text of a role becomes samples: x is `window` characters, y the next one, one sample every `stride`.

    The paper uses 80 and 1. `split` separates training from test samples: "blocked", as in LEAF, uses the first part of
    a role's text for training and the last for testing, without the windows across the border; "shuffled" draws single
    windows at random, so that nearly all characters of a test window are trained on, too.
    """

    window: int = 80
    stride: int = 1
    split: Literal["blocked", "shuffled"] = "blocked"

    def __post_init__(self) -> None:
        require(1 <= self.window <= 10_000, "window", self.window, "give 1 to 10,000 characters")
        require(self.stride >= 1, "stride", self.stride, "give 1 character or more")


PAPERS_TEXT = Text()


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
    prepare: Callable[[Tensor], Tensor] | None = None  # applied to a batch of x before the model
    roles: Tensor | None = None  # the role of each row of x; None where the source has no roles
    role_names: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Crowd:
    """A source that makes the data of each client itself, when the client is visited: for any number of clients."""

    make: Callable[[int], tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]]  # (train, test) of a client's number
    classes: int
    class_names: tuple[str, ...]


@components_in("lindt.data")
class Source(Protocol):
    """A function that returns samples for a test share, a seed and, for text, a `Text`."""

    def __call__(self, test_share: float, seed: int, text: Text, /) -> Pools | Crowd: ...


_Function = TypeVar("_Function", bound=Source)


def register_source(name: str) -> Callable[[_Function], _Function]:
    """Decorator: `data.source = "name"` in a plan uses this function's pools."""

    def enter(source: _Function) -> _Function:
        add(Source, name, source)
        return source

    return enter


@register_source("digits")
def digits(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """scikit-learn's 1,797 images of 8 x 8 pixels in ten classes: inside the package, no download."""
    rows = sklearn_table("load_digits", "digits.csv.gz")
    images, target = rows[:, :-1].reshape(-1, 8, 8), rows[:, -1]
    x = torch.as_tensor(images, dtype=torch.float32)[:, None] / 16.0
    x = (x - x.mean()) / x.std()
    y = torch.as_tensor(target, dtype=torch.int64)
    train, test = split_by_class(y.numpy(), test_share, seed)
    return Pools(x, y, train, test, 10, tuple("0123456789"))


@register_source("breast-cancer")
def breast_cancer(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """scikit-learn's 569 tumours, 30 standardised measurements each, malignant or benign: inside the package."""
    rows = sklearn_table("load_breast_cancer", "breast_cancer.csv", header=1)
    x = torch.as_tensor(rows[:, :-1], dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.as_tensor(rows[:, -1], dtype=torch.int64)
    train, test = split_by_class(y.numpy(), test_share, seed)
    return Pools(x, y, train, test, 2, ("malignant", "benign"))


def sklearn_table(loader: str, file: str, header: int = 0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """A table inside scikit-learn, the target in the last column; by `loader` where there is no such file.

    The file is read without scikit-learn, whose import takes more time than the first round of a small run.
    """
    package = find_spec("sklearn")
    folders = (package.submodule_search_locations if package else None) or ()
    for there in (Path(folder, "datasets", "data", file) for folder in folders):
        if there.is_file():
            return np.loadtxt(there, delimiter=",", skiprows=header)
    from sklearn import datasets

    return np.column_stack(getattr(datasets, loader)(return_X_y=True))


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


SOURCES: Mapping[str, Source] = Named(lambda: kinds(Source), lambda name: cast(Source, kinds(Source)[name]))
