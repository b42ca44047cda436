"""Tensors and words in one file that tells when it was damaged: safetensors with a checksum over all it says.

Nothing in such a file is executed when it is read, and nothing is allocated beyond the file's own size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

SEAL: Final = "sealed"  # the one word that safetensors is given: it would write several in an order of its own


class BrokenError(ValueError):
    """What is wrong with the bytes."""


def seal(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> bytes:
    # Copies where tensors share memory, as tied weights do: safetensors refuses those.
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    if len({tensor.untyped_storage().data_ptr() for tensor in plain.values() if tensor.numel()}) < len(plain):
        plain = {name: tensor.clone() for name, tensor in plain.items()}
    sealed = {"words": dict(words), "sha256": _checksum(plain, words)}
    return save(plain, {SEAL: json.dumps(sealed, sort_keys=True)})


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


def _sealed(content: bytes) -> Any:
    """A safetensors file begins with the length of its JSON header, then that."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"][SEAL])


def _checksum(tensors: Mapping[str, Tensor], words: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(words), sort_keys=True).encode())
    for name in sorted(tensors):
        values = tensors[name]
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)  # as bytes: numpy has no bfloat16
    return digest.hexdigest()
