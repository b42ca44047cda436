"""Open choices of the reproduction (settings left out by the paper), each changed alone in the default NFL of CIFAR.

They show which choice moves FedAvg (better than in the paper at the paper's size) and the private models (worse).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, final

from lindt.data.partition import Groups
from lindt.environment.threats import Backdoor
from lindt.plan.models import Cnn
from lindt.plan.plan import Plan


@final
@dataclass(frozen=True)
class Choice:
    """A setting with a value other than the default."""

    title: str  # the value; the default in brackets
    change: Callable[[Plan], Plan]


def _attacked(**fields: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        threat = plan.environment.threat
        assert isinstance(threat, Backdoor)
        return replace(plan, environment=replace(plan.environment, threat=replace(threat, **fields)))

    return change


def _spread(value: float) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        groups = plan.data.allocation
        assert isinstance(groups, Groups)
        return replace(plan, data=replace(plan.data, allocation=replace(groups, spread=value)))

    return change


def _dropout(value: float) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        assert isinstance(plan.model, Cnn)
        return replace(plan, model=replace(plan.model, dropout=value))

    return change


def _clipped(value: float) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, training=replace(plan.training, max_norm=value))


def _searched(times: int) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        alone = plan.alone
        return replace(plan, alone=replace(alone, epochs=times * alone.epochs, patience=times * alone.patience))

    return change


def _unfitted(plan: Plan) -> Plan:
    return replace(plan, alone=replace(plan.alone, refit=False))


# By the name of the environment (world) in which the runs are kept.
CHOICES: Final[dict[str, Choice]] = {
    "pool-1": Choice("1 backdoor sample (3)", _attacked(per_batch=1)),
    "pool-5": Choice("5 backdoor samples (3)", _attacked(per_batch=5)),
    "attacker-epochs-1": Choice("attackers: 1 epoch (5)", _attacked(epochs=1)),
    "attacker-epochs-10": Choice("attackers: 10 epochs (5)", _attacked(epochs=10)),
    "dropout-0": Choice("no dropout (0.5)", _dropout(0.0)),
    "spread-1": Choice("allocation's spread 1 (2)", _spread(1.0)),
    "clipping-1": Choice("gradients clipped at 1 (5)", _clipped(1.0)),
    "clipping-100": Choice("gradients clipped at 100 (5)", _clipped(100.0)),
    "alone-longer": Choice("P_i searched twice as long", _searched(2)),
    "alone-no-refit": Choice("P_i without the refit", _unfitted),
    "dropout-0.25": Choice("dropout 0.25 (0.5)", _dropout(0.25)),
    "spread-3": Choice("allocation's spread 3 (2)", _spread(3.0)),
}
