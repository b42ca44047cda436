"""Mistakes that give a believable false result, one problem each: every way into the package has to find each of them.

The function of a mistake is a `--task` too: `mistakes:test_is_train`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from lindt.plan.problem import Problem

CLASSES, FEATURES = 4, 6
CENTRES = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(1)) * 3


def samples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    return CENTRES[y] + torch.randn(n, FEATURES, generator=g), y


def healthy() -> list[tuple[Any, Any]]:
    """Four clients; what is wrong below is wrong at client 0, or at all of them."""
    return [(samples(600, 2 * i), samples(60, 2 * i + 1)) for i in range(4)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def no_mistake() -> Problem:
    return Problem(healthy(), net)


def test_is_train() -> Problem:
    clients = healthy()
    return Problem([(clients[0][0], clients[0][0]), *clients[1:]], net)


def test_rows_among_training_rows() -> Problem:
    clients = healthy()
    (x, y), (u, v) = clients[0]
    return Problem([((x, y), (torch.cat([u, x[:20]]), torch.cat([v, y[:20]]))), *clients[1:]], net)


def one_client_twice() -> Problem:
    clients = healthy()
    clients[1] = (clients[0][0], clients[1][1])
    return Problem(clients, net)


def shuffled_labels() -> Problem:
    def mixed(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], pair[1][torch.randperm(len(pair[1]), generator=torch.Generator().manual_seed(0))]

    return Problem([(mixed(train), mixed(test)) for train, test in healthy()], net)


class Dropped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, 0.5)  # functional dropout is on by default


def dropout_in_evaluation() -> Problem:
    return Problem(healthy(), lambda: nn.Sequential(nn.Linear(FEATURES, 8), Dropped(), nn.Linear(8, CLASSES)))


class Dataset:
    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = pair[0].clone(), pair[1].clone()

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


class Augmented(Dataset):
    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row] + 0.1 * torch.randn(FEATURES), self.y[row]


class InPlace(Dataset):
    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row].div_(2), self.y[row]


def augmentation_in_evaluation() -> Problem:
    clients = healthy()
    return Problem([(clients[0][0], Augmented(clients[0][1])), *clients[1:]], net)


def reading_changes_data() -> Problem:
    clients = healthy()
    return Problem([(InPlace(clients[0][0]), clients[0][1]), *clients[1:]], net)


def by_numpy() -> nn.Module:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.as_tensor(np.random.normal(size=parameter.shape)))  # the mistake
    return model


def model_without_seed() -> Problem:
    return Problem(healthy(), by_numpy)


def detached(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs.detach(), y) + 0 * outputs.sum()


def detached_loss() -> Problem:
    return Problem(healthy(), net, loss=detached)


def wrongness(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, reduction="none")


def lower_is_better() -> Problem:
    return Problem(healthy(), net, metric=wrongness)


@final
@dataclass(frozen=True)
class Mistake:
    """How it is staged, whether it is refused or warned of, and how the sentence begins or what stands in it."""

    problem: Callable[[], Problem]
    refused: bool
    said: str
    one_client_sees_it: bool = True

    @property
    def task(self) -> str:
        return f"mistakes:{self.problem.__name__}"


MISTAKES = [
    Mistake(test_is_train, True, "client 0: its test data are its training data"),
    Mistake(test_rows_among_training_rows, False, "client 0 (20 of 80)"),
    Mistake(one_client_twice, False, "clients 0 and 1 have the same training samples", one_client_sees_it=False),
    Mistake(shuffled_labels, False, "shuffled"),
    Mistake(dropout_in_evaluation, True, "model: two evaluations of the same samples differ"),
    Mistake(augmentation_in_evaluation, True, "client 0: two reads of the test data differ"),
    Mistake(reading_changes_data, True, "client 0: reading the training data changes them"),
    Mistake(model_without_seed, True, "the same seed"),
    Mistake(detached_loss, True, "loss: a training step changes no weight"),
    Mistake(lower_is_better, True, "metric: it is higher for wrong predictions"),
]
IDS = [mistake.problem.__name__ for mistake in MISTAKES]
