"""The cells of the scoreboard of recovery, each with its plan: a method in a federation on CIFAR-10.

The settings were fixed before any run: each method has the settings of its name (`lindt methods`), which are its
authors' where they are known. No setting is tuned on these federations; where the authors' fail, one is searched with
other seeds on validation data (settings.py). Every method trains on all of a client's data,
except guarded prediction, which holds out its validation part V_i, and gives it back to the models that predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, Final, NamedTuple

from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.guarded import Guarded
from lindt.data.partition import Dirichlet
from lindt.environment.threats import NoThreat
from lindt.errors import UserError
from lindt.plan.plan import METHODS, Plan, Scoring
from lindt.protocols import Detection
from lindt.registry import component
from lindt_experiments.plans.scales import plan_for as evaluated
from lindt_experiments.plans.scales import size_of

SCALES: Final = ("smoke", "cpu", "paper")
WORLDS: Final = {
    "nfl": "the paper's default NFL: mixed classes, 10% active, 20% backdoor attackers, noise",
    "normal": "normal FL: IID data, no attackers",
    "dirichlet": "Dirichlet(0.1) shares of the classes, no attackers",
    "dirichlet-attacked": "Dirichlet(0.1) shares of the classes, 20% backdoor attackers",
}
METHOD_NAMES: Final = (
    "fedavg", "fedprox", "fb", "apfl", "fine-tune", "ditto", "fl-guard", "fedper", "fedrep", "fedbabu", "fedala",
    "lindt", "guarded", "guarded-fine-tune", "guarded-all",
)  # fmt: skip
# Settings that the search (settings.py) found where the authors' fail: by name, the method and the fields that change.
SEARCHED: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {}
# At the paper's size a few only, as they take days.
PAPER: Final = ("fedavg", "fb", "lindt", "fl-guard", "fine-tune", "guarded", "guarded-all")


class RecoveryCell(NamedTuple):
    world: str
    method: str


def method_names() -> tuple[str, ...]:
    """All methods of the scoreboard: those with the settings of their name, and those with settings that were found."""
    return (*METHOD_NAMES, *SEARCHED)


@cache
def cells(scale: str) -> tuple[RecoveryCell, ...]:
    if scale not in SCALES:
        raise UserError(f"--scale {scale}: choose among {', '.join(SCALES)}")
    worlds, methods = (("nfl", "normal"), PAPER) if scale == "paper" else (tuple(WORLDS), method_names())
    return tuple(RecoveryCell(*names) for names in product(worlds, methods))


@cache
def plan_for(cell: RecoveryCell, scale: str, seed: int) -> Plan:
    """CIFAR's plan of that scale (plans/scales.py); recovery is on from the first round."""
    size, skewed = size_of("cifar", scale), cell.world.startswith("dirichlet")
    plan = evaluated("cifar", "nfl" if skewed else cell.world, "fedavg", scale, seed)
    if skewed:
        plan = replace(plan, data=replace(plan.data, allocation=Dirichlet(alpha=0.1, floor=size.floor)))
    if cell.world == "dirichlet":
        plan = replace(plan, environment=replace(plan.environment, threat=NoThreat()))
    name, changed = SEARCHED.get(cell.method, (cell.method, {}))
    method = METHODS[name]
    if changed:
        adaptation: Any = method.adaptation
        method = replace(method, adaptation=replace(adaptation, **changed))
    if isinstance(method.adaptation, FineTuneHead) and size.fine_tuning:
        method = replace(method, adaptation=replace(method.adaptation, epochs=size.fine_tuning))
    guarded = isinstance(method.adaptation, Guarded)
    return replace(
        plan,
        name=f"recovery-{cell.world}-{cell.method}-{scale}",
        method=method,
        detection=component(Detection, "gain") if guarded else plan.detection,
        # Only the last rounds are scored, since some methods tune a model for each client that is scored.
        scoring=Scoring(every=plan.rounds, last=plan.scoring.last),
    )
