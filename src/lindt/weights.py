"""A model on the server: one flat vector w, from w^0 on. Clients write it into an nn.Module.

w holds the trainable parameters, a tied parameter once; clipping, noise and divergence use only these. Float buffers
(BatchNorm's running statistics) are sent with w and joined without noise; integer buffers (its batch counter) are
joined by the maximum. Frozen parameters stay as the model was built and are not sent.

Legend: K clients answering, P trainable parameters, F floats and I integers in buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from lindt.errors import UserError
from lindt.protocols import NORM_STATISTICS as NORM_STATISTICS
from lindt.protocols import Buffers
from lindt.seeds import seeded, with_threads

if TYPE_CHECKING:
    from lindt.plan.plan import Plan
    from lindt.plan.problem import Problem


class Array(Protocol):
    """numpy's arrays, and other arrays that torch.as_tensor accepts."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Weights = Tensor | Array | Mapping[str, "Tensor | Array"] | Sequence["Tensor | Array"]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of w, in order; a tied parameter once."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def last_layer(module: nn.Module) -> slice:
    """The slice of the last layer in w: the parameters of the module with the last trainable parameter.

    The order is that in which modules are defined: fc2.weight and fc2.bias of a model that ends with fc2. A tied
    parameter belongs to the first of its layers.
    """
    return last_of(parameter_sizes(module))


def parameter_sizes(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """The name and the size of each part of w, in order."""
    return tuple((name, p.numel()) for name, p in module.named_parameters() if p.requires_grad)


def last_of(sizes: Sequence[tuple[str, int]]) -> slice:
    """`last_layer` of a vector with these parts."""
    named = [(name.rpartition(".")[0], size) for name, size in sizes]
    layer, total = named[-1][0], sum(size for _, size in named)
    return slice(total - sum(size for owner, size in named if owner == layer), total)


def places_of(sizes: Sequence[tuple[str, int]], left_out: Set[str]) -> Tensor:
    """The indices in w of the parts that are not left out, in order."""
    kept = [torch.full((size,), name not in left_out) for name, size in sizes]
    return torch.cat(kept).nonzero().flatten()


def read_w(module: nn.Module) -> Tensor:
    """w of a module, a copy on the CPU."""
    return torch.cat([p.detach().reshape(-1).cpu() for p in trainable(module)])  # cat copies, even a single tensor


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
        raise ValueError(f"there are {flat.numel()} values for {sum(t.numel() for t in targets)} places")
    for piece, target in zip(flat.split([t.numel() for t in targets]), targets, strict=True):
        target.copy_(piece.view_as(target))


def flat(weights: Weights, leave_out: Set[str] = frozenset()) -> Tensor:
    """One vector of floats from weights in any accepted form; of a state dict, without the names in `leave_out`."""
    if isinstance(weights, Mapping):
        # Sorted by name, so that the order of a state dict does not matter.
        names = [name for name in sorted(weights) if name not in leave_out and not name.endswith(NORM_STATISTICS)]
        tensors = [as_tensor(weights[name]) for name in names]
        parts = [tensor for tensor in tensors if tensor.is_floating_point()]
    elif isinstance(weights, Tensor) or hasattr(weights, "shape"):
        parts = [as_tensor(weights)]
    elif isinstance(weights, Iterable) and not isinstance(weights, str | torch.nn.Module):
        parts = [as_tensor(part) for part in weights]
    else:
        raise UserError(f"weights: it is of type {type(weights).__name__}; give model.state_dict(), or tensors")
    if not parts:
        raise UserError("weights: they contain no floats; give a model's parameters")
    return torch.cat([part.detach().reshape(-1).to(torch.float32) for part in parts])


def as_tensor(part: object) -> Tensor:
    # Arrays are copied: arrays from a network are often read-only, for which torch warns.
    return part if isinstance(part, Tensor) else torch.as_tensor(np.array(part))


@final
@dataclass(frozen=True)
class InitialWeights:
    """The initial model on the server: w^0, its buffers, and their names. Legend: P parameters."""

    w_P: torch.Tensor
    buffers: Buffers
    parameters: tuple[tuple[str, int], ...]  # the name and size of each part of w
    float_buffers: tuple[tuple[str, int], ...] = ()  # the name and size of each float buffer


def first_model(problem: Problem, plan: Plan) -> nn.Module:
    """A new module with w^0: the same for every method, drawn from the plan's seed.

    It calls the user's function, which may take long, so it is for code that trains. Code that needs only w^0 or its
    size calls `initial_weights`.
    """
    seed = plan.seed_for("model")
    with with_threads(plan.threads), seeded(seed, torch.device("cpu")):
        torch.manual_seed(seed)  # of every device: the user's function may build the model on one
        return problem.build()


def initial_weights(problem: Problem, plan: Plan, model: nn.Module | None = None) -> InitialWeights:
    """w^0 and its buffers, read once from `model`, an untrained `first_model`, or from a model that is built here."""
    key = plan.seed_for("model"), plan.threads
    if key not in problem._initial:
        model = first_model(problem, plan) if model is None else model
        problem._initial.clear()  # only those of the present plan are kept
        problem._initial[key] = InitialWeights(
            read_w(model), read_buffers(model), parameter_sizes(model), float_buffers(model)
        )
    return problem._initial[key]
