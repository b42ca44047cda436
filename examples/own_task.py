"""Data and a model of your own, for the command line: a function that returns a lindt.Problem.

    lindt run --task examples.own_task:problem --rounds 80

Twelve clients read digits. Six of them use another code book: what the others call 0 they call 9, and so on.
Every client holds all ten classes in like parts, so that no label count shows what is wrong; but no single
model can be right for both camps. The clients' reports show it, and each client's own model mends it. `healthy` is the
same federation with one code book. By the paper's rule, --set detection=delta --set method=runtime, epsilon has to lie
above what `healthy` shows: docs/choosing-epsilon.md.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import lindt

CLIENTS = 12
TRAIN = 75  # samples a client; the rest of its share is its test data


def model() -> nn.Module:
    """The attach points of a plain nn.Sequential are found by themselves: here after each ReLU."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def problem() -> lindt.Problem:
    """One (train, test) pair a client; cross-entropy and accuracy are the defaults."""
    return lindt.Problem(clients(camps=2), model, class_names=tuple("0123456789"))


def healthy() -> lindt.Problem:
    """The control: the same clients with one code book."""
    return lindt.Problem(clients(camps=1), model, class_names=tuple("0123456789"))


def clients(camps: int) -> list[tuple[object, object]]:
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = ((x - x.mean()) / x.std()).float()
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    pairs: list[tuple[object, object]] = []
    for i, mine in enumerate(rows.chunk(CLIENTS)):
        named = y[mine] if i % camps == 0 else 9 - y[mine]
        pairs.append(((x[mine[:TRAIN]], named[:TRAIN]), (x[mine[TRAIN:]], named[TRAIN:])))
    return pairs
