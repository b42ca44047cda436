"""What passes between the server's process and a worker: one JSON line a message, weights in shared memory.

A reply's line is that of engines/messages.py.

Nothing is pickled: a line holds numbers and words, and w lies in an unlinked file that both map.

Legend: P trainable parameters, F floats and I integers in buffers.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, final

import torch
from torch import Tensor, nn

from lindt.client.training import forward_all
from lindt.data.examples import subset
from lindt.plan.plan import Plan
from lindt.plan.problem import MeanOf, Problem, fingerprint, first_model
from lindt.protocols import Buffers, Task


@final
class SharedWeights:
    """`slots` + 1 models in one mapping.

    With n workers there are 2n + 1: slot 0 is the w that a dispatch sends to all, slot k what worker k sends back, and
    slot n + k a w for worker k alone, where the tasks of a dispatch differ in it. A slot takes memory once it is used.
    """

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
        for given, place in ((w, w_P), (buffers.floats_F, there.floats_F), (buffers.counts_I, there.counts_I)):
            if given.shape != place.shape:  # copy_ would spread a single value over all places
                raise ValueError(f"{given.numel()} values for {place.numel()} places")
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


def problem_hashes(plan: Plan, problem: Problem, model: nn.Module | None = None) -> dict[str, str]:
    """A hash each of a problem's data, model, loss and metric, to compare the problem of a worker with the server's.

    Model, loss and metric are compared by name and by their results on a few samples, because two functions may share
    a name. The name of the module is left out: what is `__main__` in the server has its own name in a worker. `model`
    is an untrained `first_model`; without it one is built.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the workers: the number of threads changes the last bits of a sum
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model = first_model(problem, plan) if model is None else model
            torch.manual_seed(0)  # for a model that draws random numbers when it predicts
            train, _ = problem.data[0]
            few = subset(train, torch.arange(min(len(train), 16)))
            weights = hashlib.sha256()
            for name, value in model.state_dict().items():  # frozen weights and buffers too
                weights.update(f"{name} {getattr(value, 'shape', value)} {getattr(value, 'dtype', '')}".encode())
                if isinstance(value, Tensor):
                    weights.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            metric = problem.metric_for(plan)
            outputs = _result(lambda: forward_all(model.eval(), few, torch.device("cpu")))
            return {
                "data": fingerprint(problem),
                "model": _hash(_name(model), weights.hexdigest(), trained, outputs),
                "loss": _hash(_name(problem.loss), _result(lambda: problem.loss(outputs, few.labels))),
                "metric": _hash(
                    _name(metric.function if isinstance(metric, MeanOf) else metric),
                    _result(lambda: metric.tally(outputs, few.labels)),
                ),
            }
    finally:
        torch.set_num_threads(threads)


def _name(thing: object) -> str:
    """The name of a function or class, or an object's text without addresses, which differ in every process."""
    if hasattr(thing, "__qualname__"):
        return str(thing.__qualname__)
    text = type(thing).__qualname__ if type(thing).__repr__ is object.__repr__ else repr(thing)
    return re.sub(r"0x[0-9a-f]+", "", text)


def _result(compute: Callable[[], Any]) -> Any:
    """What the user's own code returns; of an error its type. The error itself is raised later, by the first task."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def _hash(*parts: object) -> str:
    texts = [repr(part.tolist()) if isinstance(part, Tensor) else repr(part) for part in parts]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
