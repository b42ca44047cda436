"""What the server takes of what comes back: each update is valid, or refused by name and reason.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from lindt.engines.base import Reply
from lindt.weights import Buffers, join_buffers


@final
@dataclass(frozen=True)
class Refusal:
    """An update that the server did not take."""

    client: int
    reason: str


def stack(
    replies: Iterable[Reply], asked: set[int], round: int, w: Tensor, buffers: Buffers, wanted: int
) -> tuple[Tensor, Tensor, Buffers, list[int], tuple[Refusal, ...]]:
    """The first `wanted` valid updates w_i - w, by client id and not by arrival; the others are refused by name.

    Only updates are kept, no K x P of weights beside them: the server's memory and time are in such arrays.
    """
    taken: dict[int, Reply] = {}
    refused: list[Refusal] = []
    for reply in replies:
        if len(taken) == wanted:
            continue  # too late: it was asked in case others would not answer
        reason = _fault(reply, asked - taken.keys(), round, w, buffers)
        if reason:
            refused.append(Refusal(reply.client, reason))
        else:
            taken[reply.client] = reply
    answered = sorted(taken)
    valid = [taken[i] for i in answered]
    updates_KP = w.new_empty(len(valid), len(w))
    for row, r in zip(updates_KP, valid, strict=True):
        assert r.w is not None
        torch.sub(r.w, w, out=row)
    sizes_K = torch.tensor([r.size for r in valid])
    joined = join_buffers([r.buffers for r in valid if r.buffers is not None]) if valid else buffers
    return updates_KP, sizes_K, joined, answered, tuple(sorted(refused, key=lambda refusal: refusal.client))


def _fault(reply: Reply, expected: set[int], round: int, w: Tensor, buffers: Buffers) -> str | None:
    """Why an update cannot be taken, in words; None for a good one."""
    if reply.client not in expected:
        return "was not asked, or answered twice"
    if reply.round != round:
        return f"answers round {reply.round}"
    if reply.fault is not None:
        return reply.fault
    if reply.w is None or reply.w.shape != w.shape:
        found = "no weights" if reply.w is None else f"{reply.w.numel()} weights"
        return f"{found} where the model has {w.numel()}"
    if not torch.isfinite(torch.linalg.vector_norm(reply.w - w)):  # one pass finds either
        finite = torch.isfinite(reply.w).all()
        return "its update is too long to measure" if finite else "NaN or infinity among the weights"
    mine, theirs = buffers, reply.buffers
    if theirs is None or theirs.floats_F.shape != mine.floats_F.shape or theirs.counts_I.shape != mine.counts_I.shape:
        return "its buffers do not fit the model"
    if not torch.isfinite(theirs.floats_F).all():
        return "NaN or infinity among the buffers"
    return None
