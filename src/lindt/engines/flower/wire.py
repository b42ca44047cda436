"""What passes between server and node on Flower: Tasks and Replies as records. Nothing is pickled.

Weights travel as raw bytes in an ArrayRecord, with their type and shape declared; scores and notes as JSON. All of it
is checked before it is used: one tally of another length, with NaN or with more wins than samples would spoil
everyone's scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

from lindt.errors import one_line
from lindt.plan.metrics import Accuracy, MacroF1, MeanOf
from lindt.protocols import Buffers, ClientTally, Kind, Metric, Reply, Task

RAW = "lindt.raw"  # how the bytes of an Array are to be read: as they lie in memory, little-endian
FLOATS, COUNTS = "<f4", "<i8"
MOST = 2**31  # of a round or a client's number


@final
@dataclass(frozen=True)
class EngineSession:
    """One stretch of a run on the server, from its start or resumption. `since` is the round it goes on from:
    a client that meets a new session first drops every v_i written after that round."""

    id: str
    since: int = 0


def pack_tasks(tasks: Sequence[Task], session: EngineSession) -> RecordDict:
    """Tasks for clients of one node, with w once. The same bytes whatever the method: there is no field for v_i."""
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
        }
    )
    return RecordDict({"weights": _pack_weights(first.w, first.buffers), "task": about})


def unpack_tasks(content: RecordDict) -> tuple[list[Task], EngineSession]:
    """On the node: raises ValueError for what is no task of ours."""
    about = dict(_config(content, "task"))
    kind, run, flag, session = (about.get(name) for name in ("kind", "run", "recovering", "session"))
    words = isinstance(run, str) and isinstance(session, str) and isinstance(flag, bool)
    if kind not in ("train", "evaluate", "private") or not words or not isinstance(about.get("clients"), list):
        raise ValueError("no task of lindt's")
    round, keep, since = (whole(about, name, MOST) for name in ("round", "keep", "since"))
    w, buffers = _unpack_weights(content, "weights")
    kind, run, flag = cast(Kind, kind), cast(str, run), cast(bool, flag)
    clients = [whole({"client": i}, "client", MOST) for i in cast(list[Any], about["clients"])]
    if not clients or len(set(clients)) < len(clients):
        raise ValueError("a task for no client, or twice for one")
    return [Task(kind, run, i, round, w, buffers, flag, keep) for i in clients], EngineSession(
        cast(str, session), since
    )


def pack_replies(replies: Sequence[Reply]) -> RecordDict:
    content = RecordDict()
    for reply in replies:
        about: dict[str, Any] = {"round": reply.round, "size": reply.size}
        if reply.fault is not None:
            about["fault"] = reply.fault
        if reply.tally is not None:
            tally = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in vars(reply.tally).items()}
            about["scores"] = json.dumps({"tally": tally, "notes": reply.notes or {}}, allow_nan=False)
        content[f"reply-{reply.client}"] = ConfigRecord(about)
        if reply.w is not None and reply.buffers is not None:
            content[f"weights-{reply.client}"] = _pack_weights(reply.w, reply.buffers)
    return content


def unpack_replies(message: Message, tasks: Sequence[Task], expected: ScoreFormat) -> list[Reply]:
    """An answer for each of `tasks`; with a `fault` in words where it is no good one."""
    if message.has_error():
        why = f"failed: {message.error.reason or f'error {message.error.code}'}"
        return [failed(task, why) for task in tasks]
    return [_unpack_reply(message.content, task, expected) for task in tasks]


def failed(task: Task, reason: str) -> Reply:
    return Reply(task.client, task.round, 0, fault=one_line(reason))


def _unpack_reply(content: RecordDict, task: Task, expected: ScoreFormat) -> Reply:
    try:
        about = dict(_config(content, f"reply-{task.client}"))
        if isinstance(fault := about.get("fault"), str):
            return failed(task, f"failed: {fault}")
        round, size = whole(about, "round", MOST), whole(about, "size", MOST_SAMPLES)
        if size < 1 or round != task.round:
            raise ValueError(f"round {round}, {size} samples")
        if task.kind == "private":
            return Reply(task.client, round, size)
        if task.kind == "train":
            return Reply(task.client, round, size, *_unpack_weights(content, f"weights-{task.client}"))
        found = json.loads(str(about.get("scores")))
        if not isinstance(found, dict):
            raise ValueError("no scores")
        tally, notes = tally_of(found.get("tally"), task.client, expected), notes_of(found.get("notes"))
        return Reply(task.client, round, size, tally=tally, notes=notes)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        return failed(task, f"sent what is no answer: {error}")


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
    """One vector, if type, shape and the number of bytes agree with each other."""
    if array.stype != RAW or array.dtype != dtype or len(array.shape) != 1:
        raise ValueError(f"weights as {array.dtype!r}, {array.shape}, {array.stype!r}; we take one vector of {dtype}")
    if len(array.data) != array.shape[0] * np.dtype(dtype).itemsize:
        raise ValueError(f"{len(array.data)} bytes for {array.shape[0]} values of {dtype}")
    # A copy in the machine's own byte order: what came over the network is read-only.
    return torch.from_numpy(np.frombuffer(array.data, dtype=dtype).astype(np.dtype(dtype).newbyteorder("=")))


MOST_SAMPLES = 2**40
MOST_NOTES = 200
LARGEST = 1e18  # of a sum or a note: a sum over clients of such is still a number


@final
@dataclass(frozen=True)
class ScoreFormat:
    """What the server knows of a good answer beforehand."""

    metric: Metric
    tally: int  # numbers in a tally
    alone: frozenset[int]  # the clients that have a private model


def tally_of(found: Any, client: int, expected: ScoreFormat) -> ClientTally:
    """A tally that adds up with the other clients', or ValueError."""
    if not isinstance(found, dict) or found.keys() != ClientTally.__dataclass_fields__.keys():
        raise ValueError("no tally")
    samples = whole(found, "samples", MOST_SAMPLES)
    if samples < 1:
        raise ValueError("a tally of no samples")
    counts = {name: whole(found, name, samples) for name in ("wins", "losses", "attack_chances")}
    if counts["wins"] + counts["losses"] > samples:
        raise ValueError("more samples won and lost than there are")
    attacks = {name: whole(found, name, counts["attack_chances"]) for name in ("attack_central", "attack_local")}
    if (client in expected.alone) != (found["private"] is not None):
        raise ValueError("a private score that is not there, or was not asked for")
    names = ("central", "local", "private") if client in expected.alone else ("central", "local")
    sums = {name: _sums(found[name], expected) for name in names}
    return ClientTally(
        samples=samples, central=sums["central"], local=sums["local"], private=sums.get("private"), **counts, **attacks
    )


def _sums(found: Any, expected: ScoreFormat) -> Tensor:
    if not isinstance(found, list) or len(found) != expected.tally:
        raise ValueError(f"a tally is {expected.tally} numbers")
    sums = torch.tensor([number(value) for value in found], dtype=torch.float64)
    if not _can_be(expected.metric, sums) or not math.isfinite(expected.metric.value(sums)):
        raise ValueError("a tally of no value")
    return sums


def _can_be(metric: Metric, sums: Tensor) -> bool:
    """By itself [1, -2] has a value; with another client's [1, 2] it leaves the federation none."""
    if isinstance(metric, Accuracy):
        return 0 <= float(sums[0]) <= float(sums[1])
    if isinstance(metric, MacroF1):
        return bool((sums >= 0).all())
    return not isinstance(metric, MeanOf) or float(sums[1]) >= 1  # of a user's own Metric only it knows


def notes_of(found: Any) -> dict[str, float]:
    if not isinstance(found, dict) or len(found) > MOST_NOTES:
        raise ValueError("no notes, or too many")
    if not all(len(name) <= 100 and name.isprintable() for name in found):
        raise ValueError("a note's name is no name")
    return {name: number(value) for name, value in found.items()}


def number(value: Any) -> float:
    # The bound first: a whole number may be too large for any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError(f"a number is missing, or is none up to {LARGEST:g}")
    return float(value)


def whole(found: dict[str, Any], name: str, most: int) -> int:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} is no whole number from 0 to {most}")
    return value
