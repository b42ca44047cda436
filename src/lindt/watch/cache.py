"""Snapshots of runs, at most one every half second for any number of pages: watching must not slow the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from anyio import to_thread

from lindt.errors import UserError
from lindt.report.payload import PrivacySpent, progress
from lindt.report.reading import Run
from lindt.watch.index import RunIndex

T = TypeVar("T")
LOOK_EVERY = 0.5  # seconds
LIST_EVERY = 2.0
FORGET = 60.0  # seconds after which an unused snapshot is dropped


@final
@dataclass(frozen=True)
class More:
    """The event with the rounds after the first `have`; `rest` is everything in it except the rounds, as JSON."""

    event: str
    rest: str
    has_rounds: bool


@final
@dataclass(frozen=True)
class Snapshot:
    """A run at one moment; `run` is None where it is missing or unreadable. Each event is built only once."""

    run: Run | None
    spent: PrivacySpent | None = None
    told: dict[int, asyncio.Future[More]] = field(default_factory=dict)  # by `have`


@final
class SnapshotCache:
    """The snapshots of one event loop. Other threads read the files."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._kept: dict[str, tuple[float, asyncio.Future[Snapshot]]] = {}
        self._list: tuple[float, asyncio.Future[str]] | None = None

    async def at(self, id: str) -> Snapshot:
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(id)
        if kept is None or now - kept[0] >= LOOK_EVERY:
            self._kept = {name: one for name, one in self._kept.items() if now - one[0] < FORGET}
            kept = self._kept[id] = now, aside(lambda: self._look(id))
        snapshot = await asyncio.shield(kept[1])  # a client that disconnects must not cancel it for the others
        if snapshot.run is None:
            self._kept.pop(id, None)  # visitors may ask for any name: do not keep them all
        return snapshot

    async def more(self, id: str, snapshot: Snapshot, have: int) -> More:
        if have not in snapshot.told:
            snapshot.told[have] = aside(lambda: _more(id, snapshot, have))
        return await asyncio.shield(snapshot.told[have])

    async def listed(self) -> str:
        """The event with one row for every run."""
        now = asyncio.get_running_loop().time()
        if self._list is None or now - self._list[0] >= LIST_EVERY:
            self._list = now, aside(lambda: event("runs", self.index.run_rows()))
        return await asyncio.shield(self._list[1])

    def _look(self, id: str) -> Snapshot:
        try:
            run = self.index.run(id)
        except UserError:
            return Snapshot(None)
        return Snapshot(run, self.index.spent(id, run))


def aside(function: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.ensure_future(to_thread.run_sync(function))


def _more(id: str, snapshot: Snapshot, have: int) -> More:
    assert snapshot.run is not None
    assert snapshot.spent is not None
    found = progress(snapshot.run, id, snapshot.spent, have)
    rest = json.dumps({name: value for name, value in found.items() if name != "rounds"})
    return More(event("more", found), rest, bool(found["rounds"]))


def event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n"  # JSON has no line breaks of its own
