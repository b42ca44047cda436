"""The cells of the grid of attacks, each with its plan: an attack, an aggregator and a method on digits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Final, NamedTuple, final

from lindt.environment.participation import Sampled
from lindt.environment.threats import (
    AdditiveNoise,
    Backdoor,
    Colluding,
    FreeRider,
    InnerProduct,
    LabelFlip,
    LittleIsEnough,
    MinMax,
    ModelReplacement,
    NoThreat,
    SignFlip,
    Sybils,
    Threat,
)
from lindt.errors import UserError
from lindt.plan.file import resolve
from lindt.plan.models import Mlp
from lindt.plan.plan import METHODS, Plan, Scoring
from lindt.protocols import Aggregator
from lindt.registry import component, field_names, kinds

SCALES: Final = ("smoke", "cpu")
SHARE: Final = 0.25  # the share of attackers, which aggregators with a `share` are given
AGGREGATORS: Final = ("mean", "norm_bound", "geometric_median", "trimmed_mean", "multi_krum", "median", "krum")
# `on_evidence` is the recovery of digits-nfl, the default: it starts when the clients' reports warn.
METHOD_NAMES: Final = ("fedavg", "on_evidence", "lindt")


@final
@dataclass(frozen=True)
class Attack:
    threat: Threat
    words: str  # the behaviour of an attacker, as text


ATTACKS: Final[dict[str, Attack]] = {
    "no_threat": Attack(NoThreat(), "no client attacks"),
    "backdoor": Attack(
        Backdoor(SHARE),
        "the paper's attack on pictures: three samples of other classes with false labels in each batch, five epochs",
    ),
    "model_replacement": Attack(ModelReplacement(threat=Backdoor(SHARE)), "the backdoor, with 5 times its update"),
    "sybils": Attack(Sybils(Backdoor(SHARE)), "the backdoor, and all attackers send the same update of one of them"),
    "sign_flip": Attack(SignFlip(SHARE), "sends its update with the opposite sign"),
    "label_flip": Attack(LabelFlip(SHARE), "trains on false labels: c becomes 9 - c"),
    "colluding": Attack(
        Colluding(SHARE), "sends a direction that all attackers agreed on, with the norm of its update"
    ),
    "additive_noise": Attack(AdditiveNoise(SHARE), "adds noise with three times the norm of its update"),
    "free_rider": Attack(FreeRider(SHARE), "sends w back unchanged"),
    "inner_product": Attack(
        InnerProduct(SHARE), "knows the honest updates: sends -10 times their mean (Xie et al. 2020)"
    ),
    "inner_product-0.5": Attack(InnerProduct(SHARE, epsilon=0.5), "the same with -0.5 times their mean"),
    "little_is_enough": Attack(
        LittleIsEnough(SHARE),
        "knows the honest updates: their mean less z standard deviations, z from the paper (Baruch et al. 2019)",
    ),
    "little_is_enough-1.5": Attack(LittleIsEnough(SHARE, z=1.5), "the same with z = 1.5"),
    "min_max": Attack(
        MinMax(share=SHARE),
        "knows the honest updates: as far from their mean as they are from each other (Shejwalkar and Houmansadr 2021)",
    ),
}
SMOKE: Final = (("no_threat", "sybils", "inner_product"), ("mean", "multi_krum"))


class GridCell(NamedTuple):
    attack: str
    aggregator: str
    method: str


@cache
def cells(scale: str) -> tuple[GridCell, ...]:
    if scale not in SCALES:
        raise UserError(f"--scale {scale}: the grid of attacks has {' and '.join(SCALES)}")
    attacks, aggregators = SMOKE if scale == "smoke" else (tuple(ATTACKS), AGGREGATORS)
    return tuple(GridCell(*names) for names in product(attacks, aggregators, METHOD_NAMES))


@cache
def _preset(seed: int) -> Plan:
    return resolve("digits-nfl", seed=seed)


@cache
def plan_for(cell: GridCell, scale: str, seed: int) -> Plan:
    """The federation of digits-nfl with more clients in a round: 12 of 20 answer, 3 of them attackers."""
    plan = _preset(seed)
    share = {"share": SHARE} if "share" in field_names(kinds(Aggregator)[cell.aggregator]) else {}
    aggregator = component(Aggregator, cell.aggregator, **share)
    method = plan.method if cell.method == "on_evidence" else METHODS[cell.method]
    plan = replace(
        plan,
        name=f"attacks-{cell.attack}-{cell.aggregator}-{cell.method}",
        rounds=30,
        method=replace(method, aggregator=aggregator),
        environment=replace(plan.environment, participation=Sampled(rate=0.6), threat=ATTACKS[cell.attack].threat),
        scoring=Scoring(every=10, last=3),
        alone=replace(plan.alone, with_validation=cell.method == "on_evidence"),
    )
    if scale == "cpu":
        return plan
    return replace(
        plan,
        rounds=3,
        model=Mlp(64, 16),
        data=replace(plan.data, clients=8),
        alone=replace(plan.alone, epochs=2),
        scoring=Scoring(every=3, last=1),
    )
