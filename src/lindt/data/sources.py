"""Where samples come from: a name gives a pool of training rows and one of test rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """How the text of a role becomes samples: x is `window` characters, y the next one, a sample every `stride`.

    The paper's are 80 and 1. `split` parts training from test samples: "blocked" as LEAF does, the first part of a
    role's text for training and the last for testing, without the windows that straddle the cut; "shuffled"
    deals single windows at random, so that a test window's characters have nearly all been trained on.
    """

    window: int = 80
    stride: int = 1
    split: Literal["blocked", "shuffled"] = "blocked"

    def __post_init__(self) -> None:
        require(1 <= self.window <= 10_000, "window", self.window, "1 to 10,000 characters")
        require(self.stride >= 1, "stride", self.stride, "a sample every 1 character or more")


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
    prepare: Callable[[Tensor], Tensor] | None = None  # of a batch of x, before a model sees it
    roles: Tensor | None = None  # whose sample each row of x is by nature, where the source knows
    role_names: tuple[str, ...] = ()


@components_in("lindt.data")
class Source(Protocol):
    """Samples by the test share, the seed and, for text, how it becomes samples."""

    def __call__(self, test_share: float, seed: int, text: Text, /) -> Pools: ...


_Function = TypeVar("_Function", bound=Source)


def register_source(name: str) -> Callable[[_Function], _Function]:
    """Decorator: `data.source = "name"` in a plan is this function's pool."""

    def enter(source: _Function) -> _Function:
        add(Source, name, source)
        return source

    return enter


@register_source("digits")
def digits(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """scikit-learn's 1,797 images of 8 x 8 pixels in ten classes: inside the package, no download."""
    from sklearn.datasets import load_digits  # slow to import

    bunch = load_digits()
    x = torch.as_tensor(bunch.images, dtype=torch.float32)[:, None] / 16.0
    x = (x - x.mean()) / x.std()
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    train, test = split_by_class(y.numpy(), test_share, seed)
    return Pools(x, y, train, test, 10, tuple("0123456789"))


@register_source("breast-cancer")
def breast_cancer(test_share: float, seed: int, text: Text = PAPERS_TEXT) -> Pools:
    """scikit-learn's 569 tumours, 30 standardised measurements each, malignant or benign: inside the package."""
    from sklearn.datasets import load_breast_cancer  # slow to import

    bunch = load_breast_cancer()
    x = torch.as_tensor(bunch.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.as_tensor(bunch.target, dtype=torch.int64)
    train, test = split_by_class(y.numpy(), test_share, seed)
    return Pools(x, y, train, test, 2, ("malignant", "benign"))


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
