"""What passes between the server's process and a worker: one JSON line a message, weights in shared memory.

Nothing is pickled: a line holds numbers and words, and w lies in an unlinked file that both map.

Legend: P trainable parameters, F floats and I integers in buffers.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, final

import torch
from torch import Tensor

from lindt.engines.base import Reply, Task
from lindt.metrics import ClientTally
from lindt.weights import Buffers


@final
class SharedWeights:
    """`slots` + 1 models in one mapping: slot 0 is what the server sends, slot k what worker k sends back."""

    def __init__(self, file: int, P: int, F: int, counts: int, slots: int) -> None:
        self.P, self.F, self.I, self.slots = P, F, counts, slots
        size = self.slot_bytes * (slots + 1)
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)
        self.file = file

    @property
    def slot_bytes(self) -> int:
        return -(-(4 * (self.P + self.F) + 8 * self.I) // 64) * 64  # whole cache lines

    def _views(self, slot: int) -> tuple[Tensor, Buffers]:
        start = slot * self.slot_bytes
        counts = torch.frombuffer(self._map, dtype=torch.int64, count=self.I, offset=start) if self.I else torch.empty(0, dtype=torch.int64)  # fmt: skip  # noqa: E501
        start += 8 * self.I
        floats = torch.frombuffer(self._map, dtype=torch.float32, count=self.P + self.F, offset=start)
        return floats[: self.P], Buffers(floats[self.P :], counts)

    def put(self, slot: int, w: Tensor, buffers: Buffers) -> None:
        w_P, there = self._views(slot)
        w_P.copy_(w)
        there.floats_F.copy_(buffers.floats_F)
        there.counts_I.copy_(buffers.counts_I)

    def get(self, slot: int) -> tuple[Tensor, Buffers]:
        """A copy: the slot is used again."""
        w_P, there = self._views(slot)
        return w_P.clone(), Buffers(there.floats_F.clone(), there.counts_I.clone())

    def view(self, slot: int) -> tuple[Tensor, Buffers]:
        """The slot itself, for a worker that only reads it before it answers."""
        return self._views(slot)


def shared_file() -> BinaryIO:
    """A file without a name, in memory where the system has such a place: it goes when its last user goes."""
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return tempfile.TemporaryFile(dir=folder)


@final
@dataclass
class Line:
    """One JSON line at a time over a socket."""

    connection: socket.socket

    def __post_init__(self) -> None:
        self._file = self.connection.makefile("rb")

    def send(self, message: Mapping[str, Any]) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        try:
            line = self._file.readline()
        except ConnectionError:
            line = b""
        if not line.endswith(b"\n"):
            raise EOFError("the other side is gone")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        self._file.close()
        self.connection.close()


def task_line(task: Task) -> dict[str, Any]:
    names = ("kind", "run", "client", "round", "recovering", "keep")
    return {name: getattr(task, name) for name in names}


def reply_line(reply: Reply) -> dict[str, Any]:
    tally = None
    if reply.tally is not None:
        tally = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(reply.tally).items()}
    return {"client": reply.client, "round": reply.round, "size": reply.size, "tally": tally, "notes": reply.notes,
            "trained": reply.w is not None}  # fmt: skip


def reply_of(line: Mapping[str, Any], w: Tensor | None, buffers: Buffers | None) -> Reply:
    tally = None
    if line["tally"] is not None:
        sums: dict[str, Any] = {
            k: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for k, v in line["tally"].items()
        }
        tally = ClientTally(**sums)
    return Reply(line["client"], line["round"], line["size"], w, buffers, tally, line["notes"])
