"""The engine for more than one machine: tasks travel through Flower's Grid as Messages, replies come back.

Rounds, sampling, clipping, noise, detection and recovery stay ours (server/federation.py, inside the ServerApp); the
Grid only carries. Clients live on nodes; each node says which clients it holds when it is first met, and is given those
that no other node has held (claims.py).

Limits: a round is closed by its deadline or by the last answer, also where `over_select` asked more than K. The
clients of one node answer together, with its slowest. Messages that a dead node had already taken are lost; its clients
are then missing from the round, or asked again where `comeback` gives it the time to return. With `comeback`, a node
that is slow to answer is asked now and then whether it is still the one that was given the task.
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
NODE_CHECK_INTERVAL: Final = 5.0  # seconds between two looks whether the nodes that owe an answer are still there
SILENCE_BEFORE_CHECK: Final = (
    20.0  # seconds of silence after which such a node is asked about; then twice as many, and so on
)


@final
@dataclass(frozen=True)
class Timeouts:
    """How long the server waits, in seconds."""

    deadline: float = 600.0  # for the answers to one dispatch
    gather: float = 120.0  # for all clients to be there, before the first round
    comeback: float = 0.0  # for a node that went away; then its clients are left out
    pause: float = 0.2  # between two looks; it grows to five times that while nothing comes

    def __post_init__(self) -> None:
        if self.deadline <= 0 or self.gather < 0 or self.comeback < 0:
            raise UserError("--deadline, --gather and --comeback: give seconds, above 0 and 0 or more")


@final
@dataclass
class PendingMessage:
    """Tasks that a node was given in one message, and the life it had then."""

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
        """Nodes hear of it with their next task: the session's first round is part of every message."""
        self._session = EngineSession(self._session.id, round)

    def close(self) -> None:
        """Nodes belong to whoever started them."""

    def available(self) -> Sequence[int]:
        """Everyone who can be asked now. Waits at first for all clients, and for the answer of every node that is
        there; later only where there is nobody at all, or for those who went away less than `comeback` ago."""
        wanted = 1 if self._gathered else self._clients
        seconds = self._patience.deadline if self._gathered else self._patience.gather
        for _ in self._looks(seconds):
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
                f"no client came within {seconds:g} s; start SuperNodes that hold some, or raise --gather"
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
                "more than one; stop the wrong node, or name the right ones with --nodes, then go on with --resume"
            )

    def dispatch(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        """Replies as they come, until all are there or the deadline has passed. A node's clients share a message."""
        by_node: dict[int, list[Task]] = {}
        nodes = self.registry.nodes()
        for task in tasks:
            if task.client not in nodes:
                yield failed(task, "is not connected")
            else:
                by_node.setdefault(nodes[task.client], []).append(task)
        waiting: dict[str, PendingMessage] = {}
        missing: list[tuple[float, list[Task]]] = []  # whose node is gone, and until when it may come back
        for node, group in by_node.items():
            if not self._give(group, node, waiting):
                yield from (failed(task, "could not be sent its task") for task in group)
        checked = time.monotonic()
        for _ in self._looks(self._patience.deadline):
            if time.monotonic() - checked > NODE_CHECK_INTERVAL:
                checked = time.monotonic()
                self._look_after(waiting)
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
                # What it took before is lost; the same task has the same result.
                if back is None or not self._give(group, back, waiting):
                    if time.monotonic() < until:
                        continue
                    yield from (failed(task, "its node is gone") for task in group)
                missing.remove((until, group))
            if not waiting and not missing:
                return
        self._pulls.give_up(list(waiting))

    def _look_after(self, waiting: dict[str, PendingMessage]) -> None:
        """Whether the nodes that owe an answer are there, and still the same."""
        if self._patience.comeback:
            for node in {pending.node for pending in waiting.values() if pending.is_overdue()}:
                self.registry.identify(node)
        self.registry.look()

    def _give(self, group: list[Task], node: int, waiting: dict[str, PendingMessage]) -> bool:
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
            # One by one, so that a message nobody can read spoils only itself. What the Grid raises when the
            # SuperLink is gone is of another kind and ends the run, which then is resumed.
            return [failed(task, f"sent what is no message: {error}") for task in pending.tasks]
        if found and found[0].has_error() and found[0].error.code == ErrorCode.NODE_UNAVAILABLE:
            self.registry.forget(pending.node)  # the SuperLink has missed it before us
            return []
        return unpack_replies(found[0], pending.tasks, self._expected) if found else []

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
