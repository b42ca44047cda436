"""A run's plan.toml in words: the method, the detector's rule, how to repeat the run. Reads tables, not Plans.

A Plan is built of components, which import torch; and a folder's plan may be of another version, or damaged.
So every field is looked up with care, and what is not there is None.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

LEARNS = {
    "global_only": "FedAvg",
    "dual": "LINDT",
    "fine_tune_head": "FB",
    "apfl": "APFL",
    "separate": "Separate",
}
STATISTICS = ("delta", "clean", "spread", "median")
JOINS = {"trimmed_mean": "trimmed mean", "median": "median", "weighted_mean": "weighted mean"}


@final
@dataclass(frozen=True)
class Watched:
    """The rule that Delta is held against (Alg. 2, s8-s11)."""

    epsilon: float
    patience: int  # r'
    statistic: str
    counting: str


def at(plan: Mapping[str, Any], *path: str) -> Any:
    found: Any = plan
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def whole_at(plan: Mapping[str, Any], *path: str) -> int | None:
    value = at(plan, *path)
    return value if type(value) is int and 0 <= value < 2**53 else None


def number_at(plan: Mapping[str, Any], *path: str) -> float | None:
    value = at(plan, *path)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


def word_at(plan: Mapping[str, Any], *path: str) -> str:
    value = at(plan, *path)
    return value if isinstance(value, str) else ""


def watched(plan: Mapping[str, Any]) -> Watched | None:
    """The detector's rule; None where nobody watches."""
    where = ("method", "recovery")
    epsilon, patience = number_at(plan, *where, "epsilon"), whole_at(plan, *where, "patience")
    if word_at(plan, *where, "kind") != "on_detection" or epsilon is None or patience is None:
        return None
    statistic, counting = word_at(plan, *where, "statistic"), word_at(plan, *where, "counting")
    known = statistic if statistic in STATISTICS else "delta"  # it names a field of each round's line
    return Watched(epsilon, patience, known, counting or "cumulative")


def adapts(plan: Mapping[str, Any]) -> bool:
    """Whether clients learn something for themselves when recovery is on."""
    return word_at(plan, "method", "adaptation", "kind") not in ("", "global_only")


def method_words(plan: Mapping[str, Any]) -> str:
    """`LINDT on detection`, `FedAvg, watched`, `LINDT, trimmed mean`."""
    learns = word_at(plan, "method", "adaptation", "kind")
    name = LEARNS.get(learns, learns or "?")
    if word_at(plan, "method", "penalty", "kind") == "proximal":
        name = "FedProx" if name == "FedAvg" else f"{name}, FedProx"
    recovery = word_at(plan, "method", "recovery", "kind")
    if recovery == "on_detection":
        name += " on detection" if adapts(plan) else ", watched"
    elif recovery == "never" and adapts(plan):
        name += ", never on"
    joins = JOINS.get(word_at(plan, "method", "aggregator", "kind"))
    return f"{name}, {joins}" if joins else name


def repeat_command(plan_file: str, task: str | None) -> str:
    """What a shell is told to play the same run again; the plan holds all that decides its numbers."""
    if task == "a Flower app":  # lindt.flower.journal's: its plan.toml holds the detector's rule and no more
        return "start the Flower app with another folder"
    words = ["lindt", "run", plan_file, "--out", "runs/again"]
    return shlex.join(words + (["--task", task] if task else []))


def group_of(plan: Mapping[str, Any], task: str | None) -> str:
    """The same for runs that differ in their seed alone."""
    rest = {name: value for name, value in plan.items() if name != "seed"}
    return hashlib.sha256(json.dumps([rest, task], sort_keys=True, default=str).encode()).hexdigest()[:16]
