"""Data and a model of your own, for the command line: a function that returns a lindt.Problem.

    lindt run --task examples.own_task:problem

Twelve clients draw scikit-learn's two moons, each turned by its own angle. All hold both classes in equal
parts, and still no single model can serve them all: what is class 0 for one is class 1 for another. The
labels show no skew, the weights do.
"""

from __future__ import annotations

import math

import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

import lindt

CLIENTS = 12


def moons(client: int, samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two moons around the origin, turned by client / CLIENTS of a full circle."""
    x, y = make_moons(samples, noise=0.2, random_state=seed)
    angle = 2 * math.pi * client / CLIENTS
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    x = torch.as_tensor(x, dtype=torch.float32) - torch.tensor([0.5, 0.25])
    return x @ turn.T, torch.as_tensor(y)


def model() -> nn.Module:
    """Attach points of a plain nn.Sequential are found by themselves: after each activation here."""
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def problem() -> lindt.Problem:
    """One (train, test) pair a client; cross-entropy and accuracy are the defaults."""
    clients = [(moons(i, 60, seed=2 * i), moons(i, 200, seed=2 * i + 1)) for i in range(CLIENTS)]
    return lindt.Problem(clients, model, class_names=("upper", "lower"))
