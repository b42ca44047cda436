"""Attacks beside the paper's backdoors: what is known from the literature on hostile clients.

Each is a Threat (threats.py). Most train honestly and lie about the result; `model_replacement` makes another
attack louder, `label_flip` trains on false labels. How aggregators and recovery stand them: docs/attacks.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import torch
from torch import Tensor

from lindt.data.examples import Examples
from lindt.environment.threats import Backdoor, Relabelled, Threat, pool_within, require_share
from lindt.errors import require
from lindt.fit import LocalWork
from lindt.seeds import seed_for


class _Liar:
    """Abstract: trains as it should, reports something else, wants no label in particular."""

    per_batch: ClassVar[int] = 0

    def pool(self, everything: Examples) -> Examples | None:
        return None

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return replace(work, honest=False)

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return update_P

    def goal(self, y_n: Tensor) -> Tensor:
        return torch.full_like(y_n, -1)


@final
@dataclass(frozen=True)
class SignFlip(_Liar):
    """Reports the opposite of what it learned, `factor` times as long."""

    share: float = 0.2
    factor: float = 1.0

    def __post_init__(self) -> None:
        require_share(self.share)
        _require_factor(self.factor)

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return -self.factor * update_P


@final
@dataclass(frozen=True)
class AdditiveNoise(_Liar):
    """Adds Gaussian noise, `factor` times as long as its update on average."""

    share: float = 0.2
    factor: float = 3.0

    def __post_init__(self) -> None:
        require_share(self.share)
        _require_factor(self.factor)

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        noise_P = torch.randn(update_P.shape, generator=torch.Generator().manual_seed(seed))
        length = self.factor * float(torch.linalg.vector_norm(update_P))
        return update_P + noise_P * (length / math.sqrt(update_P.numel()))


@final
@dataclass(frozen=True)
class FreeRider(_Liar):
    """Takes w and gives it back as it was: no training, no contribution."""

    share: float = 0.2

    def __post_init__(self) -> None:
        require_share(self.share)

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return replace(work, epochs=0, honest=False)


@final
@dataclass(frozen=True)
class Colluding(_Liar):
    """A group that agreed on a direction: all report it, each `factor` times as long as what it learned.

    No single length gives them away, and they lie close to each other, which distances take for agreement.
    """

    share: float = 0.2
    factor: float = 1.0
    agreed: int = 0  # what the direction is drawn from; it stays the same in all rounds

    def __post_init__(self) -> None:
        require_share(self.share)
        _require_factor(self.factor)
        require(self.agreed >= 0, "agreed", self.agreed, "the seed of the direction is 0 or more")

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        agreed = torch.Generator().manual_seed(seed_for(self.agreed, "colluding"))
        direction_P = torch.randn(update_P.shape, generator=agreed)
        length = self.factor * float(torch.linalg.vector_norm(update_P))
        return length / float(torch.linalg.vector_norm(direction_P)) * direction_P


@final
@dataclass(frozen=True)
class LabelFlip(_Liar):
    """Trains on its own data with every label c called `classes` - 1 - c."""

    share: float = 0.2
    classes: int = 10

    def __post_init__(self) -> None:
        require_share(self.share)
        require(self.classes >= 2, "classes", self.classes, "there are at least 2 labels to flip")

    def pool(self, everything: Examples) -> Examples | None:
        highest = int(everything.labels.max())
        fix = f"a sample has the label {highest}; give at least {highest + 1}"
        require(highest < self.classes, "classes", self.classes, fix)
        return None

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return replace(work, data=Relabelled(work.data, self.flipped(work.data.labels)), honest=False)

    def goal(self, y_n: Tensor) -> Tensor:
        flipped_n = self.flipped(y_n)
        return torch.where(flipped_n == y_n, -1, flipped_n)  # the middle one of an odd number stays itself

    def flipped(self, y_n: Tensor) -> Tensor:
        return self.classes - 1 - y_n


@final
@dataclass(frozen=True)
class ModelReplacement:
    """Another attack, `factor` times louder (Bagdasaryan et al. 2020): with the factor K / attackers it outvotes
    the rest of a plain mean."""

    factor: float = 5.0
    threat: Threat = field(default_factory=Backdoor)

    def __post_init__(self) -> None:
        _require_factor(self.factor)

    @property
    def share(self) -> float:
        return self.threat.share

    @property
    def per_batch(self) -> int:
        return self.threat.per_batch

    def pool(self, everything: Examples) -> Examples | None:
        return pool_within(self.threat, everything)

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return self.threat.corrupt(work, pool, round)

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return self.factor * self.threat.report(update_P, seed, round)

    def goal(self, y_n: Tensor) -> Tensor:
        return self.threat.goal(y_n)


def _require_factor(factor: float) -> None:
    require(0 < factor <= 1e9, "factor", factor, "how many times as long lies above 0")
