"""Time and memory of a run of lazy clients as N grows: the numbers of docs/scale.md, with ratios.

    python benchmarks/many_clients.py                       # 50 rounds, K = 1,000, N = 1,000 and 1,000,000
    python benchmarks/many_clients.py --rounds 5 --K 100    # smaller

Each N is played in a process of its own, for its peak memory, one after the other in turn. Seconds are those of the
processor, so that a busy machine changes little. The plan: the generated crowd, a model of one hidden layer, LINDT from
the first round (each visited client has a v_i on disk), one scored round at the end, on a panel of 1,000.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import SignFlip
from lindt.plan.models import Mlp
from lindt.plan.plan import METHODS, Alone, Data, Plan, Scoring
from lindt.runs.play import RoundPlayed, RunEnded, RunStarted, run_plan


def plan(N: int, K: int, rounds: int, panel: int) -> Plan:
    return Plan(
        name="many-clients",
        rounds=rounds,
        data=Data("two-camps-crowd", clients=N),
        model=Mlp(features=16, hidden=16),
        environment=Environment(Sampled(active_clients=K), SignFlip(share=0.1)),
        method=METHODS["lindt-always"],
        alone=Alone(epochs=5, patience=2),
        scoring=Scoring(every=10**6, last=1, panel=min(panel, N)),
    )


def peak() -> float:
    """The most memory that this process has held so far, in MB."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def play(N: int, K: int, rounds: int, panel: int, folder: Path) -> dict[str, Any]:
    """One run in this process."""
    imported = peak()
    seconds: list[float] = []
    wall = time.perf_counter()
    clock = before = time.process_time()
    begun = 0.0
    found: dict[str, Any] = {}
    for event in run_plan(plan(N, K, rounds, panel), folder / "run", engine="inprocess", cache=folder / "cache"):
        now = time.process_time()
        if isinstance(event, RunStarted):
            begun = now - before
        elif isinstance(event, RoundPlayed):
            seconds.append(now - clock)
            found |= {f"memory_MB_after_{event.result.round}": round(peak() - imported, 1)} if len(seconds) == 1 else {}
        elif isinstance(event, RunEnded):
            found |= {"beta": event.summary["beta"], "panel": event.summary.get("panel")}
        clock = now
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    return found | {
        "N": N,
        "start_s": round(begun, 2),
        "round_s": round(statistics.median(seconds[:-1] or seconds), 3),
        "first_s": round(seconds[0], 3),
        "last_round_scored_s": round(seconds[-1], 3),
        "wall_s": round(time.perf_counter() - wall, 1),
        "memory_MB": round(peak() - imported, 1),
        "visited": len((folder / "run" / "clients.jsonl").read_bytes().splitlines()),
        "v_i_files": len([path for path in files if "private" in path.parts]),
        "on_disk_MB": round(sum(path.stat().st_size for path in files) / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--K", type=int, default=1000)
    parser.add_argument("--panel", type=int, default=1000)
    parser.add_argument("--N", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--play", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.play:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="lindt-many-") as folder:
            sys.stdout.write(json.dumps(play(given.play, given.K, given.rounds, given.panel, Path(folder))) + "\n")
        return
    rows = []
    for N in given.N:
        sizes = ("--K", str(given.K), "--rounds", str(given.rounds), "--panel", str(given.panel))
        command = [sys.executable, __file__, "--play", str(N), *sizes]
        done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        rows.append(json.loads(done.stdout))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
    for row in rows[1:]:
        ratios = {
            name: round(row[name] / rows[0][name], 2)
            for name in ("start_s", "round_s", "last_round_scored_s", "memory_MB", "on_disk_MB")
        }
        sys.stdout.write(json.dumps({"N": row["N"], "against": rows[0]["N"], "ratios": ratios}) + "\n")


if __name__ == "__main__":
    main()
