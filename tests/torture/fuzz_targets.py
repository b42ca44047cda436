"""Every parser that meets untrusted bytes, as a function of bytes: it may raise only what it documents.

Nothing may hang, take memory beyond a bound, or write outside FOLDER; fuzz.py watches over that. What is not caught
here is a defect.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import io
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import HTTPError
from urllib.parse import unquote

import fuzz_seeds as seeds
import h11
from fuzz_ground import FOLDER, told, written
from fuzz_messages import reply, task
from rich.console import Console

from lindt.client.private_store import FolderStore
from lindt.data import cifar10, download, mnist, shakespeare
from lindt.data.download import kept_array
from lindt.data.shakespeare import SAME, roles_of
from lindt.flower.client_store import ClientStore
from lindt.flower.vectors import values_of
from lindt.plan.file import from_dict, from_toml, override, to_dict
from lindt.report.page import page_with
from lindt.report.payload import privacy_spent, whole_run
from lindt.report.reading import read_run
from lindt.report.terminal import run_row, show
from lindt.runs.files import BrokenError, seal, unseal
from lindt.runs.store import Store, load_checkpoint
from lindt.watch import auth, server
from lindt.watch.index import RunIndex


def plan(data: bytes) -> None:
    """TOML, and its lines `#set FIELD=VALUE` as the command line's --set."""
    text = data.decode("utf-8", "replace")
    with told():
        table = from_toml(text)
        for line in text.splitlines():
            if line.startswith("#set "):
                table = override(table, line.removeprefix("#set "))
        found = from_dict(table)
        assert from_dict(to_dict(found)) == found


def run(data: bytes) -> None:
    """A run's files as people read them: the terminal's words, the page's values."""
    folder = _run_folder(data)
    with told():
        found = read_run(folder)
        values = whole_run(found, "one", privacy_spent(found))
        json.dumps([values, run_row(found, "one")], ensure_ascii=False, allow_nan=False).encode()  # as the server does
        page_with([values])
        show(Console(file=io.StringIO()), found)


def store(data: bytes) -> None:
    """A run's files as it is gone on with."""
    folder = _run_folder(data)
    with told():
        found = Store.open(folder)
        for read in (found.plan, found.rounds, found.summary, found.resume):
            with told():
                read()


def sealed(data: bytes) -> None:
    """Checkpoints, v_i and what a client keeps; by their bytes, and by words under a checksum that adds up."""
    with suppress(BrokenError):
        unseal(data)
    tensors = {"w": seeds.W, "floats": seeds.BUFFERS.floats_F, "counts": seeds.BUFFERS.counts_I}
    words = data.decode("utf-8", "replace")
    for content in (data, seal(tensors, {"about": words, "notes": words})):
        with told():
            load_checkpoint(written("checkpoint/round-000003.safetensors", content).parent, seeds.RUN)
        with told():
            written(f"private/{seeds.RUN}/client-00000/round-000003.safetensors", content)
            FolderStore(FOLDER / "private", seeds.RUN).read(0, 3)
    vault = ClientStore(FOLDER, "vault", "0")
    written("vault/client-0/alone.safetensors", data)
    vault.read_alone("5", 3)


def archive(data: bytes) -> None:
    """Data sets' archives; a changed .gz says so at once, so the bytes are the tar's."""
    readers = (mnist.read_archive, shakespeare.read_archive, cifar10._from_official, cifar10._from_package)
    paths = (written("a.tgz", gzip.compress(data, 1)), written("b.tgz", data))
    with patch.object(shakespeare, "PLAYS", seeds.PLAYS), patch.object(cifar10, "SHEET", (1024, seeds.PICTURES)):
        for path, read in product(paths, readers):
            with told():
                read(path)
    for said in roles_of(data.decode("ascii", "replace"), SAME["hamlet"]).values():
        shakespeare.encode(said)


def array(data: bytes) -> None:
    """Kept arrays, and those in Flower's messages."""
    path = written("arrays/x.npy", data)
    with told():
        kept_array(path.parent, "x", "mnist")
    for shape in ((2, 3), (3,), ()):
        with suppress(ValueError):
            found = values_of(seeds.Array("float32", shape, "numpy.ndarray", data))
            assert found.shape == shape


def answer(data: bytes) -> None:
    """What a server of archives answers, and what pip says of its settings."""
    with told():
        download._settings(data.decode("utf-8", "replace"))
    with told(), patch.object(download, "PAUSES", ()), written("part", b"12345").open("ab+") as part:
        download._complete("http://a/b", part, "sha256", "0" * 64, lambda _: None, Opener(data))  # type: ignore[arg-type]


class Opener:
    """Answers every request with the same bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self.data)

    def open(self, request: Any, timeout: float) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(self)  # type: ignore[arg-type]
        response.begin()
        if response.status >= 400:
            headers = response.headers
            raise HTTPError(request.full_url, response.status, response.reason, headers, None)
        return response


@cache
def _site() -> tuple[asyncio.AbstractEventLoop, server.Site, list[Any]]:
    site = server.Site(RunIndex(seeds.shelves(FOLDER / "web")))
    hosts = (("127.0.0.1", None), ("0.0.0.0", "a-token-that-is-long-enough"))
    return asyncio.new_event_loop(), site, [server.build_app(site, host, 8471, token) for host, token in hosts]


def asked(data: bytes) -> list[tuple[int, bytes]]:
    """A request as uvicorn passes it on, at a server on loopback and at one that asks for a token: what each says."""
    loop, site, apps = _site()
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    try:
        head, body = connection.next_event(), connection.next_event()
    except h11.RemoteProtocolError:
        return []
    if not isinstance(head, h11.Request):
        return []
    target, _, query = head.target.partition(b"?")
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "method": head.method.decode(), "path": unquote(target.decode()), "raw_path": target,
        "query_string": query, "headers": [(name.lower(), value) for name, value in head.headers],
        "server": ("127.0.0.1", 8471), "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    sent = {"type": "http.request", "body": bytes(getattr(body, "data", b"")), "more_body": False}
    answers = []
    for one in apps:
        site.closing, said, heard = False, [], [sent]

        async def receive(heard: list[Any] = heard) -> Any:
            if not heard:
                await asyncio.sleep(3600)
            return heard.pop()

        async def send(message: Any, said: list[Any] = said) -> None:
            said.append(message)
            site.closing = bool(message.get("more_body"))  # one event of a stream is enough

        with patch.object(server, "LOOK_EVERY", 0.0), patch.object(auth, "GUESSING", 0.0):
            loop.run_until_complete(one(dict(scope), receive, send))
        answers.append((said[0]["status"], b"".join(message.get("body", b"") for message in said)))
    return answers


def request(data: bytes) -> None:
    for status, body in asked(data):
        assert status in (200, 303, 400, 401, 404, 405, 413, 421, 431)
        assert b"a-secret-name" not in body


def _run_folder(data: bytes) -> Path:
    for name in seeds.FILES:
        (FOLDER / "run" / name).unlink(missing_ok=True)
    for name, content in zip(seeds.FILES, data.split(seeds.CUT), strict=False):
        written(f"run/{name}", content)
    return FOLDER / "run"


TARGETS: dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]] = {
    "plan": (plan, seeds.plans),
    "run": (run, seeds.runs),
    "store": (store, seeds.runs),
    "sealed": (sealed, seeds.sealed),
    "archive": (archive, seeds.archives),
    "array": (array, seeds.arrays),
    "answer": (answer, seeds.answers),
    "request": (request, seeds.requests),
    "task": (task, seeds.tasks),
    "reply": (reply, seeds.replies),
}
