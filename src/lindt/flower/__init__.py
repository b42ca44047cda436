"""LINDT in somebody's own Flower app: `NFLDetector` around the strategy, `LindtMod` on the ClientApp.

from lindt.flower import NFLDetector       # in server_app.py
from lindt.flower import LindtMod          # in client_app.py
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lindt.errors import UserError

if TYPE_CHECKING:
    from lindt.flower.detector import NFLDetector
    from lindt.flower.mod import LindtMod


__all__ = ["LindtMod", "NFLDetector"]
_HOMES = {"LindtMod": "mod", "NFLDetector": "detector"}


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
