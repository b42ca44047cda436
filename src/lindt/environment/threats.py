"""Attackers (Fig. 1d, Appendix C.1): their training data, the updates that they send, and the labels that they want.

Legend: H honest clients and A attackers that answer in a round, P parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import NormalDist
from typing import ClassVar, Literal, Protocol, final, runtime_checkable

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
        """The share of all clients that attack; the same share attacks in every round."""
        ...

    @property
    def per_batch(self) -> int:
        """The number of samples of a batch that come from the pool."""
        ...

    def pool(self, everything: Examples) -> Examples | None:
        """The backdoor data that all attackers use, made from all training data; None without backdoor data.

        Raises a PlanError for a field that does not fit the labels.
        """
        ...

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        """Change an attacker's work before training: data, labels, epochs."""
        ...

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        """The update that an attacker sends after training."""
        ...

    def goal(self, y_n: Tensor) -> Tensor:
        """The label that attackers want for each sample; -1 where they want no label."""
        ...


@runtime_checkable
class Omniscient(Threat, Protocol):
    """A threat whose attackers know the honest updates of the round before they send theirs: the papers' worst case.

    Only a simulation has such attackers; a deployment refuses the plan. `play_round` computes their updates after all
    replies have arrived, before clipping and aggregation, so that they are the same on every engine.
    """

    def conspire(self, honest_HP: Tensor, own_AP: Tensor) -> Tensor:
        """The updates that the attackers send, A x P. Rows are in the order of client ids; H and A are 1 or more.

        `own_AP` are their updates by `corrupt` and `report`, which are used in a round without an honest update.
        """
        ...


@final
@dataclass(frozen=True)
class Relabelled:
    """Samples with other labels."""

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

    Each batch has `per_batch` backdoor samples, drawn from all training samples of the source classes; its other
    samples are the attacker's own, with true labels. An attacker trains for `epochs`. The default relabels CIFAR-10's
    deer as horse and dog as frog.
    """

    share: float = 0.2
    relabel: tuple[tuple[int, int], ...] = ((4, 7), (5, 6))
    epochs: int = 5
    per_batch: int = 3

    def __post_init__(self) -> None:
        require_share(self.share)
        require(len(self.relabel) > 0, "relabel", self.relabel, "give at least one pair [from, to]")
        require(all(a != b for a, b in self.relabel), "relabel", self.relabel, "give pairs of two different labels")
        require(all(min(pair) >= 0 for pair in self.relabel), "relabel", self.relabel, "labels are 0 or more")
        require(self.epochs >= 1, "epochs", self.epochs, "an attacker trains for at least 1 epoch")
        require(self.per_batch >= 1, "per_batch", self.per_batch, "mix in at least 1 backdoor sample a batch")

    def pool(self, everything: Examples) -> Examples | None:
        wanted = self.goal(everything.labels)
        rows = (wanted >= 0).nonzero().flatten()
        if not len(rows):
            raise PlanError("relabel", self.relabel, "no training sample has one of the first labels; choose others")
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
    """The paper's attack on text: every next character is labelled as a newline. No sample keeps its true label."""

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
    """A threat that ends: after `last_round` the attackers train honestly."""

    last_round: int
    threat: Threat

    def __post_init__(self) -> None:
        require(self.last_round >= 0, "last_round", self.last_round, "give the last round with an attack, 0 or more")

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


def omniscient(threat: Threat, round: int = 1) -> Omniscient | None:
    """The threat whose attackers know the updates of this round; None where each computes its update alone."""
    if isinstance(threat, Until):
        return omniscient(threat.threat, round) if round <= threat.last_round else None
    return threat if isinstance(threat, Omniscient) else None


def pool_within(threat: Threat, everything: Examples) -> Examples | None:
    """The pool of a threat that is the field `threat` of another threat."""
    try:
        return threat.pool(everything)
    except PlanError as error:
        raise error.within("threat") from None


def require_share(share: float) -> None:
    require(0 <= share < 1, "share", share, "give the attackers' share of the clients, from 0 to below 1")


class _Liar:
    """Abstract: trains honestly, sends another update, and wants no particular label."""

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
    """Sends its update with the opposite sign, times `factor`."""

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
    """Adds Gaussian noise to its update, with on average `factor` times the norm of the update."""

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
    """Sends w back unchanged: it does not train and contributes nothing."""

    share: float = 0.2

    def __post_init__(self) -> None:
        require_share(self.share)

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return replace(work, epochs=0, honest=False)


@register(Threat)
@final
@dataclass(frozen=True)
class Colluding(_Liar):
    """A group that agreed on a direction: all send it, each with `factor` times the norm of its own update.

    Their norms are not unusual, and their updates are close to each other, which aggregators by distance take for
    agreement.
    """

    share: float = 0.2
    factor: float = 1.0
    agreed: int = 0  # the seed of the direction, which is the same in all rounds

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
    """Trains on its own data with every label c replaced by `classes` - 1 - c."""

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
        return torch.where(
            flipped_n == y_n, -1, flipped_n
        )  # with an odd number of classes the middle label does not change

    def flipped(self, y_n: Tensor) -> Tensor:
        return self.classes - 1 - y_n


@register(Threat)
@final
@dataclass(frozen=True)
class ModelReplacement:
    """The update of another attack times `factor` (Bagdasaryan et al. 2020): with the factor K / attackers it
    determines a plain mean."""

    factor: float = 5.0
    threat: Threat = field(default_factory=Backdoor)

    def __post_init__(self) -> None:
        _require_factor(self.factor)
        _require_own_work(self.threat)

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


class _Insider(_Liar):
    """Abstract: its update is computed from the honest updates, so that it does not train."""

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return replace(work, epochs=0, honest=False)


@register(Threat)
@final
@dataclass(frozen=True)
class InnerProduct(_Insider):
    """Inner-product manipulation (Xie et al. 2020, "Fall of Empires"): -epsilon times the mean of the honest updates.

    The mean of all updates has the opposite direction of the honest mean where epsilon > H / A. The default is the
    paper's attack on means: 10 is enough for one attacker per ten honest clients. A small epsilon, such as 0.5, is an
    attack on aggregators that leave out distant updates.
    """

    share: float = 0.2
    epsilon: float = 10.0

    def __post_init__(self) -> None:
        require_share(self.share)
        require(0 < self.epsilon <= 1e9, "epsilon", self.epsilon, "give the factor on the honest mean, above 0")

    def conspire(self, honest_HP: Tensor, own_AP: Tensor) -> Tensor:
        return (-self.epsilon * honest_HP.mean(0)).expand_as(own_AP)


@register(Threat)
@final
@dataclass(frozen=True)
class LittleIsEnough(_Insider):
    """ "A little is enough" (Baruch et al. 2019): in each coordinate the honest mean less z standard deviations.

    z = 0 chooses the paper's z for the numbers of clients and attackers in the round: the largest z at which enough
    honest clients are farther from the mean to be a majority together with the attackers. With few attackers it is no
    shift at all; then 1.5 is usual.
    """

    share: float = 0.2
    z: float = 0.0

    def __post_init__(self) -> None:
        require_share(self.share)
        require(0 <= self.z <= 1e9, "z", self.z, "give standard deviations, or 0 for the paper's z")

    def shift(self, clients: int, attackers: int) -> float:
        """z: with s = floor(n / 2 + 1) - m honest supporters needed, phi(z) = (n - m - s) / (n - m); never below 0."""
        honest = clients - attackers
        supporters = max(1, clients // 2 + 1 - attackers)
        return self.z or NormalDist().inv_cdf(max(0.5, (honest - supporters) / honest))

    def conspire(self, honest_HP: Tensor, own_AP: Tensor) -> Tensor:
        z = self.shift(len(honest_HP) + len(own_AP), len(own_AP))
        return (honest_HP.mean(0) - z * honest_HP.std(0, correction=0)).expand_as(own_AP)


@register(Threat)
@final
@dataclass(frozen=True)
class MinMax(_Insider):
    """Min-max (Shejwalkar and Houmansadr 2021): the honest mean plus gamma times a perturbation, with the largest gamma
    at which its distance to each honest update is at most the largest distance between two honest updates.

    The perturbation is the negative of the standard deviation by coordinate ("std"), of the mean's direction ("unit")
    or of the mean's signs ("sign"). The paper finds gamma by bisection; here it is the root of a quadratic equation.
    """

    perturbation: Literal["std", "unit", "sign"] = "std"
    share: float = 0.2

    def __post_init__(self) -> None:
        require_share(self.share)

    def conspire(self, honest_HP: Tensor, own_AP: Tensor) -> Tensor:
        mean_P = honest_HP.mean(0)
        if self.perturbation == "std":
            along_P = -honest_HP.std(0, correction=0)
        else:
            along_P = -torch.sign(mean_P) if self.perturbation == "sign" else -mean_P
        length = _norm(along_P)
        if length == 0:
            return mean_P.expand_as(own_AP)
        along_P = along_P / length
        widest = max((_norm(one - other) for one, other in combinations(honest_HP, 2)), default=0.0)
        # |mean + gamma along - u_i| = widest for each honest u_i, where |along| = 1; the nearest root binds.
        gamma = math.inf
        for u_P in honest_HP:
            behind = float((mean_P - u_P).double() @ along_P.double())
            inside = max(0.0, behind**2 + widest**2 - _norm(mean_P - u_P) ** 2)
            gamma = min(gamma, max(0.0, math.sqrt(inside) - behind))
        return (mean_P + gamma * along_P).expand_as(own_AP)


@register(Threat)
@final
@dataclass(frozen=True)
class Sybils:
    """One attacker under many names: all send the same update, which the first of them that answered computed by
    `threat`. Attackers of `colluding` share only the direction, and each keeps the norm of its own update."""

    threat: Threat = field(default_factory=Backdoor)

    def __post_init__(self) -> None:
        _require_own_work(self.threat)

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
        return self.threat.report(update_P, seed, round)

    def conspire(self, honest_HP: Tensor, own_AP: Tensor) -> Tensor:
        return own_AP[0].expand_as(own_AP)

    def goal(self, y_n: Tensor) -> Tensor:
        return self.threat.goal(y_n)


def _norm(vector_P: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector_P, dtype=torch.float64))


def _require_own_work(threat: Threat) -> None:
    fix = "its updates are computed from the honest updates; give an attack that each attacker computes alone"
    require(omniscient(threat) is None, "threat", type(threat).__name__, fix)


def _require_factor(factor: float) -> None:
    require(0 < factor <= 1e9, "factor", factor, "give the factor on the norm, above 0 and up to 1e9")
