"""A run with worker processes that is told to stop: within seconds, resumable, and nobody is left behind."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from stopping import INTERRUPTED, SECONDS, alive, children, command, finish, orphans, start, stopped, wait_for_rounds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_go_with_the_run_and_it_goes_on_to_the_same_bytes(tmp_path: Path, number: signal.Signals) -> None:
    lines = tmp_path / "cut" / "rounds.jsonl"
    process = start(command("cut", 12, "processes"), tmp_path)
    wait_for_rounds(lines, 3, process)
    workers = children(process.pid)
    assert workers
    seconds, said = stopped(process, number)
    assert process.returncode in INTERRUPTED, said
    assert "--resume continues" in said
    assert "Traceback" not in said
    assert seconds < SECONDS
    assert not any(alive(pid) for pid in workers)
    assert orphans(tmp_path) == []
    assert lines.read_bytes().count(b"\n") < 12
    finish(command("cut", 12, "inprocess", resume=True), tmp_path)
    finish(command("straight", 12), tmp_path)
    assert lines.read_bytes() == (tmp_path / "straight" / "rounds.jsonl").read_bytes()
