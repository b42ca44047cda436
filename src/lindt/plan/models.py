"""The paper's CNN and LSTM (Appendix C.2), and a small CNN for the embedded digits.

Each is a plain nn.Module in the order its layers run. Max-pooling and ReLU commute; pooling first is cheaper.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor, nn

from lindt.errors import require
from lindt.registry import components_in, register


@components_in(__name__)
class Model(Protocol):
    """A recipe for a model; building it draws its first weights from torch's global generator."""

    def build(self, classes: int) -> nn.Module: ...


@register(Model)
@final
@dataclass(frozen=True)
class Cnn:
    """Two unpadded 5x5 convolutions, 512, 128 and 10 units: 940,362 parameters on 3 x 32 x 32.

    The other fields make it smaller for smaller pictures: side 16 and kernel 3 for pictures of half the side.
    """

    dropout: float = 0.5
    side: int = 32
    kernel: int = 5
    channels: tuple[int, int] = (32, 64)
    units: tuple[int, int] = (512, 128)
    inputs: int = 3  # channels of a picture

    def __post_init__(self) -> None:
        require(0 <= self.dropout < 1, "dropout", self.dropout, "a share in [0, 1)")
        require(1 <= self.inputs <= 64, "inputs", self.inputs, "1 to 64 channels")
        require(1 <= self.kernel <= 31, "kernel", self.kernel, "1 to 31 pixels")
        require(self.left >= 1, "side", self.side, f"too small for two convolutions of {self.kernel} and two poolings")
        require(self.side <= 1024, "side", self.side, "pictures of at most 1024 x 1024")
        for name in ("channels", "units"):
            sizes = getattr(self, name)
            require(all(1 <= size <= 4096 for size in sizes), name, sizes, "1 to 4096 each")

    @property
    def left(self) -> int:
        """The side of the output of the second pooling."""
        lost = self.kernel - 1
        return ((self.side - lost) // 2 - lost) // 2

    def build(self, classes: int = 10) -> nn.Module:
        (c1, c2), (u1, u2) = self.channels, self.units
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(self.inputs, c1, self.kernel),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(c1, c2, self.kernel),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                fc1=nn.Linear(c2 * self.left**2, u1),
                relu3=nn.ReLU(),
                drop1=nn.Dropout(self.dropout),
                fc2=nn.Linear(u1, u2),
                relu4=nn.ReLU(),
                drop2=nn.Dropout(self.dropout),
                fc3=nn.Linear(u2, classes),
            )
        )


@register(Model)
@final
@dataclass(frozen=True)
class SmallCnn:
    """For 1 x 8 x 8 digits: 13,706 parameters with 10 classes."""

    def build(self, classes: int = 10) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 16, 3, padding=1),
                pool1=nn.MaxPool2d(2),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(16, 32, 3, padding=1),
                pool2=nn.MaxPool2d(2),
                relu2=nn.ReLU(),
                flatten=nn.Flatten(),
                fc1=nn.Linear(128, 64),
                relu3=nn.ReLU(),
                fc2=nn.Linear(64, classes),
            )
        )


@final
class _CharacterLstm(nn.Module):
    attach_points = ("lstm1", "lstm2")  # m = 1..M-1: not the embedding, not the logits

    def __init__(self, classes: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 8)
        self.lstm1 = nn.LSTM(8, hidden, batch_first=True)
        self.drop1 = nn.Dropout(dropout)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.drop2 = nn.Dropout(dropout)
        self.output = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm1(self.embedding(x))
        h, _ = self.lstm2(self.drop1(h))
        logits: Tensor = self.output(self.drop2(h[:, -1]))
        return logits


@register(Model)
@final
@dataclass(frozen=True)
class Lstm:
    """An embedding of 8, two LSTMs of 256, one output per character: 819,920 parameters with 80 characters."""

    hidden: int = 256
    dropout: float = 0.2

    def __post_init__(self) -> None:
        require(1 <= self.hidden <= 10**5, "hidden", self.hidden, "1 to 100,000 units")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "a share in [0, 1)")

    def build(self, classes: int = 80) -> nn.Module:
        return _CharacterLstm(classes, self.hidden, self.dropout)


@register(Model)
@final
@dataclass(frozen=True)
class Linear:
    """Softmax regression on flattened input: a small model for tests and first runs."""

    features: int = 64

    def __post_init__(self) -> None:
        require(1 <= self.features <= 10**8, "features", self.features, "1 to 100 million inputs")

    def build(self, classes: int = 10) -> nn.Module:
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(self.features, classes)))


@register(Model)
@final
@dataclass(frozen=True)
class Mlp:
    """One hidden layer on flattened input: for tables of numbers."""

    features: int = 30
    hidden: int = 32

    def __post_init__(self) -> None:
        require(1 <= self.features <= 10**8, "features", self.features, "1 to 100 million inputs")
        require(1 <= self.hidden <= 10**5, "hidden", self.hidden, "1 to 100,000 units")

    def build(self, classes: int = 10) -> nn.Module:
        return nn.Sequential(
            OrderedDict(
                flatten=nn.Flatten(),
                fc1=nn.Linear(self.features, self.hidden),
                relu1=nn.ReLU(),
                fc2=nn.Linear(self.hidden, classes),
            )
        )


def parameters_of(module: nn.Module) -> int:
    """P, the length of w."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
