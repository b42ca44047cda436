"""The gradient of a wide layer's weights as two thin matrices, which are never multiplied out.

For B rows of input the gradient is g_BO^T x_BI. Its norm follows from two Gram matrices of B x B, and a step is one
product into the weights: the O x I numbers between, more than the caches hold, are neither written nor read.

Autograd's graph says where that is the whole gradient: a matrix whose one use is to be the transposed factor of one
`addmm` or `mm`, which is what nn.Linear makes of it. Weights that are used twice, shared or penalised have a second
edge in it, and a gradient as always; so have those with a hook of their own. No model has to know.

Limits: a hook on the transposed weights or on the product's own node is not seen, since Python cannot see it.
Under activation checkpointing, asking for x_BI computes the layers before it once more.

Legend: B rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

WIDE: Final = 1 << 17  # numbers in a matrix from which on its gradient, 512 KiB, fills a core's own cache
THIN: Final = 8  # times as many inputs and outputs as rows: above, two Gram matrices cost less than they save
EXACT: Final = (torch.float32, torch.float64)  # halves have no room for squares, complex numbers would conjugate
_PRODUCTS: Final = {"AddmmBackward0": ("_saved_mat1", 2), "MmBackward0": ("_saved_self", 1)}  # x, place of the factor


@final
@dataclass(frozen=True)
class Thin:
    """A gradient g_BO^T x_BI."""

    g_BO: Tensor
    x_BI: Tensor

    def norm(self) -> Tensor:
        """|g^T x|^2 is the sum of (g g^T) * (x x^T): B x B instead of O x I. Its terms cancel, hence the digits."""
        g, x = self.g_BO.double(), self.x_BI.double()
        return ((g @ g.T) * (x @ x.T)).sum().clamp_min(0).sqrt().to(self.g_BO.dtype)

    def dense(self) -> Tensor:
        return self.g_BO.T @ self.x_BI

    def add_to(self, weights_OI: Tensor, factor: float) -> None:
        weights_OI.addmm_(self.g_BO.T, self.x_BI, alpha=factor)


Gradient = Tensor | Thin


def gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Gradient | None]:
    """The gradient for each parameter, thin where it can be; None for one that the loss does not reach."""
    thin = _thin_uses(loss, parameters)
    wanted: list[Any] = [thin[i][0] if i in thin else p for i, p in enumerate(parameters)]
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [Thin(g, thin[i][1]) if g is not None and i in thin else g for i, g in enumerate(found)]


def norm_of(grads: Sequence[Gradient]) -> Tensor:
    """Of several gradients as one vector."""
    dense = [g for g in grads if isinstance(g, Tensor)]
    norms: list[Tensor] = list(torch._foreach_norm(dense)) if dense else []
    norms += [g.norm() for g in grads if isinstance(g, Thin)]
    length: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return length


def _thin_uses(loss: Tensor, parameters: Sequence[nn.Parameter]) -> dict[int, tuple[GradientEdge, Tensor]]:
    """By a parameter's place: the edge that brings g_BO, and x_BI."""
    wide = {id(p): i for i, p in enumerate(parameters) if p.numel() >= WIDE and _plain(p) and not p._backward_hooks}
    if not wide or loss.grad_fn is None:
        return {}
    # Who uses whom: for each node, the nodes whose gradient flows into it, with the place it has among their inputs.
    users: defaultdict[Any, list[tuple[Any, int]]] = defaultdict(list)
    leaves: dict[int, Any] = {}
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        for place, (used, _) in enumerate(node.next_functions):
            if used is None:
                continue
            if used not in users:
                waiting.append(used)
                variable = getattr(used, "variable", None)
                if variable is not None and id(variable) in wide:
                    leaves[wide[id(variable)]] = used
            users[used].append((node, place))
    found: dict[int, tuple[GradientEdge, Tensor]] = {}
    stepping = {p.untyped_storage().data_ptr() for p in parameters}
    for index, leaf in leaves.items():
        product = _only_product(users, leaf)
        if product is None:
            continue
        saved = _PRODUCTS[product.name()][0]
        # The shape first: to ask for a saved tensor may cost its computation.
        if getattr(product, f"{saved}_sym_sizes")[0] * THIN > min(parameters[index].shape):
            continue
        x_BI: Tensor = getattr(product, saved)
        # An input that is a parameter itself would have stepped when it is needed.
        if _plain(x_BI) and x_BI.dtype == parameters[index].dtype and x_BI.untyped_storage().data_ptr() not in stepping:
            found[index] = GradientEdge(product, 0), x_BI.detach()
    return found


def _plain(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.dtype in EXACT and matrix.layout is torch.strided


def _only_product(users: dict[Any, list[tuple[Any, int]]], leaf: Any) -> Any | None:
    """The product x W^T that is the only use of W, if that is what it is."""
    if not leaf.name().endswith("AccumulateGrad") or [node.name() for node, _ in users[leaf]] != ["TBackward0"]:
        return None
    ((transposed, _),) = users[leaf]
    if len(users[transposed]) != 1:
        return None
    ((product, place),) = users[transposed]
    if product.name() not in _PRODUCTS or place != _PRODUCTS[product.name()][1]:
        return None
    return product if getattr(product, "_saved_alpha", 1) == 1 else None
