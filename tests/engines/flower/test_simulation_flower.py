"""Flower's simulation on Ray, started by the command line as a user starts it. Slow, but in CI."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from deployments import BIN, lines, wait_until, write_plan
from test_guard_flower import wait_for_none
from worlds import tiny_runtime

from lindt.engines.flower.superlink import environment, family
from lindt.plan.plan import METHODS, Alone
from lindt.report.reading import is_locked
from lindt.runs.play import run_plan
from lindt.runs.store import Store

pytestmark = pytest.mark.slow


def command(path: Path, out: Path, *words: str) -> list[str]:
    called = [BIN / "lindt", "run", "--engine", "flower", "--out", out, "--json", "--gather", "600", *(words or [path])]
    return [str(word) for word in called]


def commands_of(pids: list[int]) -> str:
    call = ["ps", "-ww", "-o", "args=", "-p", ",".join(map(str, pids))]
    return subprocess.run(call, capture_output=True, text=True).stdout


def test_killed_by_kill_9_it_leaves_no_process_and_resumed_it_has_the_bytes_of_in_process(tmp_path: Path) -> None:
    """SuperLink, superexec and Ray end with the command; Ray is started twice. Faults: test_kills_flower.py."""
    plan = replace(tiny_runtime(rounds=12), method=METHODS["lindt"], alone=Alone(private=False))
    path, out = write_plan(plan, tmp_path / "plan.toml"), tmp_path / "there"
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(command(path, out), env=environment(), stdout=said, stderr=said)
    try:
        wait_until(lambda: process.poll() is not None or len(lines(out)) >= 2, 900, "round 2")
        assert process.poll() is None, (tmp_path / "said").read_text()
        mine = family(process.pid)
        started = commands_of(mine)
    finally:
        process.kill()
        process.wait()
    for name in ("flower-superlink", "flower-superexec", "gcs_server"):
        assert name in started, name
    wait_for_none(mine, 60)
    assert not is_locked(out)  # --resume is not refused
    before = len(lines(out))
    assert 2 <= before < 12

    done = subprocess.run(
        command(path, out, "--resume"), env=environment(), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event.get("round") for event in events] == [*range(events[0]["round"], 13), None]
    assert events[0]["round"] in (before, before + 1)  # at most one round is played again
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    assert (out / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert torch.equal(Store.open(out).state().w, Store.open(tmp_path / "here").state().w)
    processes = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in processes  # the SuperLink it started, and what that started, are gone
