"""Runs of the queue whose first rounds are the same: one run plays them, the others branch from it (runs/branch.py).

In an environment of the figures of recovery, FedAvg and the runs with recovery at run time only train w until NFL is
detected, which takes more than r' rounds. So each keeps its state after round r', and begins with that of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

from lindt.plan.plan import Plan
from lindt.runs.branch import Branch
from lindt.runs.store import kept_in
from lindt.server.recovery import OnDetection
from lindt_experiments.plans.catalog import EXHIBITS
from lindt_experiments.plans.keys import content_key
from lindt_experiments.plans.scales import plan_for
from lindt_experiments.plans.worlds import WORLDS


@final
@dataclass(frozen=True)
class SharedRounds:
    """The round whose state a run keeps, and the keys of the runs that it may branch from, the best first."""

    round: int
    sources: tuple[str, ...]

    def branch(self, folder: Path) -> Branch | None:
        """The first run with the kept state, among the run folders beside `folder`; None where there is none."""
        for key in self.sources:
            for source in sorted(folder.parent.glob(f"*-{key[:8]}")):
                if self.round in kept_in(source):
                    return Branch(source, self.round)
        return None


def shared_rounds(task: str, scale: str, plan: Plan) -> SharedRounds | None:
    """The rounds that the run of a plan shares with others of the evaluation; None where it shares none."""
    return _shared(task, scale, plan.seed).get(content_key(plan))


@cache
def _shared(task: str, scale: str, seed: int) -> dict[str, SharedRounds]:
    found: dict[str, SharedRounds] = {}
    for world in WORLDS[task]:
        methods = _methods(task, world)
        rules = [plan_for(task, world, m, scale, seed).method.recovery for m in methods if m != "fedavg"]
        patience = {rule.patience for rule in rules if isinstance(rule, OnDetection)}
        if len(methods) > 1 and len(patience) == 1:
            (last,) = patience
            keys = [content_key(plan_for(task, world, method, scale, seed)) for method in methods]
            for number, key in enumerate(keys):
                found[key] = SharedRounds(last, tuple(keys[:number]))
    return found


def _methods(task: str, world: str) -> list[str]:
    """FedAvg and the methods with recovery at run time that the figures show in an environment, in that order."""
    figures = [exhibit for exhibit in EXHIBITS.values() if exhibit.kind == "figure"]
    cells = dict.fromkeys(cell for exhibit in figures for cell in exhibit.cells)
    shown = [cell.method for cell in cells if (cell.task, cell.world) == (task, world)]
    return [method for method in dict.fromkeys(shown) if method == "fedavg" or method.startswith("runtime")]
