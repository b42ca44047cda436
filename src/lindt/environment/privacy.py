"""Differential privacy on the server (Eq. 4): clip every update to S, add Gaussian noise to their aggregate.

In a simulation the noise is drawn with torch's generator from the plan's seed, so that a run can be repeated. This
noise protects nobody: the plan is known, and the generator uses 32 bits of a seed, which can all be tried. A deployment
draws from the operating system's cryptographic generator (`secure_normal`), with new numbers at each call. There
deviates are 53-bit floats; attacks on the last bits of floats (Mironov 2012) are not prevented.

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
    def scales(self, updates_KP: Tensor) -> Tensor | None:
        """The factor by which clipping multiplies each of the K updates; None where it shortens no update."""
        ...

    def noise(self, like_P: Tensor, seed: int | None) -> Tensor:
        """Noise from `seed` in a simulation; with None, new noise at each call from a cryptographic generator."""
        ...


@register(Privacy)
@final
@dataclass(frozen=True)
class NoPrivacy:
    def scales(self, updates_KP: Tensor) -> Tensor | None:
        return None

    def noise(self, like_P: Tensor, seed: int | None) -> Tensor:
        return like_P.new_zeros(()).expand(like_P.shape)  # one zero in memory, for any P


@register(Privacy)
@final
@dataclass(frozen=True)
class Gaussian:
    """Clip(., S) and N(0, sigma^2 I). `sigma` is the noise on the aggregate itself, not a multiplier."""

    S: float = 15.0
    sigma: float = 0.001

    def __post_init__(self) -> None:
        require(self.S > 0, "S", self.S, "the bound on an update's norm must be above 0")
        fix = "give the standard deviation of the noise, from 0 to 1e6"
        require(0 <= self.sigma <= 1e6, "sigma", self.sigma, fix)

    def scales(self, updates_KP: Tensor) -> Tensor | None:
        norms_K = _norms(updates_KP)
        binds_K = norms_K > self.S
        if not binds_K.any():
            return None
        # Only longer updates are scaled: a zero update stays zero, and a short update does not change by a bit.
        return torch.where(binds_K, self.S / norms_K, torch.ones_like(norms_K))

    def noise(self, like_P: Tensor, seed: int | None) -> Tensor:
        if seed is None:
            return self.sigma * secure_normal(like_P.numel()).reshape(like_P.shape)
        generator = torch.Generator().manual_seed(seed)
        return self.sigma * torch.randn(like_P.shape, generator=generator)


SUMMED: Final = 2**20  # squares that are added in float32


def _norms(updates_KP: Tensor) -> Tensor:
    """The norm of each update. A float32 sum over 10^8 squares is 2% too small: clipping would leave 1% more than S."""
    parts = (torch.linalg.vector_norm(part_KC, dim=1) for part_KC in updates_KP.split(SUMMED, dim=1))
    squares_K = torch.stack([norms_K.double().square() for norms_K in parts]).sum(0)
    return squares_K.sqrt().to(updates_KP.dtype)


AT_A_TIME: Final = 2**20  # deviates that are drawn at a time: each takes 8 random bytes and some temporary float64


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
