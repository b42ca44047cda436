"""Where a client keeps its v_i: in versions named by the round that wrote them.

Training in round r reads the newest version older than r; evaluating after r reads the newest up to r. A
round that is played again after a crash therefore finds the same v_i. Old versions go only when a newer one
is at or before the oldest checkpoint kept.
"""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

from lindt.errors import UserError
from lindt.runs.files import remove, seal, unseal, write_whole

if TYPE_CHECKING:  # versions of what is no tensor are pruned without torch
    from torch import Tensor

Kept = tuple[dict[str, "Tensor"], dict[str, float]]  # v_i by name, and the method's notes of that round


class Versions(Protocol):
    """What can be forgotten round by round."""

    def rounds(self, client: int) -> list[int]: ...
    def drop(self, client: int, round: int) -> None: ...


class PrivateStore(Versions, Protocol):
    def read(self, client: int, round: int) -> Kept: ...
    def write(self, client: int, round: int, kept: Kept) -> None: ...
    def flush(self) -> None:
        """What was written is kept for good once this has returned; raises what went wrong."""
        ...


def newest(versions: PrivateStore, client: int, *, up_to: int) -> Kept | None:
    rounds = [round for round in versions.rounds(client) if round <= up_to]
    return versions.read(client, max(rounds)) if rounds else None


def prune(versions: Versions, client: int, keep: int) -> None:
    """Forget the versions that no checkpoint from round `keep` on can ask for."""
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
    """For runs without a folder."""

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
        """Nothing outlives the process."""


@final
class FolderStore:
    """One sealed file a version: written aside, synced, renamed; nothing in it is ever executed."""

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
            tensors, words = unseal(path.read_bytes())
            return tensors, {str(name): float(value) for name, value in json.loads(words["notes"]).items()}
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
            raise UserError(f"{path} is damaged ({error}); start the run anew in another folder") from None

    def write(self, client: int, round: int, kept: Kept) -> None:
        tensors, notes = kept
        path = self._path(client, round)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, seal(tensors, {"notes": json.dumps(notes, sort_keys=True)}))

    def drop(self, client: int, round: int) -> None:
        remove(self._path(client, round))

    def flush(self) -> None:
        """Written is synced."""


@final
class BackgroundWriter:
    """Versions that are written in a thread of their own: the next client trains while the disk is synced."""

    def __init__(self, versions: PrivateStore) -> None:
        self._versions = versions
        self._thread = ThreadPoolExecutor(1, "v_i")
        self._writing: tuple[int, Future[None]] | None = None  # whose, and its end

    def flush(self) -> None:
        if self._writing is not None:
            _, end = self._writing
            try:
                end.result()
            finally:
                if end.done():  # an interrupted wait is for another to end
                    self._writing = None

    def rounds(self, client: int) -> list[int]:
        self._settle(client)
        return self._versions.rounds(client)

    def read(self, client: int, round: int) -> Kept:
        self._settle(client)
        return self._versions.read(client, round)

    def write(self, client: int, round: int, kept: Kept) -> None:
        self.flush()  # one after the other: whatever ends the process leaves them in the order they came
        self._writing = client, self._thread.submit(self._versions.write, client, round, _copied(kept))

    def drop(self, client: int, round: int) -> None:
        self.flush()
        self._versions.drop(client, round)

    def _settle(self, client: int) -> None:
        if self._writing is not None and self._writing[0] == client:
            self.flush()


def _copied(kept: Kept) -> Kept:
    """The module they come from goes on training."""
    tensors, notes = kept
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, dict(notes)
