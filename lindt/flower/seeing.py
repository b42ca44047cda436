"""One round as the detector sees it: what came back, what the strategy made of it, what noise lies in between.

Legend: K clients answering, P weights.
"""

from __future__ import annotations

import math

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from lindt.detection import Divergence, divergence, measure
from lindt.flower.caution import Caution, say
from lindt.flower.replies import Sifted, weights_of
from lindt.flower.taps import Taps

# A client that clips itself sends an update of length S, give or take what float32 loses.
ALMOST = 1 - 1e-4


def see(
    sifted: Sifted, arrays: ArrayRecord, clip_norm: float | None, taps: Taps, caution: Caution
) -> Divergence | None:
    """Eq. 5 and 7; None where nothing can be measured. `clip_norm` is S as it was when the round was clipped."""
    if not sifted.nodes:
        return None
    w_P = weights_of(arrays, sifted.names)
    if sifted.w_KP.shape[1] != w_P.numel():
        say("the aggregate has other weights than the clients sent: there is nothing to measure", warn=True)
        return None
    given_KP = taps.given(sifted.w_KP)
    clipped = clipped_share(sifted.lengths_K, clip_norm)
    # `spread` is the same of weights as of updates: they differ by w^{r-1} alone.
    seen = measure(sifted.w_KP, w_P, taps.noise(w_P), given_KP, clipped)
    if not all(math.isfinite(value) for value in vars(seen).values()):
        say("the aggregate is NaN or infinite; the strategy made it so, no client's update was", warn=True)
        return None
    if clip_norm is not None:
        caution.clipping(clipped, len(sifted.nodes))
    if not is_mean(taps.before_noise(w_P), given_KP, torch.tensor(sifted.sizes_K)):
        caution.no_mean()
    return seen


def clipped_share(lengths_K: list[float], clip_norm: float | None) -> float:
    """The share of updates at least as long as S."""
    if clip_norm is None:
        return 0.0
    return sum(length >= clip_norm * ALMOST for length in lengths_K) / len(lengths_K)


def is_mean(result_P: Tensor, given_KP: Tensor, sizes_K: Tensor) -> bool:
    """Whether the result is the mean of what was given, plain or weighted: told by what the strategy did, not by
    its name, so that a user's own is judged as well."""
    for weights_K in (torch.ones(len(given_KP)), sizes_K.to(torch.float32)):
        mean_P = (weights_K / weights_K.sum()) @ given_KP
        gap = float(torch.linalg.vector_norm(result_P - mean_P))
        room = 1e-3 * divergence(given_KP, mean_P) + 1e-5 * float(torch.linalg.vector_norm(mean_P))
        if gap <= room:
            return True
    return False
