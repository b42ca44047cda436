"""Requests that anybody may have sent to `lindt watch`: answered or refused, never an error of the server's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from folders import mended, write_run
from hypothesis import given, settings
from hypothesis import strategies as st
from untrusted import asked, fed

from lindt.errors import UserError
from lindt.watch.auth import host_of
from lindt.watch.index import RunIndex

target, requests = fed("request")


def get(target: str, method: str = "GET", host: str = "127.0.0.1:8471", extra: str = "") -> tuple[int, bytes]:
    """What the server on loopback says."""
    found = asked(f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n".encode("latin-1"))
    return found[0] if found else (400, b"")


@given(data=requests)
@settings(max_examples=150, deadline=None)
def test_a_changed_request_is_answered_or_refused(data: bytes) -> None:
    target(data)


pieces = ["..", ".", "/", "%2e", "%2f", "%00", "%5c", "one", "set", "two", "linked", "secret", "~", "%c0%ae", "\\", ";"]


@given(id=st.lists(st.sampled_from(pieces), max_size=8).map("".join))
@settings(max_examples=150, deadline=None)
def test_no_path_leads_to_what_is_not_a_run_here(id: str) -> None:
    status, body = get(f"/api/run?id={id}")
    assert (status == 200) == (id.replace("%2f", "/") in ("one", "set/two"))
    assert b"a-secret-name" not in body
    assert get(f"/api/events?id={id}&have=0")[0] in (200, 404)
    assert get(f"/{id}")[0] in (200, 404)


@given(method=st.sampled_from(["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "POST", "X" * 50]))
@settings(max_examples=20, deadline=None)
def test_nothing_but_reading_is_done(method: str) -> None:
    for path in ("/", "/api/runs", "/api/run?id=one", "/api/events"):
        assert get(path, method)[0] == 405
    assert get("/nowhere", method)[0] == 404


@pytest.mark.parametrize(
    "host",
    ["[", "]", "[::1", "a@127.0.0.1", "127.0.0.1:99999999", "127.0.0.1/x", "\xff", "", "127.0.0.1 evil", "evil:80"],
)
def test_a_host_that_is_none_is_not_this_one(host: str) -> None:
    """The brackets were an error of the server's: they are no address."""
    assert get("/", host=host)[0] in (421, 400)
    answers = asked(f"GET /api/runs HTTP/1.1\r\nHost: {host}\r\n\r\n".encode("latin-1"))
    assert all(status in (401, 421) for status, _ in answers)


def test_hosts_that_are() -> None:
    assert [host_of(h) for h in ("LocalHost:8471", "[::1]:80", "127.0.0.1")] == ["localhost", "::1", "127.0.0.1"]
    assert get("/", host="[::1]:8471")[0] == get("/", host="localhost")[0] == 200


@pytest.mark.parametrize("name", ["one/", "./one", "one//", "set/./two", "set//two", ".", ""])
def test_a_run_has_one_name(tmp_path: Path, name: str) -> None:
    """Under each other name it would be kept once more."""
    write_run(tmp_path / "one", mended())
    index = RunIndex(tmp_path)
    assert index.run("one") is index.run("one")  # not read again while nothing changes
    for odd in (name, str(tmp_path / "one")):
        with pytest.raises(UserError, match="there is no run"):
            index.run(odd)


def test_where_the_runs_lie_is_not_told(tmp_path: Path) -> None:
    (write_run(tmp_path, mended()) / "run.json").write_text("{}")
    index = RunIndex(tmp_path)
    with pytest.raises(UserError) as caught:
        index.run(".")
    assert index.told(caught.value) == "the run: run.json is damaged, or another version of lindt wrote it"


def test_a_folder_whose_name_is_no_text_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "one", mended())
    write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), mended())
    rows = RunIndex(tmp_path).run_rows()
    json.dumps(rows, ensure_ascii=False).encode()
    assert sorted((row["run"], row["state"]) for row in rows) == [("\\udcff", "unreadable"), ("one", "ended")]


def test_oversized_and_odd_requests() -> None:
    assert get("/api/events?" + "id=one&have=0&" * 700)[0] == 400
    assert get("/api/run?id=" + "a" * 8000)[0] == 404
    assert get("/", extra="X: " + "a" * 8000 + "\r\n")[0] == 200
    assert get("/?" + "&" * 8000)[0] == 200
    assert get("/", extra="X: " + "a" * 20_000 + "\r\n")[0] == get("/?" + "a" * 20_000)[0] == 431
    assert get("/api/runs/")[0] == 404  # no redirect to whatever host was named
    assert get("/api/events", "HEAD") == (200, b"")
    form = "token=" + "a" * 5000
    tokens = asked(f"POST /enter HTTP/1.1\r\nHost: a\r\nContent-Length: {len(form)}\r\n\r\n{form}".encode())
    assert [status for status, _ in tokens] == [421, 413]
