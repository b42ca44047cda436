"""lindt: notices federated learning that hurts the people who join it, while it runs, and mends it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lindt.client.dual_model import Intertwined, intertwine
    from lindt.errors import PlanError, UserError
    from lindt.plan.methods import METHODS, Method
    from lindt.plan.plan import Plan
    from lindt.plan.presets import resolve
    from lindt.plan.problem import Problem
    from lindt.server.detection.detector import Detector, Verdict
    from lindt.server.detection.rules import is_negative
    from lindt.server.federation import RoundResult, RunState, federate


__version__ = "0.1.0"
_HOMES = {
    "Detector": "server.detection.detector",
    "Intertwined": "client.dual_model",
    "METHODS": "plan.methods",
    "Method": "plan.methods",
    "Plan": "plan.plan",
    "PlanError": "errors",
    "Problem": "plan.problem",
    "RoundResult": "server.federation",
    "RunState": "server.federation",
    "UserError": "errors",
    "Verdict": "server.detection.detector",
    "federate": "server.federation",
    "intertwine": "client.dual_model",
    "is_negative": "server.detection.rules",
    "resolve": "plan.presets",
}
__all__ = [
    "METHODS",
    "Detector",
    "Intertwined",
    "Method",
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
