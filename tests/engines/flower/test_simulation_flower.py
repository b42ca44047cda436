"""Flower's simulation on Ray, started by the command line as a user starts it. Slow, but in CI."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
import torch
from worlds import tiny_runtime

from lindt.engines.flower.superlink import environment
from lindt.plan.file import to_dict
from lindt.plan.plan import METHODS, Alone, Plan
from lindt.runs.play import run_plan
from lindt.runs.store import Store

pytestmark = pytest.mark.slow


def lindt(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lindt"), *map(str, words)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)


# One of them in CI: each starts Ray anew. The Grid of fake_grid.py shows the same of all in the quick suite.
@pytest.mark.parametrize(
    "method",
    [pytest.param("fedavg", marks=pytest.mark.torture), "lindt", pytest.param("lindt-tm", marks=pytest.mark.torture)],
)
def test_the_simulation_has_the_bytes_of_in_process(method: str, tmp_path: Path) -> None:
    plan: Plan = replace(tiny_runtime(rounds=5), method=METHODS[method], alone=Alone(private=False))
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(to_dict(plan)))
    done = lindt("run", tmp_path / "plan.toml", "--engine", "flower", "--out", tmp_path / "there", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event.get("round") for event in events] == [1, 2, 3, 4, 5, None]
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    assert (tmp_path / "there/rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert torch.equal(Store.open(tmp_path / "there").state().w, Store.open(tmp_path / "here").state().w)
    processes = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in processes  # the SuperLink it started, and what that started, are gone


def test_a_run_that_fails_on_flower_is_an_exit_code_with_the_reason(tmp_path: Path) -> None:
    """Nobody is given the time to come: the ServerApp gives up, and the command says why."""
    plan = replace(tiny_runtime(rounds=2), alone=Alone(private=False))
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(to_dict(plan)))
    words = ("run", tmp_path / "plan.toml", "--engine", "flower", "--out", tmp_path / "there", "--gather", "0")
    done = lindt(*words)
    assert done.returncode == 2
    assert "no client came within 0 s" in done.stderr
