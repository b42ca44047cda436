"""Who is who in a federation, and what only its data can tell about a plan."""

from __future__ import annotations

from collections.abc import Sequence

from lindt.adaptations.base import Choosy
from lindt.data.examples import Examples, pool
from lindt.environment.participation import choose_attackers
from lindt.errors import PlanError
from lindt.plan import Plan
from lindt.problem import Problem, first_model


def attackers_of(plan: Plan, clients: int) -> frozenset[int]:
    return choose_attackers(plan.environment.threat.share, clients, plan.seed_for("attackers"))


def backdoor_of(plan: Plan, problem: Problem) -> Examples | None:
    """What the attackers hold in common."""
    threat = plan.environment.threat
    return threat.pool(pool([train for train, _ in problem.data])) if threat.share else None


def counted_clients(plan: Plan, clients: Sequence[int]) -> frozenset[int]:
    """Whose local scores and gains count."""
    left_out = attackers_of(plan, len(clients)) if plan.scoring.attackers == "left out" else frozenset()
    return frozenset(clients) - left_out


def check(plan: Plan, problem: Problem) -> None:
    """What only the data can tell: K against N, weights against clients, labels against the threat."""
    N = len(problem.data)
    try:
        plan.environment.participation.wanted(N)
    except PlanError as error:
        raise error.within("environment.participation") from None
    adaptation = plan.method.adaptation
    if isinstance(adaptation, Choosy):
        try:
            adaptation.fits(first_model(problem, plan))
        except PlanError as error:
            raise error.within("method.adaptation") from None
    backdoor_of(plan, problem)
    weights, counted = plan.scoring.weights, counted_clients(plan, range(N))
    if weights and len(weights) != N:
        raise PlanError("scoring.weights", weights, f"give one weight for each of {N} clients")
    if weights and not any(weights[i] for i in counted):
        raise PlanError("scoring.weights", weights, f"give a weight above 0 to one of the clients {sorted(counted)}")
    if not counted:
        raise PlanError("environment.threat.share", plan.environment.threat.share, "leave a client that is benign")
