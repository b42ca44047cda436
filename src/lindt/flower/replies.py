"""Flower's arrays: an ArrayRecord into a user's nn.Module and back, and the check of replies before the strategy gets
them.

A reply is refused with its node and a reason under the rules of server/updates.py, and where it has another shape than
the model or differs in form from the other replies: it would damage the mean or end the run. The strategy does not see
it. Errors that clients report are passed on to the strategy, which handles them itself. BatchNorm's statistics are
recognised by their names: in an app that sends a list of arrays there are no names, and they count as weights.

Legend: K clients answering, P weights, F statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, final

import numpy as np
from flwr.app import Array, ArrayRecord, Message
from numpy.typing import NDArray

from lindt.errors import UserError, one_line
from lindt.flower.vectors import (
    Vector,
    difference_square,
    distances,
    in_parts,
    length_fault,
    own_values,
    record_vector,
    sizes_of,
    square_of,
    update_squares,
    values_of,
    vector_of,
)
from lindt.gains import LONGEST
from lindt.protocols import NORM_STATISTICS
from lindt.server.updates import buffer_faults, sender_fault, size_fault

if TYPE_CHECKING:
    from torch import nn


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
    import torch

    tensors = {ours: torch.as_tensor(array) for ours, array in values.items()}
    model.load_state_dict(tensors)
    return model


def to_arrays(model: nn.Module, like: ArrayRecord) -> ArrayRecord:
    """c16: w_i with the names, the order and the types of `like`."""
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
        f"model: its state_dict has {len(ours)} entries, the message {len(theirs)}; {', '.join(missing)} are in one of "
        "them only. model(context) must build the federation's model"
    )


Replies = Literal["weights", "updates"]
Values = dict[str, np.ndarray]


EMPTY: Final = "it has no test samples"  # why the reply to an evaluation is refused
UPDATE_LIKE: Final = 0.5  # a reply whose length is below this share of its distance from w may be an update
Structure = tuple[tuple[str, tuple[int, ...]], ...]


Layout = tuple[frozenset[str], frozenset[tuple[str, str, int]]]


def statistics_of(values: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """BatchNorm's statistics by name, each as one vector."""
    names = [name for name in sorted(values) if name.endswith(NORM_STATISTICS)]
    return {name: np.array(values[name], np.float32).reshape(-1) for name in names}


def float_names(record: ArrayRecord) -> frozenset[str]:
    """The names of the weights. Use a client's record: a strategy's mean turns BatchNorm's counter into a float."""
    return frozenset(name for name, array in record.items() if "float" in array.dtype)


def nonfinite_names(record: ArrayRecord) -> frozenset[str]:
    """The names of arrays with NaN or infinity. In w^0 they are not weights, but for example a causal mask of -inf."""
    return frozenset(name for name in float_names(record) if not np.isfinite(own_values(record[name])).all())


def may_be_updates(valid: ValidReplies, sent: ArrayRecord) -> bool | None:
    """Whether most replies are far nearer to 0 than to the w that was sent; None where it cannot be known (w = 0)."""
    if not valid.nodes or not valid.names <= sent.keys():
        return None
    w = record_vector(sent, valid.names)
    if sizes_of(w) != sizes_of(valid.w_K[0]) or not any(map(square_of, w)):
        return None
    norms_K = [
        math.sqrt(math.fsum(map(square_of, vector))) if norm is None else norm
        for vector, norm in zip(valid.w_K, valid.norms_K, strict=True)
    ]
    return int((np.array(norms_K) < UPDATE_LIKE * distances(valid.w_K, w)).sum()) * 2 > len(valid.nodes)


def structure_of(record: ArrayRecord) -> Structure:
    return tuple(sorted((name, tuple(array.shape)) for name, array in record.items()))


@final
@dataclass(frozen=True)
class ValidReplies:
    """The valid replies. `passed` are given to the strategy; `w_K` are the weights or updates of `nodes`, as views."""

    passed: list[Message]
    names: frozenset[str]  # of the arrays of w
    nodes: list[int]
    w_K: list[Vector]
    norms_K: list[float | None]  # ||w_i||, where it was measured
    lengths_K: list[float]  # ||w_i - w^{r-1}|| over all arrays, as Flower's clipping counts it; 0 without clipping
    sizes_K: list[float]  # the weights of the clients in the mean; 1 where a reply does not name one
    refused: dict[int, str]
    statistics_K: list[dict[str, NDArray[np.float32]]]  # BatchNorm's
    base_norm: float | None  # ||w^{r-1}||, where it was measured


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
    """Check the replies of a round.

    `clipping`: the lengths of updates are needed. `clipped_here`: the strategy clips updates on the server. `fixed`
    are arrays with NaN or infinity in w^0: they are not part of w, and a reply must return them unchanged. `updates`:
    replies are updates of w.

    Where lengths are needed, all replies are read once to measure them. A reply whose length may be that of invalid
    weights is read again, array by array, to find the fault.
    """
    whole = [reply for reply in replies if not reply.has_error() and len(reply.content.array_records) == 1]
    structures = Counter(structure_of(_record(reply)) for reply in whole)
    # Some apps return other arrays than they were sent, such as adapters: then all clients return the same ones.
    expected = structure_of(sent)
    if structures and expected not in structures:
        expected = structures.most_common(1)[0][0]
    given = {name: own_values(array) for name, array in sent.items()}
    # The names in most replies: one client must not decide what is measured.
    said = Counter(float_names(_record(reply)) for reply in whole if structure_of(_record(reply)) == expected)
    names = (said.most_common(1)[0][0] if said else frozenset()) - fixed
    usual = _usual([reply for reply in whole if structure_of(_record(reply)) == expected])
    lengths = clipping or clipped_here
    check = _Check(replies, expected, names, given, fixed, weighted_by, usual, lengths, clipped_here, updates)
    # The indices of the replies that are read array by array.
    doubted = set[int]() if lengths else set(range(len(replies)))
    rows, refused = check.rows(doubted)
    base_norm = None
    while lengths and rows:
        base = record_vector(sent, names) if names <= sent.keys() else ()
        same = sizes_of(base) == sizes_of(rows[0].w)
        squares_K, base_square = update_squares([row.w for row in rows], base if same else None, updates=updates)
        base_norm = math.sqrt(base_square) if same else None
        room = LONGEST / 2 - (0.0 if updates or base_norm is None else base_norm)
        found = set[int]()
        for k, (row, norm) in enumerate(zip(rows, np.sqrt(squares_K).tolist(), strict=True)):
            if row.place not in doubted:
                rows[k] = check.with_length(row, norm)
                if not norm <= room or not rows[k].length:  # also true for NaN
                    found.add(row.place)
        if not found:
            break
        doubted |= found
        rows, refused = check.rows(doubted)
    faults = _statistics_faults([row.statistics for row in rows], sent)
    refused |= {rows[k].node: fault for k, fault in faults.items()}
    kept = {row.place for k, row in enumerate(rows) if k not in faults}
    rows = [row for k, row in enumerate(rows) if k not in faults]
    # In the order of arrival: a strategy may depend on it.
    passed = [reply for place, reply in enumerate(replies) if reply.has_error() or place in kept]
    return ValidReplies(
        passed,
        names,
        nodes=[row.node for row in rows],
        w_K=[row.w for row in rows],
        norms_K=[row.norm for row in rows],
        lengths_K=[row.length for row in rows],
        sizes_K=[row.size for row in rows],
        refused=refused,
        statistics_K=[row.statistics for row in rows],
        base_norm=base_norm,
    )


@final
@dataclass(frozen=True)
class _Row:
    """One valid reply."""

    place: int  # its index among the replies: a node may have sent two
    node: int
    values: Values
    w: Vector
    norm: float | None  # of w, where the arrays were read one by one
    length: float
    size: float
    statistics: dict[str, NDArray[np.float32]]


@final
@dataclass(frozen=True)
class _Check:
    """The rules for one reply of a round."""

    replies: list[Message]
    expected: Structure
    names: frozenset[str]
    given: Values
    fixed: frozenset[str]
    weighted_by: str
    usual: Layout | None
    lengths: bool
    clipped_here: bool
    updates: bool

    def rows(self, doubted: Set[int]) -> tuple[list[_Row], dict[int, str]]:
        """The valid replies in the order of nodes, and the reasons for refusing the others.

        Weights are read here only in replies whose index is in `doubted`; one pass over all replies reads the others.
        """
        rows: list[_Row] = []
        refused: dict[int, str] = {}
        asked = {reply.metadata.src_node_id for reply in self.replies}  # Flower's Grid accepts no other node's answer
        places = sorted(range(len(self.replies)), key=lambda place: self.replies[place].metadata.src_node_id)
        parts = in_parts(lambda part: [self._row_or_fault(place, place in doubted) for place in part], places)
        for place, found in zip(places, (found for part in parts for found in part), strict=True):
            node = self.replies[place].metadata.src_node_id
            fault = sender_fault(node, asked, {row.node for row in rows[-1:]})
            if fault is None and isinstance(found, _Row):
                rows.append(found)
            else:
                refused[node] = one_line(fault or str(found))
        return rows, refused

    def _row_or_fault(self, place: int, whole: bool) -> _Row | ValueError:
        try:
            return self._row(place, whole=whole)
        except ValueError as fault:
            return fault

    def _row(self, place: int, *, whole: bool) -> _Row:
        """A valid reply; ValueError with the reason where it is not valid. `whole`: the arrays of w are read too."""
        try:
            reply = self.replies[place]
            values = _read(reply, self.expected)
            squares = self._squares(values, whole=whole)
            w, norm = _weights(values, squares if whole else None, self.names)
            size = _size(reply, self.weighted_by, self.usual)
            length = _length(values, self.given, updates=self.updates) if self.lengths and whole else 0.0
            if self.clipped_here and whole and length == 0.0:
                raise ValueError("its update is zero, and Flower's clipping would divide by its length")
        except ValueError:
            if whole:
                raise
            return self._row(place, whole=True)  # a reply with two faults gets the same reason in both ways
        moved = _moved(values, self.given) if self.updates else values
        return _Row(place, reply.metadata.src_node_id, values, w, norm, length or 0.0, size, statistics_of(moved))

    def _squares(self, values: Values, *, whole: bool) -> dict[str, float]:
        """The sums of squares of all arrays, or of those that are not part of w."""
        squares = dict[str, float]()
        for name, _ in self.expected:
            if not np.issubdtype(values[name].dtype, np.inexact) or (not whole and self._in_w(name)):
                continue
            if (
                name in self.fixed
                and name in self.given
                and np.array_equal(values[name], self.given[name], equal_nan=True)
            ):
                continue
            squares[name] = square_of(values[name])
            if fault := length_fault([values[name]], squares[name], "numbers too large to measure"):
                raise ValueError(f"{fault} in {name}")
        return squares

    def _in_w(self, name: str) -> bool:
        return name in self.names and not name.endswith(NORM_STATISTICS)

    def with_length(self, row: _Row, norm: float) -> _Row:
        """The reply with the length of its update over all arrays; `norm` is that of w. 0 where there is no update."""
        others = {name: values for name, values in row.values.items() if not self._in_w(name)}
        rest = _length(
            others, {name: v for name, v in self.given.items() if not self._in_w(name)}, updates=self.updates
        )
        whole = {name: v.shape for name, v in row.values.items()} == {name: v.shape for name, v in self.given.items()}
        return replace(row, length=math.hypot(norm, rest) if whole and rest is not None else 0.0)


def _statistics_faults(statistics_K: list[dict[str, NDArray[np.float32]]], sent: ArrayRecord) -> dict[int, str]:
    """The faults of statistics, by the index of the reply. All replies have the same names and shapes here."""
    names = statistics_K[0].keys() if statistics_K else ()
    before = statistics_of({name: sent[name].numpy() for name in names if name in sent})
    return buffer_faults({name: np.stack([each[name] for each in statistics_K]) for name in names}, before)


def _record(reply: Message) -> ArrayRecord:
    return next(iter(reply.content.array_records.values()))


def _moved(update: Values, w: Values) -> Values:
    """BatchNorm's statistics of a client that sent an update."""
    names = [name for name in update if name.endswith(NORM_STATISTICS)]
    return {name: update[name] + w[name] if name in w else update[name] for name in names}


def _read(reply: Message, expected: Structure) -> Values:
    """The arrays of a valid reply; ValueError with the reason for any other."""
    if reply.has_error():
        raise ValueError(f"failed: {reply.error.reason}")
    records = reply.content.array_records
    if len(records) != 1:
        raise ValueError(f"{len(records)} records of weights, not one")
    record = _record(reply)
    if structure_of(record) != expected:
        raise ValueError("its weights have other names or shapes than the model's")
    return {name: values_of(array) for name, array in record.items()}


def _weights(values: Values, squares: Mapping[str, float] | None, names: frozenset[str]) -> tuple[Vector, float | None]:
    """The arrays that make w, and its norm where the sums of their squares are known."""
    for name in sorted(names):
        if not np.issubdtype(values[name].dtype, np.floating):
            raise ValueError(f"{name} holds {values[name].dtype}, and floats in the other replies")
    w = vector_of(values, names)
    if not w:
        raise ValueError("weights: there are no floats among them; give a model's parameters")
    if squares is None:
        return w, None
    square = math.fsum(squares[name] for name in names if not name.endswith(NORM_STATISTICS))
    if fault := length_fault(w, square, "its weights are too large to measure"):
        raise ValueError(fault)
    return w, math.sqrt(square)


def _length(values: Values, before: Values, *, updates: bool) -> float | None:
    """The length of an update, computed in the type of the weights as Flower's clipping does: there a tiny one is 0.

    None where the arrays are not those that were sent: then there is no update.
    """
    if {name: value.shape for name, value in values.items()} != {name: value.shape for name, value in before.items()}:
        return None
    if updates:
        return math.sqrt(math.fsum(map(square_of, values.values())))
    return math.sqrt(math.fsum(difference_square(value, before[name]) for name, value in values.items()))


def consistent_replies(replies: list[Message], weighted_by: str) -> tuple[list[Message], dict[int, str]]:
    """The replies to an evaluation that the strategy gets, and the reasons for refusing the others."""
    usual = _usual([reply for reply in replies if not reply.has_error()])
    refused: dict[int, str] = {}
    for reply in replies:
        if not reply.has_error():
            try:
                _size(reply, weighted_by, usual)
            except ValueError as fault:
                empty = _layout(reply) == usual and _claimed(reply, weighted_by) == 0
                refused[reply.metadata.src_node_id] = EMPTY if empty else one_line(str(fault))
    return [reply for reply in replies if reply.metadata.src_node_id not in refused], refused


def _layout(reply: Message) -> Layout:
    """The names of a reply's records and metrics, with the lengths of lists."""
    content, found = reply.content, set[tuple[str, str, int]]()
    for name, record in content.metric_records.items():
        found |= {(name, key, len(value) if isinstance(value, list) else -1) for key, value in record.items()}
    return frozenset(content.array_records), frozenset(found)


def _usual(replies: list[Message]) -> Layout | None:
    """The layout of most replies: Flower's own strategies end the run where one reply has another."""
    found = Counter(_layout(reply) for reply in replies)
    return found.most_common(1)[0][0] if found else None


def _claimed(reply: Message, weighted_by: str) -> object:
    """The number of samples in a reply; 1 if it has none."""
    metrics = reply.content.metric_records
    return next(iter(metrics.values())).get(weighted_by, 1.0) if metrics else 1.0


def _size(reply: Message, weighted_by: str, usual: Layout | None) -> float:
    if _layout(reply) != usual:
        raise ValueError("its records or metrics have other names or lengths than most others'")
    value = _claimed(reply, weighted_by)
    if fault := size_fault(
        value, weighted_by, whole=False
    ):  # a mean over replies that all have size 0 would divide by zero
        raise ValueError(fault)
    return float(value)  # type: ignore[arg-type]
