"""A node's side of the Flower engine: it holds some of the clients, with their data and their v_i.

Which clients it holds and where their v_i lie is the node's own configuration, never the server's:

    flower-supernode ... --node-config 'clients="0,1,2" private="/var/lib/lindt" task="hospital.data:problem"'

`task` is optional and names the function that gives this node's Problem; without it the run's own is used. In
Flower's simulation a node holds the client of its `partition-id`, and v_i lie beside the run.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from logging import ERROR
from pathlib import Path
from typing import Any, final

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore import log

from lindt.client.private_store import meet_session
from lindt.engines.flower.identity import proof
from lindt.engines.flower.wire import EngineSession, pack_replies, unpack_tasks
from lindt.engines.inprocess import InProcess
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
    """What a node was started with. Equal nodes share their loaded data, where a process serves several tasks."""

    plan: str  # as JSON
    task: str
    run: str
    held: tuple[int, ...]
    private: str
    cache: str  # of what clients learned alone
    device: str

    @classmethod
    def of(cls, node: Mapping[str, Any], run: Mapping[str, Any]) -> Node:
        simulated = str(run.get("simulated-private", ""))
        private = str(node.get("private", "")) or simulated
        if not private:
            raise UserError('this node keeps no v_i; start it with --node-config \'private="FOLDER" clients="0,1"\'')
        name = str(run["run"])
        if not re.fullmatch(r"[0-9a-f]{1,64}", name):
            raise UserError(f"run {name!r} is no name of a run")
        task = str(node.get("task", "")) or str(run.get("task", ""))
        cache = str(run.get("simulated-cache", "")) if private == simulated else ""
        cache, device = cache or str(Path(private) / "alone"), str(node.get("device", "cpu"))
        return cls(str(run["plan"]), task, name, held_by(node), private, cache, device)

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


def identify(message: Message, context: Context) -> Message:
    """Who lives here. The data are loaded now, so that a mistake in them is told before the first round."""
    node = Node.of(context.node_config, context.run_config)
    engine = _engine(node)
    clients = len(engine.available())
    strangers = [i for i in node.held if not 0 <= i < clients]
    if strangers:
        raise UserError(f"clients {strangers} are none of the {clients} of this federation, 0 to {clients - 1}")
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
    """A word that the SuperNode keeps as long as it lives: a killed one has lost it, with the tasks it had taken."""
    if LIFE not in context.state:
        context.state[LIFE] = ConfigRecord({"word": secrets.token_hex(8)})
    return str(context.state.config_records[LIFE]["word"])


def answer(message: Message, context: Context) -> Message:
    """Tasks for clients of ours. One that fails is told to the server and does not take the others with it."""
    node = Node.of(context.node_config, context.run_config)
    tasks, session = unpack_tasks(message.content)
    replies = []
    for task in tasks:
        try:
            replies.append(_handle(node, task, session))
        except Exception as error:  # noqa: BLE001  # the data, the model and the loss are the user's
            log(ERROR, traceback.format_exc())
            replies.append(failed(task, str(error) if isinstance(error, UserError) else repr(error)))
    return Message(pack_replies(replies), reply_to=message)


def _handle(node: Node, task: Task, session: EngineSession) -> Reply:
    if task.client not in node.held:
        raise UserError(f"client {task.client} does not live here; this node holds {list(node.held)}")
    if task.run != node.run:
        raise UserError(f"a task of run {task.run!r} in run {node.run!r}")
    engine = _engine(node)
    node.folder.mkdir(parents=True, exist_ok=True)
    name = f"client-{task.client:05d}"
    # One task of a client at a time, also where a node was started twice.
    with locked(node.folder / f"{name}.lock", wait=math.inf, busy=""):
        meet_session(engine.versions, task.client, node.folder / f"{name}.session", session.id, session.since)
        (reply,) = engine.dispatch([task])
    return reply


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
