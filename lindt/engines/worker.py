"""A worker process: it holds every client's data, serves whichever client it is asked for, one task at a time.

It ends when the server's side of the socket closes, and with the server's process, however that ends: how it
starts is in worker_start.py.
"""

from __future__ import annotations

import socket
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


def serve(socket_number: int, shared_number: int) -> None:
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
