"""An estimate of the work of a run, for the order of runs and the time left.

The unit is one epoch of FedAvg over one client's data. The factors are rough measurements on two cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import final

from lindt.client.adaptations.apfl import Apfl
from lindt.client.adaptations.ditto import Ditto
from lindt.client.adaptations.dual import Dual
from lindt.client.adaptations.fine_tune import FineTune
from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.client.adaptations.fl_guard import FlGuard
from lindt.client.adaptations.guarded import Guarded
from lindt.client.adaptations.separate import Separate
from lindt.environment.threats import Backdoor, NextCharacter, Threat, Until
from lindt.plan.plan import Plan
from lindt.protocols import Adaptation
from lindt.server.recovery import OnDetection
from lindt_experiments.results.outcomes import Outcome

ALONE = 0.7  # the usual share of the most epochs of private training, search and refit together
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
    reports = plan.detection.reports
    heavier, to_score, to_report = _factors(plan.method.adaptation)
    share = 0.5 if isinstance(plan.method.recovery, OnDetection) else 1.0  # of the rounds, recovery on
    benign = (K - attackers) * size * (1 + share * (heavier - 1))
    if reports:
        benign += K * 2 * SCORING + (K - attackers) * share * to_report
    scored = sum(plan.scored(round) for round in range(1, plan.rounds + 1)) / plan.rounds
    each = benign + attackers * _epochs(env.threat) + scored * clients * to_score
    alone = clients * plan.alone.epochs * ALONE * max(plan.alone.stretch, 0.5) if plan.alone.private else 0.0
    both = reports and plan.alone.with_validation  # a second P_i, which trains on V_i too
    return Work(alone * (2 if both else 1), each, plan.rounds)


def _factors(adaptation: Adaptation) -> tuple[float, float, float]:
    """The cost of an epoch relative to FedAvg's, and the costs of scoring a client and of its report in recovery."""
    if isinstance(adaptation, Guarded):
        heavier, to_score, to_report = _factors(adaptation.adaptation)
        tuning = adaptation.tuning_epochs if "tuned" in adaptation.members else 0
        # What is tuned at prediction is tuned twice to be scored: without V_i, and with it.
        return heavier, 2 * to_score + 2 * tuning, to_report + tuning
    if isinstance(adaptation, Dual):
        return 2.3, 2 * SCORING, 2 * SCORING
    if isinstance(adaptation, Apfl):
        return 3.0, 2 * SCORING, 2 * SCORING
    if isinstance(adaptation, Separate | Ditto | FlGuard):
        return 2.0, 2 * SCORING, 2 * SCORING
    if isinstance(adaptation, FineTuneHead):
        tuned = SCORING + 0.025 * adaptation.epochs
        return 1.0, tuned, tuned
    if isinstance(adaptation, FineTune):
        tuned = SCORING + adaptation.epochs
        return (2.0, SCORING, SCORING) if adaptation.kept else (1.0, tuned, tuned)
    return 1.0, SCORING, SCORING


def _epochs(threat: Threat) -> float:
    if isinstance(threat, Until):
        return _epochs(threat.threat)
    return float(threat.epochs) if isinstance(threat, Backdoor | NextCharacter) else 1.0


@final
class Pace:
    """Seconds per unit of work at a scale, from its stored runs: of a method, or of its task where it has none.

    It is the median, since runs that shared their cores with other processes took longer.
    """

    def __init__(self, done: Iterable[tuple[Outcome, Work]]) -> None:
        self.methods: dict[tuple[str, str], list[float]] = {}
        self.tasks: dict[str, list[float]] = {}
        for outcome, work in done:
            if outcome.rounds > 1:  # FedAvg's one round beside private models takes milliseconds
                seconds = outcome.seconds / work.federation
                self.methods.setdefault((outcome.task, outcome.method), []).append(seconds)
                self.tasks.setdefault(outcome.task, []).append(seconds)

    def of(self, task: str, method: str) -> float | None:
        found = self.methods.get((task, method)) or self.tasks.get(task)
        return median(found) if found else None
