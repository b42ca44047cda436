"""A Flower ArrayRecord into a user's nn.Module, and back: by name, or by order where names are only numbers."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import nn

from lindt.errors import UserError
from lindt.flower.npy import values_of


def fill(model: nn.Module, record: ArrayRecord) -> nn.Module:
    """c2-c3: w_i <- w^{r-1}, in place."""
    names = _names(model, record)
    state = model.state_dict()
    for theirs, ours in names.items():
        if tuple(record[theirs].shape) != tuple(state[ours].shape):
            raise UserError(
                f"model: {ours} has shape {tuple(state[ours].shape)}, the message's {theirs} has "
                f"{tuple(record[theirs].shape)}; model(context) must build the federation's model"
            )
    try:
        # A copy: arrays from a network may be read-only.
        values = {ours: np.array(values_of(record[theirs])) for theirs, ours in names.items()}
    except ValueError as error:
        raise UserError(f"the message cannot be read: {error}") from None
    tensors = {ours: torch.as_tensor(array) for ours, array in values.items()}
    model.load_state_dict(tensors)
    return model


def packed(model: nn.Module, like: ArrayRecord) -> ArrayRecord:
    """c16: w_i with the names, order and types that it came with; not one byte more."""
    state, record = model.state_dict(), ArrayRecord()
    for theirs, ours in _names(model, like).items():
        values = state[ours].detach().cpu().numpy()
        record[theirs] = Array(np.asarray(values, dtype=values_of(like[theirs]).dtype))
    return record


def _names(model: nn.Module, record: ArrayRecord) -> dict[str, str]:
    ours, theirs = list(model.state_dict()), list(record)
    if set(ours) == set(theirs):
        return {name: name for name in theirs}
    if len(ours) == len(theirs) and all(name.isdigit() for name in theirs):
        return dict(zip(theirs, ours, strict=True))  # from a list of arrays, as state_dict().values() gives it
    missing = sorted(set(ours) ^ set(theirs))[:3]
    raise UserError(
        f"model: its state_dict has {len(ours)} entries, the message {len(theirs)}; {', '.join(missing)} stand in one "
        "only. model(context) must build the federation's model"
    )
