"""The work in plain PyTorch: models, a client's epoch, the mean. Peers that use torch train with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from work import (
    BATCH,
    CHARACTERS,
    CLASSES,
    CLIENTS,
    CONTEXT,
    FEW,
    MAX_NORM,
    PARAMETERS,
    RATE,
    WINDOW_BATCH,
    Arrays,
    pictures,
    windows,
)

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


class Block(nn.Module):
    """A basic block of ResNet with GroupNorm: two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(32, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(32, channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.GroupNorm(32, channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 3 x 32 x 32 with GroupNorm: 11,173,962 parameters."""

    attach_points = ("stage1", "stage2", "stage3", "stage4")  # for lindt's dual model

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64), nn.ReLU())
        self.stage1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.stage2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.stage3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.stage4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.output = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stage4(self.stage3(self.stage2(self.stage1(self.stem(x)))))
        return self.output(h.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.inputs(x).chunk(3, dim=-1))
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(h.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """A layer of the transformer, normalised before attention and before the two linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A causal transformer of six layers of 384 that predicts the next character: 10,733,648 parameters."""

    attach_points = tuple(f"layers.{index}:step" for index in range(6))  # for lindt's dual model

    def __init__(self, width: int = 384, heads: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.norm, self.output = nn.LayerNorm(width), nn.Linear(width, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.characters(x) + self.places.weight[: x.shape[1]]
        return self.output(self.norm(self.layers(h)[:, -1]))


class Work(NamedTuple):
    model: Callable[[], nn.Module]
    data: Callable[[], list[Arrays]]
    batch: int


WORKS = {
    "cnn": Work(cnn, pictures, BATCH),
    "lstm": Work(Lstm, windows, WINDOW_BATCH),
    "resnet": Work(ResNet18, lambda: pictures(samples=FEW), BATCH),
    "transformer": Work(Transformer, lambda: windows(CLIENTS, FEW, window=CONTEXT), BATCH),
}


def as_tensors(client: Arrays) -> tuple[Tensor, Tensor]:
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
def loss_of(model: nn.Module, client: Arrays) -> float:
    x, y = as_tensors(client)
    model.eval()
    return float(nn.functional.cross_entropy(model(x), y))
