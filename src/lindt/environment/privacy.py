"""Differential privacy on the server (Eq. 4): clip every update to S, add Gaussian noise to their aggregate.

In a simulation noise comes from torch's generator and the plan's seed, so that a run can be repeated. It hides nothing:
the plan is known, and of any seed that generator keeps 32 bits, which can all be tried. A deployment draws from the
operating system's cryptographic generator (`secure_normal`), anew at each call. Deviates are 53-bit floats there; what
the last bits of floats reveal (Mironov 2012) is not defended.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Protocol, final

import numpy as np
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

    def noise(self, like_P: Tensor, seed: int | None) -> Tensor:
        """From `seed` in a simulation; from a cryptographic generator, new at each call, where there is none."""
        ...


@register(Privacy)
@final
@dataclass(frozen=True)
class NoPrivacy:
    def clip(self, updates_KP: Tensor) -> Tensor:
        return updates_KP

    def clipped(self, updates_KP: Tensor) -> float:
        return 0.0

    def noise(self, like_P: Tensor, seed: int | None) -> Tensor:
        return torch.zeros_like(like_P)


@register(Privacy)
@final
@dataclass(frozen=True)
class Gaussian:
    """Clip(., S) and N(0, sigma^2 I). `sigma` is the noise on the aggregate itself, not a multiplier."""

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

    def noise(self, like_P: Tensor, seed: int | None) -> Tensor:
        if seed is None:
            return self.sigma * secure_normal(like_P.numel()).reshape(like_P.shape)
        generator = torch.Generator().manual_seed(seed)
        return self.sigma * torch.randn(like_P.shape, generator=generator)


AT_A_TIME: Final = 2**20  # deviates that are drawn at a time: each takes 8 random bytes and some float64 on the way


def secure_normal(count: int) -> Tensor:
    """`count` deviates of N(0, 1) from `os.urandom`, by Box and Muller's transform of pairs of uniform ones."""
    found = torch.empty(count)
    for start in range(0, count, AT_A_TIME):
        stop = min(start + AT_A_TIME, count)
        pairs = (stop - start + 1) // 2
        whole = np.frombuffer(os.urandom(16 * pairs), np.uint64) >> np.uint64(11)
        uniform = (whole + 0.5) * 2.0**-53  # above 0
        radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * np.pi * uniform[pairs:]
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        found[start:stop] = torch.from_numpy(both[: stop - start])
    return found
