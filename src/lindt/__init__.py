"""lindt: notices federated learning that hurts the people who join it, while it runs, and mends it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lindt.client.adaptations.dual import Intertwined, intertwine
    from lindt.client.adaptations.guarded import GuardedPredictor
    from lindt.errors import PlanError, UserError
    from lindt.plan.file import resolve
    from lindt.plan.plan import METHODS, Method, Plan
    from lindt.plan.problem import Problem
    from lindt.protocols import GainReport, Paired
    from lindt.server.detection.detector import Detector, Verdict
    from lindt.server.detection.divergence import is_negative
    from lindt.server.federation import RoundResult, RunState, federate


__version__ = "0.1.0"
_HOMES = {
    "Detector": "server.detection.detector",
    "GainReport": "protocols",
    "GuardedPredictor": "client.adaptations.guarded",
    "Intertwined": "client.adaptations.dual",
    "METHODS": "plan.plan",
    "Method": "plan.plan",
    "Paired": "protocols",
    "Plan": "plan.plan",
    "PlanError": "errors",
    "Problem": "plan.problem",
    "RoundResult": "server.federation",
    "RunState": "server.federation",
    "UserError": "errors",
    "Verdict": "server.detection.detector",
    "federate": "server.federation",
    "intertwine": "client.adaptations.dual",
    "is_negative": "server.detection.divergence",
    "resolve": "plan.file",
}
__all__ = [
    "METHODS",
    "Detector",
    "GainReport",
    "GuardedPredictor",
    "Intertwined",
    "Method",
    "Paired",
    "Plan",
    "PlanError",
    "Problem",
    "RoundResult",
    "RunState",
    "UserError",
    "Verdict",
    "federate",
    "intertwine",
    "is_negative",
    "resolve",
]


def __getattr__(name: str) -> Any:
    """Names are fetched when they are used: `import lindt` alone does not load torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lindt' has no attribute {name!r}")
    return getattr(import_module(f"lindt.{_HOMES[name]}"), name)
