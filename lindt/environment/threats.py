"""Attackers (Fig. 1d, Appendix C.1): what they train on, what they report, what they are after."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor

from lindt.data.examples import Batch, Examples, subset
from lindt.errors import PlanError, require
from lindt.fit import LocalWork


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
