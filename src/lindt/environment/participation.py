"""Who answers in a round: client inactivity (Sec. 3.3, Fig. 1c), with the attackers' share kept per round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np

from lindt.errors import PlanError, require
from lindt.registry import components_in, register


@components_in(__name__)
class Participation(Protocol):
    def active(
        self, seed: int, available: Sequence[int], attackers: frozenset[int], clients: int | None = None
    ) -> list[int]:
        """The clients asked in this round, in the order in which their answers are taken.

        `clients` is N where not all of them can be reached; fewer than K available are all asked.
        """
        ...

    def wanted(self, clients: int) -> int:
        """K: how many answers close the round."""
        ...


@register(Participation)
@final
@dataclass(frozen=True)
class Sampled:
    """K of N drawn anew each round: K = `active_clients`, or floor(`rate` * N). Of them round(share * K) attack.

    `over_select` asks that many more and takes the first K answers, as real servers do; in a simulation the
    order of arrival is the drawn order, and those who come too late have trained for nothing.
    Where fewer than K can be reached, all of them are asked.
    The attackers' share is then kept among those asked, not among the K that are taken.
    """

    rate: float = 0.1
    active_clients: int = 0
    over_select: int = 0

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, "rate", self.rate, "the active share of the clients lies in (0, 1]")
        require(self.active_clients >= 0, "active_clients", self.active_clients, "give K, or 0 to use `rate`")
        require(self.over_select >= 0, "over_select", self.over_select, "ask 0 or more clients too many")

    def wanted(self, clients: int) -> int:
        if self.active_clients > clients:
            raise PlanError("active_clients", self.active_clients, f"K is more than the N = {clients} clients")
        if self.active_clients:
            return self.active_clients
        K = math.floor(self.rate * clients + 1e-9)  # 0.29 * 100 is 28.999...
        if K < 1:
            least = math.ceil(1e4 / clients) / 1e4  # rounded up: 0.3333 of 3 clients is none
            raise PlanError("rate", self.rate, f"K = floor(rate * {clients}) is 0; raise it to {least}")
        return K

    def asked(self, clients: int) -> int:
        """How many clients are asked in a round where all of them are available."""
        return min(self.wanted(clients) + self.over_select, clients)

    def active(
        self, seed: int, available: Sequence[int], attackers: frozenset[int], clients: int | None = None
    ) -> list[int]:
        if not available:
            return []
        # K comes from N, not from who happens to be connected: the plan asks for as many in every round.
        K = min(self.asked(clients or len(available)), len(available))
        draw = np.random.default_rng(seed)
        ordered = sorted(available)  # the order in which an engine lists them changes nothing
        hostile = [i for i in ordered if i in attackers]
        benign = [i for i in ordered if i not in attackers]
        h = min(round(len(hostile) / len(available) * K), len(hostile))
        h = max(h, K - len(benign))
        chosen = [*draw.choice(hostile, h, replace=False), *draw.choice(benign, K - h, replace=False)]
        return [int(i) for i in draw.permutation(chosen)]


def choose_attackers(share: float, clients: int, seed: int) -> frozenset[int]:
    """round(share * N) clients, for the whole run."""
    draw = np.random.default_rng(seed)
    return frozenset(int(i) for i in draw.choice(clients, round(share * clients), replace=False))
