"""How much work a run is, roughly: what is started first, and how much time is left.

The unit is one epoch of FedAvg over one client's data. The factors are rough measurements on two cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.separate import Separate
from lindt.environment.threats import Backdoor, NextCharacter, Threat, Until
from lindt.plan.plan import Plan
from lindt.protocols import Adaptation
from lindt.server.recovery import OnDetection
from lindt_experiments.results.outcomes import Outcome

ALONE = 0.7  # of the most epochs that private training may take, search and refit together
SCORING = 0.1  # a client's test data, forwards only


@final
@dataclass(frozen=True)
class Work:
    alone: float  # the private models, unless they are cached
    round: float  # on average
    rounds: int

    @property
    def federation(self) -> float:
        return self.round * self.rounds


def work_of(plan: Plan) -> Work:
    clients, env, size = plan.data.clients, plan.environment, plan.training.epochs
    K = env.participation.wanted(clients)
    attackers = round(env.threat.share * K)
    heavier, to_score = _factors(plan.method.adaptation)
    share = 0.5 if isinstance(plan.method.recovery, OnDetection) else 1.0  # of the rounds, recovery on
    benign = (K - attackers) * size * (1 + share * (heavier - 1))
    scored = sum(plan.scored(round) for round in range(1, plan.rounds + 1)) / plan.rounds
    each = benign + attackers * _epochs(env.threat) + scored * clients * to_score
    alone = clients * plan.alone.epochs * ALONE * max(plan.alone.stretch, 0.5) if plan.alone.private else 0.0
    return Work(alone, each, plan.rounds)


def _factors(adaptation: Adaptation) -> tuple[float, float]:
    """What an epoch costs against FedAvg's, and what scoring a client costs."""
    if isinstance(adaptation, Dual):
        return 2.3, 2 * SCORING
    if isinstance(adaptation, Apfl):
        return 3.0, 2 * SCORING
    if isinstance(adaptation, Separate):
        return 2.0, 2 * SCORING
    if isinstance(adaptation, FineTuneHead):
        return 1.0, SCORING + 0.025 * adaptation.epochs
    return 1.0, SCORING


def _epochs(threat: Threat) -> float:
    if isinstance(threat, Until):
        return _epochs(threat.threat)
    return float(threat.epochs) if isinstance(threat, Backdoor | NextCharacter) else 1.0


def seconds_a_unit(done: Iterable[tuple[Outcome, Work]]) -> float | None:
    """From runs that were played on this scale; None where there are none yet."""
    pairs = list(done)
    units = sum(work.federation for _, work in pairs)
    return sum(outcome.seconds for outcome, _ in pairs) / units if units else None
