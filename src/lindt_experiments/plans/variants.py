"""The methods of the evaluation by name: the paper's, the stopping rules of its figures, and the ablations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import final

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
# Attach position x scale of the score x first v. The default of all three is LINDT itself.
ABLATIONS: dict[str, Method] = {
    f"dual-{position}-{scale}-{first}": replace(LINDT, adaptation=dual)
    for position, scale, first in product(POSITIONS, SCORES, FIRSTS)
    if (dual := Dual(position=position, scale=scale, first=first)) != Dual()
} | {
    "dual-head": replace(LINDT, adaptation=Dual(trains="head")),  # only the head of v trains
    "separate": replace(LINDT, adaptation=Separate()),  # v alone, no attaching
}
# The private models alone, under the rule's own number of epochs, half and twice of it; FedAvg plays one round.
ALONE = {"alone-x0.5": 0.5, "alone-x1": 1.0, "alone-x2": 2.0}
PAPERS = ("fedavg", "fedprox", "trimmed-mean", "fb", "apfl", "lindt", "lindt-tm")
OURS = ("lindt-before",)  # the best of the ablation on CIFAR / NFL, seed 0: a row of its own in table 3
NAMES = (*PAPERS, *OURS, "runtime", "runtime-once", "runtime-quiet", *ABLATIONS, *ALONE)


@final
@dataclass(frozen=True)
class Detection:
    """What detection uses at a scale; `quiet` is the third rule's number of rounds."""

    epsilon: float
    patience: int  # r'
    quiet: int = 10


def variant(name: str, task: str, trimmed: float, detection: Detection) -> Method:
    """A method by name; a trimmed mean trims the attackers' share."""
    if name in ABLATIONS:
        return ABLATIONS[name]
    if name in ALONE or name == "fedavg":
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
    if name not in (*PAPERS, *OURS):
        raise UserError(f"method {name!r}: choose among {', '.join(NAMES)}")
    return METHODS[name]
