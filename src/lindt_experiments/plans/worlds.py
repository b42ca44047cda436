"""The environments (worlds) of the paper's evaluation: each changes one setting of a task's default NFL."""

from __future__ import annotations

from dataclasses import replace

from lindt.data.partition import Balanced, Classes, Groups, Iid, Partition, Roles
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.environment.threats import Backdoor, NextCharacter, NoThreat, Until
from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt_experiments.plans.choices import CHOICES

TASKS = ("cifar", "shake")
WORLDS: dict[str, tuple[str, ...]] = {
    "cifar": (
        "nfl",  # Tables 2 and 9: Mixed, 10% active, 20% attackers, sigma = 0.001
        "normal",  # IID, no attackers
        *("nfl-long", "normal-long"),  # Figures 3 and 7: these two, over more rounds where a scale is short
        *("iid", "classes-10", "classes-5", "classes-2"),  # Table 4, with the attackers
        *("active-0.9", "active-0.7", "active-0.5", "active-0.3"),  # Table 5
        *("attack-0", "attack-0.1"),  # Table 6
        *("sigma-0.003", "sigma-0.005", "sigma-0.007", "sigma-0.01"),  # Table 7
        "lifted",  # Figures 8 and 9: non-IID(10), the attacks end after 70% of the rounds
        *CHOICES,  # the default NFL with one open choice changed
    ),
    "shake": (
        "nfl",  # by role, 10% active, 16% attackers, sigma = 0.001
        "normal",  # no attackers
        "balanced",  # Table 10
        *("active-0.9", "active-0.3"),  # Table 11
        *("attack-0", "attack-0.33"),  # Table 12
        *("sigma-0.003", "sigma-0.005", "sigma-0.007", "sigma-0.01"),  # Table 13
    ),
}
LIFTED = 0.7  # the share of the rounds with attacks: the paper's round 350 of 500
# Environments in which recovery begins after half of the rounds and ends before the last: they need more rounds.
LONG = ("nfl-long", "normal-long", "lifted")


def check_world(task: str, world: str) -> None:
    if task not in TASKS:
        raise UserError(f"task {task!r}: choose among {', '.join(TASKS)}")
    if world not in WORLDS[task]:
        raise UserError(f"world {world!r} of {task}: choose among {', '.join(WORLDS[task])}")


def one_name(task: str, world: str) -> str:
    """The name of an environment. Shakespeare's normal FL and that with 0% attackers are the same run."""
    return "normal" if (task, world) == ("shake", "attack-0") else world


def in_world(plan: Plan, task: str, world: str) -> Plan:
    """The task's default plan in another environment."""
    check_world(task, world)
    if world in CHOICES:
        return CHOICES[world].change(plan)
    kind, _, value = one_name(task, world).removesuffix("-long").partition("-")
    if kind == "active":
        return _environment(plan, participation=Sampled(rate=float(value)))
    if kind == "sigma":
        privacy = plan.environment.privacy
        assert isinstance(privacy, Gaussian)
        return _environment(plan, privacy=replace(privacy, sigma=float(value)))
    if kind == "attack":
        return _attacked(plan, float(value))
    if kind == "lifted":
        plan = _allocated(plan, _classes(plan, 10))
        return _environment(plan, threat=Until(round(LIFTED * plan.rounds), plan.environment.threat))
    if kind == "normal":
        return _attacked(plan if task == "shake" else _allocated(plan, Iid()), 0.0)
    if kind == "iid":
        return _allocated(plan, Iid())
    if kind == "balanced":
        roles = plan.data.allocation
        assert isinstance(roles, Roles)
        # Single windows are shuffled, as in the paper: test windows overlap those trained on (docs/data.md).
        shuffled = replace(plan, data=replace(plan.data, text=replace(plan.data.text, split="shuffled")))
        return _allocated(shuffled, Balanced(floor=roles.floor, least=roles.least))
    if kind == "classes":
        return _allocated(plan, _classes(plan, int(value)))
    return plan


def _classes(plan: Plan, per_client: int) -> Classes:
    mixed = plan.data.allocation
    assert isinstance(mixed, Groups)
    return Classes(per_client=per_client, spread=mixed.spread, floor=mixed.floor)


def _allocated(plan: Plan, allocation: Partition) -> Plan:
    return replace(plan, data=replace(plan.data, allocation=allocation))


def _attacked(plan: Plan, share: float) -> Plan:
    threat = plan.environment.threat
    assert isinstance(threat, Backdoor | NextCharacter)
    return _environment(plan, threat=replace(threat, share=share) if share else NoThreat())


def _environment(plan: Plan, **changes: object) -> Plan:
    return replace(plan, environment=replace(plan.environment, **changes))  # type: ignore[arg-type]
