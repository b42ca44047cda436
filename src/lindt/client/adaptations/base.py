"""The plain method, FedAvg. Its training step is in client/training.py, since every other method uses it, too."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any, final

from torch import nn

from lindt.client.training import global_step as _global_step
from lindt.protocols import Adaptation, Context, Predictor, Step
from lindt.registry import register, register_method


@register(Adaptation)
@final
@dataclass(frozen=True)
class GlobalOnly:
    """FedAvg's client: trains w, keeps nothing, predicts with w."""

    takes_optimizer = True

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        return None

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        return _global_step(ctx, shared)

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        return shared


register_method("fedavg", recovery="never")


_MOVED = {
    "Initial": "lindt.client.training",
    "global_step": "lindt.client.training",
    "gradient_step": "lindt.client.training",
    "initial_private": "lindt.client.training",
    "require_choice": "lindt.errors",
    "sgd_step": "lindt.client.training",
}


def __getattr__(name: str) -> Any:
    """Names that were in this module before, which users' methods may still import from here."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is deprecated; import it from {_MOVED[name]}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(_MOVED[name]), name)
