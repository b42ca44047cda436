"""The engine for more than one machine: tasks travel through Flower's Grid as Messages, replies come back.

Rounds, sampling, clipping, noise, detection and recovery stay ours (lindt/federation.py, inside the ServerApp); the
Grid only carries. Clients live on nodes; which node holds which clients, each node says when it is first met.

Limits: a round is closed by its deadline or by the last answer, also where `over_select` asked more than K. The
clients of one node answer together, with its slowest. Messages that a dead node had already taken are lost; its clients
are then missing from the round, or asked again where `comeback` gives it the time to return.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from lindt.engines.base import Reply, Task
from lindt.engines.flower_pulling import Pulls
from lindt.engines.flower_scores import Expected
from lindt.engines.flower_wire import Session, failed, pack_tasks, unpack_replies
from lindt.errors import UserError
from lindt.fit import forward_all
from lindt.parties import counted_clients
from lindt.plan import Plan
from lindt.problem import Problem, first_model
from lindt.weights import read_w

# The handler of each kind of task on a node.
TYPES: Final = {"train": "train", "evaluate": "evaluate", "private": "train.alone"}
GREETING: Final = "query.clients"
GONE: Final = 5.0  # seconds between two looks whether the nodes that owe an answer are still there


@final
@dataclass(frozen=True)
class Patience:
    """How long the server waits, in seconds."""

    deadline: float = 600.0  # for the answers to one dispatch
    gather: float = 120.0  # for all clients to be there, before the first round
    comeback: float = 0.0  # for a node that went away; then its clients are left out
    pause: float = 0.2  # between two looks; it grows to five times that while nothing comes

    def __post_init__(self) -> None:
        if self.deadline <= 0 or self.gather < 0 or self.comeback < 0:
            raise UserError("--deadline, --gather and --comeback: give seconds, above 0 and 0 or more")


@final
class Flower:
    """Engine over a Grid. `said` tells, by node, what is wrong with the nodes that cannot take part."""

    def __init__(self, grid: Grid, plan: Plan, problem: Problem, patience: Patience | None = None) -> None:
        torch.set_num_threads(plan.threads)  # as in-process: the server's sums must have the same last bits
        self._grid, self._pulls, self._patience = grid, Pulls(grid), patience or Patience()
        self._session = Session(secrets.token_hex(16))
        self._clients = len(problem.data)
        model = first_model(problem, plan)
        self._parameters = read_w(model).numel()
        metric = problem.metric_for(plan)
        test = problem.data[0][1]
        outputs = forward_all(model.eval(), test, torch.device("cpu"))
        alone = counted_clients(plan, range(self._clients)) if plan.alone.private else frozenset()
        self._expected = Expected(metric, metric.tally(outputs, test.labels).numel(), alone)
        self._held: dict[int, frozenset[int]] = {}  # by node, in the order they were met
        self._greeted: dict[str, int] = {}  # greetings without an answer yet: message and node
        self.said: dict[int, str] = {}
        self._gathered = False
        self._most, self._whole = 0, 0.0  # clients met at once, and when so many were last seen

    def forget_after(self, round: int) -> None:
        """Nodes hear of it with their next task: the session's first round is part of every message."""
        self._session = Session(self._session.id, round)

    def close(self) -> None:
        """Nodes belong to whoever started them."""

    def available(self) -> Sequence[int]:
        """Everyone who can be asked now. Waits for all at first, later only where there is nobody at all, or for
        those who went away less than `comeback` ago."""
        wanted = 1 if self._gathered else self._clients
        seconds = self._patience.deadline if self._gathered else self._patience.gather
        for _ in self._looks(seconds):
            self._meet()
            missed = self._gathered and time.monotonic() < self._whole + self._patience.comeback
            if len(self._nodes()) >= (self._most if missed else wanted):
                break
        if not self._gathered and not self._nodes():
            why = "; ".join(f"node {node}: {said}" for node, said in self.said.items())
            raise UserError(
                f"no client came within {seconds:g} s; start SuperNodes that hold some, or raise --gather"
                + (f" ({why})" if why else "")
            )
        self._gathered = True
        return sorted(self._nodes())

    def dispatch(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Replies as they come, until all are there or the deadline has passed. A node's clients share a message."""
        by_node: dict[int, list[Task]] = {}
        nodes = self._nodes()
        for task in tasks:
            if task.client not in nodes:
                yield failed(task, "is not connected")
            else:
                by_node.setdefault(nodes[task.client], []).append(task)
        waiting: dict[str, tuple[int, list[Task]]] = {}
        away: list[tuple[float, list[Task]]] = []  # whose node is gone, and until when it may come back
        for node, group in by_node.items():
            message = self._give(group, node)
            if message is None:
                yield from (failed(task, "could not be sent its task") for task in group)
            else:
                waiting[message] = node, group
        checked = time.monotonic()
        for _ in self._looks(self._patience.deadline):
            if time.monotonic() - checked > GONE:
                checked = time.monotonic()
                self._meet()
            for message, (node, group) in list(waiting.items()):
                replies = self._pull(message, group)
                if replies or node not in self._held:
                    del waiting[message]
                    yield from replies
                if not replies and node not in self._held:
                    away.append((time.monotonic() + self._patience.comeback, group))
            for until, group in list(away):
                found = {self._nodes().get(task.client) for task in group}
                back = found.pop() if len(found) == 1 else None
                again = self._give(group, back) if back is not None else None
                if again is not None and back is not None:
                    waiting[again] = back, group  # what it took before is lost; the same task has the same result
                elif time.monotonic() >= until:
                    yield from (failed(task, "its node is gone") for task in group)
                else:
                    continue
                away.remove((until, group))
            if not waiting and not away:
                return
        self._pulls.give_up(list(waiting))

    def _give(self, group: list[Task], node: int) -> str | None:
        return self._send(pack_tasks(group, self._session), TYPES[group[0].kind], node, group[0].round)

    def _pull(self, message: str, tasks: Sequence[Task]) -> list[Reply]:
        try:
            found = self._pulls.look(message)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # One by one, so that a message nobody can read spoils only itself. What the Grid raises when the
            # SuperLink is gone is of another kind and ends the run, which then is resumed.
            return [failed(task, f"sent what is no message: {error}") for task in tasks]
        return unpack_replies(found[0], tasks, self._expected) if found else []

    def _looks(self, seconds: float) -> Iterator[None]:
        """Once at least, then again and again until time is up; whoever has seen enough breaks off."""
        end, pause = time.monotonic() + seconds, self._patience.pause
        while True:
            yield
            left = end - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(pause, left))
            pause = min(pause * 1.2, 5 * self._patience.pause)

    def _send(self, content: RecordDict, kind: str, node: int, round: int) -> str | None:
        # It may be answered as long as somebody listens: a node that comes back later does not work for nobody.
        message = Message(content, node, kind, ttl=self._patience.deadline + 10, group_id=str(round))
        sent = list(self._grid.push_messages([message]))
        return sent[0] if sent and sent[0] else None

    def _nodes(self) -> dict[int, int]:
        """The node of each client; where two claim the same, the one met last: a restarted node has a new name."""
        return {client: node for node, clients in self._held.items() for client in clients}

    def _meet(self) -> None:
        """Greet nodes that are new, hear those greeted before, forget those that are gone."""
        there = set(self._grid.get_node_ids())
        self._held = {node: clients for node, clients in self._held.items() if node in there}
        self.said = {node: said for node, said in self.said.items() if node in there}
        self._greeted = {message: node for message, node in self._greeted.items() if node in there}
        known = {*self._held, *self._greeted.values(), *self.said}
        for node in sorted(there - known):
            greeting = self._send(RecordDict({"greeting": ConfigRecord({})}), GREETING, node, 0)
            if greeting:
                self._greeted[greeting] = node
        for message, node in list(self._greeted.items()):
            for answer in self._pulls.look(message):
                del self._greeted[message]
                self._hear(node, answer)
        if len(self._nodes()) >= self._most:
            self._most, self._whole = len(self._nodes()), time.monotonic()

    def _hear(self, node: int, answer: Message) -> None:
        try:
            if answer.has_error():
                raise ValueError(answer.error.reason)
            about = json.loads(str(dict(answer.content.config_records["clients"])["about"]))
            clients, shape = frozenset(about["held"]), (about["clients"], about["parameters"])
            if shape != (self._clients, self._parameters):
                raise ValueError(
                    f"its federation has {shape[0]} clients and {shape[1]} weights, this one {self._clients} and "
                    f"{self._parameters}"
                )
            if not all(type(i) is int and 0 <= i < self._clients for i in clients):
                raise ValueError(f"holds clients that are none of 0 to {self._clients - 1}")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.said[node] = " ".join(str(error).split())[:300]
        else:
            self._held[node] = clients
