"""Detector: detection for a federated loop that exists already. Feed it weights, it answers with a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor

from lindt.errors import UserError
from lindt.protocols import Statistic
from lindt.server.detection.divergence import measure
from lindt.server.detection.rules import Counting, Rule


class _Array(Protocol):
    """numpy's arrays, and whatever else torch.as_tensor takes."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Weights = Tensor | _Array | Mapping[str, "Tensor | _Array"] | Sequence["Tensor | _Array"]


@final
@dataclass(frozen=True)
class Verdict:
    """The detector's answer after a round."""

    round: int
    w_div: float
    delta: float
    watched: float  # the statistic held against epsilon: delta, unless the detector was told otherwise
    count: int
    negative: bool


class Detector:
    """Detection for a loop that exists already: feed it weights, it answers with a verdict.

    >>> detector = Detector(epsilon=0.1, patience=250)
    >>> verdict = detector.observe([w_1, w_2, w_3], new_global)       # after every aggregation
    >>> if verdict.negative: ...                                      # tell the clients to recover

    Weights are tensors, numpy arrays, lists of either, or state dicts; of a state dict BatchNorm's statistics
    and integer entries are no weights and are left out. Give `noise` in the same form where the server adds any.

    Tied weights, two names of a state dict for one tensor, count once. The tie has to show: in one state dict at
    least, of a client or the global one, both names are the same memory, and in all of them they are equal. Where
    every state dict is a copy (deserialised, or arrays) the tie is lost and the weights count twice: give lists
    without the second tensor, such as `list(model.parameters())`.
    """

    def __init__(
        self,
        epsilon: float = 0.1,
        patience: int = 250,
        *,
        statistic: Statistic = "delta",
        counting: Counting = "cumulative",
    ) -> None:
        self.rule = Rule(epsilon, patience, statistic, counting)
        self.round = 0
        self.count = 0
        self.negative = False

    def observe(self, clients: Sequence[Weights], new_global: Weights, noise: Weights | None = None) -> Verdict:
        if isinstance(clients, Mapping):
            raise UserError("clients: it is of type dict; give a list with the weights of each client")
        clients = list(clients)
        if len(clients) == 0:
            raise UserError("clients: no weights were given; skip the detector in a round without answers")
        tied = _tied([weights for weights in (new_global, *clients) if isinstance(weights, Mapping)])
        w_P = flat(new_global, tied)
        for index, client in enumerate(clients):
            _check_names(f"clients[{index}]", client, new_global)
        rows = [_fitting(f"clients[{index}]", client, w_P, tied) for index, client in enumerate(clients)]
        noise_P = torch.zeros_like(w_P) if noise is None else _fitting("noise", noise, w_P, tied)
        w_KP = torch.stack(rows)
        # Updates are not known here; the clients' own weights have the same spread around their mean.
        seen = measure(w_KP, w_P, noise_P, w_KP, clipped=0.0)
        if not math.isfinite(seen.delta):
            raise UserError("clients: a weight is NaN or infinite; drop that client's update before aggregating it")
        watched = seen.watched(self.rule.statistic)
        self.round += 1
        self.count = self.rule.count(self.count, watched)
        self.negative = self.negative or self.rule.exceeded(self.count)
        return Verdict(self.round, seen.w_div, seen.delta, watched, self.count, self.negative)


def _check_names(name: str, weights: Weights, new_global: Weights) -> None:
    """Two state dicts are the same weights only under the same names: with others the sums would match in length."""
    if isinstance(weights, Mapping) and isinstance(new_global, Mapping):
        theirs, ours = _shapes(weights), _shapes(new_global)
        odd = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        if odd:
            raise UserError(
                f"{name}: its {odd[0]!r} has shape {theirs.get(odd[0])}, in the global model {ours.get(odd[0])}; "
                "give state dicts of the same model"
            )


def _shapes(state: Mapping[str, Tensor | _Array]) -> dict[str, tuple[int, ...]]:
    """Of what counts as weights in a state dict."""
    named = {name: part if isinstance(part, Tensor) else np.asarray(part) for name, part in state.items()}
    return {
        name: tuple(part.shape)
        for name, part in named.items()
        if not name.endswith(_STATISTICS)
        and (part.is_floating_point() if isinstance(part, Tensor) else part.dtype.kind == "f")
    }


def _fitting(name: str, weights: Weights, w_P: Tensor, tied: Set[str]) -> Tensor:
    found = flat(weights, tied)
    if found.shape != w_P.shape:
        raise UserError(
            f"{name} has {found.numel()} weights but the global model has {w_P.numel()}; give both in the same form"
        )
    return found


# BatchNorm's: measured on data, not learned, so no part of w.
_STATISTICS = ("running_mean", "running_var")


def _tied(states: Sequence[Mapping[str, Tensor | _Array]]) -> frozenset[str]:
    """The second names of tied weights: the same memory in one state dict, and equal in all."""
    pairs: dict[str, str] = {}
    for state in states:
        first: dict[object, str] = {}
        for name in sorted(state):
            tensor = state[name]
            if isinstance(tensor, Tensor) and tensor.numel() and not tensor.is_meta:
                place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                if first.setdefault(place, name) != name:
                    pairs.setdefault(name, first[place])
    return frozenset(name for name, twin in pairs.items() if all(_equal(state, name, twin) for state in states))


def _equal(state: Mapping[str, Tensor | _Array], name: str, twin: str) -> bool:
    return name in state and twin in state and torch.equal(_tensor(state[name]), _tensor(state[twin]))


def flat(weights: Weights, leave_out: Set[str] = frozenset()) -> Tensor:
    """One vector of floats from whatever a framework calls weights; of a state dict, without some names."""
    if isinstance(weights, Mapping):
        # By name, so that two state dicts in different order are the same weights.
        names = [name for name in sorted(weights) if name not in leave_out and not name.endswith(_STATISTICS)]
        tensors = [_tensor(weights[name]) for name in names]
        parts = [tensor for tensor in tensors if tensor.is_floating_point()]
    elif isinstance(weights, Tensor) or hasattr(weights, "shape"):
        parts = [_tensor(weights)]
    elif isinstance(weights, Iterable) and not isinstance(weights, str | torch.nn.Module):
        parts = [_tensor(part) for part in weights]
    else:
        raise UserError(f"weights: of type {type(weights).__name__}; give model.state_dict(), or tensors")
    if not parts:
        raise UserError("weights: there are no floats among them; give a model's parameters")
    return torch.cat([part.detach().reshape(-1).to(torch.float32) for part in parts])


def _tensor(part: object) -> Tensor:
    # Arrays are copied: those that come over a network are often read-only, which torch warns of.
    return part if isinstance(part, Tensor) else torch.as_tensor(np.array(part))
