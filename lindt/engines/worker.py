"""A worker process: it holds every client's data, serves whichever client it is asked for, one task at a time.

Started by engines/processes.py as `python -m lindt.engines.worker SOCKET SHARED`; it ends when the server's side of
the socket closes, and with the server's process, however that ends.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from lindt.engines.base import Task
from lindt.engines.inprocess import InProcess
from lindt.engines.wire import Line, SharedWeights, reply_line
from lindt.errors import UserError
from lindt.planfile import from_dict
from lindt.problem import problem_for
from lindt.records import fingerprint
from lindt.tasks import load_task


def main(socket_number: int, shared_number: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then lets us go
    _end_with_parent()
    line = Line(socket.socket(fileno=socket_number))
    setup = line.receive()
    try:
        engine = _engine(setup)
    except UserError as error:
        line.send({"error": str(error)})
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
    plan = from_dict(setup["plan"])
    problem = load_task(setup["task"]) if setup["task"] else problem_for(plan)
    if setup["task"] and fingerprint(problem) != setup["data"]:
        raise UserError(f"--task {setup['task']} gives other data in every process; draw them from a fixed seed")
    return InProcess(
        plan,
        problem,
        run=setup["run"],
        folder=Path(setup["folder"]),
        cache=Path(setup["cache"]),
        device=setup["device"],
    )


def _answer(engine: InProcess, weights: SharedWeights, asked: dict[str, Any], slot: int) -> dict[str, Any]:
    w, buffers = weights.view(0)
    try:
        (reply,) = engine.dispatch([Task(w=w, buffers=buffers, **asked)])
    except UserError as error:
        return {"error": str(error)}
    except Exception:  # noqa: BLE001  # told to the server, which raises it there
        return {"failure": traceback.format_exc()}
    if reply.w is not None and reply.buffers is not None:
        weights.put(slot, reply.w, reply.buffers)
    return reply_line(reply)


def _end_with_parent() -> None:
    """Where the system can, be killed when the server's process dies in the middle of our task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
