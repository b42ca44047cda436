"""Writing files so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Written aside, synced, renamed over `path`; the folder is synced too, so that the name survives."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_line(path: Path, line: bytes) -> None:
    """At the end of a file that grows; durable once this returns."""
    with path.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
