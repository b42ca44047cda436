"""Client apps small enough to check by hand, and ears for Flower's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict

App = Callable[[Message, Context], Message]


def arrays(**named: Sequence[float]) -> ArrayRecord:
    return ArrayRecord({name: Array(np.array(value, dtype=np.float32)) for name, value in named.items()})


def pushing(*updates: Sequence[float], sizes: Sequence[int] = ()) -> App:
    """Client i adds updates[i] to w, whatever it is sent; it evaluates to 0.5."""

    def app(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        size = sizes[client] if sizes else 10
        if message.metadata.message_type == "evaluate":
            metrics = MetricRecord({"num-examples": size, "acc": 0.5})
            return Message(RecordDict({"metrics": metrics}), reply_to=message)
        w = message.content["arrays"]["w"].numpy()
        moved = ArrayRecord({"w": Array(w + np.array(updates[client], dtype=np.float32))})
        metrics = MetricRecord({"num-examples": size, "train_loss": 1.0})
        return Message(RecordDict({"arrays": moved, "metrics": metrics}), reply_to=message)

    return app


@contextmanager
def heard() -> Iterator[list[str]]:
    """What lindt says in Flower's log; warnings begin with `!`."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if text.startswith("lindt: "):
                said.append(("! " if record.levelno >= logging.WARNING else "") + text.removeprefix("lindt: "))

    ear, logger = Ear(), logging.getLogger("flwr")
    logger.addHandler(ear)
    try:
        yield said
    finally:
        logger.removeHandler(ear)
