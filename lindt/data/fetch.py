"""Data sets that were fetched: checked by hash, kept outside the repository. Nothing downloaded is ever run.

An archive (transfer.py gets it, or the user has it) is read member by member, by name, with sizes bounded; nothing is
unpacked to disk, unpickled or built.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lindt.disk import write_whole
from lindt.errors import UserError

Array = NDArray[Any]  # bytes, or where parts of them end
Progress = Callable[[str], None]


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


def member(archive: tarfile.TarFile, name: str, limit: int) -> IO[bytes]:
    """One file of an archive, by its exact name, unless it is larger than it can be."""
    try:
        info = archive.getmember(name)
    except KeyError:
        raise UserError(f"the archive has no {name}") from None
    # A link is not followed: what it names has a size of its own.
    file = archive.extractfile(info) if info.isreg() else None
    if file is None or info.size > limit:
        raise UserError(f"{name} in the archive is no plain file of at most {limit} bytes")
    return file


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


def kept_array(folder: Path, name: str, fetch: str) -> Array:
    """A kept array, mapped and not read: several processes share its pages."""
    path = folder / f"{name}.npy"
    if not path.exists():
        raise UserError(f"{fetch} is not here yet; get it with `lindt data fetch {fetch}`")
    try:
        found: Array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}); get it anew with `lindt data fetch {fetch}`") from None
    return found
