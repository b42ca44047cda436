"""Clients whose data are made or sliced when they are visited: for more clients than fit into memory.

`LazyClients` is what a user gives, `VisitedData` what training reads. Nothing here lists all N clients; what is
remembered grows with the clients that were visited, by about 100 bytes each.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, SupportsIndex, final

import numpy as np
import torch

from lindt.data.examples import label_counts
from lindt.errors import UserError
from lindt.protocols import Examples, tensors_of
from lindt.seeds import isolated_random_state

RECENT: Final = 64  # clients whose data stay in memory after a visit
CHECKED: Final = 64  # clients that are read before training
KNOWN: Final = 10_000  # clients whose `Facts` are remembered


@final
@dataclass(frozen=True)
class LazyClients(Sequence[Sequence[object]]):
    """N clients as a sequence whose items are made when they are visited, for `clients=` of `lindt.run` and others.

    `make(i)` returns the data of client i in the form of an item of `clients`: a pair (train, test), or (train,
    validation, test). It is called at every visit, so its result must depend on i alone: draw from a seed that names
    the client. A client whose data differ between two visits ends the run.

    Args:
        clients: N, the number of clients.
        make: A function of a client's number, from 0 to N - 1.

    Raises:
        UserError: `clients` is below 2, or `make` is not a function.

    Examples:
        >>> import lindt, torch
        >>> def make(i):
        ...     x = torch.randn(20, 2, generator=torch.Generator().manual_seed(i))
        ...     y = (x[:, i % 2] > 0).long()
        ...     return (x[:10], y[:10]), (x[10:], y[10:])
        >>> clients = lindt.LazyClients(1_000_000, make)
        >>> len(clients), len(clients[123_456])
        (1000000, 2)
    """

    clients: int  # N
    make: Callable[[int], Sequence[object]]  # of a client's number, from 0

    def __post_init__(self) -> None:
        if type(self.clients) is not int or self.clients < 2:
            raise UserError(f"clients: it is {self.clients!r}; give the number of clients, at least 2")
        if not callable(self.make):
            raise UserError(
                f"make: it is of type {type(self.make).__name__}; give a function of a client's number that returns "
                "its data"
            )

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: SupportsIndex) -> Sequence[object]:  # type: ignore[override]  # no slices
        number = operator.index(client)
        if not 0 <= number < self.clients:
            raise IndexError(f"client {number} does not exist: there are clients 0 to {self.clients - 1}")
        return self.make(number)


class Facts(NamedTuple):
    """What a run records of a visited client."""

    train: int  # training samples
    test: int  # test samples
    labels: dict[str, int]  # training samples of each class; empty where labels are no classes
    finite: bool  # whether no sample holds NaN or infinity
    data: str  # a hash of its samples


class Made(NamedTuple):
    """The data of one client, as it was made for one visit."""

    parts: tuple[Examples, ...]  # train and test, or train, validation and test
    batch: int | None  # of a DataLoader


@final
class VisitedData(Sequence[tuple[Examples, Examples]]):
    """The (train, test) of each client, read at each visit. The last RECENT clients stay in memory.

    `read` makes and checks a client's data. Each client is compared with its visit before, and its parts with those of
    client 0.
    """

    def __init__(self, count: int, read: Callable[[int], Made]) -> None:
        self._count, self._read = count, read
        self._recent: OrderedDict[int, Made] = OrderedDict()
        self._facts: OrderedDict[int, Facts] = OrderedDict()
        self._hashes: dict[int, int] = {}
        self._first: Made | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, client: SupportsIndex) -> tuple[Examples, Examples]:  # type: ignore[override]  # no slices
        parts = self.made(operator.index(client)).parts
        return parts[0], parts[-1]

    def __iter__(self) -> NoReturn:
        """Not allowed: a loop over all clients would make the data of each of them."""
        raise TypeError("a loop over all lazy clients; loop over the problem's `checked` clients")

    @property
    def checked(self) -> tuple[int, ...]:
        """The clients that are read before training: the first one, and others drawn at random."""
        if self._count <= CHECKED:
            return tuple(range(self._count))
        drawn = np.random.default_rng(0).choice(self._count, CHECKED - 1, replace=False).tolist()
        return tuple(sorted({0, *drawn}))

    def made(self, client: int) -> Made:
        found = self._recent.get(client)
        if found is None:
            found = self._read(client)
            self._compare(client, found)
            self._recent[client] = found
            if len(self._recent) > RECENT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(client)
        return found

    def facts(self, client: int) -> Facts:
        """What a run records of a client; it is visited again where this is not remembered."""
        if client not in self._facts:
            self._recent.pop(client, None)
            self.made(client)
        return self._facts[client]

    def expect(self, client: int, data: str) -> None:
        """Compare the next visit of a client with the hash of an earlier one, as `facts` had it before a resume."""
        self._hashes.setdefault(client, int(data, 16))

    def _compare(self, client: int, found: Made) -> None:
        if self._first is None:
            self._first = found if client == 0 else self.made(0)
        if len(found.parts) != len(self._first.parts):
            has = "a" if len(found.parts) == 3 else "no"
            raise UserError(
                f"clients[{client}]: it has {has} validation part, unlike client 0; give all the same parts"
            )
        if found.batch != self._first.batch:
            raise UserError(
                f"clients[{client}]: the batch_size of its DataLoader is {found.batch}, that of client 0 "
                f"{self._first.batch}; give all the same"
            )
        facts = _facts(found.parts)
        if self._hashes.setdefault(client, int(facts.data, 16)) != int(facts.data, 16):
            raise UserError(
                f"clients[{client}]: its data differ from those of an earlier visit; make them from the client's "
                "number alone, with a seed that names the client"
            )
        self._facts[client] = facts
        if len(self._facts) > KNOWN:
            self._facts.popitem(last=False)


@final
class VisitedValidation(Sequence[Examples]):
    """The validation part of each client, where lazy clients have one."""

    def __init__(self, data: VisitedData) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, client: SupportsIndex) -> Examples:  # type: ignore[override]  # no slices
        return self._data.made(operator.index(client)).parts[1]

    def __iter__(self) -> NoReturn:
        iter(self._data)
        raise AssertionError


def _facts(parts: Sequence[Examples]) -> Facts:
    digest, finite = hashlib.blake2b(digest_size=8), True
    with isolated_random_state(0, torch.device("cpu")):  # random augmentation then gives the same hash at each visit
        for data in parts:
            digest.update(f"{len(data)} ".encode())
            for rows in torch.arange(len(data)).split(1024):
                for tensor in (one for part in data.take(rows) for one in tensors_of(part)):
                    digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
                    digest.update(tensor.contiguous().numpy().tobytes())
                    finite = finite and (not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()))
        labels = label_counts(parts[0].labels)
    return Facts(len(parts[0]), len(parts[-1]), labels, finite, digest.hexdigest())
