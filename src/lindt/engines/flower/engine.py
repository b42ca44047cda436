"""The engine for more than one machine: tasks travel through Flower's Grid as Messages, replies come back.

Rounds, sampling, clipping, noise, detection and recovery are lindt's own (server/federation.py, inside the ServerApp);
the Grid only carries messages. Clients are on nodes. When a node connects, it sends the clients that it holds, and gets
those that no other node has held (claims.py).

Limits: a round ends at its deadline or with the last answer, also if `over_select` asked more than K clients. The
clients of one node answer together, when its slowest is done. Messages that a dead node had already taken are lost; its
clients are then missing from the round, or asked again if the node returns within `comeback` seconds. With `comeback`,
a node that is slow to answer is asked from time to time whether it has been restarted since it got the task.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

from flwr.app import Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from lindt.engines.flower.claims import Claims
from lindt.engines.flower.nodes import NodeRegistry, ReplyPoller
from lindt.engines.flower.wire import EngineSession, pack_tasks, unpack_replies
from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem
from lindt.protocols import Reply, Task
from lindt.server.updates import ScoreFormat, failed
from lindt.weights import first_model, read_w

# The handler of each kind of task on a node.
TYPES: Final = {"train": "train", "evaluate": "evaluate", "private": "train.alone"}
NODE_CHECK_INTERVAL: Final = 5.0  # seconds between two checks that the nodes with an open task are connected
LONGEST_PAUSE: Final = 1.0  # seconds between two polls
SILENCE_BEFORE_CHECK: Final = 20.0  # seconds without an answer before a node is asked; doubled after each time


@final
@dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds."""

    deadline: float = 600.0  # for the answers to one dispatch
    gather: float = 120.0  # for all clients to connect, before the first round
    comeback: float = 0.0  # for a node that has disconnected; after it the node's clients are left out
    pause: float = 0.02  # at least so long between two polls, and a tenth of the time waited (`Flower._poll`)

    def __post_init__(self) -> None:
        if self.deadline <= 0 or self.gather < 0 or self.comeback < 0:
            raise UserError("--deadline must be above 0 seconds, --gather and --comeback 0 seconds or more")


@final
@dataclass
class PendingMessage:
    """Tasks that were sent to a node in one message, and the node's incarnation at that time."""

    node: int
    tasks: list[Task]
    incarnation: str | None
    check_at: float  # when to ask about the node
    check_interval: float = SILENCE_BEFORE_CHECK

    def is_overdue(self) -> bool:
        if time.monotonic() < self.check_at:
            return False
        self.check_interval *= 2
        self.check_at = time.monotonic() + self.check_interval
        return True


@final
class Flower:
    """Engine over a Grid."""

    def __init__(
        self,
        grid: Grid,
        plan: Plan,
        problem: Problem,
        patience: Timeouts | None = None,
        claims: Claims | None = None,
    ) -> None:
        self._grid, self._pulls, self._patience = grid, ReplyPoller(grid), patience or Timeouts()
        self._session = EngineSession(secrets.token_hex(16))
        self._clients = len(problem.data)
        self._parameters = read_w(first_model(problem, plan)).numel()
        self._expected = ScoreFormat.of(plan, problem)
        held = claims if claims is not None else Claims()
        self.registry = NodeRegistry(grid, self._pulls, self._send, self._clients, self._parameters, held)
        self._gathered = False

    def forget_after(self, round: int) -> None:
        """Nodes learn it from their next task: the session's first round is part of every message."""
        self._session = EngineSession(self._session.id, round)

    def close(self) -> None:
        """Nothing to do: the engine has not started the nodes, so it does not stop them."""

    def available(self) -> Sequence[int]:
        """The clients that can be asked now. The first call waits for all clients, and for the answer of every
        connected node. Later calls wait only if there is no client at all, or for clients whose node disconnected less
        than `comeback` seconds ago."""
        wanted = 1 if self._gathered else self._clients
        seconds = self._patience.deadline if self._gathered else self._patience.gather
        for _ in self._poll(seconds):
            self.registry.look()
            missed = self.registry.missed(self._patience.comeback) if self._gathered else 0
            heard = self._gathered or not self.registry.unheard
            if len(self.registry.nodes()) >= (missed or wanted) and heard:
                break
        if not self._gathered:
            self._settle()
        if not self._gathered and not self.registry.nodes():
            why = "; ".join(f"node {node}: {said}" for node, said in self.registry.said.items())
            raise UserError(
                f"no client came within {seconds:g} s; start SuperNodes that hold clients, or raise --gather"
                + (f" ({why})" if why else "")
            )
        self._gathered = True
        return sorted(self.registry.nodes())

    def _settle(self) -> None:
        claims = self.registry.claims
        claims.settle()
        if claims.contested:
            clients, nodes = sorted(claims.contested), sorted(set().union(*claims.contested.values()))
            raise UserError(
                f"clients {', '.join(map(str, clients))} are claimed by nodes {', '.join(map(str, nodes))}, each by "
                "more than one node; stop the wrong node, or name the right nodes with --nodes, then resume with "
                "--resume"
            )

    def dispatch(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Yield replies as they come, until all have come or the deadline is over. A node's clients share a message."""
        by_node: dict[int, list[Task]] = {}
        nodes = self.registry.nodes()
        for task in tasks:
            if task.client not in nodes:
                yield failed(task, "is not connected")
            else:
                by_node.setdefault(nodes[task.client], []).append(task)
        waiting: dict[str, PendingMessage] = {}
        missing: list[tuple[float, list[Task]]] = []  # tasks whose node is gone, and until when it may come back
        for node, group in by_node.items():
            if not self._assign(group, node, waiting):
                yield from (failed(task, "could not be sent its task") for task in group)
        checked = time.monotonic()
        for _ in self._poll(self._patience.deadline):
            if time.monotonic() - checked > NODE_CHECK_INTERVAL:
                checked = time.monotonic()
                self._check_nodes(waiting)
            for message, pending in list(waiting.items()):
                replies = self._pull(message, pending)
                lost = self.registry.incarnation(pending.node) != pending.incarnation
                if replies or lost:
                    del waiting[message]
                    yield from replies
                if lost and not replies:
                    missing.append((time.monotonic() + self._patience.comeback, pending.tasks))
            nodes = self.registry.nodes() if missing else {}
            for until, group in list(missing):
                found = {nodes.get(task.client) for task in group}
                back = found.pop() if len(found) == 1 else None
                # The messages that it took before are lost. Send the task again: it has the same result.
                if back is None or not self._assign(group, back, waiting):
                    if time.monotonic() < until:
                        continue
                    yield from (failed(task, "its node is gone") for task in group)
                missing.remove((until, group))
            if not waiting and not missing:
                return
        self._pulls.give_up(list(waiting))

    def _check_nodes(self, waiting: dict[str, PendingMessage]) -> None:
        """Check that the nodes with an open task are connected and have not been restarted."""
        if self._patience.comeback:
            for node in {pending.node for pending in waiting.values() if pending.is_overdue()}:
                self.registry.identify(node)
        self.registry.look()

    def _assign(self, group: list[Task], node: int, waiting: dict[str, PendingMessage]) -> bool:
        content, kind = pack_tasks(group, self._session), TYPES[group[0].kind]
        message = self._send(content, kind, node, group[0].round)
        if message is not None:
            waiting[message] = PendingMessage(
                node, group, self.registry.incarnation(node), time.monotonic() + SILENCE_BEFORE_CHECK
            )
        return message is not None

    def _pull(self, message: str, pending: PendingMessage) -> list[Reply]:
        try:
            found = self._pulls.look(message)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            # Messages are read one by one, so that an unreadable message fails only its own tasks. When the SuperLink
            # is gone, the Grid raises another type of error, which ends the run; it can be resumed.
            return [failed(task, f"sent an unreadable message: {error}") for task in pending.tasks]
        if found and found[0].has_error() and found[0].error.code == ErrorCode.NODE_UNAVAILABLE:
            self.registry.forget(pending.node)  # the SuperLink has noticed first that the node is gone
            return []
        return unpack_replies(found[0], pending.tasks, self._expected) if found else []

    def _poll(self, seconds: float) -> Iterator[None]:
        """Yield at least once, then after each pause until the time is up. The caller may stop before.

        A pause is a tenth of the time waited: so an answer is noticed a tenth of its time late, and at most a second.
        It is as long as the poll itself, which takes long with many nodes, so that polls take at most half of a core.
        """
        start = time.monotonic()
        while True:
            begun = time.monotonic()
            yield
            now = time.monotonic()
            left = start + seconds - now
            if left <= 0:
                return
            pause = max(self._patience.pause, min(LONGEST_PAUSE, max((now - start) / 10, now - begun)))
            time.sleep(min(pause, left))

    def _send(self, content: RecordDict, kind: str, node: int, round: int) -> str | None:
        # The message expires shortly after the deadline: a node that comes back later does no work in vain.
        message = Message(content, node, kind, ttl=self._patience.deadline + 10, group_id=str(round))
        sent = list(self._grid.push_messages([message]))
        return sent[0] if sent and sent[0] else None
