"""The server of `lindt watch`, asked over loopback: what it shows, what it refuses, what it tells of a live run."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from folders import about, line, mended, plan, write_run

from lindt.errors import UserError
from lindt.report.payload import PrivacySpent
from lindt.report.reading import Run
from lindt.watch import index as shelf_module
from lindt.watch import server as server_module
from lindt.watch import timeouts
from lindt.watch.auth import is_loopback, token_for
from lindt.watch.index import RunIndex
from lindt.watch.server import Site, build_app, configuration, serve

TOKEN = "a-token-that-is-long-enough"


@contextmanager
def serving(root: Path, host: str = "127.0.0.1", token: str | None = None) -> Iterator[int]:
    site = Site(RunIndex(root))
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        server = uvicorn.Server(configuration(build_app(site, host, port, token)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield port
        finally:
            site.closing = server.should_exit = True
            thread.join()


def ask(port: int, path: str, method: str = "GET", body: str | None = None, **headers: str) -> tuple[int, str, Any]:
    talk = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    talk.request(method, path, body, headers)
    answer = talk.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    talk.close()
    return found


@contextmanager
def listening(port: int, path: str) -> Iterator[Iterator[tuple[str, Any]]]:
    """Server-sent events, one by one."""
    talk = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    talk.request("GET", path)
    answer = talk.getresponse()
    assert answer.getheader("content-type", "").startswith("text/event-stream")

    def events() -> Iterator[tuple[str, Any]]:
        name = ""
        while text := answer.readline().decode():
            if text.startswith("event: "):
                name = text[7:].strip()
            elif text.startswith("data: "):
                yield name, json.loads(text[6:])

    try:
        yield events()
    finally:
        talk.close()


def test_the_page_the_list_and_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "set" / "one", mended())
    with serving(tmp_path) as port:
        status, page, headers = ask(port, "/")
        assert (status, "<title>lindt</title>" in page) == (200, True)
        for rule in ("default-src 'none'", "script-src 'sha256-", "connect-src 'self'", "frame-ancestors 'none'"):
            assert rule in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")
        (row,) = json.loads(ask(port, "/api/runs")[1])
        assert (row["run"], row["state"], row["tone"]) == ("set/one", "ended", "helps")
        run = json.loads(ask(port, "/api/run?id=set/one")[1])
        assert (run["id"], len(run["rounds"])) == ("set/one", 10)
        assert ask(port, "/api/run", "POST")[0] == 405


@pytest.mark.parametrize(
    "id",
    [
        "",
        "..",
        "../secret",
        "one/../../secret",
        "%2e%2e/secret",
        "linked",
        "one/../one",
        "no%00name",
        "set",
        "%2Fsecret",
    ],
)
def test_whatever_leads_out_of_the_folder_is_refused(tmp_path: Path, id: str) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "one", mended())
    write_run(tmp_path / "secret", mended())
    (runs / "linked").symlink_to(tmp_path / "secret")
    with serving(runs) as port:
        status, text, _ = ask(port, f"/api/run?id={id}")
        assert status == 404
        assert str(tmp_path) not in text
        assert ask(port, f"/api/events?id={id}&have=0")[0] == 404
        with pytest.raises(UserError, match="there is no run"):
            RunIndex(runs).folder(str(tmp_path / "secret"))


def test_only_its_own_name_is_answered_to(tmp_path: Path) -> None:
    """A page elsewhere that points its name at 127.0.0.1 gets nothing."""
    with serving(tmp_path) as port:
        assert ask(port, "/api/runs", Host="evil.example")[0] == 421
        assert ask(port, "/api/runs", Host=f"localhost:{port}")[0] == 200


def test_any_other_host_asks_for_a_token(tmp_path: Path) -> None:
    write_run(tmp_path / "one", mended())
    with serving(tmp_path, "0.0.0.0", TOKEN) as port:
        status, text, headers = ask(port, "/")
        assert (status, "asks for a token" in text) == (401, True)
        assert "by-hand" not in text
        assert ask(port, "/api/runs")[0] == ask(port, "/api/events")[0] == ask(port, "/?token=wrong")[0] == 401
        assert ask(port, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, _, headers = ask(port, f"/?token={TOKEN}")
        assert (status, headers["location"]) == (303, "/")
        assert all(word in headers["set-cookie"].lower() for word in ("httponly", "samesite=strict"))
        assert TOKEN not in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert ask(port, "/api/runs", Cookie=cookie)[0] == 200
        assert ask(port, "/api/runs", Cookie=cookie[:-1])[0] == 401
        assert ask(port, "/enter", "POST", f"token={TOKEN}")[0] == 303
        assert ask(port, "/enter", "POST", "token=wrong")[0] == 401
        assert ask(port, "/enter", "POST", "x" * 5000)[0] == 413


def test_where_a_token_is_needed() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "192.168.0.1", "example.org")] == [False] * 4
    assert token_for("127.0.0.1", None) is None
    assert token_for("127.0.0.1", TOKEN) == token_for("0.0.0.0", TOKEN) == TOKEN
    drawn = {token_for("0.0.0.0", None) for _ in range(5)}
    assert len(drawn) == 5
    assert all(token is not None and len(token) == 32 for token in drawn)
    with pytest.raises(UserError, match="are easy to guess"):
        token_for("0.0.0.0", "short")


def test_a_run_is_followed_round_by_round(tmp_path: Path) -> None:
    lines = mended()
    folder = write_run(tmp_path / "one", lines[:2], ended=False)
    with (
        (folder / "lock").open("w") as held,
        (folder / "rounds.jsonl").open("a", buffering=1) as file,
        serving(tmp_path) as port,
    ):
        fcntl.flock(held, fcntl.LOCK_EX)
        with listening(port, "/api/events?id=one&have=1") as events:
            name, changes = next(events)
            assert (name, changes["state"], [one["round"] for one in changes["rounds"]]) == ("more", "running", [2])
            file.write(json.dumps(lines[2]) + "\n")
            name, changes = next(events)
            assert [one["round"] for one in changes["rounds"]] == [3]
            assert changes["verdict"]["sentence"].startswith(
                "Suspected by Delta since round 3; in that round the clients were"
            )
            (folder / "rounds.jsonl").write_text(json.dumps(lines[0]) + "\n")  # cut back, as on resume
            assert next(events) == ("anew", {"id": "one"})
            fcntl.flock(held, fcntl.LOCK_UN)
            name, changes = next(events)
            assert (name, changes["state"], changes["rounds"]) == ("more", "crashed", [])


def test_runs_appear_in_the_list_by_themselves(tmp_path: Path) -> None:
    with serving(tmp_path) as port, listening(port, "/api/events") as events:
        assert next(events) == ("runs", [])
        write_run(tmp_path / "new", mended(), the_about=about(name="<script>"))
        name, rows = next(events)
        assert (name, rows[0]["run"], rows[0]["name"]) == ("runs", "new", "<script>")


def test_the_list_is_by_time_with_running_runs_first(tmp_path: Path) -> None:
    for day, name in enumerate(("c", "a", "b", "d"), 1):
        folder = write_run(tmp_path / name, mended(), ended=name != "a")
        for path in folder.iterdir():
            os.utime(path, (86_400.0 * day, 86_400.0 * day))
    (tmp_path / "b" / "run.json").write_text("{}")
    with (tmp_path / "a" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rows = RunIndex(tmp_path).run_rows()
    assert [(row["run"], row["state"], row["changed"] / 86_400) for row in rows] == [
        ("a", "running", 2), ("d", "ended", 4), ("b", "unreadable", 3), ("c", "ended", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("query", ["id=one", "id=one&have=x", "id=one&have=-1", "have=1", "id=one&have=0&" * 30])
def test_a_stream_that_makes_no_sense_is_refused(tmp_path: Path, query: str) -> None:
    write_run(tmp_path / "one", mended())
    with serving(tmp_path) as port:
        assert ask(port, f"/api/events?{query}")[0] == 400


def test_a_damaged_run_is_told_and_no_path_with_it(tmp_path: Path) -> None:
    (write_run(tmp_path / "odd", mended()) / "run.json").write_text("{}")
    with serving(tmp_path) as port:
        (row,) = json.loads(ask(port, "/api/runs")[1])
        assert (row["state"], row["verdict"]) == (
            "unreadable",
            "odd: run.json is damaged, or another version of lindt wrote it",
        )
        assert ask(port, "/api/run?id=odd")[:2] == (404, row["verdict"])


def test_many_runs_are_not_all_kept_in_memory(tmp_path: Path) -> None:
    for n in range(40):
        write_run(tmp_path / f"run{n}", [line(1)], ended=False)
    index = RunIndex(tmp_path)
    assert len(index.run_rows()) == 40
    assert len(index._open) == 32
    first = index.run_rows()[0]
    assert first is index.run_rows()[0]  # unchanged: not read again
    write_run(tmp_path / "run0", mended())
    assert index.run_rows()[0]["round"] == 10


def test_a_port_that_is_taken_gets_a_sentence(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as door,
        pytest.raises(UserError, match="name another --host or --port"),
    ):
        serve(tmp_path, "127.0.0.1", door.getsockname()[1], None, print)


def test_the_budget_is_computed_aside_and_kept_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never in the way of the rounds; known from the first round on, and anew after every ten."""
    asked: list[int] = []

    def slowly(run: Run) -> PrivacySpent:
        asked.append(len(run.rounds))
        return PrivacySpent(f"{len(run.rounds)} rounds")

    monkeypatch.setattr(shelf_module, "privacy_spent_so_far", slowly)
    noisy = plan(environment={"privacy": {"kind": "gaussian", "sigma": 0.1, "S": 1.0}})
    index = RunIndex(tmp_path)
    for rounds in (0, 1, 2, 10, 11):
        folder = write_run(tmp_path / "one", [line(r) for r in range(1, rounds + 1)], ended=False, the_plan=noisy)
        with (folder / "lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            index.spent("one", index.run("one"))
            with index._computing:  # wait until it is done
                pass
    assert asked == [0, 1, 11]
    assert index.spent("one", index.run("one")).words == "11 rounds"


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.1\r\nX: ", b"POST /enter HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n"]
)
def test_connections_that_ask_nothing_shut_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """More of them than there are places; in truth 512 places, of which they take 256."""
    write_run(tmp_path / "one", mended())
    monkeypatch.setattr(server_module, "MOST_CONNECTIONS", 12)
    monkeypatch.setattr(timeouts, "MOST_IDLE", 6)
    with serving(tmp_path) as port, ExitStack() as stack, listening(port, "/api/events") as events:
        assert next(events)[0] == "runs"  # a page that listens is no idle connection
        for _ in range(30):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            silent.sendall(said)
        begun = time.monotonic()
        assert ask(port, "/")[0] == 200
        assert time.monotonic() - begun < 5  # far before the idle ones are given up
        write_run(tmp_path / "two", mended())
        assert next(events)[0] == "runs"
