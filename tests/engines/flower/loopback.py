"""A Grid in this process: messages go through Flower's own serialisation to the real ClientApp and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

CLIENT_APP_RAISED_EXCEPTION = 2


def over_the_wire(message: Message) -> Message:
    """What arrives: the message as Flower writes and reads it."""
    return message_from_proto(type(message_to_proto(message)).FromString(message_to_proto(message).SerializeToString()))


class Loopback(Grid):
    """`nodes` gives each node's configuration; `spoil` may change or drop a reply."""

    def __init__(
        self,
        app: ClientApp,
        nodes: Mapping[int, dict[str, Any]],
        run_config: dict[str, Any],
        spoil: Callable[[Message, Message], Message | None] = lambda task, reply: reply,
    ) -> None:
        # A message takes its sender from the process's identity, which a SuperLink would have set.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.nodes, self.run_config, self.spoil = app, dict(nodes), run_config, spoil
        self.states: dict[int, RecordDict] = {}  # what each SuperNode keeps in memory; taken out, it was restarted
        self.sent: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.pulled: list[Message] = []

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return list(self.pull_messages(self.push_messages(messages)))

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            id = f"message-{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = id
            self.sent.append(message)
            ids.append(id)
            reply = self._answer(over_the_wire(message))
            if reply is not None:
                self.replies[id] = over_the_wire(reply)
        return ids

    def _answer(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        if node not in self.nodes:
            return None
        state = self.states.setdefault(node, RecordDict())
        context = Context(1, node, self.nodes[node], state, self.run_config)
        try:
            reply = self.app(message, context)
        except Exception as error:  # noqa: BLE001  # as a SuperNode does it
            reply = Message(Error(CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>"), reply_to=message)
        return self.spoil(message, reply)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        found = [self.replies.pop(id) for id in list(message_ids) if id in self.replies]
        self.pulled += found
        return found
