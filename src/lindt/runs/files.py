"""Files of a run: replaced so that a crash leaves the old file or the new one, and sealed so that damage is noticed.

Every durable step has a name, so that tests can kill the process or fill the disk at each step: `watch` is called with
the step and the file before the next step begins. Only tests set `watch`.

A sealed file holds tensors and texts: safetensors with a checksum over its whole content. Reading it executes nothing
and allocates no more than the file's own size. torch is imported only where tensors are read or written: `report` and
`watch` use this module without it.

A folder and a cache may come from somebody whom the user does not trust: links in them are not followed, and reading
a pipe does not block. A hard link to a file outside the folder is a plain file with two names: it is refused where a
file is locked or appended to. Where a file is replaced whole, its other name keeps the old bytes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from lindt.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

STEPS: Final = (
    "before write", "written", "synced", "renamed", "name synced",  # a file replaced whole
    "before append", "appended", "append synced",  # a file that grows
    "before removal", "removed",
)  # fmt: skip
watch: Callable[[str, Path], None] | None = None


def write_whole(path: Path, content: bytes) -> None:
    """Write a temporary file, sync it and rename it to `path`; sync the folder too, so that the name is durable."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    _reached("before write", path)
    with _naming(path):
        try:
            aside.unlink(missing_ok=True)  # left by a process that crashed, or a link in its place
            with aside.open("xb") as file:
                file.write(content)
                file.flush()
                _reached("written", path)
                os.fsync(file.fileno())
            _reached("synced", path)
            os.replace(aside, path)
            _reached("renamed", path)
        finally:
            aside.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    _reached("name synced", path)


def append_line(path: Path, line: bytes) -> None:
    """Append a line to a file; the line is durable once this returns."""
    _reached("before append", path)
    with _naming(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line)
            file.flush()
            _reached("appended", path)
            os.fsync(file.fileno())
    _reached("append synced", path)


def remove(path: Path) -> None:
    """Delete a file that nothing refers to any more."""
    _reached("before removal", path)
    path.unlink()
    _reached("removed", path)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to errors of the system: the error of a full disk does not say which file was written."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def open_file(path: Path) -> int | None:
    """A descriptor of a plain file; None where `path` is not one. Links are not followed; a pipe does not block."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    return None


def read_plain(path: Path) -> bytes:
    """The content of a plain file. Raises BrokenError where `path` is not one."""
    descriptor = open_file(path)
    if descriptor is None:
        raise BrokenError("it is not a plain file that can be read")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def require_plain(folder: Path, names: Iterable[str], in_place: Iterable[str] = ()) -> None:
    """Refuse links, pipes and devices under those names in a folder, at any depth: the folder may not be trustworthy.

    `in_place` are the files that are about to be locked or appended to: they must have no second name (hard link). The
    folder itself may be a link, because the user named it.
    """
    waiting, single = [folder / name for name in names], {folder / name for name in in_place}
    while waiting:
        path = waiting.pop()
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        mode = found.st_mode
        if stat.S_ISLNK(mode):
            raise UserError(f"{path} is a link; a run's folder holds plain files only, put the file itself there")
        if stat.S_ISDIR(mode):
            waiting += path.iterdir()
        elif not stat.S_ISREG(mode):
            raise UserError(f"{path} is not a plain file; a run's folder holds plain files only, remove it")
        elif path in single and found.st_nlink > 1:
            raise UserError(
                f"{path} has {found.st_nlink} names (hard links), and writing to it would change the others; "
                "copy the folder with cp -r, and use the copy"
            )


@contextmanager
def locked(path: Path, *, wait: float, busy: str) -> Iterator[None]:
    """Hold the lock of `path` for this process; the operating system releases it when the process ends.

    `wait` is how many seconds to try, `math.inf` to try without end. `busy` is the error's message if another process
    still holds the lock after that. A missing file is created; the content of an existing file does not change.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise UserError(f"{path}: cannot be locked, it is not a plain file; remove it") from None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path}: cannot be locked, it is not a plain file; remove it")
        try:
            _acquire(file.fileno(), wait, busy)
        except OSError as error:  # a file system without locks
            raise UserError(f"{path}: cannot be locked ({error.strerror}); use a folder on a local disk") from None
        yield


@contextmanager
def locked_folder(path: Path, *, wait: float, busy: str) -> Iterator[None]:
    """Hold the lock of a folder itself, as `locked` does for a file. Deleting files in the folder does not end it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # NFS locks files only: there the lock of the file `lock` must suffice
            _acquire(descriptor, wait, busy)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, wait: float, busy: str) -> None:
    end = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise UserError(busy) from None
            time.sleep(0.05)


def is_held(descriptor: int | None) -> bool:
    """Whether another process holds the lock of this descriptor, which is then closed. False for None."""
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks of that kind
        return False
    finally:
        os.close(descriptor)
    return False


def _reached(step: str, path: Path) -> None:
    if watch is not None:
        watch(step, path)


SEAL: Final = "sealed"  # the only key in the file's metadata
DTYPES: Final = {  # torch's names, and safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class BrokenError(ValueError):
    """A file's content is damaged; the message says how."""


def seal(tensors: Mapping[str, Tensor | NDArray[Any]], words: Mapping[str, str]) -> bytes:
    """The bytes of a file of tensors, or of arrays, and texts. Both kinds give the same bytes."""
    plain = {name: _plain(values) for name, values in tensors.items()}
    sealed = {"words": dict(words), "sha256": _checksum(plain, words)}
    return _written(plain, json.dumps(sealed, sort_keys=True))


def unseal(content: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and texts that `seal` was given. Raises BrokenError where the content is damaged."""
    from safetensors.torch import load

    return _unsealed(content, load)


def unseal_arrays(content: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """As `unseal`, with arrays of numpy: it needs no torch, and cannot read types that numpy does not have."""
    from safetensors.numpy import load

    return _unsealed(content, load)


def _unsealed(content: bytes, load: Callable[[bytes], dict[str, Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError

    try:
        tensors, sealed = load(content), _sealed(content)
        words = {str(name): str(word) for name, word in sealed["words"].items()}
        if sealed["sha256"] != _checksum(tensors, words):
            raise BrokenError("its checksum is wrong")
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BrokenError(" ".join(str(error).split()) or "it cannot be read") from None
    return tensors, words


def seal_table(table: Mapping[str, Any]) -> bytes:
    """JSON with its checksum, for values that are read without torch."""
    return json.dumps({"sealed": table, "sha256": _table_checksum(table)}, indent=2, allow_nan=False).encode()


def unseal_table(content: bytes) -> dict[str, Any]:
    """The table that `seal_table` was given. Raises BrokenError where the content is damaged."""
    try:
        found = json.loads(content.decode("utf-8"))
        table = found["sealed"]
        if not isinstance(table, dict) or found["sha256"] != _table_checksum(table):
            raise BrokenError("its checksum is wrong")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BrokenError(" ".join(str(error).split()) or "it cannot be read") from None
    return table


def _table_checksum(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def _written(plain: Mapping[str, Tensor | NDArray[Any]], sealed: str) -> bytes:
    """The bytes of a safetensors file. Each value is copied once: the library's writer takes three times as long."""
    header: dict[str, Any] = {"__metadata__": {SEAL: sealed}}
    pieces: list[memoryview] = []
    end = 0
    for name, tensor in sorted(plain.items(), key=lambda item: (-item[1].itemsize, item[0])):  # widest first
        if _dtype(tensor) not in DTYPES:
            raise ValueError(
                f"{name}: {tensor.dtype} cannot be written to a file; use one of {', '.join(DTYPES.values())}"
            )
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[_dtype(tensor)], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        pieces.append(_bytes(tensor))
    about = json.dumps(header).encode()
    about += b" " * (-len(about) % 8)  # values begin aligned
    return b"".join([len(about).to_bytes(8, "little"), about, *pieces])


def _plain(values: Tensor | NDArray[Any]) -> Tensor | NDArray[Any]:
    if _is_tensor(values):
        return values.detach().cpu().contiguous()
    import numpy as np

    return np.ascontiguousarray(values)


def _is_tensor(values: Tensor | NDArray[Any]) -> TypeGuard[Tensor]:
    return hasattr(values, "detach")  # neither torch nor numpy is imported to find out


def _dtype(values: Tensor | NDArray[Any]) -> str:
    return str(values.dtype).removeprefix("torch.")


def _bytes(values: Tensor | NDArray[Any]) -> memoryview:
    assert sys.byteorder == "little", "safetensors are little-endian"
    if _is_tensor(values):
        import torch

        tensor: memoryview = values.reshape(-1).view(torch.uint8).numpy().data  # numpy has no bfloat16
        return tensor
    array: memoryview = values.reshape(-1).view("uint8").data  # type: ignore[arg-type, assignment]
    return array


def _sealed(content: bytes) -> Any:
    """The sealed JSON in the header. A safetensors file begins with the length of its JSON header and the header."""
    length = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    if SEAL not in about:
        raise BrokenError("it has no checksum")
    return json.loads(about[SEAL])


def _checksum(tensors: Mapping[str, Tensor | NDArray[Any]], words: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(words), sort_keys=True).encode())
    for name in sorted(tensors):
        values = tensors[name]
        digest.update(f"{name} torch.{_dtype(values)} {tuple(values.shape)}".encode())
        digest.update(_bytes(values))
    return digest.hexdigest()
