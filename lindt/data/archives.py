"""An archive (.tar.gz) that somebody else packed: read member by member, by exact name, with sizes bounded beforehand.

Nothing is unpacked to disk, so that no member's name or link can lead out of a folder; nothing is unpickled or built.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, cast, final

from lindt.errors import UserError, one_line

MOST_BYTES: Final = 1 << 30  # unpacked, all in all; the largest archive we know has 190 MB
LARGEST_MEMBER: Final = 64 << 20  # read at once
LARGEST_HEADER: Final = 4096  # a header may claim any size, and Python's reader takes quadratic time for some
MOST_MEMBERS: Final = 2000


@final
class Bounded:
    """The unpacked bytes of a file, as a tar reader wants them, up to a limit."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file, self.largest = file, LARGEST_HEADER

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.largest or self._file.tell() + size > MOST_BYTES:
            raise tarfile.ReadError(
                f"something in it takes {size} bytes, or all of it more than {MOST_BYTES >> 20} MiB"
            )
        return self._file.read(size)

    def seek(self, place: int) -> int:
        if not 0 <= place <= MOST_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def opened(path: Path) -> Iterator[tarfile.TarFile]:
    """The archive; UserError where it cannot be read, also where that shows only later, inside the `with`."""
    try:
        with gzip.open(path, "rb") as unpacked:
            content = Bounded(unpacked)
            with tarfile.open(fileobj=cast(IO[bytes], content), mode="r:") as archive:
                for number, _ in enumerate(archive):
                    if number == MOST_MEMBERS:
                        raise tarfile.ReadError(f"it has more than {MOST_MEMBERS} members")
                content.largest = LARGEST_MEMBER
                yield archive
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path.name}: no readable archive ({one_line(str(error))})") from None


def member(archive: tarfile.TarFile, name: str, limit: int) -> bytes:
    """One file of an archive, by its exact name, unless it is larger than it can be."""
    try:
        info = archive.getmember(name)
    except KeyError:
        raise UserError(f"the archive has no {name}") from None
    # A link is not followed: what it names has a size of its own. A file with holes unpacks to more than it takes.
    file = archive.extractfile(info) if info.isreg() and not info.issparse() else None
    if file is None or not 0 <= info.size <= limit:
        raise UserError(f"{name} in the archive is no plain file of at most {limit} bytes")
    return file.read()
