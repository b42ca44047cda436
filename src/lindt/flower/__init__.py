"""LINDT in somebody's own Flower app, in two lines.

app = lindt.flower.wrap(app)            # the last line of client_app.py
strategy = NFLDetector(FedAvg())        # in server_app.py

`wrap(app, dual=Dual(model=..., ...))` keeps the paper's intertwined training.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lindt.errors import UserError

if TYPE_CHECKING:
    from lindt.flower.client_app import wrap
    from lindt.flower.detector import NFLDetector
    from lindt.flower.mod import Dual, LindtMod


__all__ = ["Dual", "LindtMod", "NFLDetector", "wrap"]
_HOMES = {"Dual": "mod", "LindtMod": "mod", "NFLDetector": "detector", "wrap": "client_app"}


def __getattr__(name: str) -> Any:
    """Fetched when they are used: Flower is an optional extra."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lindt.flower' has no attribute {name!r}")
    try:
        return getattr(import_module(f"lindt.flower.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "flwr":
            raise UserError("Flower is not installed; pip install 'lindt[flower]'") from None
        raise
