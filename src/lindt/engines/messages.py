"""A client's answer as JSON values, and back: what a worker's pipe and a Flower message carry besides the weights.

Every answer is checked when it is unpacked, whichever engine carried it: its types here, its numbers by the rules of
server/updates.py. An answer that breaks a rule becomes a Reply with a `fault` in words; it never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from lindt.client.training import forward_all
from lindt.data.examples import subset
from lindt.errors import in_short, one_line
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, counted_clients, first_model
from lindt.protocols import Buffers, ClientTally, GainReport, Metric, Paired, Reply, Task
from lindt.server.updates import LONGEST, MOST_SAMPLES, notes_fault, tally_fault

MOST: Final = 2**31  # of a round or a client's number


SUMS: Final = ("central", "local", "private")


COUNTS: Final = ("wins", "losses", "attack_chances", "attack_central", "attack_local")


@final
@dataclass(frozen=True)
class ScoreFormat:
    """What the server knows of a good answer to an evaluation beforehand."""

    metric: Metric
    shape: tuple[int, ...]  # of the metric's tally
    alone: frozenset[int]  # the clients that have a private model

    @classmethod
    def of(cls, plan: Plan, problem: Problem, model: nn.Module | None = None) -> ScoreFormat:
        """The shape of a tally is found by scoring two samples with an untrained model: `model`, or one built here."""
        metric, test = problem.metric_for(plan), problem.data[0][1]
        few = subset(test, torch.arange(min(len(test), 2)))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model = first_model(problem, plan) if model is None else model
            outputs = forward_all(model.eval(), few, torch.device("cpu"))
            shape = tuple(metric.tally(outputs, few.labels).shape)
        alone = counted_clients(plan, range(len(problem.data))) if plan.alone.private else frozenset()
        return cls(metric, shape, alone)


def pack_reply(reply: Reply) -> dict[str, Any]:
    """All of a reply but its weights, as JSON values."""
    tally = None if reply.tally is None else pack_tally(reply.tally)
    found = {"client": reply.client, "round": reply.round, "size": reply.size, "fault": reply.fault, "tally": tally,
             "notes": reply.notes}  # fmt: skip
    return found if reply.report is None else found | {"report": asdict(reply.report)}


def unpack_reply(
    found: object, task: Task, expected: ScoreFormat, weights: Callable[[], tuple[Tensor, Buffers]]
) -> Reply:
    """The answer to `task`, with a `fault` where it is no valid one. `weights` reads w_i, after training only."""
    try:
        if not isinstance(found, dict):
            raise ValueError("it is no reply")
        if isinstance(found.get("fault"), str):
            return failed(task, f"failed: {found['fault']}")
        client, round = (whole_number(found.get(name), name, MOST) for name in ("client", "round"))
        size = whole_number(found.get("size"), "size", MOST_SAMPLES)
        if size < 1 or (client, round) != (task.client, task.round):
            raise ValueError(f"client {client}, round {round}, {size} samples")
        if task.kind == "private":
            return Reply(client, round, size, notes=unpack_notes(found.get("notes")))
        if task.kind == "train":
            return Reply(client, round, size, *weights(), report=_report_or_none(found.get("report")))
        tally = unpack_tally(found.get("tally"), expected.metric, expected.shape, private=client in expected.alone)
        return Reply(client, round, size, tally=tally, notes=unpack_notes(found.get("notes")))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        return failed(task, f"sent what is no answer: {error}")


def failed(task: Task, reason: str) -> Reply:
    return Reply(task.client, task.round, 0, fault=one_line(reason))


def pack_tally(tally: ClientTally) -> dict[str, Any]:
    return {name: v.flatten().tolist() if isinstance(v, Tensor) else v for name, v in vars(tally).items()}


def unpack_tally(found: object, metric: Metric, shape: tuple[int, ...], *, private: bool | None) -> ClientTally:
    """A tally that adds up with the other clients', or ValueError. `private`: whether it must hold a private score;
    None where both will do."""
    if not isinstance(found, dict) or found.keys() != ClientTally.__dataclass_fields__.keys():
        raise ValueError("no tally")
    if private is not None and private != (found["private"] is not None):
        raise ValueError("a private score that is not there, or was not asked for")
    sums = {name: None if found[name] is None else _sums(found[name], shape) for name in SUMS}
    central, local = sums["central"], sums["local"]
    if central is None or local is None:
        raise ValueError("a score is missing")
    samples = whole_number(found["samples"], "samples", MOST_SAMPLES)
    counts = {name: whole_number(found[name], name, MOST_SAMPLES) for name in COUNTS}
    tally = ClientTally(samples, central, local, sums["private"], **counts)
    if fault := tally_fault(tally, metric):
        raise ValueError(fault)
    return tally


def unpack_report(found: object) -> GainReport:
    """A gain report, or ValueError. The server clips its numbers to their bounds (server/updates.py)."""
    if not isinstance(found, dict) or not found.keys() <= GainReport.__dataclass_fields__.keys():
        raise ValueError("no gain report")
    private, equal_age = _paired(found.get("private")), _paired(found.get("equal_age"))
    if private is None or equal_age is None:
        raise ValueError("a gain report without a gain")
    first = found.get("first_batch")
    return GainReport(
        whole_number(found.get("samples"), "samples", MOST_SAMPLES),
        private,
        equal_age,
        _paired(found.get("adapted")),
        _paired(found.get("adapted_private")),
        None if first is None else number(first, "first_batch"),
    )


def _paired(found: object) -> Paired | None:
    if found is None:
        return None
    if not isinstance(found, dict) or found.keys() != {"mean", "square"}:
        raise ValueError("no mean and square of a difference")
    return Paired(number(found["mean"], "mean"), number(found["square"], "square"))


def _report_or_none(found: object) -> GainReport | None:
    """An update counts without its report, as it does where a client has none."""
    try:
        return None if found is None else unpack_report(found)
    except ValueError:
        return None


def _sums(found: object, shape: tuple[int, ...]) -> Tensor:
    length = torch.Size(shape).numel()
    if not isinstance(found, list) or len(found) != length:
        raise ValueError(f"a tally is {length} numbers")
    return torch.tensor([number(value, "a sum") for value in found], dtype=torch.float64).reshape(shape)


def unpack_notes(found: object) -> dict[str, float]:
    """A method's notes, or ValueError. NaN and infinity pass: the server leaves such notes out of its means."""
    notes = {} if found is None else found
    if not isinstance(notes, dict) or not all(type(value) in (int, float) for value in notes.values()):
        raise ValueError("no notes")
    if fault := notes_fault(notes):
        raise ValueError(fault)
    return {name: float(value) for name, value in notes.items()}


def number(value: object, name: str) -> float:
    # The bound first: a whole number may be too large for any float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LONGEST:
        raise ValueError(f"{name} = {in_short(value)}: no number up to {LONGEST:g}")
    return float(value)


def whole_number(value: object, name: str, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} = {in_short(value)}: no whole number from 0 to {most}")
    return value
