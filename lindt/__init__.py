"""lindt: notices federated learning that hurts the people who join it, while it runs, and mends it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lindt.detection import Detector, Verdict, is_negative
    from lindt.errors import PlanError, UserError
    from lindt.federation import RoundResult, RunState, federate
    from lindt.intertwining import Intertwined, intertwine
    from lindt.methods import METHODS, Method
    from lindt.plan import Plan
    from lindt.presets import resolve
    from lindt.problem import Problem

__version__ = "0.1.0"

_HOMES = {
    "Detector": "detection",
    "Intertwined": "intertwining",
    "METHODS": "methods",
    "Method": "methods",
    "Plan": "plan",
    "PlanError": "errors",
    "Problem": "problem",
    "RoundResult": "federation",
    "RunState": "federation",
    "UserError": "errors",
    "Verdict": "detection",
    "federate": "federation",
    "intertwine": "intertwining",
    "is_negative": "detection",
    "resolve": "presets",
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
