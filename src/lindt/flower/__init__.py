"""LINDT in a user's own Flower app, in two lines.

app = lindt.flower.wrap(app)            # the last line of client_app.py
strategy = NFLDetector(FedAvg())        # in server_app.py

`wrap(app, dual=Dual(model=..., ...))` keeps the paper's intertwined training. `NFLDetector(strategy,
detection=Gain(noise=0.1))` sets the test of gains.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lindt.errors import naming_extras

if TYPE_CHECKING:
    from lindt.flower.client_app import wrap
    from lindt.flower.detector import NFLDetector
    from lindt.flower.mod import Dual, LindtMod
    from lindt.server.detection.gain import Gain


__all__ = ["Dual", "Gain", "LindtMod", "NFLDetector", "wrap"]
_HOMES = {
    "Dual": "flower.mod",
    "Gain": "server.detection.gain",
    "LindtMod": "flower.mod",
    "NFLDetector": "flower.detector",
    "wrap": "flower.client_app",
}


def __getattr__(name: str) -> Any:
    """Fetched when they are used: Flower is an optional extra, and Dual needs torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lindt.flower' has no attribute {name!r}")
    with naming_extras():
        import_module("flwr")  # first, so that an error names its extra
        return getattr(import_module(f"lindt.{_HOMES[name]}"), name)
