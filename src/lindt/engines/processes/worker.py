"""A worker process: it holds every client's data, serves whichever client it is asked for, one task at a time.

It ends when the server's side of the socket closes, and with the server's process, however that ends: how it
starts is in engines/processes/__main__.py.
"""

from __future__ import annotations

import socket
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

from lindt.engines.inprocess import InProcess
from lindt.engines.messages import pack_reply
from lindt.engines.processes.wire import Line, SharedWeights, problem_hashes
from lindt.errors import UserError, mendable
from lindt.plan.file import from_dict
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, import_task, load_task, problem_for
from lindt.protocols import Task


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
    except Exception:  # noqa: BLE001  # the data and the model are the user's; the server raises it there
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
    )


def _problem(plan: Plan, task: str | None, expected: dict[str, str]) -> Problem:
    """The problem that the server has, built anew; refused where it is another one."""
    remedy = 'give Processes(..., task="module:function"), a function that returns the problem, or use InProcess'
    try:
        problem = load_task(task) if task else problem_for(plan)
    except UserError as error:
        # The server has a problem all the same: it can only be the user's own.
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
        raise UserError(f"--task {task} gives other data in every process; draw them from a fixed seed")
    raise UserError(
        f"--task {task} gives another problem in a worker than the server has (its {different} is different); "
        "give the server the problem that this function returns"
    )


def _answer(engine: InProcess, weights: SharedWeights, asked: dict[str, Any], slot: int) -> dict[str, Any]:
    w, buffers = weights.view(asked.pop("weights"))
    try:
        (reply,) = engine.dispatch([Task(w=w, buffers=buffers, **asked)])
    except UserError as error:
        return {"error": str(error)}
    except OSError as error:
        said = mendable(error)  # a full disk, met while a v_i is written
        return {"failure": traceback.format_exc()} if said is None else {"error": said}
    except Exception:  # noqa: BLE001  # told to the server, which raises it there
        return {"failure": traceback.format_exc()}
    if reply.w is not None and reply.buffers is not None:
        weights.put(slot, reply.w, reply.buffers)
    return pack_reply(reply)
