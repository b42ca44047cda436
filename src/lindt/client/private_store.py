"""The store of a client's v_i: in versions, each named by the round that wrote it.

Training in round r reads the newest version older than r; evaluating after r reads the newest version up to r. So a
round that is repeated after a crash finds the same v_i. A version is deleted only when there is a newer one that the
oldest kept checkpoint can use.

On disk a run of up to MANY clients has a folder for each client, with a file for each version (`FolderStore`). A run of
more clients has SHARDS SQLite files (`ShardStore`): a file system does not bear millions of small files.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Final, Protocol, final

from lindt.errors import UserError
from lindt.protocols import MANY
from lindt.runs.files import remove, seal, unseal, write_whole

if TYPE_CHECKING:  # other versions are pruned by these functions, too, without importing torch
    from torch import Tensor

Kept = tuple[dict[str, "Tensor"], dict[str, float]]  # v_i by name, and the method's notes of that round


class Versions(Protocol):
    """A store whose versions can be deleted by round."""

    def rounds(self, client: int) -> list[int]: ...
    def drop(self, client: int, round: int) -> None: ...


class PrivateStore(Versions, Protocol):
    def read(self, client: int, round: int) -> Kept: ...
    def write(self, client: int, round: int, kept: Kept) -> None: ...
    def flush(self) -> None:
        """Wait until all that was written is on disk; raises the error of a failed write."""
        ...

    def newest_rounds(self, up_to: int) -> dict[int, int]:
        """The round of the newest version up to a round, of each client that has one."""
        ...

    def drop_after(self, round: int) -> None:
        """Delete every version written after a round."""
        ...


def newest(versions: PrivateStore, client: int, *, up_to: int) -> Kept | None:
    rounds = [round for round in versions.rounds(client) if round <= up_to]
    return versions.read(client, max(rounds)) if rounds else None


def prune(versions: Versions, client: int, keep: int) -> None:
    """Delete the versions that no checkpoint from round `keep` on needs."""
    old = sorted(round for round in versions.rounds(client) if round <= keep)
    for round in old[:-1]:
        versions.drop(client, round)


def forget_after(versions: Versions, client: int, round: int) -> None:
    for later in [r for r in versions.rounds(client) if r > round]:
        versions.drop(client, later)


def meet_session(versions: Versions, client: int, mark: Path, session: str, since: int) -> None:
    """Before a task of a server's session: where the session is new, drop every v_i written after round `since`.

    A server that is resumed from round `since` begins a new session and plays the later rounds again. `mark` is the
    file with the session that the client met last; v_i written in that session stay.
    """
    if not mark.exists() or mark.read_bytes() != session.encode():
        forget_after(versions, client, since)
        write_whole(mark, session.encode())  # last: after a crash in between, the session is new again


@final
class MemoryStore:
    """Versions in memory, for runs without a folder."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, Kept]] = {}

    def rounds(self, client: int) -> list[int]:
        return list(self._kept.get(client, {}))

    def read(self, client: int, round: int) -> Kept:
        return self._kept[client][round]

    def write(self, client: int, round: int, kept: Kept) -> None:
        self._kept.setdefault(client, {})[round] = _copied(kept)

    def drop(self, client: int, round: int) -> None:
        del self._kept[client][round]

    def flush(self) -> None:
        """Nothing to do: versions in memory are lost with the process."""

    def newest_rounds(self, up_to: int) -> dict[int, int]:
        return _newest_rounds(self, self._kept, up_to)

    def drop_after(self, round: int) -> None:
        for client in self._kept:
            forget_after(self, client, round)


@final
class FolderStore:
    """One sealed file for each version: written to a temporary name, synced, renamed. Reading executes no code."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder / run

    def _path(self, client: int, round: int) -> Path:
        return self.folder / f"client-{client:05d}" / f"round-{round:06d}.safetensors"

    def rounds(self, client: int) -> list[int]:
        home = self.folder / f"client-{client:05d}"
        names = [path.stem.removeprefix("round-") for path in home.glob("round-*.safetensors")]
        return [int(name) for name in names if name.isdecimal()]

    def has(self, client: int, round: int) -> bool:
        return self._path(client, round).exists()

    def read(self, client: int, round: int) -> Kept:
        path = self._path(client, round)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{path} is damaged ({error}); start a new run in another folder") from None
        return _unsealed(content, str(path))

    def write(self, client: int, round: int, kept: Kept) -> None:
        path = self._path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _sealed(kept))

    def drop(self, client: int, round: int) -> None:
        remove(self._path(client, round))

    def flush(self) -> None:
        """Nothing to do: `write` returns after the file is synced."""

    def newest_rounds(self, up_to: int) -> dict[int, int]:
        return _newest_rounds(self, self._clients(), up_to)

    def drop_after(self, round: int) -> None:
        for client in self._clients():
            forget_after(self, client, round)

    def _clients(self) -> list[int]:
        names = [path.name.removeprefix("client-") for path in self.folder.glob("client-*")]
        return sorted(int(name) for name in names if name.isdecimal())


def _newest_rounds(versions: Versions, clients: Iterable[int], up_to: int) -> dict[int, int]:
    found = {client: [round for round in versions.rounds(client) if round <= up_to] for client in clients}
    return {client: max(rounds) for client, rounds in found.items() if rounds}


SHARDS: Final = 8  # files of a run: one damaged file costs an eighth of the clients
WAITING: Final = 32 * 2**20  # bytes that are written in one transaction, about
BUSY: Final = 120  # seconds to wait for another worker's transaction
JOURNAL_MAGIC: Final = bytes.fromhex("d9d505f920a163d7")
TABLE: Final = (
    "CREATE TABLE v (client INTEGER NOT NULL, round INTEGER NOT NULL, sealed BLOB NOT NULL, "
    "PRIMARY KEY (client, round))"
)


@final
class ShardStore:
    """Versions of all clients in SHARDS SQLite files, client i in file i modulo SHARDS. Workers may share them.

    Changes are collected, and one transaction for each file makes them durable at `flush`, or when WAITING bytes have
    come together: a crash loses whole transactions, never half of one. Each version is sealed with a checksum. Reading
    executes nothing: a file with anything but the one table is refused.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder / run
        self._open: dict[int, sqlite3.Connection] = {}
        self._waiting: dict[int, dict[int, bytes | None]] = {}  # by client and round; None for a version to delete
        self._bytes = 0  # of these
        self._lock = RLock()  # `BackgroundWriter` writes in a thread

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard}.sqlite"

    @contextmanager
    def _shard(self, shard: int, write: bool = False) -> Iterator[sqlite3.Connection | None]:
        """The connection to a file in a transaction, to read or to `write`; to read None where there is no file."""
        path = self._path(shard)
        with self._lock:
            try:
                if shard not in self._open:
                    if not path.exists() and not write:
                        yield None
                        return
                    self._open[shard] = self._connected(path)
                connection = self._open[shard]
                connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
                with connection:  # commits, or rolls back
                    yield connection
            except sqlite3.DatabaseError as error:
                raise UserError(
                    f"{path} cannot be used ({error}); where the file is damaged, start a new run in another folder"
                ) from None

    def _connected(self, path: Path) -> sqlite3.Connection:
        path.parent.mkdir(parents=True, exist_ok=True)
        if names_other_files(path.with_name(f"{path.name}-journal")):
            raise UserError(f"{path}-journal names a file outside of the store; delete it, or use another folder")
        connection = sqlite3.connect(path, timeout=BUSY, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.execute("PRAGMA synchronous = FULL")
        found = connection.execute("SELECT sql FROM sqlite_master").fetchall()
        if not found:  # asked again inside: another worker may have made the table
            connection.execute("BEGIN IMMEDIATE")
            if not connection.execute("SELECT sql FROM sqlite_master").fetchall():
                connection.execute(TABLE)
            connection.execute("COMMIT")
            found = connection.execute("SELECT sql FROM sqlite_master").fetchall()
        if found != [(TABLE,), (None,)]:  # the table and the index of its key
            connection.close()
            raise UserError(f"{path} is not a file of v_i; start a new run in another folder")
        return connection

    def rounds(self, client: int) -> list[int]:
        with self._lock:
            with self._shard(client % SHARDS) as shard:
                rows = () if shard is None else shard.execute("SELECT round FROM v WHERE client = ?", (client,))
                found = {round for (round,) in rows}
            if not all(type(round) is int for round in found):  # SQLite keeps a text in a column of integers
                raise UserError(f"{self._path(client % SHARDS)} is damaged; start a new run in another folder")
            for round, sealed in self._waiting.get(client, {}).items():
                found = found - {round} if sealed is None else found | {round}
            return sorted(found)

    def has(self, client: int, round: int) -> bool:
        return round in self.rounds(client)

    def read(self, client: int, round: int) -> Kept:
        with self._lock:
            sealed = self._waiting.get(client, {}).get(round)
            if sealed is None:
                asked = "SELECT sealed FROM v WHERE client = ? AND round = ?"
                with self._shard(client % SHARDS) as shard:
                    row = None if shard is None else shard.execute(asked, (client, round)).fetchone()
                sealed = b"" if row is None else row[0]
        return _unsealed(sealed, f"{self._path(client % SHARDS)}: v_i of client {client}, round {round},")

    def write(self, client: int, round: int, kept: Kept) -> None:
        self._change(client, round, _sealed(kept))

    def drop(self, client: int, round: int) -> None:
        if round not in self.rounds(client):
            raise KeyError(round)
        self._change(client, round, None)

    def _change(self, client: int, round: int, sealed: bytes | None) -> None:
        with self._lock:
            self._waiting.setdefault(client, {})[round] = sealed
            self._bytes += 100 + len(sealed or b"")
            if self._bytes > WAITING:
                self.flush()

    def flush(self) -> None:
        with self._lock:
            for number in sorted({client % SHARDS for client in self._waiting}):
                changes = [
                    (client, round, sealed)
                    for client, versions in self._waiting.items()
                    if client % SHARDS == number
                    for round, sealed in versions.items()
                ]
                with self._shard(number, write=True) as shard:
                    assert shard is not None
                    written = [change for change in changes if change[2] is not None]
                    dropped = [change[:2] for change in changes if change[2] is None]
                    shard.executemany("INSERT OR REPLACE INTO v VALUES (?, ?, ?)", written)
                    shard.executemany("DELETE FROM v WHERE client = ? AND round = ?", dropped)
            self._waiting.clear()
            self._bytes = 0

    def newest_rounds(self, up_to: int) -> dict[int, int]:
        found: dict[int, int] = {}
        with self._lock:
            self.flush()
            for number in range(SHARDS):
                with self._shard(number) as shard:
                    asked = "SELECT client, MAX(round) FROM v WHERE round <= ? GROUP BY client"
                    found |= {} if shard is None else dict(shard.execute(asked, (up_to,)).fetchall())
        return found

    def drop_after(self, round: int) -> None:
        with self._lock:
            self.flush()
            for number in range(SHARDS):
                if self._path(number).exists():
                    with self._shard(number, write=True) as shard:
                        assert shard is not None
                        shard.execute("DELETE FROM v WHERE round > ?", (round,))


def names_other_files(journal: Path) -> bool:
    """Whether a journal names a super-journal. SQLite would delete the file of that name when it rolls back.

    Only transactions over several databases have one; the files of a store are written one by one. A name lies at the
    end of the journal, before SQLite's magic bytes.
    """
    try:
        with journal.open("rb") as file:
            file.seek(-min(len(JOURNAL_MAGIC), journal.stat().st_size), os.SEEK_END)
            return file.read() == JOURNAL_MAGIC
    except FileNotFoundError:
        return False


def private_store(folder: Path, run: str, clients: int) -> FolderStore | ShardStore:
    """The store of a run's v_i on disk. A run that was begun with a folder for each client keeps it."""
    if clients > MANY and not any((folder / run).glob("client-*")):
        return ShardStore(folder, run)
    return FolderStore(folder, run)


def _sealed(kept: Kept) -> bytes:
    tensors, notes = kept
    return seal(tensors, {"notes": json.dumps(notes, sort_keys=True)})


def _unsealed(content: bytes, where: str) -> Kept:
    try:
        tensors, words = unseal(content)
        return tensors, {str(name): float(value) for name, value in json.loads(words["notes"]).items()}
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{where} is damaged ({error}); start a new run in another folder") from None


@final
class BackgroundWriter:
    """Writes versions in a background thread: the next client trains while the disk is synced."""

    def __init__(self, versions: PrivateStore) -> None:
        self._versions = versions
        self._thread = ThreadPoolExecutor(1, "v_i")
        self._writing: tuple[int, Future[None]] | None = None  # the client, and the pending write

    def flush(self) -> None:
        self._wait()
        self._versions.flush()

    def _wait(self) -> None:
        if self._writing is not None:
            _, end = self._writing
            try:
                end.result()
            finally:
                if end.done():  # after an interrupted wait the write is still pending
                    self._writing = None

    def newest_rounds(self, up_to: int) -> dict[int, int]:
        self.flush()
        return self._versions.newest_rounds(up_to)

    def drop_after(self, round: int) -> None:
        self.flush()
        self._versions.drop_after(round)

    def rounds(self, client: int) -> list[int]:
        self._settle(client)
        return self._versions.rounds(client)

    def read(self, client: int, round: int) -> Kept:
        self._settle(client)
        return self._versions.read(client, round)

    def write(self, client: int, round: int, kept: Kept) -> None:
        self._wait()  # one write after the other, so that a crash never leaves a later version without an earlier one
        self._writing = client, self._thread.submit(self._versions.write, client, round, _copied(kept))

    def drop(self, client: int, round: int) -> None:
        self._wait()
        self._versions.drop(client, round)

    def _settle(self, client: int) -> None:
        if self._writing is not None and self._writing[0] == client:
            self._wait()


def _copied(kept: Kept) -> Kept:
    """A copy of the tensors, since their module is trained further."""
    tensors, notes = kept
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, dict(notes)
