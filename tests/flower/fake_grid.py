"""A Grid without a network: messages go to ClientApps in this process, through the bytes they would be on a wire.

    grid = FakeGrid(app, nodes=3)                        # contexts with partition-id 0, 1, 2
    result = strategy.start(grid, arrays, num_rounds=2)
    grid.sent, grid.received                             # every message of the run, in order

A node whose app raises answers with an error, as a SuperNode does. `silent` nodes never answer; `faults` may put
anything in a node's place: `grid.faults[node] = lambda message, context: ...`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

App = Callable[[Message, Context], Message]


class FakeGrid(Grid):
    def __init__(self, app: App, nodes: int | list[int] = 3, config: dict[str, Any] | None = None) -> None:
        # A message takes its sender from the process's identity, which a SuperLink would have set.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app = app
        # Ids as Flower draws them: beyond 2**53, and not in the order of the partitions.
        ids = [2**60 + 7919 * (5 * i % 11) + i for i in range(nodes)] if isinstance(nodes, int) else nodes
        self.contexts = {
            node: Context(1, node, {"partition-id": i, "num-partitions": len(ids)}, RecordDict(), dict(config or {}))
            for i, node in enumerate(ids)
        }
        self.silent: set[int] = set()
        self.faults: dict[int, App] = {}
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.rounds = 0

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = [self._answer(over_the_wire(message)) for message in messages]
        found = [over_the_wire(reply) for reply in replies if reply is not None]
        self.received += [over_the_wire(reply) for reply in found]  # strategies change what they are given
        return found

    def _answer(self, message: Message) -> Message | None:
        self.sent.append(over_the_wire(message))
        node = message.metadata.dst_node_id
        if node in self.silent:
            return None
        try:
            return self.faults.get(node, self.app)(message, self.contexts[node])
        except Exception as error:  # noqa: BLE001  # a SuperNode turns any error of the app into an error reply
            return Message(Error(1, f"{type(error).__name__}: {error}"), reply_to=message)

    def of(self, kind: str) -> list[Message]:
        """The messages sent of one kind, `train` or `evaluate`."""
        return [message for message in self.sent if message.metadata.message_type.split(".")[0] == kind]

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError


def over_the_wire(message: Message) -> Message:
    """A copy that shares nothing with the original: what the other side would hold."""
    if message.has_error():
        return Message(error=message.error, metadata=message.metadata)
    return Message(content=copied(message.content), metadata=message.metadata)


def copied(content: RecordDict) -> RecordDict:
    records: dict[str, Any] = {}
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            records[name] = ArrayRecord(
                {k: Array(v.dtype, tuple(v.shape), v.stype, bytes(v.data)) for k, v in record.items()}
            )
        elif isinstance(record, MetricRecord):
            records[name] = MetricRecord({k: list(v) if isinstance(v, list) else v for k, v in record.items()})
        else:
            records[name] = ConfigRecord({k: list(v) if isinstance(v, list) else v for k, v in record.items()})
    return RecordDict(records)
