"""The folder in which a wrapped Flower client keeps its own models: v_i and P_i. Neither ever leaves it.

    FOLDER/EXPERIMENT/client-NAME/adapted/round-000012.model    v_i by the round that wrote it
    FOLDER/EXPERIMENT/client-NAME/private/round-000012.model    P_i likewise, with its scores so far
    FOLDER/EXPERIMENT/client-NAME/choice                        which model predicts: w, v_i or P_i
    FOLDER/EXPERIMENT/client-NAME/evaluation                    the last evaluation's config
    FOLDER/EXPERIMENT/client-NAME/session                       the server's session that was met last
    FOLDER/EXPERIMENT/client-NAME/lock

A model is its arrays, and the records of Context.state that the app's functions left while they worked on it. Each file
is written aside, synced and renamed, and begins with a checksum of the rest. torch is not imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from lindt.client.private_store import forget_after, prune
from lindt.errors import PlanError, UserError
from lindt.flower.messages import Instruction, pack_records, unpack_records
from lindt.runs.files import BrokenError, locked, read_plain, remove, write_whole

SUM: Final = 32  # bytes of the checksum
ONLY: Final = 0  # a store of versions holds those of one client


def default_folder() -> Path:
    """LINDT_PRIVATE, or the user's own data folder: it must outlive a restart, so it is no cache."""
    if os.environ.get("LINDT_PRIVATE"):
        return Path(os.environ["LINDT_PRIVATE"])
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "lindt" / "private"


def client_home(folder: Path, experiment: str, client: str) -> Path:
    name = quote(client, safe="")
    if not 0 < len(name) <= 200:
        raise PlanError("client_id", client, "give a name of 1 to 200 characters")
    return folder / experiment / f"client-{name}"  # the prefix keeps `..` from leading out


def lock_client(home: Path, wait: float = 60.0) -> AbstractContextManager[None]:
    """One process a client. A node that was killed may leave a process that still trains: it is waited for."""
    home.mkdir(parents=True, exist_ok=True)
    busy = (
        f"{home}: another process has trained this client for {wait:g} seconds; "
        "stop it, or give each client an id of its own"
    )
    return locked(home / "lock", wait=wait, busy=busy)


@final
@dataclass(frozen=True)
class LocalModel:
    """v_i or P_i: its arrays, the state that belongs to it, and notes about it."""

    arrays: ArrayRecord
    state: RecordDict
    notes: dict[str, Any] = field(default_factory=dict)

    def pack(self) -> bytes:
        records = {f"state/{name}": record for name, record in self.state.items()}
        own: dict[str, Any] = {"arrays": self.arrays, "notes": ConfigRecord({"notes": json.dumps(self.notes)})}
        return pack_records(RecordDict(own | records))

    @classmethod
    def unpack(cls, content: bytes) -> LocalModel:
        records = unpack_records(content)
        arrays, notes = records.get("arrays"), records.get("notes")
        if not isinstance(arrays, ArrayRecord) or not isinstance(notes, ConfigRecord):
            raise ValueError("there are no arrays, or no notes")
        state = {name.removeprefix("state/"): r for name, r in records.items() if name.startswith("state/")}
        return cls(arrays, RecordDict(state), json.loads(str(notes["notes"])))


@final
class ModelVersions:
    """The versions of one model, by the round that wrote them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.model"

    def rounds(self, client: int = ONLY) -> list[int]:
        names = [path.stem.removeprefix("round-") for path in self.folder.glob("round-*.model")]
        return [int(name) for name in names if name.isdecimal()]

    def drop(self, client: int, round: int) -> None:
        remove(self._path(round))

    def newest(self, *, up_to: int) -> LocalModel | None:
        rounds = [round for round in self.rounds() if round <= up_to]
        if not rounds:
            return None
        path = self._path(max(rounds))
        try:
            return LocalModel.unpack(unsealed(read_plain(path)))
        except (BrokenError, ValueError, KeyError) as error:
            raise UserError(f"{path} is damaged ({error}); delete it, and the model is trained anew") from None

    def write(self, model: LocalModel, instruction: Instruction) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(instruction.round), sealed(model.pack()))
        prune(self, ONLY, instruction.keep)


@final
class Vault:
    """One client's own models in one experiment."""

    def __init__(self, folder: Path, experiment: str, client: str) -> None:
        self.home = client_home(folder, experiment, client)
        self.adapted = ModelVersions(self.home / "adapted")  # v_i
        self.private = ModelVersions(self.home / "private")  # P_i

    def locked(self) -> AbstractContextManager[None]:
        return lock_client(self.home)

    def begin_session(self, instruction: Instruction) -> None:
        """Drop what was learned in rounds that the server's session, if it is new, will play again."""
        mark = self.home / "session"
        if not mark.exists() or mark.read_bytes() != instruction.session.encode():
            for versions in (self.adapted, self.private):
                forget_after(versions, ONLY, instruction.since)
            write_whole(mark, instruction.session.encode())  # last: after a crash in between, the session is new again

    def keep_choice(self, choice: str) -> None:
        """Which model predicts: w, v_i or P_i."""
        if choice != self.choice():
            write_whole(self.home / "choice", choice.encode())

    def choice(self) -> str:
        path = self.home / "choice"
        return path.read_text() if path.exists() else "w"

    def keep_evaluation(self, kind: str, others: RecordDict) -> None:
        """The type of the last evaluation's message, and its records besides the arrays."""
        content = sealed(pack_records(RecordDict({"kind": ConfigRecord({"kind": kind})} | _prefixed(others))))
        path = self.home / "evaluation"
        if not path.exists() or path.read_bytes() != content:
            write_whole(path, content)

    def last_evaluation(self) -> tuple[str, RecordDict] | None:
        path = self.home / "evaluation"
        if not path.exists():
            return None
        try:
            records = unpack_records(unsealed(read_plain(path)))
            kind = str(records.config_records["kind"]["kind"])
        except (BrokenError, ValueError, KeyError):
            return None  # the next evaluation writes it anew
        others = {name.removeprefix("of/"): r for name, r in records.items() if name.startswith("of/")}
        return kind, RecordDict(others)


def _prefixed(records: RecordDict) -> dict[str, Any]:
    return {f"of/{name}": record for name, record in records.items()}


def sealed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest() + content


def unsealed(content: bytes) -> bytes:
    if hashlib.sha256(content[SUM:]).digest() != content[:SUM]:
        raise BrokenError("its checksum does not add up")
    return content[SUM:]
