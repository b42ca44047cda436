"""The messages between server and node on Flower: Tasks and Replies as records. Nothing is pickled.

Weights travel as raw bytes in an ArrayRecord, with their type and shape declared, and are checked here; the rest of a
reply travels as JSON and is checked in server/updates.py.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from lindt.gains import whole_number
from lindt.protocols import Buffers, Kind, Reply, Task
from lindt.server.updates import MOST_NUMBER, ScoreFormat, failed, pack_reply, unpack_reply

RAW = "lindt.raw"  # the format of an Array's bytes: raw values, little-endian
FLOATS, COUNTS = "<f4", "<i8"


@final
@dataclass(frozen=True)
class EngineSession:
    """One session of a run on the server, from its start or resumption. `since` is the round after which it starts: a
    client that sees a new session first drops every v_i written after that round."""

    id: str
    since: int = 0


def pack_tasks(tasks: Sequence[Task], session: EngineSession) -> RecordDict:
    """Tasks for clients of one node, with w once. The fields are the same for every method: there is none for v_i."""
    first = tasks[0]
    if any((t.kind, t.round) != (first.kind, first.round) or t.w is not first.w for t in tasks):
        raise ValueError("tasks of one message share their kind, round and w")
    about = ConfigRecord(
        {
            "kind": first.kind,
            "run": first.run,
            "clients": [task.client for task in tasks],
            "round": first.round,
            "recovering": first.recovering,
            "keep": first.keep,
            "session": session.id,
            "since": session.since,
            # A message's id in Flower is its hash. With the nonce no other node can compute it and answer instead.
            "nonce": secrets.token_hex(16),
        }
    )
    return RecordDict({"weights": _pack_weights(first.w, first.buffers), "task": about})


def unpack_tasks(content: RecordDict) -> tuple[list[Task], EngineSession]:
    """On the node: the tasks of a message. Raises ValueError if it has no valid tasks."""
    about = dict(_config(content, "task"))
    kind, run, flag, session = (about.get(name) for name in ("kind", "run", "recovering", "session"))
    words = isinstance(run, str) and isinstance(session, str) and isinstance(flag, bool)
    if kind not in ("train", "evaluate", "private") or not words or not isinstance(about.get("clients"), list):
        raise ValueError("task: kind, run, clients, recovering or session is missing or of a wrong type")
    round, keep, since = (whole_number(about.get(name), name, MOST_NUMBER) for name in ("round", "keep", "since"))
    w, buffers = _unpack_weights(content, "weights")
    kind, run, flag = cast(Kind, kind), cast(str, run), cast(bool, flag)
    clients = [whole_number(i, "client", MOST_NUMBER) for i in cast(list[Any], about["clients"])]
    if not clients or len(set(clients)) < len(clients):
        raise ValueError("task.clients is empty, or has a client twice")
    return [Task(kind, run, i, round, w, buffers, flag, keep) for i in clients], EngineSession(
        cast(str, session), since
    )


def pack_replies(replies: Sequence[Reply]) -> RecordDict:
    content = RecordDict()
    for reply in replies:
        content[f"reply-{reply.client}"] = ConfigRecord({"about": json.dumps(pack_reply(reply))})
        if reply.w is not None and reply.buffers is not None:
            content[f"weights-{reply.client}"] = _pack_weights(reply.w, reply.buffers)
    return content


def unpack_replies(message: Message, tasks: Sequence[Task], expected: ScoreFormat) -> list[Reply]:
    """A reply for each of `tasks`; with a `fault`, a sentence, if it is missing or malformed."""
    if message.has_error():
        why = f"failed: {message.error.reason or f'error {message.error.code}'}"
        return [failed(task, why) for task in tasks]
    return [_unpack_reply(message.content, task, expected) for task in tasks]


def _unpack_reply(content: RecordDict, task: Task, expected: ScoreFormat) -> Reply:
    try:
        found = json.loads(str(_config(content, f"reply-{task.client}").get("about")))
    except (ValueError, RecursionError) as error:
        return failed(task, f"sent a malformed reply: {error}")
    return unpack_reply(found, task, expected, lambda: _unpack_weights(content, f"weights-{task.client}"))


def _config(content: RecordDict, name: str) -> ConfigRecord:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise ValueError(f"there is no record {name!r}")
    return record


def _pack_weights(w: Tensor, buffers: Buffers) -> ArrayRecord:
    return ArrayRecord(
        {
            "w": _raw(w, FLOATS),
            "floats": _raw(buffers.floats_F, FLOATS),
            "counts": _raw(buffers.counts_I, COUNTS),
        }
    )


def _raw(tensor: Tensor, dtype: str) -> Array:
    values = tensor.detach().cpu().contiguous().numpy().astype(dtype, copy=False)
    return Array(dtype=dtype, shape=values.shape, stype=RAW, data=values.tobytes())


def _unpack_weights(content: RecordDict, name: str) -> tuple[Tensor, Buffers]:
    record = content.get(name)
    if not isinstance(record, ArrayRecord) or set(record) != {"w", "floats", "counts"}:
        raise ValueError("there are no weights")
    w, floats, counts = _flat(record["w"], FLOATS), _flat(record["floats"], FLOATS), _flat(record["counts"], COUNTS)
    return w, Buffers(floats, counts)


def _flat(array: Array, dtype: str) -> Tensor:
    """The array as one vector. Raises ValueError if type, shape and number of bytes do not agree."""
    if array.stype != RAW or array.dtype != dtype or len(array.shape) != 1:
        raise ValueError(f"weights are {array.dtype!r}, {array.shape}, {array.stype!r}, not one vector of {dtype}")
    if len(array.data) != array.shape[0] * np.dtype(dtype).itemsize:
        raise ValueError(f"{len(array.data)} bytes for {array.shape[0]} values of {dtype}")
    # A copy in the machine's own byte order, since the message's bytes are read-only.
    return torch.from_numpy(np.frombuffer(array.data, dtype=dtype).astype(np.dtype(dtype).newbyteorder("=")))
