"""A reply as JSON values and back: the same on every engine, and a fault in words for anything else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from worlds import tiny

from lindt.plan.problem import METRICS, problem_for
from lindt.protocols import Buffers, ClientTally, Kind, Reply, Task
from lindt.server.updates import ScoreFormat, pack_reply, unpack_reply

W, BUFFERS = torch.tensor([1.0, 2.0]), Buffers(torch.empty(0), torch.empty(0, dtype=torch.int64))
EXPECTED = ScoreFormat(METRICS["accuracy"], (2,), frozenset({3}))
SCORED = Reply(
    3, 1, 5,
    tally=ClientTally(4, *(torch.tensor([hits, 4.0], dtype=torch.float64) for hits in (1.0, 2.0, 3.0)), 1, 2),
    notes={"alpha": 0.5, "odd": math.nan},
)  # fmt: skip


def task(kind: Kind) -> Task:
    return Task(kind, "ab", 3, 1, W, BUFFERS, recovering=True)


def carried(reply: Reply, kind: Kind, **changes: Any) -> Reply:
    """Over a wire and back."""

    def weights() -> tuple[Tensor, Buffers]:
        return W + 1, BUFFERS

    return unpack_reply(json.loads(json.dumps(pack_reply(reply) | changes)), task(kind), EXPECTED, weights)


def test_a_scored_reply_comes_back_as_it_was() -> None:
    found = carried(SCORED, "evaluate")
    assert found.fault is None
    assert found.tally is not None
    assert SCORED.tally is not None
    assert (found.client, found.round, found.size) == (3, 1, 5)
    for name, value in vars(SCORED.tally).items():
        there = getattr(found.tally, name)
        assert torch.equal(there, value) if isinstance(value, Tensor) else there == value
    assert found.notes is not None
    assert found.notes["alpha"] == 0.5
    assert math.isnan(found.notes["odd"])


def test_weights_are_read_after_training_only() -> None:
    trained = carried(Reply(3, 1, 5, W, BUFFERS), "train")
    assert trained.w is not None
    assert trained.w.tolist() == [2.0, 3.0]
    assert carried(Reply(3, 1, 5), "private").w is None
    assert carried(SCORED, "evaluate").w is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client": 4}, "client 4, round 1"),
        ({"round": 2}, "client 3, round 2"),
        ({"size": 0}, "0 samples"),
        ({"size": True}, "size = True"),
        ({"size": 2**41}, "not a whole number"),
        ({"fault": "out of memory"}, "failed: out of memory"),
        ({"tally": None}, "tally is not a table"),
        ({"tally": {}}, "tally is not a table"),
        ({"notes": {"a": "b"}}, "notes is not a table"),
        ({"notes": {"a": 1e30}}, "a value of its notes is above 1e+18"),
    ],
)
def test_a_reply_that_breaks_a_rule_becomes_a_fault(changes: dict[str, Any], said: str) -> None:
    found = carried(SCORED, "evaluate", **changes)
    assert found.fault is not None
    assert said in found.fault
    assert (found.client, found.round, found.tally) == (3, 1, None)


def test_a_private_score_is_there_for_the_clients_that_have_one() -> None:
    assert SCORED.tally is not None
    without = replace(SCORED, tally=replace(SCORED.tally, private=None, wins=0, losses=0))
    assert "tally.private is missing" in str(carried(without, "evaluate").fault)


def test_a_sample_with_several_predictions_may_win_with_each() -> None:
    """A text's sample is a window of characters: 4 samples, 40 predictions."""
    sums = torch.tensor([10.0, 40.0], dtype=torch.float64)
    found = carried(replace(SCORED, tally=ClientTally(4, sums, sums, sums, 20, 15)), "evaluate")
    assert found.fault is None


def test_the_format_of_a_plan() -> None:
    plan = tiny()
    found = ScoreFormat.of(plan, problem_for(plan))
    assert found.shape == (2,)
    assert found.alone <= set(range(len(problem_for(plan).data)))
