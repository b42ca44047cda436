"""Writing files so that a crash leaves the old one or the new one, never half of either.

Every durable step is named, so that tests can kill the process, or fill the disk, at each of them: `watch` is told the
step and the file before the next one begins. It is nobody's business outside tests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

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


def _reached(step: str, path: Path) -> None:
    if watch is not None:
        watch(step, path)
