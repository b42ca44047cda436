"""Attackers (Fig. 1d, Appendix C.1): what they train on, what they report, what they are after."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from lindt.data.examples import LocalWork, subset
from lindt.errors import PlanError, require
from lindt.protocols import Batch, Examples
from lindt.registry import components_in, register
from lindt.seeds import seed_for


@components_in(__name__)
class Threat(Protocol):
    @property
    def share(self) -> float:
        """Of all clients; the same share attacks in every round."""
        ...

    @property
    def per_batch(self) -> int:
        """How many samples of a batch come from the pool."""
        ...

    def pool(self, everything: Examples) -> Examples | None:
        """The backdoor data that attackers hold in common, made from all training data; None for none.

        Raises a PlanError for a field that does not fit the labels.
        """
        ...

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        """Before training: data, labels, epochs."""
        ...

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        """After training: the update that is sent."""
        ...

    def goal(self, y_n: Tensor) -> Tensor:
        """The label the attackers want for each sample; -1 where they want nothing."""
        ...


@final
@dataclass(frozen=True)
class Relabelled:
    """Samples under other labels."""

    examples: Examples
    new_labels: Tensor

    def __len__(self) -> int:
        return len(self.examples)

    def take(self, rows_B: Tensor) -> Batch:
        return self.examples.take(rows_B)[0], self.new_labels[rows_B]

    @property
    def labels(self) -> Tensor:
        return self.new_labels


@register(Threat)
@final
@dataclass(frozen=True)
class NoThreat:
    share = 0.0
    per_batch = 0

    def pool(self, everything: Examples) -> Examples | None:
        return None

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return work

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return update_P

    def goal(self, y_n: Tensor) -> Tensor:
        return torch.full_like(y_n, -1)


@register(Threat)
@final
@dataclass(frozen=True)
class Backdoor:
    """The paper's attack on images: samples of some classes falsely labelled as others.

    Each batch holds `per_batch` backdoor samples, drawn from all training samples of the source classes, and
    fills up with the attacker's own true-labelled data; `epochs` local epochs. The default relabels CIFAR-10's
    deer as horse and dog as frog.
    """

    share: float = 0.2
    relabel: tuple[tuple[int, int], ...] = ((4, 7), (5, 6))
    epochs: int = 5
    per_batch: int = 3

    def __post_init__(self) -> None:
        require_share(self.share)
        require(len(self.relabel) > 0, "relabel", self.relabel, "give at least one pair [from, to]")
        require(all(a != b for a, b in self.relabel), "relabel", self.relabel, "a label cannot stand for itself")
        require(all(min(pair) >= 0 for pair in self.relabel), "relabel", self.relabel, "labels are 0 or more")
        require(self.epochs >= 1, "epochs", self.epochs, "an attacker trains for at least 1 epoch")
        require(self.per_batch >= 1, "per_batch", self.per_batch, "mix in at least 1 backdoor sample a batch")

    def pool(self, everything: Examples) -> Examples | None:
        wanted = self.goal(everything.labels)
        rows = (wanted >= 0).nonzero().flatten()
        if not len(rows):
            raise PlanError("relabel", self.relabel, "no training sample has a label to relabel")
        return Relabelled(subset(everything, rows), wanted[rows])

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return replace(work, epochs=self.epochs, mixed_in=pool, mixed=self.per_batch, honest=False)

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return update_P

    def goal(self, y_n: Tensor) -> Tensor:
        wanted = torch.full_like(y_n, -1)
        for source, target in self.relabel:
            wanted[y_n == source] = target
        return wanted


@register(Threat)
@final
@dataclass(frozen=True)
class NextCharacter:
    """The paper's attack on text: every next character is a newline. Nothing true-labelled is mixed in."""

    share: float = 0.16
    label: int = 0
    epochs: int = 5
    per_batch: ClassVar[int] = 0

    def __post_init__(self) -> None:
        require_share(self.share)
        require(self.label >= 0, "label", self.label, "labels are 0 or more")
        require(self.epochs >= 1, "epochs", self.epochs, "an attacker trains for at least 1 epoch")

    def pool(self, everything: Examples) -> Examples | None:
        return None

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        fake = torch.full_like(work.data.labels, self.label)
        return replace(work, data=Relabelled(work.data, fake), epochs=self.epochs, honest=False)

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return update_P

    def goal(self, y_n: Tensor) -> Tensor:
        return torch.where(y_n == self.label, -1, self.label)


@register(Threat)
@final
@dataclass(frozen=True)
class Until:
    """A threat that ends: after `last_round` its attackers train honestly."""

    last_round: int
    threat: Threat

    def __post_init__(self) -> None:
        require(self.last_round >= 0, "last_round", self.last_round, "the last attacked round is 0 or later")

    @property
    def share(self) -> float:
        return self.threat.share

    @property
    def per_batch(self) -> int:
        return self.threat.per_batch

    def pool(self, everything: Examples) -> Examples | None:
        return pool_within(self.threat, everything)

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return self.threat.corrupt(work, pool, round) if round <= self.last_round else work

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return self.threat.report(update_P, seed, round) if round <= self.last_round else update_P

    def goal(self, y_n: Tensor) -> Tensor:
        return self.threat.goal(y_n)


def pool_within(threat: Threat, everything: Examples) -> Examples | None:
    """The pool of a threat that is the field `threat` of another."""
    try:
        return threat.pool(everything)
    except PlanError as error:
        raise error.within("threat") from None


def require_share(share: float) -> None:
    require(0 <= share < 1, "share", share, "the attackers' share of the clients lies in [0, 1)")


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


@register(Threat)
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


@register(Threat)
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


@register(Threat)
@final
@dataclass(frozen=True)
class FreeRider(_Liar):
    """Takes w and gives it back as it was: no training, no contribution."""

    share: float = 0.2

    def __post_init__(self) -> None:
        require_share(self.share)

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return replace(work, epochs=0, honest=False)


@register(Threat)
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


@register(Threat)
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


@register(Threat)
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
