"""lindt: detects federated learning that hurts its clients, while it runs, and recovers from it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lindt.errors import naming_extras

if TYPE_CHECKING:
    from lindt.client.adaptations.dual import Intertwined, intertwine
    from lindt.client.adaptations.guarded import GuardedPredictor
    from lindt.data.clients import LazyClients
    from lindt.errors import PlanError, UserError
    from lindt.opening import Run
    from lindt.opening import open_ as open  # noqa: A004  # as gzip and tarfile have one
    from lindt.plan.file import resolve
    from lindt.plan.plan import METHODS, Method, Plan
    from lindt.plan.problem import Problem
    from lindt.protocols import GainReport, Paired
    from lindt.server.detection.detector import Detector, Verdict
    from lindt.server.detection.divergence import is_negative
    from lindt.server.federation import federate
    from lindt.server.state import RoundResult, RunState
    from lindt.session import run


__version__ = "0.1.0"
_HOMES = {
    "Detector": "server.detection.detector",
    "GainReport": "protocols",
    "GuardedPredictor": "client.adaptations.guarded",
    "Intertwined": "client.adaptations.dual",
    "LazyClients": "data.clients",
    "METHODS": "plan.plan",
    "Method": "plan.plan",
    "Paired": "protocols",
    "Plan": "plan.plan",
    "PlanError": "errors",
    "Problem": "plan.problem",
    "RoundResult": "server.state",
    "Run": "opening",
    "RunState": "server.state",
    "UserError": "errors",
    "Verdict": "server.detection.detector",
    "federate": "server.federation",
    "intertwine": "client.adaptations.dual",
    "is_negative": "server.detection.divergence",
    "open": "opening",
    "resolve": "plan.file",
    "run": "session",
}
__all__ = [
    "METHODS",
    "Detector",
    "GainReport",
    "GuardedPredictor",
    "Intertwined",
    "LazyClients",
    "Method",
    "Paired",
    "Plan",
    "PlanError",
    "Problem",
    "RoundResult",
    "Run",
    "RunState",
    "UserError",
    "Verdict",
    "federate",
    "intertwine",
    "is_negative",
    "open",
    "resolve",
    "run",
]


def __getattr__(name: str) -> Any:
    """Names are fetched when they are used: `import lindt` alone does not load torch.

    Where a name needs an extra that is not installed, a MissingExtraError names it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'lindt' has no attribute {name!r}")
    import random

    state = random.getstate()
    try:
        with naming_extras():
            home = import_module(f"lindt.{_HOMES[name]}")
    finally:
        random.setstate(state)  # rich draws from Python's generator when it is imported
    return getattr(home, "open_" if name == "open" else name)
