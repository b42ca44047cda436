"""The connected nodes, whether a node was restarted since it got a task, and the answers of nodes.

A node sends which clients it holds; claims.py decides whether it gets them.

A killed SuperNode loses the messages that it has taken, but with a registered key it comes back under its old id. So
each node has an incarnation: a random word in Flower's own client state, which is lost with the process. Flower's Grid
announces an answer before its weights have come: answers are pulled in threads, so that a node that dies while it sends
does not delay the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging import WARNING
from threading import Thread
from typing import Final, final

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore import log

from lindt.engines.flower.claims import Claims
from lindt.engines.flower.identity import new_challenge, proven_key

PULL_WAIT = 1.0  # seconds


@final
class ReplyPoller:
    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._running: dict[str, Future[list[Message]]] = {}

    def look(self, message: str) -> list[Message]:
        """The answer to a message, empty if it has not come. Raises the error of the pull, if it failed."""
        known = self._running.pop(message, None)
        pull = known or self._begin(message)
        try:
            return pull.result(0 if known else PULL_WAIT)
        except TimeoutError:
            if pull.done():  # the pull itself raised TimeoutError
                raise
            self._running[message] = pull
            return []

    def give_up(self, messages: Sequence[str]) -> None:
        """Stop waiting for these answers. A pull that is still running ends by itself, or with the process."""
        for message in messages:
            self._running.pop(message, None)

    def _begin(self, message: str) -> Future[list[Message]]:
        pull: Future[list[Message]] = Future()

        def work() -> None:
            try:
                pull.set_result(list(self._grid.pull_messages([message])))
            except BaseException as error:  # noqa: BLE001  # raised where the result is read
                pull.set_exception(error)

        Thread(target=work, daemon=True, name=f"pull {message[:12]}").start()
        return pull


GREETING: Final = "query.clients"
LOST: Final = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
AGAIN: Final = 60.0  # seconds after which a greeting without an answer counts as lost
Send = Callable[[RecordDict, str, int, int], str | None]


@final
@dataclass(frozen=True)
class NodeRecord:
    """The clients that a node holds, and its incarnation."""

    clients: frozenset[int]
    incarnation: str


@final
@dataclass(frozen=True)
class Greeting:
    """A node that was asked for its clients, and the challenge that it has to sign."""

    node: int
    challenge: str


@final
class NodeRegistry:
    """The connected nodes. `said` has the error of each node that cannot take part."""

    def __init__(
        self, grid: Grid, pulls: ReplyPoller, send: Send, clients: int, parameters: int, claims: Claims
    ) -> None:
        self._grid, self._pulls, self._send, self.claims = grid, pulls, send, claims
        self._clients, self._parameters = clients, parameters
        self.known: dict[int, NodeRecord] = {}  # by node, in the order in which they connected
        self.said: dict[int, str] = {}
        self._greeted: dict[str, Greeting] = {}  # greetings without an answer yet, by message
        self._when: dict[int, float] = {}  # the time of each node's last greeting
        self.unheard: set[int] = set()  # connected nodes that have not answered their greeting yet
        self._most, self._whole = 0, 0.0  # the most clients connected at once, and when so many were last seen

    def nodes(self) -> dict[int, int]:
        """The node of each client, for the clients whose node is connected."""
        return {
            client: holder.node
            for client, holder in self.claims.holders.items()
            if holder.node in self.known and client in self.known[holder.node].clients
        }

    def missed(self, seconds: float) -> int:
        """The most clients that were connected at once, if that was less than `seconds` ago, else 0."""
        return self._most if time.monotonic() < self._whole + seconds else 0

    def incarnation(self, node: int) -> str | None:
        """The word of the node's current process; None for a node that is not connected."""
        return self.known[node].incarnation if node in self.known else None

    def forget(self, node: int) -> None:
        """Drop a node. It is greeted again when it is connected."""
        self.known.pop(node, None)
        self._greeted = {message: greeting for message, greeting in self._greeted.items() if greeting.node != node}

    def identify(self, node: int) -> None:
        challenge = new_challenge()
        message = self._send(RecordDict({"greeting": ConfigRecord({"challenge": challenge})}), GREETING, node, 0)
        if message:
            self._greeted[message], self._when[node] = Greeting(node, challenge), time.monotonic()

    def look(self) -> None:
        """Greet new nodes, read the answers to earlier greetings, drop nodes that are gone."""
        there = set(self._grid.get_node_ids())
        self.known = {node: known for node, known in self.known.items() if node in there}
        self.said = {node: said for node, said in self.said.items() if node in there}
        self._greeted = {message: greeting for message, greeting in self._greeted.items() if greeting.node in there}
        greeted = {greeting.node for greeting in self._greeted.values()}
        awaited = {node for node in greeted if time.monotonic() < self._when[node] + AGAIN}
        for node in sorted(there - {*self.known, *awaited, *self.said}):
            self.identify(node)
        for message, greeting in list(self._greeted.items()):
            for answer in self._pulls.look(message):
                del self._greeted[message]
                # The SuperLink answers a greeting that was lost with a killed process: the node is greeted again.
                if not (answer.has_error() and answer.error.code in LOST):
                    self._read_answer(greeting, answer)
        self.unheard = there - self.known.keys() - self.said.keys()
        if len(self.nodes()) >= self._most:
            self._most, self._whole = len(self.nodes()), time.monotonic()

    def _read_answer(self, greeting: Greeting, answer: Message) -> None:
        node = greeting.node
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
                raise ValueError(f"holds clients that do not exist; they are 0 to {self._clients - 1}")
            granted = self.claims.claim(node, proven_key(about, node, greeting.challenge), clients)
            if clients - granted:
                refused = (
                    f"claims clients {', '.join(map(str, sorted(clients - granted)))}, which other nodes hold or claim"
                )
                log(WARNING, "lindt: node %s %s; refused. The operator can name the nodes with --nodes", node, refused)
                if not granted:
                    raise ValueError(f"{refused}; the operator can name it with --nodes")
            self.known[node] = NodeRecord(granted, str(about.get("life", ""))[:100])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self.said[node] = " ".join(str(error).split())[:300]
            log(WARNING, "lindt: node %s cannot take part: %s", node, self.said[node])
