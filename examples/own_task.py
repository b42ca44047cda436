"""Data and a model of your own, for the command line: a function that returns a lindt.Problem.

    cd examples
    lindt run --task own_task:problem --rounds 80

Twelve clients classify digits. Six of them use other labels: they label 0 as 9, 1 as 8, and so on. Every client has all
ten classes in equal parts, so that label counts do not show the problem; but no single model can be right for both
groups. The test of the clients' reports detects it, and each client's own model solves it. `healthy` is the same
federation with one set of labels. With the paper's rule, --set detection=delta --set method=lindt-on-detection, epsilon
has to be above the Delta of `healthy`: docs/choosing-epsilon.md.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import lindt

CLIENTS = 12
TRAIN = 75  # training samples per client; its other samples are its test data


def model() -> nn.Module:
    """The attach points of a plain nn.Sequential are found automatically: here after each ReLU."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def problem() -> lindt.Problem:
    """One (train, test) pair per client; cross entropy and accuracy are the defaults."""
    return lindt.Problem(clients(camps=2), model, class_names=tuple("0123456789"))


def healthy() -> lindt.Problem:
    """The control: the same clients with the same labels."""
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
