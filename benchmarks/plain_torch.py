"""The work as anyone would write it in PyTorch: models, a client's epoch, the mean. Peers on torch train with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from work import BATCH, CHARACTERS, CLASSES, MAX_NORM, PARAMETERS, RATE

Weights = dict[str, Tensor]


def cnn() -> nn.Module:
    """The paper's CNN on 3 x 32 x 32."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(1600, 512), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(512, 128), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )  # fmt: skip
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
    return model


class Lstm(nn.Module):
    """The paper's LSTM on 80 characters: 819,920 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, 8)
        self.lstm = nn.LSTM(8, 256, num_layers=2, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.output = nn.Linear(256, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.embedding(x))
        return self.output(self.drop(h[:, -1]))


def as_tensors(client: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(client[0]), torch.from_numpy(client[1])


def train(model: nn.Module, x: Tensor, y: Tensor, batch: int = BATCH, rate: float = RATE) -> None:
    """One epoch on a client."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    model.train()
    for rows in torch.randperm(len(y)).split(batch):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def copied(model: nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


def mean(found: Sequence[Weights]) -> Weights:
    return {name: torch.stack([weights[name] for weights in found]).mean(0) for name in found[0]}


@torch.no_grad()
def loss_of(model: nn.Module, client: tuple[np.ndarray, np.ndarray]) -> float:
    x, y = as_tensors(client)
    model.eval()
    return float(nn.functional.cross_entropy(model(x), y))
