"""Where a client keeps what is its own: v_i, and how well it does alone. Neither ever leaves this folder.

    FOLDER/EXPERIMENT/client-NAME/v/.../round-000012.safetensors   v_i by the round that wrote it
    FOLDER/EXPERIMENT/client-NAME/alone.safetensors                the private model's score of each test sample
    FOLDER/EXPERIMENT/client-NAME/session                          the server's session that was met last
    FOLDER/EXPERIMENT/client-NAME/lock

Flower's Context.state survives neither a node's restart nor a new run, and a node's id may change: so files, keyed
by experiment and client. Each is written aside, synced and renamed.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
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

    def read_alone(self, key: str, samples: int) -> Tensor | None:
        """The private model's score of each test sample; None where its key says other settings, model or data."""
        path = self.home / "alone.safetensors"
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                scores: Tensor = file.get_tensor("scores")
                same = (file.metadata() or {}).get("key") == key and scores.shape == (samples,)
                same = same and scores.is_floating_point() and bool(torch.isfinite(scores).all())
        except (SafetensorError, OSError):
            return None  # damaged: it can be trained anew
        return scores if same else None

    def write_alone(self, key: str, scores: Tensor) -> None:
        blob = save({"scores": scores.contiguous()}, {"key": key})
        write_whole(self.home / "alone.safetensors", blob)
