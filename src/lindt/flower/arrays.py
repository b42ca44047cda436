"""Flower's arrays: a stranger's bytes into values, an ArrayRecord into a user's nn.Module and back.

NumPy's own reader allocates the size that the bytes claim before it has seen them: a header of 100 bytes asks for a
terabyte, and the MemoryError ends the run. Here the bytes must be as many as they claim.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import nn

from lindt.errors import UserError

# What np.save writes, in format 1.0: whatever Flower's apps send. Booleans, whole numbers and floats, nothing else.
_HEAD: Final = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '([<>|]?[biuf][1248])', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,15}(?:, ?|(?=\)))){0,32})\), \} *\n",
    re.DOTALL,
)


def values_of(array: Array) -> NDArray[Any]:
    """What `array.numpy()` gives, or ValueError: also where its shape is not the one that the Array declares."""
    head = _HEAD.match(array.data) if array.stype == "numpy.ndarray" else None
    if head is None or head.end() != 10 + int.from_bytes(head[1], "little"):
        raise ValueError("its weights are no numbers as NumPy writes them")
    try:
        dtype = np.dtype(head[2].decode())
    except TypeError:
        raise ValueError(f"its weights are of no type {head[2]!r}") from None
    shape = tuple(int(size) for size in re.findall(rb"[0-9]+", head[4]))
    if shape != tuple(array.shape):
        raise ValueError(f"weights of shape {shape[:8]} that were declared {tuple(array.shape)[:8]}")
    if len(array.data) - head.end() != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(array.data)} bytes for weights of shape {shape[:8]} as {dtype}")
    values = np.frombuffer(array.data, dtype, offset=head.end()).astype(dtype.newbyteorder("="), copy=False)
    return values.reshape(shape, order="F" if head[3] == b"True" else "C")


def load_arrays(model: nn.Module, record: ArrayRecord) -> nn.Module:
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


def to_arrays(model: nn.Module, like: ArrayRecord) -> ArrayRecord:
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
