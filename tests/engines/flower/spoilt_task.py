"""A node's own task whose node has gone bad: what client 4 answers is spoilt, in another way each round.

Imported on a SuperNode by its configuration, `task="spoilt_task:problem"`; the data are those of `node_task`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from flwr.app import RecordDict
from node_task import problem

from lindt.engines.flower import node
from lindt.protocols import Reply

__all__ = ["problem"]
HANG = 3  # the round that client 4 never answers in
pack = node.pack_replies


def spoilt(replies: Sequence[Reply]) -> RecordDict:
    """Round 1: NaN. Round 2: another shape in training, nothing at all in evaluation. Round 3: no answer in time."""
    reply = replies[0]
    if reply.w is not None and reply.round == 1:
        return pack([replace(reply, w=torch.full_like(reply.w, float("nan")))])
    if reply.w is not None and reply.round == 2:
        return pack([replace(reply, w=reply.w[:-1])])
    if reply.w is not None and reply.round == HANG:
        time.sleep(10**6)
    return RecordDict() if reply.w is None and reply.round else pack(replies)


node.pack_replies = spoilt
