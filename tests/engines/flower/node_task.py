"""Five clients in two camps that disagree, from a fixed seed: a task that costs a node little more than torch."""

from __future__ import annotations

import torch
from torch import nn

from lindt import Problem


def problem() -> Problem:
    draw = torch.Generator().manual_seed(0)
    xs = torch.randn(5, 60, 2, generator=draw)
    ys = [(x @ torch.tensor([1.0, sign]) > 0).long() for x, sign in zip(xs, (1, -1, 1, -1, 1), strict=True)]
    clients = [((x[:40], y[:40]), (x[40:], y[40:])) for x, y in zip(xs, ys, strict=True)]
    return Problem(clients, lambda: nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)))
