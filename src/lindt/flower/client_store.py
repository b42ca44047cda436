"""The folder in which a client of `Dual` keeps v_i, P_i and the scores of P_i. They never leave this folder.

    FOLDER/EXPERIMENT/client-NAME/v/.../round-000012.safetensors   v_i by the round that wrote it
    FOLDER/EXPERIMENT/client-NAME/alone.safetensors                the private model P_i, and its score of each sample
    FOLDER/EXPERIMENT/client-NAME/alone.session                    the session in which its key was last compared
    FOLDER/EXPERIMENT/client-NAME/session                          the last session of the server
    FOLDER/EXPERIMENT/client-NAME/origin                           settings that identify the data and the model
    FOLDER/EXPERIMENT/client-NAME/aside                            v_i of other data or of another model
    FOLDER/EXPERIMENT/client-NAME/lock

Flower's Context.state is lost when a node restarts and in a new run, and a node's id may change. So the models are in
files, by experiment and client. Each file is written under a temporary name, synced and renamed. v_i and the private
model have checksums. A damaged v_i is an error, since there is no second copy; a damaged private model is set aside
with a warning and trained again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from lindt.client.private_store import FolderStore, meet_session, newest, prune
from lindt.errors import UserError
from lindt.flower.messages import Instruction, log_message
from lindt.flower.vault import client_home, lock_client, set_aside_moved
from lindt.runs.files import BrokenError, read_plain, seal, unseal, write_whole

CLIENT = 0  # a store holds the versions of one client


@final
@dataclass(frozen=True)
class AloneScores:
    """The private model's score of each sample. Legend: n test samples, e epochs, v validation samples."""

    test_n: Tensor
    validation_ev: Tensor | None = None  # after each epoch; None if the client does not report
    rows_v: Tensor | None = None  # rows of the validation data that are not in the training data too

    def at(self, epoch: int | None = None) -> Tensor:
        """The score of each validation sample after `epoch` epochs, or of the finished model if it had fewer epochs."""
        assert self.validation_ev is not None
        last = len(self.validation_ev)
        return self.validation_ev[(last if epoch is None else min(max(1, epoch), last)) - 1]

    def tensors(self) -> dict[str, Tensor]:
        found = {"scores": self.test_n, "validation": self.validation_ev, "rows": self.rows_v}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors().values())

    @classmethod
    def read(cls, kept: dict[str, Tensor]) -> AloneScores:
        """The inverse of `tensors`. Raises BrokenError if the tensors are not those of a private model."""
        scores, values, rows = (kept.get(name) for name in ("scores", "validation", "rows"))
        if scores is None or scores.dim() != 1 or not scores.is_floating_point():
            raise BrokenError("scores is missing, or has a wrong shape or type")
        if (values is None) != (rows is None):
            raise BrokenError("only one of validation and rows is present")
        if values is not None and rows is not None:
            fitting = values.dim() == 2 and len(values) > 0 and values.is_floating_point()
            if not fitting or rows.shape != values.shape[1:] or rows.dtype != torch.int64:
                raise BrokenError("validation or rows has a wrong shape or type")
        found = cls(scores, values, rows)
        if not found.finite:
            raise BrokenError("a tensor has NaN or infinity")
        return found


@final
class ClientStore:
    """One client's files in one experiment."""

    def __init__(self, folder: Path, experiment: str, client: str) -> None:
        self.home = client_home(folder, experiment, client)
        self._versions = FolderStore(self.home, "v")

    @property
    def new(self) -> bool:
        return not self.home.exists()

    def open(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)

    def rounds(self) -> list[int]:
        """The rounds with a stored version of v_i."""
        return self._versions.rounds(CLIENT)

    def locked(self, wait: float = 60.0) -> AbstractContextManager[None]:
        """Allow one process per client. A killed node may leave a process that still trains: wait for it."""
        return lock_client(self.home, wait)

    def set_aside_moved(self, origin: Mapping[str, str], visitor: tuple[str, str]) -> str:
        """For v_i only: the private model has its own key, a hash of its data."""
        return set_aside_moved(self.home, ("v",), origin, visitor)

    def prune(self, instruction: Instruction) -> None:
        """Remove old versions. After the last round one v_i is left."""
        prune(self._versions, CLIENT, instruction.keep)

    def begin_session(self, instruction: Instruction) -> None:
        """If the server's session is new, drop the v_i of the rounds that it will repeat."""
        meet_session(self._versions, CLIENT, self.home / "session", instruction.session, instruction.since)

    def read(self, private: nn.Module, *, up_to: int) -> bool:
        """Load v_i as it was after round `up_to` into `private`; False if there is no v_i yet."""
        kept = newest(self._versions, CLIENT, up_to=up_to)
        if kept is None:
            return False
        wanted = {name: tuple(tensor.shape) for name, tensor in private.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in kept[0].items()}
        if found != wanted:
            odd = sorted(set(wanted.items()) ^ set(found.items()))[0]
            raise UserError(
                f"{self.home}: v_i does not fit the model (first at {odd[0]}, {odd[1]}): it was trained with another "
                "model; begin a new experiment (a new folder of NFLDetector), or move this folder away"
            )
        private.load_state_dict(kept[0])
        return True

    def write(self, private: nn.Module, instruction: Instruction) -> bool:
        """Store v_i; False if it has NaN or infinity. Then the version before it is kept."""
        tensors = private.state_dict()
        if not all(torch.isfinite(tensor).all() for tensor in tensors.values()):
            return False
        self._versions.write(CLIENT, instruction.round, (tensors, {}))
        prune(self._versions, CLIENT, instruction.keep)
        return True

    def read_alone(self, key: str | None, samples: int | None = None) -> AloneScores | None:
        """The scores of P_i; None if its key shows other settings, another model or other data.

        With `key` None the key is not compared: `checked` tells whether this session has compared it already.
        """
        path = self.home / "alone.safetensors"
        if not os.path.lexists(path):
            return None
        try:
            kept, words = unseal(read_plain(path))
            if key is not None and words.get("key") != key:
                return None
            found = AloneScores.read(kept)
        except BrokenError as error:
            os.replace(path, path.with_suffix(".damaged"))
            log_message(
                f"{path} does not fit ({error}); it is set aside as .damaged, and the private model is trained anew",
                warn=True,
            )
            return None
        return None if samples not in (None, len(found.test_n)) else found

    def write_alone(self, key: str, alone: AloneScores, model: nn.Module) -> bool:
        """Store the scores and P_i itself; False if the scores have NaN or infinity. Then nothing is stored."""
        if not alone.finite:
            (self.home / "alone.safetensors").unlink(missing_ok=True)  # a P_i of other settings
            return False
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()} | alone.tensors()
        write_whole(self.home / "alone.safetensors", seal(tensors, {"key": key}))
        return True

    def checked(self, session: str) -> bool:
        """Whether this session has compared the private model's key. A comparison reads all of the data."""
        path = self.home / "alone.session"
        return path.exists() and path.read_text() == session

    def check(self, session: str) -> None:
        write_whole(self.home / "alone.session", session.encode())
