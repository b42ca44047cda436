"""Writing files so that a crash leaves the old one or the new one, never half of either.

Every durable step is named, so that tests can kill the process, or fill the disk, at each of them: `watch` is told the
step and the file before the next one begins. It is nobody's business outside tests.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from lindt.errors import UserError

STEPS: Final = (
    "before write", "written", "synced", "renamed", "name synced",  # a file replaced whole
    "before append", "appended", "append synced",  # a file that grows
    "before removal", "removed",
)  # fmt: skip
watch: Callable[[str, Path], None] | None = None


def write_whole(path: Path, content: bytes) -> None:
    """Written aside, synced, renamed over `path`; the folder is synced too, so that the name survives."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    _reached("before write", path)
    try:
        with aside.open("wb") as file:
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
    """At the end of a file that grows; durable once this returns."""
    _reached("before append", path)
    with path.open("ab") as file:
        file.write(line)
        file.flush()
        _reached("appended", path)
        os.fsync(file.fileno())
    _reached("append synced", path)


def remove(path: Path) -> None:
    """A file that nothing refers to any more."""
    _reached("before removal", path)
    path.unlink()
    _reached("removed", path)


@contextmanager
def locked(path: Path, *, wait: float, busy: str) -> Iterator[None]:
    """Hold the lock of `path` for this process; the operating system releases it when the process ends.

    `wait` is how many seconds to try, `math.inf` for as long as it takes. `busy` is the error's message when another
    process still holds the lock then.
    """
    end = time.monotonic() + wait
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(busy) from None
                time.sleep(0.05)
            except OSError as error:  # a file system without locks
                raise UserError(f"{path}: cannot be locked ({error.strerror}); use a folder on a local disk") from None
        yield


def _reached(step: str, path: Path) -> None:
    if watch is not None:
        watch(step, path)
