"""Data sets that were fetched: checked by hash, kept outside the repository. Nothing downloaded is ever run.

An archive comes by transfer.py, or the user has it; archives.py reads it.
"""

from __future__ import annotations

import hashlib
import io
import os
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lindt.disk import write_whole
from lindt.errors import UserError, one_line

Array = NDArray[Any]  # bytes, or where parts of them end
Progress = Callable[[str], None]
# What numpy raises over a header that is none: it reads it as Python's literals.
UNREADABLE = (
    ValueError, TypeError, KeyError, OSError, EOFError, OverflowError, SyntaxError, RecursionError, MemoryError,
    tokenize.TokenError,
)  # fmt: skip


def data_folder(name: str) -> Path:
    """Where a data set is kept: LINDT_DATA, or the user's cache folder."""
    chosen = os.environ.get("LINDT_DATA")
    if chosen:
        return Path(chosen) / name
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lindt" / "data" / name


def check_file(path: Path, algorithm: str, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise UserError(f"{path.name}: its {algorithm} is {found}, not {expected}; the archive is not the known one")


def check_array(name: str, array: Array, sha256: str) -> None:
    found = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    if found != sha256:
        raise UserError(f"{name}: its sha256 is {found}, not {sha256}; the data are not the known ones")


def keep_arrays(folder: Path, arrays: dict[str, Array]) -> None:
    """One .npy a name, each written whole."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array, allow_pickle=False)
            write_whole(folder / f"{name}.npy", file.getvalue())
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); set LINDT_DATA to another folder") from None


def kept_array(folder: Path, name: str, fetch: str, shape: tuple[int, ...] | None = None) -> Array:
    """A kept array, of that shape where one is given; mapped and not read: several processes share its pages."""
    path = folder / f"{name}.npy"
    if not path.exists():
        raise UserError(f"{fetch} is not here yet; get it with `lindt data fetch {fetch}`")
    try:
        # Not np.load, which reads archives and pickles too, whatever a file's name.
        found: Array = np.lib.format.open_memmap(path, mode="c")
        if found.dtype.kind not in "iu" or (shape is not None and found.shape != shape):
            raise ValueError(f"{found.dtype} {found.shape}")
    except UNREADABLE as error:
        raise UserError(
            f"{path} is damaged ({one_line(str(error))}); get it anew with `lindt data fetch {fetch}`"
        ) from None
    return found
