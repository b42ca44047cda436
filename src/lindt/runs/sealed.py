"""Tensors and words in one file that tells when it was damaged: safetensors with a checksum over all it says.

Nothing in such a file is executed when it is read, and nothing is allocated beyond the file's own size.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

SEAL: Final = "sealed"  # the one word of the file's metadata
DTYPES: Final = {  # by the names that safetensors gives them
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class BrokenError(ValueError):
    """What is wrong with the bytes."""


def seal(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> bytes:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sealed = {"words": dict(words), "sha256": _checksum(plain, words)}
    return _written(plain, json.dumps(sealed, sort_keys=True))


def unseal(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What was sealed, or BrokenError."""
    try:
        tensors, sealed = load(content), _sealed(content)
        words = {str(name): str(word) for name, word in sealed["words"].items()}
        if sealed["sha256"] != _checksum(tensors, words):
            raise BrokenError("its checksum does not add up")
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BrokenError(" ".join(str(error).split()) or "it cannot be read") from None
    return tensors, words


def _written(plain: Mapping[str, Tensor], sealed: str) -> bytes:
    """A safetensors file, each value copied once: the library's own writer takes three times as long."""
    header: dict[str, Any] = {"__metadata__": {SEAL: sealed}}
    pieces: list[memoryview] = []
    end = 0
    for name, tensor in sorted(plain.items(), key=lambda item: (-item[1].element_size(), item[0])):  # widest first
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name}: {tensor.dtype} cannot be kept in a file; use one of {', '.join(DTYPES.values())}"
            )
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        pieces.append(_bytes(tensor))
    about = json.dumps(header).encode()
    about += b" " * (-len(about) % 8)  # values begin aligned
    return b"".join([len(about).to_bytes(8, "little"), about, *pieces])


def _bytes(values: Tensor) -> memoryview:
    assert sys.byteorder == "little", "safetensors are little-endian"
    found: memoryview = values.reshape(-1).view(torch.uint8).numpy().data  # not by numpy's types: it has no bfloat16
    return found


def _sealed(content: bytes) -> Any:
    """A safetensors file begins with the length of its JSON header, then that."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"][SEAL])


def _checksum(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(words), sort_keys=True).encode())
    for name in sorted(tensors):
        values = tensors[name]
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(_bytes(values))
    return digest.hexdigest()
