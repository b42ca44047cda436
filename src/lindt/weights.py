"""A model as the server sees it: one flat vector w. It becomes an nn.Module once, at the client's door.

w holds the trainable parameters, each tied one once; clip, noise and divergence see only these. Float
buffers (BatchNorm's running statistics) travel beside w and are joined without noise; integer buffers
(its batch counter) take the maximum. Frozen parameters stay as the model was built and do not travel.

Legend: K clients answering, P trainable parameters, F floats and I integers in buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lindt.protocols import Buffers


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that make w, in order; a tied one once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def last_layer(module: nn.Module) -> slice:
    """Where the last layer lies in w: the parameters of the module that the last trainable one belongs to.

    By the order in which modules are defined, as in w: fc2.weight and fc2.bias of a model that ends with fc2. A tied
    parameter belongs to the layer that comes first.
    """
    named = [(name.rpartition(".")[0], p.numel()) for name, p in module.named_parameters() if p.requires_grad]
    layer, total = named[-1][0], sum(size for _, size in named)
    return slice(total - sum(size for owner, size in named if owner == layer), total)


def read_w(module: nn.Module) -> Tensor:
    """w of a module, a copy on the CPU."""
    return torch.cat([p.detach().reshape(-1).cpu() for p in trainable(module)])  # cat copies, one tensor too


def read_buffers(module: nn.Module) -> Buffers:
    floats = [b.detach().reshape(-1).cpu() for b in module.buffers() if b.is_floating_point()]
    counts = [b.detach().reshape(-1).cpu() for b in module.buffers() if not b.is_floating_point()]
    return Buffers(
        torch.cat(floats) if floats else torch.empty(0),
        torch.cat(counts).to(torch.int64) if counts else torch.empty(0, dtype=torch.int64),
    )


def float_buffers(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """The name and the size of each part of `floats_F`, in order."""
    return tuple((name, b.numel()) for name, b in module.named_buffers() if b.is_floating_point())


@torch.no_grad()
def write(module: nn.Module, w_P: Tensor, buffers: Buffers) -> None:
    """Fill a module with w and its buffers, in place."""
    _pour(w_P, [p.data for p in trainable(module)])
    _pour(buffers.floats_F, [b for b in module.buffers() if b.is_floating_point()])
    _pour(buffers.counts_I, [b for b in module.buffers() if not b.is_floating_point()])


def _pour(flat: Tensor, targets: list[Tensor]) -> None:
    if flat.numel() != sum(target.numel() for target in targets):
        raise ValueError(f"{flat.numel()} values for {sum(t.numel() for t in targets)} places")
    for piece, target in zip(flat.split([t.numel() for t in targets]), targets, strict=True):
        target.copy_(piece.view_as(target))
