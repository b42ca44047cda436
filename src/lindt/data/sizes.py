"""Table 8, client statistics: the mean and the standard deviation of client sizes of our allocations, over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from lindt.data.partition import Balanced, ByRole, Classes, Groups, Iid, IntArray, Partition, Roles
from lindt.data.sources import Text

Labels = tuple[IntArray, IntArray, ByRole]  # of the training rows, of the test rows, and whose they are


@final
@dataclass(frozen=True)
class Scheme:
    """A line of the paper's table. Its mean and standard deviation are those of one draw."""

    task: str
    name: str
    allocation: Partition
    clients: int
    paper_mean: int
    paper_std: int


LEAST = 10_000  # the fewest windows of a role
SCHEMES = (
    Scheme("CIFAR", "IID", Iid(), 100, 600, 0),
    Scheme("CIFAR", "non-IID(10)", Classes(10), 100, 600, 572),
    Scheme("CIFAR", "non-IID(5)", Classes(5), 100, 600, 811),
    Scheme("CIFAR", "non-IID(2)", Classes(2), 100, 600, 855),
    Scheme("CIFAR", "non-IID(Mixed)", Groups(), 100, 600, 732),
    Scheme("SHAKE", "by role", Roles(least=LEAST), 66, 17_742, 8_997),
    Scheme("SHAKE", "balanced", Balanced(least=LEAST), 66, 17_741, 0),
)


@final
@dataclass(frozen=True)
class Sizes:
    """The mean client size and the standard deviation of client sizes, each as mean and deviation over seeds."""

    scheme: Scheme
    mean: float
    mean_spread: float
    std: float
    std_spread: float


def sizes_over(seeds: int, schemes: tuple[Scheme, ...] = SCHEMES) -> Iterator[Sizes]:
    """The sizes of allocations, without training.

    CIFAR-10 need not be downloaded: it has 5,000 training and 1,000 test pictures per class, and sizes depend on
    nothing else. The plays must be downloaded.
    """
    labels: dict[str, Labels] = {}
    for scheme in schemes:
        if scheme.task not in labels:
            labels[scheme.task] = _LABELS[scheme.task]()
        rows = labels[scheme.task]
        means, stds = [], []
        for seed in range(seeds):
            shares = scheme.allocation.split(rows[0], rows[1], scheme.clients, seed, rows[2])
            sizes = np.array([len(share.train) + len(share.test) for share in shares])
            means.append(sizes.mean())
            stds.append(sizes.std())
        yield Sizes(scheme, *(float(value) for found in (means, stds) for value in (np.mean(found), np.std(found))))


def _pictures() -> Labels:
    classes = np.arange(10)
    return classes.repeat(5000), classes.repeat(1000), None


def _plays() -> Labels:
    from lindt.data.shakespeare import shakespeare

    pools = shakespeare(0.1, 0, Text(split="shuffled"))  # no window is dropped, as in the paper's table
    assert pools.roles is not None
    roles = (pools.roles[pools.train].numpy(), pools.roles[pools.test].numpy())
    return roles[0], roles[1], roles  # roles in place of labels, which these allocations do not use


_LABELS: dict[str, Callable[[], Labels]] = {"CIFAR": _pictures, "SHAKE": _plays}
