"""Weight divergence (Sec. 3.4, Eq. 5 to 7).

The clients' local optimums w_i lie around the new global optimum w. Their mean distance is the weight
divergence (Eq. 5); less the norm of the privacy noise it is Delta (Eq. 7), which falls to zero in a
federation that converges (Theorem 1).

Limits: Delta is no absolute. It scales with the learning rate, the local epochs and P, and once clipping
binds or the aggregator is no mean it has no limit of zero. See docs/choosing-epsilon.md.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from lindt.protocols import Divergence


def divergence(w_KP: Tensor, w_P: Tensor) -> float:
    """w_div (Eq. 5): the mean over K clients of ||w_i - w||; a plain mean whatever the aggregator."""
    far_K = distances(w_KP, w_P)
    return sum(far_K) / len(far_K)


def distances(w_KP: Tensor, w_P: Tensor) -> list[float]:
    """||w_i - w|| of each client. Row by row: the same numbers as one K x P difference, without its memory."""
    return [float(torch.linalg.vector_norm(w_i - w_P)) for w_i in w_KP]


def delta_of(w_KP: Tensor, w_P: Tensor, noise_P: Tensor) -> float:
    """Delta (Eq. 7): the weight divergence less the norm of the noise that the server added itself."""
    return divergence(w_KP, w_P) - float(torch.linalg.vector_norm(noise_P))


def measure(w_KP: Tensor, w_P: Tensor, noise_P: Tensor, clipped_KP: Tensor, clipped: float) -> Divergence:
    """The divergence of one round; `clipped_KP` are the updates after clipping."""
    far_K, noise_norm = distances(w_KP, w_P), float(torch.linalg.vector_norm(noise_P))
    w_div = sum(far_K) / len(far_K)
    clean = divergence(w_KP, w_P - noise_P) if noise_norm else w_div
    spread = divergence(clipped_KP, clipped_KP.mean(0))
    return Divergence(w_div, w_div - noise_norm, clean, spread, clipped, noise_norm, median(far_K) - noise_norm)
