"""Where a client keeps what is its own: v_i, and how well it does alone. Neither ever leaves this folder.

    FOLDER/EXPERIMENT/client-NAME/v/.../round-000012.safetensors   v_i by the round that wrote it
    FOLDER/EXPERIMENT/client-NAME/alone.safetensors                the private model P_i, and its score of each sample
    FOLDER/EXPERIMENT/client-NAME/alone.session                    the session in which its key was compared last
    FOLDER/EXPERIMENT/client-NAME/session                          the server's session that was met last
    FOLDER/EXPERIMENT/client-NAME/lock

Flower's Context.state survives neither a node's restart nor a new run, and a node's id may change: so files, keyed
by experiment and client. Each is written aside, synced and renamed. v_i and the private model are sealed: a damaged
v_i is an error, since there is no second copy; a private model is set aside, said in the log and trained anew.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from lindt.client.private_store import FolderStore, meet_session, newest, prune
from lindt.errors import UserError
from lindt.flower.messages import Instruction, log_message
from lindt.flower.vault import client_home, lock_client
from lindt.runs.files import BrokenError, read_plain, seal, unseal, write_whole

CLIENT = 0  # a store holds the versions of one client


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

    @property
    def finite(self) -> bool:
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors().values())

    @classmethod
    def read(cls, kept: dict[str, Tensor]) -> AloneScores:
        """What `tensors` gave. Raises BrokenError where it cannot be."""
        scores, values, rows = (kept.get(name) for name in ("scores", "validation", "rows"))
        if scores is None or scores.dim() != 1 or not scores.is_floating_point():
            raise BrokenError("scores is missing, or of another shape or type")
        if (values is None) != (rows is None):
            raise BrokenError("validation and rows are not both there")
        if values is not None and rows is not None:
            fitting = values.dim() == 2 and len(values) > 0 and values.is_floating_point()
            if not fitting or rows.shape != values.shape[1:] or rows.dtype != torch.int64:
                raise BrokenError("validation or rows is of another shape or type")
        found = cls(scores, values, rows)
        if not found.finite:
            raise BrokenError("it has NaN or infinity")
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
        """The rounds that left a version of v_i."""
        return self._versions.rounds(CLIENT)

    def locked(self, wait: float = 60.0) -> AbstractContextManager[None]:
        """One process a client. A node that was killed may leave a process that still trains: it is waited for."""
        return lock_client(self.home, wait)

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
        """Keep the scores and P_i itself; False where the scores have NaN or infinity: nothing is kept then."""
        if not alone.finite:
            (self.home / "alone.safetensors").unlink(missing_ok=True)  # of other settings: it is not this P_i
            return False
        tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()} | alone.tensors()
        write_whole(self.home / "alone.safetensors", seal(tensors, {"key": key}))
        return True

    def checked(self, session: str) -> bool:
        """Whether the key of the private model was compared in this session: that takes reading all of the data."""
        path = self.home / "alone.session"
        return path.exists() and path.read_text() == session

    def check(self, session: str) -> None:
        write_whole(self.home / "alone.session", session.encode())
