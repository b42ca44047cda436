"""A client's scores as plain values, for engines that carry them to another process or machine.

From a process of our own they are taken as they are. From a node they are JSON that anybody may have written: one tally
of another length, with NaN or with more wins than samples would spoil everyone's scores, or end the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from lindt.plan.metrics import Accuracy, MacroF1, MeanOf
from lindt.protocols import ClientTally, Metric

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


def tally_values(tally: ClientTally) -> dict[str, Any]:
    """A tally as plain values, for JSON."""
    return {name: v.tolist() if isinstance(v, Tensor) else v for name, v in vars(tally).items()}


def trusted_tally(found: Mapping[str, Any]) -> ClientTally:
    """What `tally_values` gave, from a process of our own."""
    values: dict[str, Any] = {name: _tensor(v) if isinstance(v, list) else v for name, v in found.items()}
    return ClientTally(**values)


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
    sums = _tensor([number(value) for value in found])
    if not _can_be(expected.metric, sums) or not math.isfinite(expected.metric.value(sums)):
        raise ValueError("a tally of no value")
    return sums


def _tensor(sums: list[float]) -> Tensor:
    return torch.tensor(sums, dtype=torch.float64)


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
