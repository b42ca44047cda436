"""Archives and arrays that anybody may have made: known data or a sentence, in bounded memory, nothing written."""

from __future__ import annotations

import gzip
import io
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from untrusted import fed, seeds

from lindt.data import cifar10, download, mnist, shakespeare
from lindt.data.download import keep_arrays, kept_array, member, opened
from lindt.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # numpy and PIL warn of what is odd, and refuse it

archive, tars = fed("archive")
array, arrays = fed("array")
answer, answers = fed("answer")


@given(data=tars)
@settings(max_examples=40, deadline=None)
def test_a_changed_archive_is_read_or_refused_in_words(data: bytes) -> None:
    archive(data)


@given(data=arrays)
@settings(max_examples=150, deadline=None)
def test_a_changed_array_is_read_or_refused_in_words(data: bytes) -> None:
    array(data)


@given(data=answers)
@settings(max_examples=60, deadline=None)
def test_a_changed_answer_of_a_server_is_refused_in_words(data: bytes) -> None:
    answer(data)


def packed(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, 1))
    return path


def entry(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header that claims a size, whatever follows."""
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, "../../outside"
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_takes_no_memory_for_what_it_claims(tmp_path: Path, kind: bytes) -> None:
    path = packed(tmp_path / "a.tgz", entry("x", 200 << 20, kind) + bytes(200 << 20))
    tracemalloc.start()
    with pytest.raises(UserError, match="it is not a readable archive"), opened(path):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_header_does_not_take_quadratic_time(tmp_path: Path) -> None:
    """`2 2 2 ... =` in a PAX header: Python's reader looks for the = anew at every 2."""
    content = b"2 " * (4 << 20) + b"="
    path = packed(tmp_path / "a.tgz", entry("x", len(content), tarfile.XHDTYPE) + content)
    with pytest.raises(UserError, match="it is not a readable archive"), opened(path):
        pass


def test_an_archive_does_not_swell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MOST_BYTES", 1 << 20)
    path = packed(tmp_path / "a.tgz", entry("x", 2 << 20) + bytes(2 << 20))
    with pytest.raises(UserError, match="unpacks to more than 1 MiB"), opened(path):
        pass
    monkeypatch.setattr(download, "MOST_MEMBERS", 3)
    path = packed(tmp_path / "b.tgz", seeds.tar({str(n): b"" for n in range(4)}))
    with pytest.raises(UserError, match="more than 3 members"), opened(path):
        pass


def test_no_member_leads_out_of_the_archive(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    home = tmp_path / "a" / "b"
    home.mkdir(parents=True)
    odd = {"../../outside": tarfile.REGTYPE, "soft": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE, "pipe": tarfile.FIFOTYPE}
    content = b"".join(entry(name, 0, kind) for name, kind in odd.items()) + bytes(1024)
    with opened(packed(home / "a.tgz", content)) as archive:
        assert member(archive, "../../outside", 10) == b""  # what the archive says of it, which is nothing
        for name in ("soft", "hard", "pipe"):
            with pytest.raises(UserError, match="not a plain file"):
                member(archive, name, 10)
    assert [path.name for path in home.iterdir()] == ["a.tgz"]
    assert (tmp_path / "outside").read_bytes() == b"secret"


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-30], lambda raw: raw[:40] + b"\xff" * 40 + raw[80:], lambda raw: b""]
)
def test_a_broken_gzip_is_told(tmp_path: Path, damage: object) -> None:
    whole = gzip.compress(seeds.tar(seeds.official()), 9)
    (tmp_path / "a.tgz").write_bytes(damage(whole))  # type: ignore[operator]
    for read in (cifar10._from_official, cifar10._from_package, mnist.read_archive, shakespeare.read_archive):
        with pytest.raises(UserError, match=r"^a.tgz: it is not a readable archive"):
            read(tmp_path / "a.tgz")


@pytest.mark.parametrize(
    "content", [b"[" * 10**5, b"{}", b"[[1], [2]]", b"[300]", b"[-1]", b"[1.5]", b'["1"]', b"\xff"]
)
def test_labels_that_are_none(tmp_path: Path, content: bytes) -> None:
    path = packed(tmp_path / "a.tgz", seeds.tar({"labels": content}))
    with opened(path) as archive, pytest.raises(UserError, match="not a list of labels from 0 to 9"):
        cifar10._labels(archive, "labels")


def test_pictures_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "SHEET", (1024, seeds.PICTURES))
    good = seeds.package()["package/test_batch.png"]
    huge = good[:16] + (2**30).to_bytes(4, "big") * 2 + good[24:]  # a thousand million times as many pixels
    odd = {"cut": good[:-40], "spoilt": good[:60] + b"\xff" * 20 + good[80:], "huge": huge, "text": b"no picture"}
    with opened(packed(tmp_path / "a.tgz", seeds.tar({"good": good, **odd}))) as archive:
        assert cifar10._sheet(archive, "good").shape == (seeds.PICTURES, 32, 32, 3)
        for name in odd:
            with pytest.raises(UserError, match=f"^{name}: "):
                cifar10._sheet(archive, name)


def test_half_a_picture_and_plays_without_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = seeds.official() | {"cifar-10-batches-bin/test_batch.bin": bytes(3072)}
    with pytest.raises(UserError, match=r"test_batch.bin: 3072 bytes are not a whole number of pictures"):
        cifar10._from_official(packed(tmp_path / "a.tgz", seeds.tar(batches)))
    monkeypatch.setattr(shakespeare, "PLAYS", seeds.PLAYS)
    with pytest.raises(UserError, match="no speaker was found"):
        shakespeare.read_archive(packed(tmp_path / "b.tgz", seeds.tar(dict.fromkeys(seeds.plays(), b"ACT I."))))


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        saved(np.arange(5, dtype=np.uint8)),  # another shape
        saved(np.arange(6.0)),  # floats
        saved(np.array(["a"] * 6)),
        saved(np.arange(6, dtype=np.uint8)).replace(b"(6,)", b"(6666666666666,)"),  # more than there is
        saved(np.arange(6, dtype=np.uint8)).replace(b"'|u1'", b"'|O'"),  # Python's objects
        saved(np.arange(6, dtype=np.uint8)).replace(b"(6,)", b"(((("),
        b"PK\x03\x04 an archive",
        b"",
    ],
)
def test_a_kept_array_is_what_was_kept(tmp_path: Path, content: bytes) -> None:
    keep_arrays(tmp_path, {"x": np.arange(6, dtype=np.uint8)})
    assert kept_array(tmp_path, "x", "mnist", (6,)).tolist() == [0, 1, 2, 3, 4, 5]
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"x.npy is damaged .* get it again"):
        kept_array(tmp_path, "x", "mnist", (6,))


def test_addresses_and_settings_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINDT_DATA", str(tmp_path))
    monkeypatch.setattr(download, "PAUSES", ())
    for address in ("http://[", "http://a:b/c", "http://\x1b[31m"):
        with pytest.raises(UserError), download.archive(address, "sha256", "0" * 64, lambda _: None):
            pass
    assert download._settings("global.cert='/a'\n:env:.cert='/b'") == {"cert": "/b"}
    for value in ("(" * 10**4, "(" * 200, "open('x')", "5", "'", "['/a']"):
        with pytest.raises(UserError, match="is not a text in quotes"):
            download._settings(f"global.cert={value}")
