"""What the server takes of what comes back: each answer is valid, or refused by name and reason. None ends a run.

The rules are the same on every engine:

    who     a client that was asked, in the round that was asked, once; the first good answer counts
    w_i     one vector of P float32, all finite, no farther than LONGEST from w^{r-1}
    n_i     a whole number from 1 to MOST_SAMPLES. It is a claim: only WeightedMean and `scoring.weighting = "size"`
            listen to it, and under these one client may outweigh all others
    buffers of the model's shapes and types, floats within LONGEST, integers within MOST_COUNT
    scores  sums that are finite and within LONGEST, an accuracy from 0 to 1; who sends others is missing from the
            round's scores

A finite update within LONGEST is taken as it is, denormals too: how far it then moves w is bounded by clipping
(`environment.privacy.S`) and by the aggregator. Float buffers are averaged without either.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from lindt.plan.metrics import Accuracy, MacroF1
from lindt.protocols import Buffers, ClientTally, Metric, Reply

LONGEST: Final = 1e18  # of an update: the squared distance of two such is still a float32
MOST_SAMPLES: Final = 2**40
MOST_COUNT: Final = 2**53  # of an integer in a buffer: a client that counts on from there does not overflow


@final
@dataclass(frozen=True)
class Refusal:
    """An update that the server did not take."""

    client: int
    reason: str


@final
@dataclass(frozen=True)
class _ValidUpdates:
    size: int
    buffers: Buffers


def collect_updates(
    replies: Iterable[Reply], asked: set[int], round: int, w: Tensor, buffers: Buffers, wanted: int
) -> tuple[Tensor, Tensor, Buffers, list[int], tuple[Refusal, ...]]:
    """The first `wanted` valid updates w_i - w, by client id and not by arrival; the others are refused by name.

    Each is written where it stays, and no K x P of weights beside them: the server's memory and time are in such
    arrays.
    """
    rows = {client: row for row, client in enumerate(sorted(asked))}
    updates_KP = w.new_empty(len(rows), len(w))  # a row that nobody answers for takes no memory
    taken: dict[int, _ValidUpdates] = {}
    refused: list[Refusal] = []
    for reply in replies:
        misplaced = _misplaced(reply, asked, taken.keys(), round)
        if misplaced is None and len(taken) == wanted:
            continue  # too late: it was asked in case others would not answer
        found = misplaced or _read(reply, w, buffers, updates_KP[rows[reply.client]])
        if isinstance(found, _ValidUpdates):
            taken[reply.client] = found
        else:
            refused.append(Refusal(reply.client, found))
    answered = sorted(taken)
    sizes_K = torch.tensor([taken[i].size for i in answered])
    joined = join_buffers([taken[i].buffers for i in answered]) if answered else buffers
    for row, i in enumerate(answered):
        if rows[i] > row:  # move up, to where one was missing
            updates_KP[row].copy_(updates_KP[rows[i]])
    return (
        updates_KP[: len(answered)],
        sizes_K,
        joined,
        answered,
        tuple(sorted(refused, key=lambda refusal: refusal.client)),
    )


def collect_scores(replies: Iterable[Reply], asked: set[int], round: int, metric: Metric) -> dict[int, Reply]:
    """The answers to an evaluation that can be added up, by client id; one with NaN would spoil everyone's scores."""
    found: dict[int, Reply] = {}
    for reply in replies:
        placed = _misplaced(reply, asked, found.keys(), round) is None
        if placed and _is_size(reply.size) and reply.tally is not None and _adds_up(reply.tally, metric):
            found[reply.client] = reply
    return {i: found[i] for i in sorted(found)}


def _misplaced(reply: Reply, asked: Set[int], taken: Set[int], round: int) -> str | None:
    if reply.client not in asked or reply.client in taken:
        return "was not asked, or answered twice"
    return None if reply.round == round else f"answers round {reply.round}"


def _read(reply: Reply, w: Tensor, buffers: Buffers, update_P: Tensor) -> _ValidUpdates | str:
    """Writes the update, or says in words why it cannot be taken."""
    if reply.fault is not None:
        return reply.fault
    if not _is_size(reply.size):
        return f"its number of samples is no whole number from 1 to {MOST_SAMPLES}"
    if reply.w is None or reply.w.numel() != w.numel():
        found = "no weights" if reply.w is None else f"{reply.w.numel()} weights"
        return f"{found} where the model has {w.numel()}"
    if reply.w.shape != w.shape or reply.w.dtype != w.dtype:
        return f"weights as {_kind(reply.w)} where the model has {_kind(w)}"
    torch.sub(reply.w, w, out=update_P)
    length = float(torch.linalg.vector_norm(update_P))  # one pass finds NaN, infinity and too much of anything
    if not length <= LONGEST:
        finite = torch.isfinite(reply.w).all()
        return f"its update is longer than {LONGEST:g}" if finite else "NaN or infinity among the weights"
    if reply.buffers is None:
        return "there are no buffers"
    return _misfit(reply.buffers, buffers) or _ValidUpdates(reply.size, reply.buffers)


def _misfit(theirs: Buffers, mine: Buffers) -> str | None:
    pairs = ((theirs.floats_F, mine.floats_F), (theirs.counts_I, mine.counts_I))
    if any(their.shape != my.shape or their.dtype != my.dtype for their, my in pairs):
        return "its buffers do not fit the model"
    if not torch.isfinite(theirs.floats_F).all():
        return "NaN or infinity among the buffers"
    if (theirs.floats_F.abs() > LONGEST).any():
        return f"a buffer holds more than {LONGEST:g}"
    if ((theirs.counts_I > MOST_COUNT) | (theirs.counts_I < -MOST_COUNT)).any():
        return f"a buffer counts beyond {MOST_COUNT}"
    return None


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def _is_size(size: object) -> bool:
    return type(size) is int and 1 <= size <= MOST_SAMPLES


def _adds_up(tally: ClientTally, metric: Metric) -> bool:
    """Finite, small enough that no sum of many is infinite, and what such a metric can be."""
    parts = [part for part in (tally.central, tally.local, tally.private) if part is not None]
    sums, values = [float(part.abs().max()) for part in parts], [metric.value(part) for part in parts]
    least, most = (0.0, 1.0) if isinstance(metric, Accuracy | MacroF1) else (-LONGEST, LONGEST)
    return all(number <= LONGEST for number in sums) and all(least <= value <= most for value in values)


def join_buffers(replies: list[Buffers]) -> Buffers:
    """The clients' buffers as one: the mean of floats, the maximum of integers."""
    return Buffers(
        torch.stack([b.floats_F for b in replies]).mean(0),
        torch.stack([b.counts_I for b in replies]).amax(0),
    )
