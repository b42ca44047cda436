"""The attaching module (Eq. 8 and 9): where the global and the local representation agree, the global one is taken.

Legend: B samples.
"""

from __future__ import annotations

from typing import Any, Literal, final

import torch
from torch import Tensor

Per = Literal["sample", "step"]
Scale = Literal["paper", "sqrt_d", "cosine"]

_ZERO = 1e-12  # a norm below this is no direction: the score is 0.5 and its gradient stays finite


def score(global_B: Tensor, local_B: Tensor, per: Per = "sample", scale: Scale = "paper") -> Tensor:
    """Eq. 8: sigmoid of the scalar projection of the global representation on the local one.

    One score a sample (the first dimension), or one a step of a sequence (all but the last); shaped to
    broadcast. Limit: a module that puts time first mixes samples under `sample`.
    """
    return torch.sigmoid(_projection(global_B, local_B, per, scale)[0])


def _projection(global_B: Tensor, local_B: Tensor, per: Per, scale: Scale) -> tuple[Tensor, Tensor, Tensor | float]:
    """What the sigmoid is taken of, the local norm it was divided by, and what else."""
    over = _over(local_B, per)
    norm = _nonzero(torch.linalg.vector_norm(local_B, dim=over, keepdim=True))
    dot = (local_B * global_B).sum(over, keepdim=True) / norm
    other: Tensor | float = 1.0
    if scale == "sqrt_d":
        other = (local_B.numel() // dot.numel()) ** 0.5
    elif scale == "cosine":
        other = _nonzero(torch.linalg.vector_norm(global_B, dim=over, keepdim=True))
    return (dot if scale == "paper" else dot / other), norm, other


def _over(local_B: Tensor, per: Per) -> tuple[int, ...]:
    """The dimensions that sums run over: all but the batch, or the features only."""
    return tuple(range(1, local_B.dim())) if per == "sample" else (-1,)


def _nonzero(norm: Tensor) -> Tensor:
    return torch.where(norm > _ZERO, norm, torch.ones_like(norm))


def attach(global_B: Tensor, local_B: Tensor, per: Per = "sample", scale: Scale = "paper") -> Tensor:
    """Eq. 9: h = score * G + (1 - score) * L."""
    plain = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()  # they make their own backward
    if plain or local_B.dtype == torch.float16:  # which has no room for 1 / |L|^2
        return torch.lerp(local_B, global_B, score(global_B, local_B, per, scale))
    h: Tensor = _Attach.apply(global_B, local_B, per, scale)  # type: ignore[no-untyped-call]
    return h


@final
class _Attach(torch.autograd.Function):
    """With its backward by hand: autograd's own takes 26 operators for it, of which 13 pass over whole tensors."""

    @staticmethod
    def forward(ctx: Any, global_B: Tensor, local_B: Tensor, per: Per, scale: Scale) -> Tensor:
        projection, norm, other = _projection(global_B, local_B, per, scale)
        score = torch.sigmoid(projection)
        kept = [global_B, local_B, projection, score, norm]
        ctx.save_for_backward(*kept, *([other] if isinstance(other, Tensor) else []))
        ctx.per, ctx.scale, ctx.factor = per, scale, other
        return torch.lerp(local_B, global_B, score)

    @staticmethod
    def backward(ctx: Any, g_B: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """With p the projection: dp/dL = G / (|L| f) - p L / |L|^2, dp/dG = L / (|L| f), f = 1, sqrt(d) or |G|."""
        G, L, p, s, norm, *other = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again: what forward kept has no graph
            p, norm, factor = _projection(G, L, ctx.per, ctx.scale)
            s, other = torch.sigmoid(p), [factor] if isinstance(factor, Tensor) else []
        slope = torch.ops.aten.sigmoid_backward((g_B * (G - L)).sum(_over(L, ctx.per), keepdim=True), s)
        along = slope / norm
        back = p * along / norm
        turn = along / (other[0] if other else ctx.factor)
        to_G = s * g_B
        to_L = (g_B - to_G).addcmul_(turn, G).addcmul_(back, L, value=-1)
        to_G.addcmul_(turn, L)
        if other:  # cosine: p falls with |G| as well
            to_G.addcmul_(p * slope / other[0].square(), G, value=-1)
        return to_G, to_L, None, None
