"""The clients that take part in a round (inactivity: Sec. 3.3, Fig. 1c). Each round has the same share of attackers.

Above MANY clients nothing here lists all of them: a role is a `Drawn` set, and the K clients of a round are drawn in
time and memory O(K). Up to MANY clients the draws are those of earlier versions.

Legend: N clients, K of them in a round.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

from lindt.errors import PlanError, require
from lindt.protocols import MANY as MANY
from lindt.registry import components_in, register
from lindt.seeds import seed_for

ROUNDS: Final = 8  # of the Feistel network
WORD: Final = 2**64 - 1


@final
@dataclass(frozen=True)
class Shuffle:
    """A random order of 0 to N - 1 that is computed at each place, so that no list of N is needed.

    It is a Feistel network over the next power of 4: a bijection. A result of N or more is put in again until it is
    below N, at most about 4 times on average, which leaves a bijection of 0 to N - 1.
    """

    N: int
    seed: int

    def at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """The clients at these places of the order."""
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= self.N):
            raise ValueError(f"a place is not in 0 to {self.N - 1}")
        found = self._forwards(places.astype(np.uint64))
        while len(outside := np.flatnonzero(found >= np.uint64(self.N))):
            found[outside] = self._forwards(found[outside])
        clients: NDArray[np.int64] = found.astype(np.int64)
        return clients

    def place(self, client: int) -> int:
        """The place of a client in the order: the inverse of `at`."""
        if not 0 <= client < self.N:
            raise ValueError(f"client {client} is not in 0 to {self.N - 1}")
        found = self._backwards(client)
        while found >= self.N:
            found = self._backwards(found)
        return found

    @cached_property
    def _half(self) -> int:
        """The bits of one half of a value."""
        return max(1, ((self.N - 1).bit_length() + 1) // 2)

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        return tuple(seed_for(self.seed, "shuffle", round) for round in range(ROUNDS))

    def _forwards(self, values: Any) -> Any:
        half, mask = self._half, (1 << self._half) - 1
        left, right = values >> half, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << half) | right

    def _backwards(self, value: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        left, right = value >> half, value & mask
        for key in reversed(self._keys):
            left, right = right ^ (_mixed(left ^ key) & mask), left
        return (left << half) | right


def _mixed(values: Any) -> Any:
    """The finalizer of splitmix64: each bit of the result depends on all bits. Of an integer, or of uint64s."""
    values = ((values ^ (values >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    values = ((values ^ (values >> 27)) * 0x94D049BB133111EB) & WORD
    return values ^ (values >> 31)


@final
@dataclass(frozen=True, eq=False)  # equal to any set of the same clients
class Drawn(Set[int]):
    """The clients at the places `start` to `stop` - 1 of a random order: a uniform draw, as a set without a list."""

    order: Shuffle
    start: int
    stop: int

    @classmethod
    def _from_iterable(cls, clients: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        return frozenset(clients)  # of a difference, a union or an intersection

    def __len__(self) -> int:
        return self.stop - self.start

    def __contains__(self, client: object) -> bool:
        if not isinstance(client, int) or not 0 <= client < self.order.N:
            return False
        if len(self) == self.order.N:
            return True
        return self.start <= self.order.place(client) < self.stop

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.at(np.arange(self.start, self.stop)).tolist())

    @property
    def others(self) -> Drawn:
        """The clients that are not in a set that begins at place 0."""
        if self.start:
            raise ValueError("the others of a draw are known only where it begins at place 0")
        return Drawn(self.order, self.stop, self.order.N)

    def sample(self, draw: np.random.Generator, count: int) -> NDArray[np.int64]:
        """`count` of these clients, drawn without replacement."""
        return self.order.at(self.start + draw.choice(len(self), count, replace=False))


def drawn(clients: int, count: int, seed: int) -> Drawn:
    """`count` of the clients 0 to `clients` - 1, drawn uniformly."""
    return Drawn(Shuffle(clients, seed), 0, count)


@components_in(__name__)
class Participation(Protocol):
    def active(self, seed: int, available: Sequence[int], attackers: Set[int], clients: int | None = None) -> list[int]:
        """The clients to ask in this round, in the order in which their answers are used.

        `clients` is N where some clients are not available; if fewer than K are available, all of them are asked.
        """
        ...

    def wanted(self, clients: int) -> int:
        """K: the number of answers that ends the round."""
        ...


@register(Participation)
@final
@dataclass(frozen=True)
class Sampled:
    """K of N clients are drawn in each round: K = `active_clients`, or floor(`rate` * N). round(share * K) attack.

    `over_select` asks that many more and uses the first K answers, as real servers do. In a simulation the order of
    arrival is the drawn order, and later answers are not used. Where fewer than K clients are available, all of them
    are asked. With `over_select` the attackers' share holds among the clients asked, not among the K that are used.
    """

    rate: float = 0.1
    active_clients: int = 0
    over_select: int = 0

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, "rate", self.rate, "give a share of the clients, above 0 and up to 1")
        require(self.active_clients >= 0, "active_clients", self.active_clients, "give K, or 0 to use `rate`")
        require(self.over_select >= 0, "over_select", self.over_select, "give 0 or more additional clients")

    def wanted(self, clients: int) -> int:
        if self.active_clients > clients:
            raise PlanError(
                "active_clients", self.active_clients, f"there are {clients} clients; give {clients} or fewer"
            )
        if self.active_clients:
            return self.active_clients
        K = math.floor(self.rate * clients + 1e-9)  # 0.29 * 100 is 28.999...
        if K < 1:
            least = math.ceil(1e4 / clients) / 1e4  # rounded up: 0.3333 * 3 is below 1
            raise PlanError("rate", self.rate, f"K = floor(rate * {clients}) is 0; raise it to {least}")
        return K

    def asked(self, clients: int) -> int:
        """How many clients are asked in a round where all of them are available."""
        return min(self.wanted(clients) + self.over_select, clients)

    def active(self, seed: int, available: Sequence[int], attackers: Set[int], clients: int | None = None) -> list[int]:
        if not available:
            return []
        # K follows from N, not from the number of connected clients: the plan asks for the same K in every round.
        K = min(self.asked(clients or len(available)), len(available))
        draw = np.random.default_rng(seed)
        if len(available) > MANY and isinstance(available, range) and (isinstance(attackers, Drawn) or not attackers):
            return _of_many(draw, available, attackers, K)
        ordered = sorted(available)  # the result does not depend on the order in which an engine lists clients
        hostile = [i for i in ordered if i in attackers]
        benign = [i for i in ordered if i not in attackers]
        h = min(round(len(hostile) / len(available) * K), len(hostile))
        h = max(h, K - len(benign))
        chosen = [*draw.choice(hostile, h, replace=False), *draw.choice(benign, K - h, replace=False)]
        return [int(i) for i in draw.permutation(chosen)]


def _of_many(draw: np.random.Generator, available: range, attackers: Set[int], K: int) -> list[int]:
    """K of all clients in time and memory O(K), with the attackers' share. `available` is all of them."""
    N = len(available)
    h = max(min(round(len(attackers) / N * K), len(attackers)), K - (N - len(attackers)))
    if isinstance(attackers, Drawn):
        chosen = np.concatenate([attackers.sample(draw, h), attackers.others.sample(draw, K - h)])
    else:
        chosen = draw.choice(N, K, replace=False)
    return [int(i) for i in draw.permutation(chosen)]


def choose_attackers(share: float, clients: int, seed: int) -> Set[int]:
    """The attackers of the whole run: round(share * N) clients."""
    if clients > MANY and round(share * clients):
        return drawn(clients, round(share * clients), seed)
    draw = np.random.default_rng(seed)
    return frozenset(int(i) for i in draw.choice(clients, round(share * clients), replace=False))
