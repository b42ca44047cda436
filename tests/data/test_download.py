"""Archives over the network: a broken transfer is taken up again, only the known bytes count, nothing is run."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from lindt.data import download
from lindt.errors import UserError

CONTENT = bytes(range(256)) * 4000  # a megabyte
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Fickle(BaseHTTPRequestHandler):
    """Serves CONTENT, but breaks off after as many bytes as `breaks` says for the next answer."""

    breaks: ClassVar[list[int]] = []
    asked: ClassVar[list[str | None]] = []
    resumes = True
    status: ClassVar[list[int]] = []

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.asked.append(asked)
        if self.status:
            self.send_error(self.status.pop(0))
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.resumes else 0
        if start >= len(CONTENT):
            self.send_error(416)
            return
        body = CONTENT[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.breaks.pop(0)] if self.breaks else body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("LINDT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(download, "PAUSES", (0.0, 0.0, 0.0, 0.0))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Fickle.breaks, Fickle.asked, Fickle.resumes, Fickle.status = [], [], True, []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fickle)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/archive"
    server.shutdown()
    thread.join()
    server.server_close()


def get(address: str, said: list[str] | None = None, digest: str = SHA256) -> bytes:
    with download.archive(address, "sha256", digest, (said if said is not None else []).append) as path:
        return path.read_bytes()


def parts(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data/partial").iterdir())


def test_a_whole_transfer_shows_progress_and_leaves_nothing(address: str, tmp_path: Path) -> None:
    said: list[str] = []
    assert get(address, said) == CONTENT
    assert said[-1] == "1.0 of 1.0 MiB"
    assert parts(tmp_path) == []


def test_a_broken_transfer_goes_on_where_it_broke(address: str, tmp_path: Path) -> None:
    Fickle.breaks = [300_000, 200_000]
    assert get(address) == CONTENT
    assert Fickle.asked == [None, "bytes=300000-", "bytes=500000-"]
    assert parts(tmp_path) == []


def test_what_has_come_is_kept_for_the_next_command_and_counts_for_nothing(address: str, tmp_path: Path) -> None:
    Fickle.breaks = [1000] * 5
    with pytest.raises(UserError, match=r"the connection ended after 5000 of 1024000 bytes.*5000 bytes are kept"):
        get(address)
    assert [part.stat().st_size for part in parts(tmp_path)] == [5000]
    assert get(address) == CONTENT
    assert Fickle.asked[-1] == "bytes=5000-"


def test_a_server_that_cannot_resume_begins_anew(address: str) -> None:
    Fickle.breaks, Fickle.resumes = [300_000], False
    assert get(address) == CONTENT


def test_a_part_that_is_not_a_part_of_it_is_thrown_away(address: str, tmp_path: Path) -> None:
    (tmp_path / "data/partial").mkdir(parents=True)
    part = tmp_path / f"data/partial/{SHA256}.part"
    part.write_bytes(b"something else")
    assert get(address) == CONTENT  # resumed, found wrong, fetched anew
    assert Fickle.asked == ["bytes=14-", None]
    part.write_bytes(b"x" * (len(CONTENT) + 5))  # longer than the whole: 416
    assert get(address) == CONTENT
    part.write_bytes(CONTENT)  # all there: it is not asked for again
    Fickle.asked = []
    assert get(address) == CONTENT
    assert Fickle.asked == []


def test_other_bytes_than_the_known_ones_never_count(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the archive is damaged or of another version"):
        get(address, digest="0" * 64)
    assert [part.stat().st_size for part in parts(tmp_path)] == [0]


def test_a_refusal_is_told_at_once_and_a_busy_server_asked_again(address: str) -> None:
    Fickle.status = [404]
    with pytest.raises(UserError, match="404"):
        get(address)
    assert len(Fickle.asked) == 1
    Fickle.status = [503]
    assert get(address) == CONTENT


def test_no_server_no_archive(address: str) -> None:
    with pytest.raises(UserError, match="the download stopped"):
        get("http://127.0.0.1:9/none")
    with pytest.raises(UserError, match="not an address to download from"):
        get("ftp://127.0.0.1/x")


def test_more_than_any_archive_we_know_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "LIMIT", 300_000)
    with pytest.raises(UserError, match="sends more than"):
        get(address)


def test_two_fetches_at_once_do_not_mix(address: str) -> None:
    with (
        download.archive(address, "sha256", SHA256, lambda _: None),
        pytest.raises(UserError, match="another process is downloading to"),
    ):
        get(address)


def sdist(path: Path, marker: Path) -> Path:
    setup = f"open({str(marker)!r}, 'w').close()\nfrom setuptools import setup\nsetup(name='playbook', version='1.0')\n"
    with tarfile.open(path, "w:gz") as archive:
        info = tarfile.TarInfo("playbook-1.0/setup.py")
        info.size = len(setup)
        archive.addfile(info, io.BytesIO(setup.encode()))
    return path


def test_pip_says_where_the_archive_is_and_its_setup_is_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index, marker = tmp_path / "simple/playbook", tmp_path / "ran"
    index.mkdir(parents=True)
    path = sdist(index / "playbook-1.0.tar.gz", marker)
    (index / "index.html").write_text('<a href="playbook-1.0.tar.gz">playbook-1.0.tar.gz</a>')
    monkeypatch.setenv("LINDT_DATA", str(tmp_path / "data"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "simple").as_uri())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with download.pip_archive("playbook", "1.0", digest, lambda _: None) as found:
        assert found.read_bytes() == path.read_bytes()
    assert not marker.exists()
    with (
        pytest.raises(UserError, match=r"not playbook-2.0.tar.gz"),
        download.pip_archive("playbook", "2.0", digest, lambda _: None),
    ):
        pass


def test_pips_settings_are_read_the_environment_first() -> None:
    listed = ":env:.cert='/env.pem'\nglobal.cert='/global.pem'\nglobal.proxy='http://proxy:1'\nglobal.timeout='9'\n"
    assert download._settings(listed) == {"cert": "/env.pem", "proxy": "http://proxy:1"}
    assert download._settings("") == {}
    with pytest.raises(UserError, match="pip's setting cert"):
        download._opener({"cert": "/no/such.pem"})


NPM = """#!/bin/sh
case "$1" in
view) echo "$ADDRESS" ;;
pack) cp "$PACKED" "archive.tgz" ;;
esac
"""


def test_npm_says_where_the_archive_is_or_gets_it_itself(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    npm = tmp_path / "bin/npm"
    npm.parent.mkdir()
    npm.write_text(NPM)
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ADDRESS", address)
    monkeypatch.setenv("PACKED", str(tmp_path / "packed"))
    (tmp_path / "packed").write_bytes(CONTENT)
    sha1 = hashlib.sha1(CONTENT).hexdigest()
    for refusals in ([], [401]):  # with a token that only npm has, npm must do it
        Fickle.status = [*refusals]
        with download.npm_archive("thing@1", sha1, lambda _: None) as found:
            assert found.read_bytes() == CONTENT
            assert (found.name == "archive.tgz") == bool(refusals)
    (tmp_path / "packed").write_bytes(b"other")
    Fickle.status = [401]
    with (
        pytest.raises(UserError, match="damaged or of another version"),
        download.npm_archive("thing@1", sha1, lambda _: None),
    ):
        pass
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="npm was not found"), download.npm_archive("thing@1", sha1, lambda _: None):
        pass
