"""The folder in which a wrapped Flower client keeps its own models v_i and P_i. They never leave it.

    FOLDER/EXPERIMENT/client-NAME/adapted/round-000012.model    v_i by the round that wrote it
    FOLDER/EXPERIMENT/client-NAME/private/round-000012.model    P_i likewise, with its scores so far
    FOLDER/EXPERIMENT/client-NAME/choice                        the model with which the client predicts: w, v_i or P_i
    FOLDER/EXPERIMENT/client-NAME/evaluation                    the last evaluation's config
    FOLDER/EXPERIMENT/client-NAME/session                       the last session of the server
    FOLDER/EXPERIMENT/client-NAME/origin                        settings that identify the data and the model
    FOLDER/EXPERIMENT/client-NAME/aside                         models of other data or of another model
    FOLDER/EXPERIMENT/client-NAME/lock
    FOLDER/name                                                 the name of a client without a partition-id

A model is its arrays, and the records of Context.state that the app's functions wrote for it. Each file is written
under a temporary name, synced and renamed. The files of models and `evaluation` begin with a checksum of the rest. This
module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import quote

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from lindt.client.private_store import forget_after, prune
from lindt.errors import PlanError, UserError
from lindt.flower.messages import Instruction, changed_settings, pack_records, settings_of, unpack_records
from lindt.runs.files import BrokenError, locked, read_plain, remove, write_whole

SUM: Final = 32  # bytes of the checksum
ONLY: Final = 0  # the client number: a store has the versions of one client


def default_folder() -> Path:
    """LINDT_PRIVATE, or the user's data folder. It must survive a restart, so a cache folder will not do."""
    if os.environ.get("LINDT_PRIVATE"):
        return Path(os.environ["LINDT_PRIVATE"])
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "lindt" / "private"


def client_home(folder: Path, experiment: str, client: str) -> Path:
    name = quote(client, safe="")
    if not 0 < len(name) <= 200:
        raise PlanError("client_id", client, "give a name of 1 to 200 characters")
    return folder / experiment / f"client-{name}"  # with the prefix a client named `..` stays inside the folder


# The names in a client's folder; of a client with a dual model: client_store.py.
PARTS: Final = {"adapted", "private", "choice", "evaluation", "session", "origin", "aside", "lock"}
DUAL_PARTS: Final = {"v", "alone.safetensors", "alone.damaged", "alone.session"}


def is_client_home(folder: Path) -> bool:
    """Whether a folder holds nothing but what a client keeps, or wrote aside when it was killed."""
    known = PARTS | DUAL_PARTS
    return all(path.name in known or _written_aside(path.name) in known for path in folder.iterdir())


def _written_aside(name: str) -> str:
    """The name of the file that `.NAME.PID` was to replace; "" for other names."""
    dot, _, rest = name.partition(".")
    kept, _, process = rest.rpartition(".")
    return kept if not dot and process.isdecimal() else ""


def unwritable(folder: Path, error: OSError) -> str:
    """One sentence: why the client cannot keep its models, and how to correct it."""
    return (
        f"the folder of its models, {folder}, cannot be used ({error.strerror or error}); make it writable, or name "
        "another with LINDT_PRIVATE or folder="
    )


def is_in(folder: Path, error: OSError) -> bool:
    """Whether an OSError is about a file in `folder`, and not about a file of the app."""
    named = error.filename
    return isinstance(named, str | os.PathLike) and Path(named).is_relative_to(folder)


def kept_name(folder: Path, node: int, visit: str) -> str:
    """The name of a client that has no other: made once, and kept in its folder.

    `visit` identifies the message by experiment, session, round and type. Each node gets it once, so two nodes that
    share a folder are detected in the first round in which both are asked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "name"
    with locked(folder / "name.lock", wait=60.0, busy=f"{path}: another process has held it for 60 seconds; stop it"):
        found = {"name": f"site-{secrets.token_hex(6)}", "node": "", "visit": ""}
        if path.exists():
            try:
                found = json.loads(read_plain(path))
                if not all(isinstance(found[key], str) for key in ("name", "node", "visit")):
                    raise ValueError("name, node or visit is not a string")
            except (BrokenError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise UserError(
                    f"{path} is damaged ({error}); restore it, or delete it: the client then gets a new name, and "
                    "trains its models again"
                ) from None
        if found["visit"] == visit and found["node"] != str(node):
            raise UserError(
                f"{folder} is used by two nodes, {found['node']} and {node}; give each node a folder of its own "
                "(LINDT_PRIVATE or folder=), or a partition-id or client_id"
            )
        if (found["visit"], found["node"]) != (visit, str(node)):
            write_whole(path, json.dumps({"name": found["name"], "node": str(node), "visit": visit}).encode())
        return found["name"]


def origin_of(
    node_config: Mapping[str, Any], run_config: Mapping[str, Any], arrays: ArrayRecord, examples: int | None
) -> dict[str, str]:
    """The settings that identify a client's data, model and training, without reading the data.

    Any setting of `run_config` may choose the data (`iid`), or how a model is trained (`learning-rate`): w and a P_i of
    other settings cannot be compared.
    """
    shapes = sorted((name, list(array.shape)) for name, array in arrays.items())
    found = {
        "node_config": json.dumps(dict(node_config), sort_keys=True, default=str),
        "run_config": json.dumps(settings_of(run_config)),
        "names and shapes of arrays": hashlib.sha256(json.dumps(shapes).encode()).hexdigest(),
    }
    return found if examples is None else found | {"number of examples": str(examples)}


def set_aside_moved(home: Path, parts: Sequence[str], origin: Mapping[str, str], visitor: tuple[str, str]) -> str:
    """Set models aside if the client's data or model have changed. Returns a sentence about it, "" if nothing changed.

    `visitor` is the type of the message, and the server's session with the node's id. `origin` is compared once for
    each visitor: a node's data do not change within a session, and some apps report another number of examples in each
    round.
    """
    path, kept = home / "origin", {"origin": dict[str, str](), "visitors": dict[str, str]()}
    if path.exists():
        try:
            found = json.loads(read_plain(path))
            kept = {key: {str(k): str(v) for k, v in found[key].items()} for key in kept}
        except (BrokenError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # a damaged file counts as no file
    kind, who = visitor
    if kept["visitors"].get(kind) == who:
        return ""
    changed = [key for key, value in origin.items() if kept["origin"].get(key, value) != value]
    moved = [part for part in parts if (home / part).exists()] if changed else []
    if moved:
        aside = home / "aside"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for part in moved:
            os.replace(home / part, aside / part)
    table = {"origin": kept["origin"] | dict(origin), "visitors": kept["visitors"] | {kind: who}}
    write_whole(path, json.dumps(table, sort_keys=True).encode())
    words = [_settings_words(kept["origin"][key], origin[key]) if key == "run_config" else key for key in changed]
    return f"{', '.join(words)} changed; its models are set aside and trained again" if moved else ""


def _settings_words(before: str, now: str) -> str:
    """`run_config (iid, learning-rate)`: the names of the settings that have changed."""
    try:
        names = changed_settings(dict(json.loads(before)), json.loads(now))
    except (ValueError, TypeError, RecursionError):
        return "run_config"  # the file is damaged
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"run_config ({', '.join(name[:60] for name in names[:10])}{more})"


def lock_client(home: Path, wait: float = 60.0) -> AbstractContextManager[None]:
    """Allow one process per client. A killed node may leave a process that still trains: wait for it."""
    home.mkdir(parents=True, exist_ok=True)
    busy = (
        f"{home}: another process has trained this client for the last {wait:g} seconds; "
        "stop it, or give each client a client_id of its own"
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
            raise ValueError("the record arrays or notes is missing")
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
            raise UserError(f"{path} is damaged ({error}); delete it: the model is then trained again") from None

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

    def set_aside_moved(self, origin: Mapping[str, str], visitor: tuple[str, str]) -> str:
        return set_aside_moved(self.home, ("adapted", "private", "choice"), origin, visitor)

    def prune(self, instruction: Instruction) -> None:
        """Remove old versions. After the last round one v_i and one P_i are left."""
        for versions in (self.adapted, self.private):
            prune(versions, ONLY, instruction.keep)

    def begin_session(self, instruction: Instruction) -> None:
        """If the server's session is new, drop the models of the rounds that it will repeat."""
        mark = self.home / "session"
        if not mark.exists() or mark.read_bytes() != instruction.session.encode():
            for versions in (self.adapted, self.private):
                forget_after(versions, ONLY, instruction.since)
            write_whole(mark, instruction.session.encode())  # last: after a crash in between, the session is new again

    def keep_choice(self, choice: str) -> None:
        """Store the model with which the client predicts: w, v_i or P_i."""
        if choice != self.choice():
            write_whole(self.home / "choice", choice.encode())

    def choice(self) -> str:
        path = self.home / "choice"
        return path.read_text() if path.exists() else "w"

    def keep_dp_sgd(self) -> None:
        """Store that the app has trained with DP-SGD. It counts for the whole experiment."""
        if not self.has_dp_sgd():
            write_whole(self.home / "dp-sgd", b"")

    def has_dp_sgd(self) -> bool:
        return (self.home / "dp-sgd").exists()

    def keep_evaluation(self, kind: str, others: RecordDict) -> None:
        """Store the type of the last evaluation's message, and its records other than the arrays."""
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
        raise BrokenError("its checksum is wrong")
    return content[SUM:]
