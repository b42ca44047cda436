"""A node's side of the Flower engine: it holds some of the clients, with their data and their v_i.

The node's own configuration, never the server, sets which clients it holds and where it keeps their v_i:

    flower-supernode ... --node-config 'clients="0,1,2" private="/var/lib/lindt" task="hospital.data:problem"'

`task` is optional and names the function that returns this node's Problem; by default it is the run's task. With
`workers=4` up to four clients of one message work at the same time, each in a process of its own. In
Flower's simulation a node holds the client of its `partition-id`, and keeps v_i beside the run's folder.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from logging import ERROR, WARNING
from pathlib import Path
from typing import Any, final

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore import log

from lindt.client.private_store import meet_session
from lindt.engines.flower.identity import proof
from lindt.engines.flower.wire import EngineSession, pack_replies, unpack_tasks
from lindt.engines.inprocess import InProcess
from lindt.engines.processes.engine import Processes
from lindt.errors import UserError
from lindt.plan.file import from_dict
from lindt.plan.problem import import_task, load_task, problem_for
from lindt.protocols import Reply, Task
from lindt.runs.files import locked
from lindt.server.updates import failed
from lindt.weights import read_w

LIFE = "lindt-life"


@final
@dataclass(frozen=True)
class Node:
    """The settings of a node. Nodes with equal settings share loaded data when one process does several tasks."""

    plan: str  # as JSON
    task: str
    run: str
    held: tuple[int, ...]
    private: str
    cache: str  # the folder of the private models
    device: str
    workers: int  # clients of a message that work at the same time

    @classmethod
    def of(cls, node: Mapping[str, Any], run: Mapping[str, Any]) -> Node:
        simulated = str(run.get("simulated-private", ""))
        private = str(node.get("private", "")) or simulated
        if not private:
            raise UserError(
                'private: it is not set, so this node keeps no v_i; start it with --node-config \'private="FOLDER" '
                'clients="0,1"\''
            )
        name = str(run["run"])
        if not re.fullmatch(r"[0-9a-f]{1,64}", name):
            raise UserError(f"run = {name!r}: not the id of a run (1 to 64 hexadecimal digits)")
        task = str(node.get("task", "")) or str(run.get("task", ""))
        cache = str(run.get("simulated-cache", "")) if private == simulated else ""
        cache, device = cache or str(Path(private) / "alone"), str(node.get("device", "cpu"))
        return cls(str(run["plan"]), task, name, held_by(node), private, cache, device, _workers(node))

    @property
    def folder(self) -> Path:
        return Path(self.private) / self.run


def held_by(node: Mapping[str, Any]) -> tuple[int, ...]:
    """`clients="0,1,2"`, or the one client of `partition-id`."""
    named = node.get("clients", node.get("partition-id"))
    try:
        return tuple(sorted({int(word) for word in str(named).split(",")}))
    except ValueError:
        raise UserError(f'--node-config clients={named!r}: give client numbers, as in clients="0,1,2"') from None


def _workers(node: Mapping[str, Any]) -> int:
    named = node.get("workers", 1)
    if not re.fullmatch(r"[1-9][0-9]{0,3}", str(named)):
        raise UserError(f"--node-config workers={named!r}: give a whole number from 1 on, as in workers=4")
    return int(named)


def identify(message: Message, context: Context) -> Message:
    """The clients of this node. The data are loaded now, so that an error in them is reported before round 1."""
    node = Node.of(context.node_config, context.run_config)
    engine = _engine(node)
    clients = len(engine.available())
    unknown = [i for i in node.held if not 0 <= i < clients]
    if unknown:
        raise UserError(f"clients {unknown} do not exist: this federation has the clients 0 to {clients - 1}")
    about: dict[str, Any] = {
        "held": node.held,
        "clients": clients,
        "parameters": read_w(engine.clients[0].worker.shared).numel(),
        "life": _incarnation(context),
    }
    if node.private != str(context.run_config.get("simulated-private", "")):
        challenge = dict(message.content.config_records.get("greeting", {})).get("challenge")
        about |= proof(Path(node.private), context.node_id, challenge)
    return Message(RecordDict({"clients": ConfigRecord({"about": json.dumps(about)})}), reply_to=message)


def _incarnation(context: Context) -> str:
    """A random word in the SuperNode's state. A killed SuperNode loses it, with the tasks that it had taken."""
    if LIFE not in context.state:
        context.state[LIFE] = ConfigRecord({"word": secrets.token_hex(8)})
    return str(context.state.config_records[LIFE]["word"])


def answer(message: Message, context: Context) -> Message:
    """Do the tasks for clients of this node. A task that fails is reported to the server; the others go on."""
    node = Node.of(context.node_config, context.run_config)
    tasks, session = unpack_tasks(message.content)
    replies = _together(node, tasks, session)
    if replies is None:
        replies = [_alone(node, task, session) for task in tasks]
    return Message(pack_replies(replies), reply_to=message)


def _alone(node: Node, task: Task, session: EngineSession) -> Reply:
    try:
        _check(node, task)
        with ExitStack() as held:
            _take(node, task, session, held)
            (reply,) = _engine(node).dispatch([task])
        return reply
    except Exception as error:  # noqa: BLE001  # the data, the model and the loss are the user's
        log(ERROR, traceback.format_exc())
        return failed(task, str(error) if isinstance(error, UserError) else repr(error))


def _together(node: Node, tasks: Sequence[Task], session: EngineSession) -> list[Reply] | None:
    """The replies of tasks that worker processes do at the same time, the same as one after another.

    None where there is nothing to share, or where a task fails: the workers do not say which. The tasks are then done
    one after another, where a v_i that has been trained is replaced by the same.
    """
    workers = min(node.workers, len(tasks))
    if workers < 2:
        return None
    try:
        for task in tasks:
            _check(node, task)
        shared = _engine(node).clients[0].worker
        folder, cache = Path(node.private), Path(node.cache)
        with ExitStack() as held:
            for task in sorted(tasks, key=lambda task: task.client):  # in one order, so that no two nodes wait in turn
                _take(node, task, session, held)
            engine = held.enter_context(
                Processes(
                    shared.plan,
                    shared.problem,
                    task=node.task or None,
                    run=node.run,
                    folder=folder,
                    cache=cache,
                    device=node.device,
                    workers=workers,
                    far_away=True,
                )
            )
            return list(engine.dispatch(tasks))
    except Exception as error:  # noqa: BLE001  # raised again for its own client, one after another
        log(WARNING, "%d clients at the same time: %s; they are asked one after another", workers, error)
        return None


def _check(node: Node, task: Task) -> None:
    if task.client not in node.held:
        raise UserError(f"client {task.client} is not on this node, which holds {list(node.held)}")
    if task.run != node.run:
        raise UserError(f"a task of run {task.run!r} was sent to a node in run {node.run!r}")


def _take(node: Node, task: Task, session: EngineSession, held: ExitStack) -> None:
    """Lock the client until `held` ends: one task at a time, even if a node was started twice."""
    node.folder.mkdir(parents=True, exist_ok=True)
    name = f"client-{task.client:05d}"
    held.enter_context(locked(node.folder / f"{name}.lock", wait=math.inf, busy=""))
    meet_session(_engine(node).versions, task.client, node.folder / f"{name}.session", session.id, session.since)


@lru_cache(maxsize=1)
def _loaded(plan: str, task: str, run: str, private: str, cache: str, device: str) -> InProcess:
    if task:
        import_task(task)  # the plan may name components that the user's module registers
    parsed = from_dict(json.loads(plan))
    problem = load_task(task) if task else problem_for(parsed)
    return InProcess(parsed, problem, run=run, folder=Path(private), cache=Path(cache), device=device, far_away=True)


def _engine(node: Node) -> InProcess:
    """In Flower's simulation one process serves many nodes; on a SuperNode each task has a process of its own."""
    return _loaded(node.plan, node.task, node.run, node.private, node.cache, node.device)
