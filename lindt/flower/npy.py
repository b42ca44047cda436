"""The values of a Flower Array from a stranger: NumPy's .npy bytes, read without NumPy's reader.

That one takes memory for the size that the bytes claim before it has seen them: a header of 100 bytes asks for a
terabyte, and the MemoryError ends the run. Here the bytes must be as many as they say.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import numpy as np
from flwr.app import Array
from numpy.typing import NDArray

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
