"""The gradient of a wide layer's weights as two thin matrices, which are never multiplied out.

For B rows of input the gradient is g_BO^T x_BI. Its norm follows from two Gram matrices of B x B, and a step is one
product into the weights: the O x I numbers between, more than the caches hold, are neither written nor read.

Autograd's graph says where that is the whole gradient: a matrix whose one use is to be the transposed factor of one
`addmm` or `mm`, which is what nn.Linear makes of it. Weights that are used twice, shared or penalised have a second
edge in it, and a gradient as always; so have those with a hook of their own. No model has to know.

The graph also shows a convolution's bias, whose gradient is a plain sum: oneDNN takes several times as long for it.

Limits: a hook on the transposed weights or on the product's own node is not seen, since Python cannot see it.
Under activation checkpointing, asking for x_BI computes the layers before it once more.

Legend: B rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

WIDE: Final = 1 << 17  # numbers in a matrix from which on its gradient, 512 KiB, fills a core's own cache; a model


# with fewer in all has steps too short for looking at the graph
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


Made = Callable[[Tensor], Gradient]


Users = dict[Any, list[tuple[Any, int]]]  # of a node: the nodes whose gradient flows into it, and its place there


def gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Gradient | None]:
    """The gradient for each parameter, thin where it can be; None for one that the loss does not reach."""
    shortcuts = _shortcuts(loss, parameters)
    wanted: list[Any] = [shortcuts[i][0] if i in shortcuts else p for i, p in enumerate(parameters)]
    found: Sequence[Tensor | None] = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [shortcuts[i][1](g) if g is not None and i in shortcuts else g for i, g in enumerate(found)]


def norm_of(grads: Sequence[Gradient]) -> Tensor:
    """Of several gradients as one vector."""
    dense = [g for g in grads if isinstance(g, Tensor)]
    norms: list[Tensor] = list(torch._foreach_norm(dense)) if dense else []
    norms += [g.norm() for g in grads if isinstance(g, Thin)]
    length: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return length


def _shortcuts(loss: Tensor, parameters: Sequence[nn.Parameter]) -> dict[int, tuple[GradientEdge, Made]]:
    """By a parameter's place: an edge of the graph, and how what it brings makes the gradient."""
    if loss.grad_fn is None or sum(p.numel() for p in parameters) < WIDE:
        return {}
    asked = {id(p): i for i, p in enumerate(parameters) if not p._backward_hooks}
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
                if variable is not None and id(variable) in asked:
                    leaves[asked[id(variable)]] = used
            users[used].append((node, place))
    stepping = {p.untyped_storage().data_ptr() for p in parameters}
    found: dict[int, tuple[GradientEdge, Made]] = {}
    for index, leaf in leaves.items():
        p = parameters[index]
        shortcut = _bias(users, leaf) if p.dim() == 1 else _thin(users, leaf, p, stepping)
        if shortcut is not None:
            found[index] = shortcut
    return found


def _thin(users: Users, leaf: Any, weights_OI: Tensor, stepping: set[int]) -> tuple[GradientEdge, Made] | None:
    product = _only_product(users, leaf) if weights_OI.numel() >= WIDE and _plain(weights_OI) else None
    if product is None:
        return None
    saved = _PRODUCTS[product.name()][0]
    # The shape first: to ask for a saved tensor may cost its computation.
    if getattr(product, f"{saved}_sym_sizes")[0] * THIN > min(weights_OI.shape):
        return None
    x_BI: Tensor = getattr(product, saved).detach()
    # An input that is a parameter itself would have stepped when it is needed.
    if _plain(x_BI) and x_BI.dtype == weights_OI.dtype and x_BI.untyped_storage().data_ptr() not in stepping:
        return GradientEdge(product, 0), lambda g_BO: Thin(g_BO, x_BI)
    return None


def _bias(users: Users, leaf: Any) -> tuple[GradientEdge, Made] | None:
    """A convolution's bias: the sum of what comes back to it."""
    if [(node.name(), place) for node, place in users[leaf]] != [("ConvolutionBackward0", 2)]:
        return None
    ((convolution, _),) = users[leaf]
    return GradientEdge(convolution, 0), lambda g: g.sum([0, *range(2, g.dim())])


def _plain(matrix: Tensor) -> bool:
    return matrix.dim() == 2 and matrix.dtype in EXACT and matrix.layout is torch.strided


def _only_product(users: Users, leaf: Any) -> Any | None:
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
