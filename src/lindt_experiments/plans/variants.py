"""The methods of the evaluation by name: the paper's, the stopping rules of its figures, and the ablations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import final

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.dual import Dual, Position, Scale
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.separate import Separate
from lindt.client.training import Initial
from lindt.errors import UserError
from lindt.plan.plan import METHODS, Method
from lindt.protocols import Stop
from lindt.server.aggregation import TrimmedMean
from lindt.server.recovery import EveryoneTreated, OnDetection, Persist, QuietRounds

FINE_TUNING = {"cifar": FineTuneHead(rate=0.001, epochs=200), "shake": FineTuneHead(rate=0.01, epochs=40)}
LINDT = METHODS["lindt"]
POSITIONS: tuple[Position, ...] = ("after", "before")
SCORES: tuple[Scale, ...] = ("paper", "sqrt_d", "cosine")
FIRSTS: tuple[Initial, ...] = ("copy", "random")
# Attach position x scale of the score x first v. LINDT has the default of all three.
ABLATIONS: dict[str, Method] = {
    f"dual-{position}-{scale}-{first}": replace(LINDT, adaptation=dual)
    for position, scale, first in product(POSITIONS, SCORES, FIRSTS)
    if (dual := Dual(position=position, scale=scale, first=first)) != Dual()
} | {
    "dual-head": replace(LINDT, adaptation=Dual(trains="head")),  # only the head of v trains
    "separate": replace(LINDT, adaptation=Separate()),  # v alone, no attaching
}
# Only the private models, with the rule's number of epochs, half of it and twice of it; FedAvg plays one round.
ALONE = {"alone-x0.5": 0.5, "alone-x1": 1.0, "alone-x2": 2.0}
PAPERS = ("fedavg", "fedprox", "trimmed-mean", "fb", "apfl", "lindt", "lindt-tm")
# Rows of our own in table 3: the best variant of the ablation on CIFAR / NFL, seed 0, and the default recovery.
OURS = ("lindt-before", "guarded")
# Not in the paper: APFL that learns, two later recoveries, and FedAvg whose clients report gains for the test.
LATER = ("apfl-own", "fl-guard", "guarded-all", "fedavg-gain")
NAMES = (*PAPERS, *OURS, *LATER, "runtime", "runtime-once", "runtime-quiet", *ABLATIONS, *ALONE)


@final
@dataclass(frozen=True)
class Detection:
    """The settings of detection at a scale; `quiet` is the number of rounds of the third stopping rule."""

    epsilon: float
    patience: int  # r'
    quiet: int = 10


def variant(name: str, task: str, trimmed: float, detection: Detection) -> Method:
    """A method by name; a trimmed mean trims the attackers' share."""
    if name in ABLATIONS:
        return ABLATIONS[name]
    if name in ALONE or name in ("fedavg", "fedavg-gain"):
        return METHODS["fedavg"]
    if name == "fb":
        return replace(METHODS["fb"], adaptation=FINE_TUNING[task])
    if name in ("trimmed-mean", "lindt-tm"):
        return replace(METHODS[name], aggregator=TrimmedMean(share=trimmed))
    rules: dict[str, Stop] = {
        "runtime": Persist(),
        "runtime-once": EveryoneTreated(),
        "runtime-quiet": QuietRounds(detection.quiet),
    }
    if name in rules:
        recovery = OnDetection(epsilon=detection.epsilon, patience=detection.patience, stop=rules[name])
        return replace(LINDT, recovery=recovery)
    if name == "apfl-own":
        return replace(METHODS["apfl"], adaptation=Apfl(v_loss="own"))
    if name not in (*PAPERS, *OURS, *LATER):
        raise UserError(f"method {name!r}: choose among {', '.join(NAMES)}")
    return METHODS[name]
