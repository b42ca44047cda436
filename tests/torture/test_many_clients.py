"""Ten thousand clients, each with a v_i of its own on disk: what all of them weigh need not fit into memory.

In a process of its own, for its peak memory: `python tests/torture/test_many_clients.py FOLDER` prints it as JSON.

Legend: N clients, K answering in a round, P parameters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from crashing import figure
from torch import nn

from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.plan.plan import METHODS, Alone, Plan, Scoring
from lindt.plan.problem import Problem
from lindt.runs.play import RoundPlayed, RunEnded, RunStarted, run_plan

pytestmark = pytest.mark.torture
N, K = int(os.environ.get("LINDT_MANY_CLIENTS", "10000")), 250
P = 19_210
ALLOWED = 200.0  # MB over what the process holds before its first round


def world() -> Problem:
    """Everyone has four samples of its own; a layer of 256 between 64 inputs and ten classes."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(N, 4, 64, generator=draw), torch.randint(10, (N, 4), generator=draw)
    clients = [((x[i, :3], y[i, :3]), (x[i, 3:], y[i, 3:])) for i in range(N)]
    return Problem(clients, lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))


def plan() -> Plan:
    """LINDT from the first round; N / K rounds treat everyone once, and the last one scores everyone."""
    return Plan(
        name="many",
        rounds=N // K,
        environment=Environment(Sampled(active_clients=K)),
        method=METHODS["lindt"],
        alone=Alone(private=False),
        scoring=Scoring(every=N, last=1),
    )


def in_turn() -> Iterator[list[int]]:
    while True:
        yield from (list(range(first, first + K)) for first in range(0, N, K))


def peak() -> float:
    """The most this process has held so far, in MB."""
    # Not getrusage's: that one begins with what the process before exec held, which was the tests'.
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    turns, before = in_turn(), 0.0
    # Drawn at random, the last of them would be met after four hundred rounds.
    Sampled.active = lambda *_: next(turns)  # type: ignore[method-assign,assignment]
    found: dict[str, Any] = {}
    for event in run_plan(plan(), folder / "run", task="test_many_clients:world", engine="inprocess"):
        if isinstance(event, RunStarted):
            before = peak()
        elif isinstance(event, RoundPlayed):
            found[f"after {event.result.round}"] = round(peak() - before, 1)
        elif isinstance(event, RunEnded):
            files = list((folder / "run" / "private").rglob("*.safetensors"))
            found |= {
                "before_MB": round(before, 1),
                "grown_MB": round(peak() - before, 1),
                "versions": len(files),
                "on_disk_MB": round(sum(file.stat().st_size for file in files) / 2**20, 1),
                "scored": event.summary["counted_clients"],
            }
    sys.stdout.write(json.dumps(found) + "\n")


def play(folder: Path) -> dict[str, Any]:
    paths: Sequence[str] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_v_i_of_ten_thousand_clients_spill_to_disk() -> None:
    with tempfile.TemporaryDirectory(prefix="lindt-many-") as folder:  # not pytest's, which keeps a gigabyte for days
        found = play(Path(folder))
    figure(
        clients=N, P=P, N_times_P_MB=round(4 * N * P / 2**20), on_disk_MB=found["on_disk_MB"],
        before_MB=found["before_MB"], grown_MB=found["grown_MB"], after_half_MB=found[f"after {N // K // 2}"],
    )  # fmt: skip
    assert found["versions"] == found["scored"] == N
    assert found["on_disk_MB"] > 4 * N * P / 2**20
    assert found["grown_MB"] < ALLOWED


if __name__ == "__main__":
    main(Path(sys.argv[1]))
