"""Where a client keeps what is its own: v_i, and how well it does alone. Neither ever leaves this folder.

    FOLDER/EXPERIMENT/client-NAME/v/.../round-000012.safetensors   v_i by the round that wrote it
    FOLDER/EXPERIMENT/client-NAME/alone.safetensors                the private model P_i, and its score of each sample
    FOLDER/EXPERIMENT/client-NAME/alone.session                    the session in which its key was compared last
    FOLDER/EXPERIMENT/client-NAME/session                          the server's session that was met last
    FOLDER/EXPERIMENT/client-NAME/lock

Flower's Context.state survives neither a node's restart nor a new run, and a node's id may change: so files, keyed
by experiment and client. Each is written aside, synced and renamed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import final
from urllib.parse import quote

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from lindt.client.private_store import FolderStore, meet_session, newest, prune
from lindt.errors import PlanError, UserError
from lindt.flower.protocol import Instruction
from lindt.runs.files import locked, write_whole

CLIENT = 0  # a store holds the versions of one client


def default_folder() -> Path:
    """LINDT_PRIVATE, or the user's own data folder: it must outlive a restart, so it is no cache."""
    if os.environ.get("LINDT_PRIVATE"):
        return Path(os.environ["LINDT_PRIVATE"])
    home = os.environ.get("XDG_DATA_HOME")
    return (Path(home) if home else Path.home() / ".local" / "share") / "lindt" / "private"


@final
@dataclass(frozen=True)
class AloneScores:
    """How the private model P_i does. Legend: n test samples, e epochs, v validation samples."""

    test_n: Tensor
    validation_ev: Tensor | None = None  # after each epoch; None where the client does not report
    rows_v: Tensor | None = None  # of the validation data, without those that stand in the training data too

    def at(self, epoch: int | None = None) -> Tensor:
        """The score of each validation sample after `epoch` epochs; of the finished model, where there are fewer."""
        assert self.validation_ev is not None
        last = len(self.validation_ev)
        return self.validation_ev[(last if epoch is None else min(max(1, epoch), last)) - 1]

    def tensors(self) -> dict[str, Tensor]:
        found = {"scores": self.test_n, "validation": self.validation_ev, "rows": self.rows_v}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @classmethod
    def read(cls, kept: dict[str, Tensor]) -> AloneScores | None:
        """None where the tensors are not what `tensors` gave."""
        scores, values, rows = (kept.get(name) for name in ("scores", "validation", "rows"))
        if scores is None or scores.dim() != 1 or not _finite(scores):
            return None
        if (values is None) != (rows is None):
            return None
        if values is not None and rows is not None:
            fitting = values.dim() == 2 and len(values) > 0 and rows.dtype == torch.int64
            if not fitting or rows.shape != values.shape[1:] or not _finite(values):
                return None
        return cls(scores, values, rows)


def _finite(scores: Tensor) -> bool:
    return scores.is_floating_point() and bool(torch.isfinite(scores).all())


@final
class ClientStore:
    """One client's files in one experiment."""

    def __init__(self, folder: Path, experiment: str, client: str) -> None:
        name = quote(client, safe="")
        if not 0 < len(name) <= 200:
            raise PlanError("client_id", client, "give a name of 1 to 200 characters")
        self.home = folder / experiment / f"client-{name}"  # the prefix keeps `..` from leading out
        self._versions = FolderStore(self.home, "v")

    @property
    def new(self) -> bool:
        return not self.home.exists()

    def open(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[int]:
        """The rounds that left a version of v_i."""
        return self._versions.rounds(CLIENT)

    def locked(self, wait: float = 60.0) -> AbstractContextManager[None]:
        """One process a client. A node that was killed may leave a process that still trains: it is waited for."""
        self.open()
        busy = (
            f"{self.home}: another process has trained this client for {wait:g} seconds; "
            "stop it, or give each client an id of its own"
        )
        return locked(self.home / "lock", wait=wait, busy=busy)

    def begin_session(self, instruction: Instruction) -> None:
        """Drop the v_i of rounds that the server's session, if it is new, will play again."""
        meet_session(self._versions, CLIENT, self.home / "session", instruction.session, instruction.since)

    def read(self, private: nn.Module, *, up_to: int) -> bool:
        """Fill `private` with v_i as it was after round `up_to`; False where there is none yet."""
        kept = newest(self._versions, CLIENT, up_to=up_to)
        if kept is None:
            return False
        wanted = {name: tuple(tensor.shape) for name, tensor in private.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in kept[0].items()}
        if found != wanted:
            odd = sorted(set(wanted.items()) ^ set(found.items()))[0]
            raise UserError(
                f"{self.home}: v_i does not fit the model (first at {odd[0]}, {odd[1]}). It is of another model; "
                "begin a new experiment (a new folder of NFLDetector), or move this folder away"
            )
        private.load_state_dict(kept[0])
        return True

    def write(self, private: nn.Module, instruction: Instruction) -> bool:
        """False where v_i has gone to NaN and would never come back: the one before is kept."""
        tensors = private.state_dict()
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            return False
        self._versions.write(CLIENT, instruction.round, (tensors, {}))
        prune(self._versions, CLIENT, instruction.keep)
        return True

    def read_alone(self, key: str | None, samples: int | None = None) -> AloneScores | None:
        """How the private model P_i does; None where the kept key says other settings, model or data.

        With `key` None the file is taken as it is: `checked` says whether this session has compared its key already.
        """
        path = self.home / "alone.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                kept = {name: file.get_tensor(name) for name in file.keys() if not name.startswith("model/")}  # noqa: SIM118
                same = key is None or (file.metadata() or {}).get("key") == key
        except (SafetensorError, OSError):
            return None  # damaged: it can be trained anew
        found = AloneScores.read(kept) if same else None
        return None if found is None or samples not in (None, len(found.test_n)) else found

    def write_alone(self, key: str, alone: AloneScores, model: nn.Module) -> None:
        """Keep the scores and P_i itself."""
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()} | alone.tensors()
        # A copy of each: tied weights share memory, which safetensors refuses.
        blob = save(
            {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}, {"key": key}
        )
        write_whole(self.home / "alone.safetensors", blob)

    def checked(self, session: str) -> bool:
        """Whether the key of the private model was compared in this session: that takes reading all of the data."""
        path = self.home / "alone.session"
        return path.exists() and path.read_text() == session

    def check(self, session: str) -> None:
        write_whole(self.home / "alone.session", session.encode())
