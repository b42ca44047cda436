"""A worker process, and its messages to and from the server: one JSON line each, with the weights in shared memory.

A worker holds every client's data and trains any client that it is asked for, one task at a time. It ends when the
server's side of the socket closes, or when the server's process ends, for any reason. It starts in
engines/processes/__main__.py.

Nothing is pickled: a line holds numbers and texts (a reply is packed by server/updates.py), and w is in a file without
a name that both processes map.

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
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, final

import torch
from torch import Tensor, nn

from lindt.client.optimizers import identity, optimization_of
from lindt.client.training import forward_all
from lindt.data.examples import subset
from lindt.engines.inprocess import InProcess
from lindt.errors import UserError, mendable
from lindt.plan.file import from_dict
from lindt.plan.plan import Plan
from lindt.plan.problem import MeanOf, Problem, fingerprint, import_task, load_task, problem_for
from lindt.protocols import Buffers, Task
from lindt.seeds import seeded, with_threads
from lindt.server.updates import pack_reply
from lindt.weights import first_model


def serve(socket_number: int, shared_number: int) -> None:
    with closing(Line(socket.socket(fileno=socket_number))) as line:
        _serve(line, shared_number)


def _serve(line: Line, shared_number: int) -> None:
    setup = line.receive()
    try:
        engine = _engine(setup)
    except UserError as error:
        line.send({"error": str(error)})
        return
    except Exception:  # noqa: BLE001  # of the user's data or model; the server raises it
        line.send({"failure": traceback.format_exc()})
        return
    P, F, counts = setup["shape"]
    weights = SharedWeights(shared_number, P, F, counts, setup["slots"])
    line.send({"ready": True})
    while True:
        try:
            asked = line.receive()
        except EOFError:
            return
        line.send(_answer(engine, weights, asked, setup["slot"]))


def _engine(setup: dict[str, Any]) -> InProcess:
    if setup["task"]:
        import_task(setup["task"])  # the plan may name components that the user's module registers
    plan = from_dict(setup["plan"])
    return InProcess(
        plan,
        _problem(plan, setup["task"], setup["problem"]),
        run=setup["run"],
        folder=Path(setup["folder"]),
        cache=Path(setup["cache"]),
        device=setup["device"],
        far_away=setup["far_away"],
    )


def _problem(plan: Plan, task: str | None, expected: dict[str, str]) -> Problem:
    """Build the problem, and refuse it where it differs from the server's."""
    remedy = 'give Processes(..., task="module:function"), a function that returns the problem, or use InProcess'
    try:
        problem = load_task(task) if task else problem_for(plan)
    except UserError as error:
        # The server has a problem although the plan cannot give one: it can only be the user's own.
        raise (
            error if task else UserError(f"a worker cannot build the plan's own problem ({error}); {remedy}")
        ) from None
    found = problem_hashes(plan, problem)
    different = next((part for part in found if found[part] != expected[part]), None)
    if different is None:
        return problem
    if not task:
        raise UserError(
            f"the problem is not the plan's own (its {different} is different), which is the only one that a worker "
            f"can build without a task; {remedy}"
        )
    if different == "data":
        raise UserError(f"task {task} returns other data in every process; draw the data from a fixed seed")
    raise UserError(
        f"task {task} returns another problem in a worker than the server has (its {different} is different); "
        "give the server the problem that this function returns"
    )


def _answer(engine: InProcess, weights: SharedWeights, asked: dict[str, Any], slot: int) -> dict[str, Any]:
    w, buffers = weights.view(asked.pop("weights"))
    try:
        (reply,) = engine.dispatch([Task(w=w, buffers=buffers, **asked)])
    except UserError as error:
        return {"error": str(error)}
    except OSError as error:
        said = mendable(error)  # such as a full disk while a v_i is written
        return {"failure": traceback.format_exc()} if said is None else {"error": said}
    except Exception:  # noqa: BLE001  # sent to the server, which raises it
        return {"failure": traceback.format_exc()}
    if reply.w is not None and reply.buffers is not None:
        weights.put(slot, reply.w, reply.buffers)
    return pack_reply(reply)


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
            if given.shape != place.shape:  # copy_ would broadcast a single value
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
    """A file without a name, in memory where the system has /dev/shm. It is gone when the last process closes it."""
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
    """A hash each of a problem's data, model, loss, metric and optimizer: a worker's are compared with the server's.

    Model, loss and metric are compared by name and by their results on a few samples, because two functions may share
    a name. The name of the module is left out: what is `__main__` in the server has its own name in a worker. `model`
    is an untrained `first_model`; without it one is built.
    """
    with with_threads(1), torch.no_grad():  # as in the workers: the number of threads changes the last bits of a sum
        model = first_model(problem, plan) if model is None else model
        with seeded(0, torch.device("cpu")):  # for a model that draws random numbers when it predicts
            train, _ = problem.data[0]
            few = subset(train, torch.arange(min(len(train), 16)))
            weights = hashlib.sha256()
            for name, value in model.state_dict().items():  # frozen weights and buffers too
                weights.update(f"{name} {getattr(value, 'shape', value)} {getattr(value, 'dtype', '')}".encode())
                if isinstance(value, Tensor):
                    weights.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            metric, by = problem.metric_for(plan), optimization_of(plan, problem)
            outputs = _result(lambda: forward_all(model.eval(), few, torch.device("cpu")))
            return {
                "data": fingerprint(problem),
                "model": _hash(_name(model), weights.hexdigest(), trained, outputs),
                "loss": _hash(_name(problem.loss), _result(lambda: problem.loss(outputs, few.labels))),
                "metric": _hash(
                    _name(metric.function if isinstance(metric, MeanOf) else metric),
                    _result(lambda: metric.tally(outputs, few.labels)),
                ),
                "optimizer": "" if by is None else identity(by, model, train, problem, len(train)),
            }


def _name(thing: object) -> str:
    """The name of a function or class, or an object's text without addresses, which differ in every process."""
    if hasattr(thing, "__qualname__"):
        return str(thing.__qualname__)
    text = type(thing).__qualname__ if type(thing).__repr__ is object.__repr__ else repr(thing)
    return re.sub(r"0x[0-9a-f]+", "", text)


def _result(compute: Callable[[], Any]) -> Any:
    """The result of the user's own code, or the name of its error. The first task raises the error itself later."""
    try:
        return compute()
    except Exception as error:  # noqa: BLE001
        return type(error).__name__


def _hash(*parts: object) -> str:
    texts = [repr(part.tolist()) if isinstance(part, Tensor) else repr(part) for part in parts]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
