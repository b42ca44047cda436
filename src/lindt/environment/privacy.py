"""Differential privacy on the server (Eq. 4): clip every update to S, add Gaussian noise to their aggregate.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from lindt.errors import require
from lindt.registry import components_in, register


@components_in(__name__)
class Privacy(Protocol):
    def clip(self, updates_KP: Tensor) -> Tensor: ...
    def clipped(self, updates_KP: Tensor) -> float:
        """The share of updates that clipping shortens."""
        ...

    def noise(self, like_P: Tensor, seed: int) -> Tensor: ...


@register(Privacy)
@final
@dataclass(frozen=True)
class NoPrivacy:
    def clip(self, updates_KP: Tensor) -> Tensor:
        return updates_KP

    def clipped(self, updates_KP: Tensor) -> float:
        return 0.0

    def noise(self, like_P: Tensor, seed: int) -> Tensor:
        return torch.zeros_like(like_P)


@register(Privacy)
@final
@dataclass(frozen=True)
class Gaussian:
    """Clip(., S) and N(0, sigma^2 I). `sigma` is the noise on the aggregate itself, not a multiplier.

    In simulation the noise's seed comes from the plan, so that a run can be repeated: simulated privacy.
    """

    S: float = 15.0
    sigma: float = 0.001

    def __post_init__(self) -> None:
        require(self.S > 0, "S", self.S, "the bound on an update's norm must be above 0")
        fix = "the noise's standard deviation must be 0 or more, and not absurd"
        require(0 <= self.sigma <= 1e6, "sigma", self.sigma, fix)

    def clip(self, updates_KP: Tensor) -> Tensor:
        norms_K = torch.linalg.vector_norm(updates_KP, dim=1)
        binds_K = norms_K > self.S
        if not binds_K.any():
            return updates_KP
        # Divided only where it binds: a zero update stays zero and a short one keeps its bits.
        scale_K = torch.where(binds_K, self.S / norms_K, torch.ones_like(norms_K))
        return updates_KP * scale_K[:, None]

    def clipped(self, updates_KP: Tensor) -> float:
        return float((torch.linalg.vector_norm(updates_KP, dim=1) > self.S).float().mean())

    def noise(self, like_P: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.sigma * torch.randn(like_P.shape, generator=generator)
