"""Two federations with a known answer, and what an app is to the tests.

hurts   two camps whose labels are opposite: a shared model serves neither, and each client learns its own easily
helps   one task, ten training samples a client: too few to learn it alone
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Strategy
from numpy.typing import NDArray
from torch import Tensor, nn

CLIENTS = 6
FEATURES = 8
TEST = 60


def numbers(context: Context, split: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """A client's samples."""
    i, hurts = int(context.node_config["partition-id"]), context.run_config["federation"] == "hurts"
    rng = np.random.default_rng(1000 + i)
    x = rng.normal(size=(40 + TEST, FEATURES)).astype(np.float32)
    direction = np.array([1, -1, 0.5, 2, 0, 0, 1, -0.5], np.float32)
    y = (x @ direction > 0).astype(np.int64)
    if hurts and i % 2:
        y = 1 - y
    rows = slice(40 if hurts else 10) if split == "train" else slice(40, None)
    return x[rows], y[rows]


def tensors(context: Context, split: str) -> tuple[Tensor, Tensor]:
    x, y = numbers(context, split)
    return torch.from_numpy(x), torch.from_numpy(y)


def trained(message: Message, arrays: ArrayRecord, metrics: Mapping[str, Any], **more: Any) -> Message:
    records: dict[str, Any] = {"arrays": arrays, "metrics": MetricRecord(dict(metrics)), **more}
    return Message(RecordDict(records), reply_to=message)


def evaluated(message: Message, **metrics: Any) -> Message:
    named = {name.replace("_examples", "-examples"): value for name, value in metrics.items()}
    return Message(RecordDict({"metrics": MetricRecord(named)}), reply_to=message)


def filled(model: nn.Module, message: Message) -> nn.Module:
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model


def first(build: Callable[[], nn.Module]) -> ArrayRecord:
    torch.manual_seed(7)
    return ArrayRecord(build().state_dict())


@dataclass(frozen=True)
class Case:
    """An app as its user wrote it. `app()` is the ClientApp, `arrays()` w^0."""

    app: Callable[[], ClientApp]
    arrays: Callable[[], ArrayRecord]
    strategy: Callable[[], Strategy] = FedAvg
    config: dict[str, Any] = field(default_factory=dict)  # of a training message
    wrap: dict[str, Any] = field(default_factory=dict)  # what the user had to say to wrap()
    detector: dict[str, Any] = field(default_factory=dict)  # ... and to NFLDetector()
    hurts: tuple[str, ...] = ("hurts",)  # the right answers in the federation of that name
    helps: tuple[str, ...] = ("helps",)
    reports: bool = True
    metrics: tuple[str, ...] = ()  # of its own, alive in recovery

    def train_config(self) -> ConfigRecord:
        return ConfigRecord(dict(self.config))
