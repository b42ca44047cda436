"""A deployment whose SuperLink and SuperNodes are killed at random moments plays to the bytes of an undisturbed run."""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_deployment_flower import deployment, finished, lines, start, wait_until, write_plan
from worlds import tiny_runtime

from lindt.plan.plan import Alone, Scoring
from lindt.runs.play import run_plan
from lindt.runs.store import Store

pytestmark = pytest.mark.torture
__all__ = ["deployment"]
KILLS = 3


def test_killed_superlinks_and_supernodes_change_no_byte(deployment: Any, tmp_path: Path) -> None:
    draw, rounds = random.Random(7), 12
    plan = replace(tiny_runtime(rounds=rounds), alone=Alone(private=False), scoring=Scoring(every=100, last=1))
    list(run_plan(plan, tmp_path / "here", engine="inprocess"))
    hosts = {"host-a": "0,1,2", "host-b": "3,4,5"}
    for name, clients in hosts.items():
        deployment.register(name)
        deployment.start_node(name, clients)
    out, path = tmp_path / "run", write_plan(plan, tmp_path / "plan.toml")
    patient = ("--comeback", "200", "--deadline", "300", "--gather", "200")
    run = start(deployment, out, str(path), *patient)

    for kill in range(KILLS):
        played = len(lines(out))
        wait_until(lambda played=played: len(lines(out)) > played, 200, f"a round before node kill {kill + 1}")
        name = draw.choice(list(hosts))
        time.sleep(draw.uniform(0.0, 5.0))  # a moment somewhere in a round
        deployment.kill(deployment.nodes[name])
        deployment.restart_node(name, hosts[name])
    for kill in range(KILLS):
        played = len(lines(out))
        wait_until(lambda played=played: len(lines(out)) > played, 300, f"a round before SuperLink kill {kill + 1}")
        time.sleep(draw.uniform(0.0, 5.0))  # a moment somewhere in a round
        deployment.kill(deployment.superlink)
        code, said = finished(run, deployment)
        assert code == 2, said
        deployment.start_superlink()
        run = start(deployment, out, "--resume", *patient)
    code, said = finished(run, deployment, 400)
    assert code == 0, said
    assert (out / "rounds.jsonl").read_bytes() == (tmp_path / "here/rounds.jsonl").read_bytes()
    assert torch.equal(Store.open(out).state().w, Store.open(tmp_path / "here").state().w)
    sys.__stdout__.write(f"FIGURE kills_of_supernodes={KILLS} kills_of_superlink={KILLS} same_bytes=1\n")  # type: ignore[union-attr]
