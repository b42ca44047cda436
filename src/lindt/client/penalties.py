"""What a client adds to its loss to stay near the weights it received. Legend: P parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lindt.errors import require
from lindt.protocols import Penalty
from lindt.registry import register, register_method
from lindt.weights import trainable


@register(Penalty)
@final
@dataclass(frozen=True)
class NoPenalty:
    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        return None


@register(Penalty)
@final
@dataclass(frozen=True)
class Proximal:
    """FedProx (Sahu et al. 2018, Eq. 2): mu / 2 * ||w_i - w^{r-1}||^2."""

    mu: float = 0.001

    def __post_init__(self) -> None:
        require(self.mu >= 0, "mu", self.mu, "the proximal coefficient must be 0 or more")

    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        w_P = torch.cat([p.reshape(-1) for p in trainable(shared)])
        return self.mu / 2 * (w_P - received_P).square().sum()


register_method("fedprox", penalty={"kind": "proximal", "mu": 0.001}, recovery="never")
