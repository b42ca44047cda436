"""The files of a run, read while they may still grow: bounded, whole lines only, broken ones counted."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from lindt.report.shapes import parsed

WHOLE_FILE = 8 * 2**20  # plan.toml, run.json, summary.json: kilobytes in truth
LONGEST_LINE = 8 * 2**20  # a scored round of 10,000 clients takes about 1.5 MB
LONGEST_FILE = 2**28  # 500 rounds of 100 clients, each round scored, take 7 MB


def open_file(path: Path) -> int | None:
    """A descriptor of a plain file; None where there is none. No link is followed, no pipe is waited for."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    return None


def read_small(path: Path) -> bytes | None:
    """The whole of a small file; None where it is missing, no plain file, or too large to be one of ours."""
    descriptor = open_file(path)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(WHOLE_FILE) if os.fstat(descriptor).st_size <= WHOLE_FILE else None


@final
class Lines:
    """A file with one JSON line a round, read on from where it was left; `read` adds the new ones to `found`.

    Half a line at the end waits for its rest. A file that was replaced or cut back (a run that was resumed) is
    read anew from its start; `anew` counts how often.
    """

    def __init__(self, path: Path, shape: Mapping[str, Any]) -> None:
        self.path, self.shape = path, shape
        self.anew = 0
        self._begin(-1)

    def _begin(self, inode: int) -> None:
        self.found: dict[int, dict[str, Any]] = {}  # by round; of two lines for a round the later
        self.broken = 0  # lines that cannot be read
        self.half = False  # the last line has no end yet
        self.inode, self.offset, self.passing = inode, 0, False

    @property
    def cut(self) -> bool:
        return self.offset >= LONGEST_FILE

    def read(self) -> None:
        descriptor = open_file(self.path)
        if descriptor is None:
            self._begin(-1)
            return
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_ino != self.inode or status.st_size < self.offset:
                self.anew += self.offset > 0
                self._begin(status.st_ino)
            file.seek(self.offset)
            self.half = False
            while not self.cut and (piece := file.readline(LONGEST_LINE)):
                whole = piece.endswith(b"\n")
                if not whole and len(piece) < LONGEST_LINE:
                    self.half = True
                    return
                self.offset += len(piece)
                if self.passing or not whole:  # a line too long to be one of ours, passed over piece by piece
                    self.passing = not whole
                    self.broken += whole
                else:
                    self._keep(piece)

    def _keep(self, line: bytes) -> None:
        table = parsed(line, self.shape)
        if table is None or table["round"] < 1:
            self.broken += 1
        else:
            self.found[table["round"]] = table
