"""The federations of the scoreboard: base configurations, each in one part: design, judged or stress.

A base configuration is all of a plan but the seed. Detectors are designed on the design part and judged on the judged
part. A hash of the configuration's name decides the part, so that we cannot choose it. CIFAR and Shakespeare are in the
judged part only. The stress part has settings outside the ranges of the others.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, Literal, final

from lindt.data.partition import Classes, Dirichlet, Groups, Iid, Partition, Roles
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian, NoPrivacy
from lindt.environment.threats import (
    AdditiveNoise,
    Backdoor,
    Colluding,
    FreeRider,
    LabelFlip,
    ModelReplacement,
    NoThreat,
    SignFlip,
    Threat,
)
from lindt.errors import UserError
from lindt.plan.models import Linear, Mlp, Model, SmallCnn
from lindt.plan.plan import METHODS, Alone, Data, Plan, Scoring, Training
from lindt.protocols import Detection
from lindt.registry import component
from lindt.seeds import seed_for
from lindt_experiments.plans.scales import plan_for

Part = Literal["design", "judged", "stress"]
SCALES: Final = ("smoke", "cpu")
ROUNDS: Final = 60
RATES: Final = (0.02, 0.05, 0.1, 0.2, 0.3)
SHARES: Final = (0.1, 0.1, 0.25, 0.4)  # shares of attackers; the smallest is drawn twice as often
ACTIVE: Final = (0.2, 0.5, 1.0)  # K / N
SIGMAS: Final = (0.003, 0.01, 0.03)
ATTACKS: Final = ("backdoor", "replace", "sign", "noise", "free", "collude", "flip")
# The environments of one allocation. Each allocation has attackers, with one of three shares.
ENVIRONMENTS: Final = (*(["plain"] * 8), *(["private"] * 3), *ATTACKS)
DESIGNED: Final = 0.25  # the share of the base configurations in the design part
ALONE: Final = Alone(epochs=30, patience=6)
SCORING: Final = Scoring(
    every=4, last=10
)  # the true beta is known in every fourth round; the label is that of the last ten


@final
@dataclass(frozen=True)
class FastTask:
    """A task with fast runs, for hundreds of federations: its data, a small model, five allocations."""

    model: Model
    other_model: Model  # of the stress part
    classes: int
    allocations: Mapping[str, tuple[str, Partition]]  # the source and the allocation
    clients: tuple[int, ...] = (10, 20, 30)
    relabel: tuple[tuple[int, int], ...] = ((4, 7), (5, 6))
    batch: int = 10


def _ten_classes(source: str) -> dict[str, tuple[str, Partition]]:
    return {
        "iid": (source, Iid(floor=5)),
        "classes3": (source, Classes(3, spread=1.0, floor=5)),
        "classes5": (source, Classes(5, spread=1.0, floor=5)),
        "groups": (source, Groups(spread=1.0, floor=5)),
        "dirichlet": (source, Dirichlet(1.0, floor=5)),
    }


TASKS: Final[dict[str, FastTask]] = {
    "digits": FastTask(Mlp(64, 32), SmallCnn(), 10, _ten_classes("digits")),
    "mnist": FastTask(Mlp(196, 32), Linear(196), 10, _ten_classes("mnist-small"), batch=20),
    "generated": FastTask(Mlp(16, 32), Linear(16), 10, _ten_classes("generated-clusters"), batch=20),
    "cancer": FastTask(
        Mlp(30, 16),
        Linear(30),
        2,
        {
            "iid": ("breast-cancer", Iid(floor=3)),
            "classes1": ("breast-cancer", Classes(1, spread=0.5, floor=3)),
            "groups": ("breast-cancer", Groups(clients=(60, 40), classes=(2, 1), spread=1.0, floor=3)),
            "dirichlet": ("breast-cancer", Dirichlet(0.3, floor=3)),
            "dirichlet1": ("breast-cancer", Dirichlet(1.0, floor=3)),
        },
        clients=(8, 12, 18),
        relabel=((0, 1),),
    ),
    "camps": FastTask(
        Mlp(16, 24),
        Linear(16),
        6,
        {
            "roles": ("two-camps", Roles()),
            "part": ("two-camps-in-part", Roles()),
            "iid": ("two-camps-in-part", Iid()),
            "dirichlet": ("two-camps-in-part", Dirichlet(1.0)),
            "classes2": ("two-camps-in-part", Classes(2, spread=1.0)),
        },
        relabel=((2, 3), (4, 5)),
    ),
}
# The environments of CIFAR and Shakespeare at `cpu`, with the number of seeds of each. Environments of one allocation
# share private models.
SLOW: Final[dict[str, dict[str, int]]] = {
    "cifar": {
        "normal": 3,
        "iid": 3,
        "nfl": 1,
        "attack-0": 1,
        "attack-0.1": 1,
        "sigma-0.01": 1,
        "classes-10": 1,
        "classes-5": 1,
        "classes-2": 1,
    },
    "shake": {"normal": 3, "nfl": 3, "attack-0.33": 3, "sigma-0.01": 3},
}


@final
@dataclass(frozen=True)
class Configuration:
    """A base configuration; `plan(0)`, `plan(1)`, ... are its runs."""

    name: str
    task: str
    part: Part
    base: Plan = field(repr=False)
    by_name: bool = True  # whether seeds are derived from its name; else they are 0, 1, ... as in the paper's tables

    def plan(self, index: int) -> Plan:
        seed = seed_for(index, "detectors", self.name) % 2**31 if self.by_name else index
        return replace(self.base, seed=seed)


def part_of(name: str) -> Part:
    """The part of a base configuration, by a hash of its name."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
    return "design" if place < DESIGNED else "judged"


def recording(plan: Plan) -> Plan:
    """The plan with FedAvg and gain reports, which have no effect on the run.

    w trains without V_i here, and its gain on test data is over a P_i without V_i: the same data on both sides.
    """
    alone = replace(plan.alone, with_validation=False)
    return replace(plan, method=METHODS["fedavg"], detection=component(Detection, "gain"), alone=alone)


@cache
def configurations(scale: str) -> tuple[Configuration, ...]:
    """The configurations of a scale, each with its own name."""
    if scale not in SCALES:
        raise UserError(f"--scale {scale}: the scoreboard of detectors has {' and '.join(SCALES)}")
    found = _smoke() if scale == "smoke" else (*_fast(), *_stress(), *_slow())
    assert len({one.name for one in found}) == len(found)
    return found


def seeds_of(configuration: Configuration, seeds: int) -> int:
    """The number of runs of a configuration; CIFAR and Shakespeare have their own number, times `seeds`."""
    _, _, world = configuration.name.partition("-")
    return seeds * SLOW.get(configuration.task, {}).get(world, 1)


def named(scale: str, name: str) -> Configuration:
    for one in configurations(scale):
        if one.name == name:
            return one
    raise UserError(f"configuration {name!r}: the scale {scale} has no such configuration")


def _fast() -> tuple[Configuration, ...]:
    found = []
    for task, about in TASKS.items():
        for allocation in about.allocations:
            taken: set[str] = set()
            for index, environment in enumerate(ENVIRONMENTS):
                draw = random.Random(f"{task} {allocation} {environment} {index}")
                while True:
                    axes = _drawn(draw, about)
                    name = _name(task, allocation, environment, axes)
                    if name not in taken:
                        break
                taken.add(name)
                found.append(Configuration(name, task, part_of(name), _plan(name, task, allocation, environment, axes)))
    return tuple(found)


def _stress() -> tuple[Configuration, ...]:
    """The stress part: another rate, another noise, or another model, which the other parts do not have."""
    found = []
    for task, about in TASKS.items():
        for allocation in list(about.allocations)[:4]:
            for kind in ("rate", "noise", "model"):
                draw = random.Random(f"stress {task} {allocation} {kind}")
                environment = {"rate": "plain", "noise": "private", "model": draw.choice(("plain", "sign"))}[kind]
                axes = _drawn(draw, about)
                changes: dict[str, dict[str, Any]] = {"rate": {"rate": 0.6}, "noise": {"sigma": 0.1}, "model": {"E": 1}}
                axes |= changes[kind]
                name = f"stress-{kind}-{_name(task, allocation, environment, axes)}"
                model = about.other_model if kind == "model" else None
                plan = _plan(name, task, allocation, environment, axes, model)
                found.append(Configuration(name, task, "stress", plan))
    return tuple(found)


def _slow() -> tuple[Configuration, ...]:
    found = []
    for task, worlds in SLOW.items():
        for world in worlds:
            plan = plan_for(task, world, "fedavg", "cpu", 0)
            plan = replace(recording(plan), name=f"detectors-{task}-{world}", scoring=Scoring(every=5, last=10))
            found.append(Configuration(f"{task}-{world}", task, "judged", plan, by_name=False))
    return tuple(found)


SMOKE: Final[tuple[tuple[Part, str, str, str], ...]] = (
    ("design", "camps", "roles", "plain"),
    ("design", "camps", "dirichlet", "plain"),
    ("design", "cancer", "dirichlet", "private"),
    ("judged", "digits", "iid", "plain"),
    ("judged", "camps", "part", "flip"),
    ("judged", "cancer", "iid", "sign"),
)


def _smoke() -> tuple[Configuration, ...]:
    """A few tiny configurations, negative and healthy."""
    axes = {"rate": 0.3, "E": 1, "clients": 6, "active": 0.5, "share": 0.25, "sigma": 0.01}
    found = []
    for part, task, allocation, environment in SMOKE:
        name = f"smoke-{_name(task, allocation, environment, axes)}"
        plan = _plan(name, task, allocation, environment, axes)
        plan = replace(
            plan, rounds=16, alone=replace(plan.alone, epochs=4, patience=2), scoring=Scoring(every=3, last=2)
        )
        found.append(Configuration(name, task, part, plan))
    return tuple(found)


def _drawn(draw: random.Random, about: FastTask) -> dict[str, Any]:
    epochs, clients = draw.choice((1, 1, 5)), draw.choice(about.clients)
    costly = epochs > 1 or clients == max(about.clients)
    return {
        "rate": draw.choice(RATES),
        "E": epochs,
        "clients": clients,
        "active": draw.choice(ACTIVE[:2] if costly else ACTIVE),
        "share": draw.choice(SHARES),
        "sigma": draw.choice(SIGMAS),
    }


def _name(task: str, allocation: str, environment: str, axes: Mapping[str, Any]) -> str:
    around = {"plain": "", "private": f"-sigma{axes['sigma']:g}"}.get(environment, f"-{environment}{axes['share']:g}")
    place = f"{axes['rate']:g}-E{axes['E']}-N{axes['clients']}-K{axes['active']:g}"
    return f"{task}-{allocation}{around}-rate{place}"


def _plan(
    name: str, task: str, allocation: str, environment: str, axes: Mapping[str, Any], model: Model | None = None
) -> Plan:
    about = TASKS[task]
    source, partition = about.allocations[allocation]
    privacy = Gaussian(S=5.0, sigma=axes["sigma"]) if environment == "private" else NoPrivacy()
    return recording(
        Plan(
            name=f"detectors-{name}",
            rounds=ROUNDS,
            data=Data(source, axes["clients"], allocation=partition),
            model=model or about.model,
            training=Training(rate=axes["rate"], epochs=axes["E"], batch=about.batch),
            environment=Environment(Sampled(axes["active"]), _threat(environment, axes["share"], about), privacy),
            alone=ALONE,
            scoring=SCORING,
        )
    )


def _threat(environment: str, share: float, about: FastTask) -> Threat:
    backdoor = Backdoor(share, about.relabel, epochs=2)
    threats: dict[str, Threat] = {
        "backdoor": backdoor,
        "replace": ModelReplacement(3.0, backdoor),
        "sign": SignFlip(share),
        "noise": AdditiveNoise(share),
        "free": FreeRider(share),
        "collude": Colluding(share),
        "flip": LabelFlip(share, about.classes),
    }
    return threats.get(environment, NoThreat())
