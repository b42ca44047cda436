"""Flower's messages as functions of bytes: what a node reads from the server, what the server reads from a client."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache

import fuzz_seeds as seeds
import torch
from flwr.app import Message
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.serverapp.strategy import FedAvg
from fuzz_ground import told
from google.protobuf.message import DecodeError
from torch import nn

from lindt.engines.flower.wire import unpack_replies, unpack_tasks
from lindt.flower.protocol import instruction_of, penalty_of, record_of, reports_of
from lindt.flower.recorder import RunRecorder
from lindt.flower.replies import consistent_replies, load_arrays, validate_replies
from lindt.plan.problem import METRICS
from lindt.protocols import Task
from lindt.server.scores import summarise
from lindt.server.updates import ScoreFormat, collect_scores, collect_updates


def task(data: bytes) -> None:
    """What a node reads from the server: the engine's tasks, and an order with weights for a user's model."""
    message = _message(data)
    if message is None or message.has_error():
        return
    with suppress(ValueError):
        unpack_tasks(message.content)
    with told():
        order = instruction_of(message)
        load_arrays(nn.Linear(2, 1), record_of(message))
        if order is not None:
            penalty_of(message)


def reply(data: bytes) -> None:
    """What the server reads from a client, beside two honest ones: nothing may end the round or spoil it."""
    message = _message(data)
    if message is None:
        return
    expected = ScoreFormat(METRICS["accuracy"], (2,), frozenset({0}))
    honest = [_message(one) for one in _good()]  # anew each time: strategies change what they are given
    for kind, good in (("train", honest[0]), ("evaluate", honest[1])):
        asked = [Task(kind, "ab", i, 3, seeds.W, seeds.BUFFERS, True) for i in (0, 0)]  # type: ignore[arg-type]
        back = [*unpack_replies(message, asked[:1], expected), *unpack_replies(good, asked[1:], expected)]
        collect_updates([back[0]], {0}, 3, seeds.W, seeds.BUFFERS, 2)
        if kind == "evaluate":
            found = {i: one.tally for i, one in enumerate(back) if collect_scores([one], {0}, 3, expected.metric)}
            scores = summarise(found, expected.metric, counted=frozenset(found), alphas=dict.fromkeys(found, 1.0))
            json.dumps(scores.central, allow_nan=False)
    _strategy(message, [one for one in honest[3:5] if one is not None])


def _strategy(message: Message, honest: list[Message]) -> None:
    """The same for Flower's own strategy under the detector."""
    trained, tested = honest
    books = RunRecorder(None)
    message.metadata.__dict__["_src_node_id"] = 99
    sifted = validate_replies([message, trained, trained], seeds.weights(), "num-examples", clipping=True)
    arrays, _ = FedAvg().aggregate_train(1, sifted.passed)
    assert arrays is not None
    assert all(torch.isfinite(torch.as_tensor(one.numpy())).all() for one in arrays.values())
    reports, _ = reports_of([message, tested])
    FedAvg().aggregate_evaluate(1, consistent_replies([message, tested, tested], "num-examples")[0])
    json.dumps([vars(scores) for scores in [books.scored(1, reports)] if scores], allow_nan=False, default=vars)


@cache
def _good() -> list[bytes]:
    return seeds.replies()


def _message(data: bytes) -> Message | None:
    try:
        return message_from_proto(ProtoMessage.FromString(data))
    except (DecodeError, ValueError, TypeError, KeyError, AttributeError):  # Flower's to refuse, before it is ours
        return None
