"""Flower's arrays: a stranger's bytes into values, an ArrayRecord into a user's nn.Module and back, and which replies
the server takes before the strategy has them.

NumPy's own reader allocates the size that the bytes claim before it has seen them: a header of 100 bytes asks for a
terabyte, and the MemoryError ends the run. Here the bytes must be as many as they claim.

A reply is refused by name and reason under the rules of server/updates.py, and where it is of another shape than the
model or unlike the other replies: it would poison the mean or end the run. The strategy does not see it. Errors that
clients report go on to the strategy, which has its own way with them. BatchNorm's statistics are known by their names:
in an app that sends a list of arrays they have none, and count as weights.

Legend: K clients answering, P weights, F statistics.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray
from torch import Tensor, nn

from lindt.errors import UserError, one_line
from lindt.server.updates import buffer_faults, length_fault, sender_fault, size_fault
from lindt.weights import NORM_STATISTICS, flat

# What np.save writes, in format 1.0: whatever Flower's apps send. Booleans, whole numbers and floats, nothing else.
_HEAD: Final = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|]?[biuf][1248])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,15}(?:, ?|(?=\)))){0,32})\), \} *\n",
    re.DOTALL,
)


def values_of(array: Array) -> NDArray[Any]:
    """What `array.numpy()` gives, or ValueError: also where its shape is not the one that the Array declares."""
    head = _HEAD.match(array.data) if array.stype == "numpy.ndarray" else None
    if head is None or head.end() != 10 + int.from_bytes(head[1], "little"):
        raise ValueError("its weights are no numbers as NumPy writes them")
    try:
        dtype = np.dtype(head[2].decode())
    except TypeError:
        raise ValueError(f"its weights are of no type {head[2]!r}") from None
    shape = tuple(int(size) for size in re.findall(rb"[0-9]+", head[4]))
    if shape != tuple(array.shape):
        raise ValueError(f"weights of shape {shape[:8]} that were declared {tuple(array.shape)[:8]}")
    if len(array.data) - head.end() != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(array.data)} bytes for weights of shape {shape[:8]} as {dtype}")
    values = np.frombuffer(array.data, dtype, offset=head.end()).astype(dtype.newbyteorder("="), copy=False)
    return values.reshape(shape, order="F" if head[3] == b"True" else "C")


def load_arrays(model: nn.Module, record: ArrayRecord) -> nn.Module:
    """c2-c3: w_i <- w^{r-1}, in place."""
    names = _names(model, record)
    state = model.state_dict()
    for theirs, ours in names.items():
        if tuple(record[theirs].shape) != tuple(state[ours].shape):
            raise UserError(
                f"model: {ours} has shape {tuple(state[ours].shape)}, the message's {theirs} has "
                f"{tuple(record[theirs].shape)}; model(context) must build the federation's model"
            )
    try:
        # A copy: arrays from a network may be read-only.
        values = {ours: np.array(values_of(record[theirs])) for theirs, ours in names.items()}
    except ValueError as error:
        raise UserError(f"the message cannot be read: {error}") from None
    tensors = {ours: torch.as_tensor(array) for ours, array in values.items()}
    model.load_state_dict(tensors)
    return model


def to_arrays(model: nn.Module, like: ArrayRecord) -> ArrayRecord:
    """c16: w_i with the names, order and types that it came with; not one byte more."""
    state, record = model.state_dict(), ArrayRecord()
    for theirs, ours in _names(model, like).items():
        values = state[ours].detach().cpu().numpy()
        record[theirs] = Array(np.asarray(values, dtype=values_of(like[theirs]).dtype))
    return record


def _names(model: nn.Module, record: ArrayRecord) -> dict[str, str]:
    ours, theirs = list(model.state_dict()), list(record)
    if set(ours) == set(theirs):
        return {name: name for name in theirs}
    if len(ours) == len(theirs) and all(name.isdigit() for name in theirs):
        return dict(zip(theirs, ours, strict=True))  # from a list of arrays, as state_dict().values() gives it
    missing = sorted(set(ours) ^ set(theirs))[:3]
    raise UserError(
        f"model: its state_dict has {len(ours)} entries, the message {len(theirs)}; {', '.join(missing)} stand in one "
        "only. model(context) must build the federation's model"
    )


Replies = Literal["weights", "updates"]
Values = dict[str, np.ndarray]


UPDATE_LIKE: Final = 0.5  # a reply whose length is below this share of its distance from w may be an update
Structure = tuple[tuple[str, tuple[int, ...]], ...]


Layout = tuple[frozenset[str], frozenset[tuple[str, str, int]]]


def weights_of(record: ArrayRecord, names: frozenset[str]) -> Tensor:
    """w as one vector, a copy. BatchNorm's statistics are no part of it (`flat` leaves them out)."""
    return flat({name: array.numpy() for name, array in record.items() if name in names})


def statistics_of(values: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
    """BatchNorm's statistics by name, each as one vector."""
    names = [name for name in sorted(values) if name.endswith(NORM_STATISTICS)]
    return {name: torch.from_numpy(np.array(values[name], np.float32).reshape(-1)) for name in names}


def float_names(record: ArrayRecord) -> frozenset[str]:
    """Which arrays are weights. Ask a client's: a strategy's mean turns BatchNorm's counter into a float."""
    return frozenset(name for name, array in record.items() if "float" in array.dtype)


def nonfinite_names(record: ArrayRecord) -> frozenset[str]:
    """The arrays with NaN or infinity. In w^0 they are no weights: a causal mask of -inf in a buffer, say."""
    values = {name: record[name].numpy() for name in float_names(record)}
    return frozenset(name for name, array in values.items() if not np.isfinite(array).all())


def may_be_updates(valid: ValidReplies, sent: ArrayRecord) -> bool | None:
    """Whether most replies lie far nearer to 0 than to the w that was sent. From w = 0 nothing can be told: None."""
    if not valid.nodes or not valid.names <= sent.keys():
        return None
    w_P = weights_of(sent, valid.names)
    if w_P.numel() != valid.w_KP.shape[1] or not float(torch.linalg.vector_norm(w_P)):
        return None
    from_zero_K, from_w_K = (torch.linalg.vector_norm(rows_KP, dim=1) for rows_KP in (valid.w_KP, valid.w_KP - w_P))
    return int((from_zero_K < UPDATE_LIKE * from_w_K).sum()) * 2 > len(valid.nodes)


def structure_of(record: ArrayRecord) -> Structure:
    return tuple(sorted((name, tuple(array.shape)) for name, array in record.items()))


@final
@dataclass(frozen=True)
class ValidReplies:
    """`passed` goes on to the strategy; rows of `w_KP` are `nodes`, in order."""

    passed: list[Message]
    names: frozenset[str]  # of the arrays that make w
    nodes: list[int]
    w_KP: Tensor
    lengths_K: list[float]  # ||w_i - w^{r-1}|| over all arrays, as Flower's clipping counts it; 0 where nobody clips
    sizes_K: list[float]  # what the strategy weighs them by; ones where nothing is said
    refused: dict[int, str]
    statistics_K: list[dict[str, Tensor]]  # BatchNorm's


def validate_replies(
    replies: list[Message],
    sent: ArrayRecord,
    weighted_by: str,
    *,
    clipping: bool = False,
    clipped_here: bool = False,
    fixed: frozenset[str] = frozenset(),
    updates: bool = False,
) -> ValidReplies:
    """`clipping`: the lengths of updates are wanted. `clipped_here`: the strategy clips updates on the server.

    `fixed` are arrays with NaN or infinity in w^0: they are no part of w, and a reply must have them as they were sent.
    `updates`: replies are updates of w. The strategy is given them as they are; what is measured are weights.
    """
    whole = [reply for reply in replies if not reply.has_error() and len(reply.content.array_records) == 1]
    structures = Counter(structure_of(_record(reply)) for reply in whole)
    # Some apps return other arrays than they were sent (adapters, say): then they agree with one another.
    expected = structure_of(sent)
    if structures and expected not in structures:
        expected = structures.most_common(1)[0][0]
    given = {name: array.numpy() for name, array in sent.items() if clipping or updates or name in fixed}
    before = given if clipping else {}
    # What most of them say: one client must not decide what is measured.
    said = Counter(float_names(_record(reply)) for reply in whole if structure_of(_record(reply)) == expected)
    names = (said.most_common(1)[0][0] if said else frozenset()) - fixed
    usual = _usual([reply for reply in whole if structure_of(_record(reply)) == expected])
    rows: list[tuple[int, Tensor, float, float, dict[str, Tensor]]] = []
    refused: dict[int, str] = {}
    places: list[int] = []  # of the rows: a node may have sent two replies
    asked = {reply.metadata.src_node_id for reply in replies}  # Flower's Grid takes answers of the nodes asked only
    for place, reply in sorted(enumerate(replies), key=lambda each: each[1].metadata.src_node_id):
        node = reply.metadata.src_node_id
        try:
            if fault := sender_fault(node, asked, {row[0] for row in rows[-1:]}):
                raise ValueError(fault)
            values = _read(reply, expected, {name: given[name] for name in fixed if name in given})
            values = _moved(values, given) if updates else values
            w = _weights(values, names)
            size = _size(reply, weighted_by, usual)
            if clipped_here and not _can_be_clipped(values, before):
                raise ValueError("its update is zero, which Flower's clipping divides by")
        except ValueError as error:
            refused[node] = one_line(str(error))
        else:
            places.append(place)
            rows.append((node, w, _length(values, before), size, statistics_of(values)))
    faults = _statistics_faults([row[4] for row in rows], sent)
    refused |= {rows[k][0]: fault for k, fault in faults.items()}
    kept = {place for k, place in enumerate(places) if k not in faults}
    rows = [row for k, row in enumerate(rows) if k not in faults]
    # In the order they came: a strategy may depend on it.
    passed = [reply for place, reply in enumerate(replies) if reply.has_error() or place in kept]
    w_KP = torch.stack([row[1] for row in rows]) if rows else torch.empty(0, 0)
    return ValidReplies(
        passed,
        names,
        nodes=[row[0] for row in rows],
        w_KP=w_KP,
        lengths_K=[row[2] for row in rows],
        sizes_K=[row[3] for row in rows],
        refused=refused,
        statistics_K=[row[4] for row in rows],
    )


def _statistics_faults(statistics_K: list[dict[str, Tensor]], sent: ArrayRecord) -> dict[int, str]:
    """What is wrong with a reply's statistics, by its place among them. All have the same names and shapes here."""
    names = statistics_K[0].keys() if statistics_K else ()
    before = statistics_of({name: sent[name].numpy() for name in names if name in sent})
    return buffer_faults({name: torch.stack([each[name] for each in statistics_K]) for name in names}, before)


def _record(reply: Message) -> ArrayRecord:
    return next(iter(reply.content.array_records.values()))


def _moved(update: Values, w: Values) -> Values:
    """The weights of a client that sent an update."""
    return {name: value + w[name] if name in w else value for name, value in update.items()}


def _read(reply: Message, expected: Structure, fixed: Values) -> Values:
    """The arrays of a good reply; ValueError, in words, for any other."""
    if reply.has_error():
        raise ValueError(f"failed: {reply.error.reason}")
    records = reply.content.array_records
    if len(records) != 1:
        raise ValueError(f"{len(records)} records of weights where one is wanted")
    record = _record(reply)
    if structure_of(record) != expected:
        raise ValueError("its weights have other names or shapes than the model's")
    values = {name: values_of(array) for name, array in record.items()}
    for name, _ in expected:
        if name in fixed and np.array_equal(values[name], fixed[name], equal_nan=True):
            continue
        if np.issubdtype(values[name].dtype, np.inexact):
            # A copy, as what came over the network is read-only; float16 would overflow in a sum of squares.
            copy = np.array(values[name], np.promote_types(values[name].dtype, np.float32))
            if fault := length_fault(torch.from_numpy(copy), "numbers too large to measure"):
                raise ValueError(f"{fault} in {name}")
    return values


def _weights(values: Values, names: frozenset[str]) -> Tensor:
    for name in sorted(names):
        if not np.issubdtype(values[name].dtype, np.floating):
            raise ValueError(f"{name} holds {values[name].dtype}, the others' floats")
    try:
        w = flat({name: value for name, value in values.items() if name in names})
    except UserError as error:
        raise ValueError(str(error)) from None
    if fault := length_fault(w, "its weights are too large to measure"):
        raise ValueError(fault)
    return w


def _length(values: Values, before: Values) -> float:
    """0 where the arrays are not those that were sent: there is no update then."""
    if {name: value.shape for name, value in values.items()} != {name: value.shape for name, value in before.items()}:
        return 0.0
    squares = [float(np.square(np.float64(value) - before[name]).sum()) for name, value in values.items()]
    return float(np.sqrt(sum(squares)))


def _can_be_clipped(values: Values, before: Values) -> bool:
    """Flower's clipping divides by the update's length, computed in the weights' own type: there a tiny one is 0."""
    if values.keys() != before.keys():
        return True
    return any(np.linalg.norm(np.subtract(value, before[name])) > 0 for name, value in values.items())


def consistent_replies(replies: list[Message], weighted_by: str) -> tuple[list[Message], dict[int, str]]:
    """The replies to an evaluation that go on to the strategy, and why others do not."""
    usual = _usual([reply for reply in replies if not reply.has_error()])
    refused: dict[int, str] = {}
    for reply in replies:
        if not reply.has_error():
            try:
                _size(reply, weighted_by, usual)
            except ValueError as fault:
                refused[reply.metadata.src_node_id] = one_line(str(fault))
    return [reply for reply in replies if reply.metadata.src_node_id not in refused], refused


def _layout(reply: Message) -> Layout:
    """The names of its records and metrics, with the lengths of lists."""
    content, found = reply.content, set[tuple[str, str, int]]()
    for name, record in content.metric_records.items():
        found |= {(name, key, len(value) if isinstance(value, list) else -1) for key, value in record.items()}
    return frozenset(content.array_records), frozenset(found)


def _usual(replies: list[Message]) -> Layout | None:
    """What most of them are like: Flower's own strategies end the run where one is unlike the others."""
    found = Counter(_layout(reply) for reply in replies)
    return found.most_common(1)[0][0] if found else None


def _size(reply: Message, weighted_by: str, usual: Layout | None) -> float:
    if _layout(reply) != usual:
        raise ValueError("its records or metrics have other names or lengths than most others'")
    metrics = reply.content.metric_records
    value = next(iter(metrics.values())).get(weighted_by, 1.0) if metrics else 1.0
    if fault := size_fault(value, weighted_by, whole=False):  # a mean over replies of size 0 alone divides by zero
        raise ValueError(fault)
    return float(value)  # type: ignore[arg-type]
