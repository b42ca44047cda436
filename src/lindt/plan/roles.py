"""Which clients attack, what the attackers share, and whose scores count."""

from __future__ import annotations

from collections.abc import Sequence

from lindt.data.examples import pool
from lindt.environment.participation import choose_attackers
from lindt.errors import PlanError
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem
from lindt.protocols import Examples


def attackers_of(plan: Plan, clients: int) -> frozenset[int]:
    return choose_attackers(plan.environment.threat.share, clients, plan.seed_for("attackers"))


def backdoor_of(plan: Plan, problem: Problem) -> Examples | None:
    """What the attackers hold in common. Raises a PlanError where the threat does not fit the labels."""
    threat = plan.environment.threat
    if not threat.share:
        return None
    try:
        return threat.pool(pool([train for train, _ in problem.data]))
    except PlanError as error:
        raise error.within("environment.threat") from None


def counted_clients(plan: Plan, clients: Sequence[int]) -> frozenset[int]:
    """Whose local scores and gains count."""
    left_out = attackers_of(plan, len(clients)) if plan.scoring.attackers == "left out" else frozenset()
    return frozenset(clients) - left_out
