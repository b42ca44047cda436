"""A federation of real SuperNodes on this machine: what a round costs as nodes, clients of a node and weights grow.

    python benchmarks/nodes.py --nodes 2 4 8                           # a SuperLink with TLS and so many SuperNodes
    python benchmarks/nodes.py --nodes 2 --clients 4 --workers 1 4     # four clients of a node, one by one or together
    python benchmarks/nodes.py --nodes 2 --hidden 50000                # larger messages

All processes are those of examples/flower-deployment: one SuperLink, N SuperNodes with registered keys, `lindt run`.
Seconds of processor time are read from /proc at the end of each round, over a process with all its descendants, also
those that have ended; wall time includes waiting for the cores of this one machine. Private models and scores are left
out, so that a message is training alone. PSS counts memory that processes share once, divided among them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "flower-deployment"))
from hosts import BIN, Deployment  # type: ignore[import-not-found]

from lindt.engines.flower.superlink import environment, family

PLAN = """
name = "nodes"
rounds = {rounds}
model = {{ kind = "mlp", features = 16, hidden = {hidden} }}
detection = "delta"
method = "fedavg"

[data]
source = "two-camps-crowd"
clients = {clients}

[alone]
private = false

[environment]
participation = {{ kind = "sampled", rate = 1.0 }}

[scoring]
every = 1000000
last = 1
"""


@dataclass(frozen=True)
class Cost:
    """Of one federation: medians over the rounds after the first."""

    nodes: int
    clients: int
    workers: int
    weights: int
    first: float  # seconds until the first round is in
    wall: Sequence[float]
    node_cpu: float  # of one message
    server_cpu: float  # of a round: SuperLink and `lindt run`
    node_memory: float  # PSS in MB, at rest
    server_memory: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--clients", type=int, default=1, help="clients of each node")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="clients of a node at the same time")
    parser.add_argument("--hidden", type=int, default=16, help="hidden units; about 20 weights each")
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    names = (
        *("nodes", "clients a node", "workers", "weights", "first round", "a round"),
        *("CPU of a message on its node", "CPU of a round on the server", "a node at rest", "the server"),
    )
    say(f"| {' | '.join(names)} |")
    say("|--:" * len(names) + "|")
    for nodes, workers in itertools.product(asked.nodes, asked.workers):
        with tempfile.TemporaryDirectory(prefix="lindt-nodes-") as aside:
            say(row(measure(Path(aside), nodes, asked.clients, workers, asked.hidden, asked.rounds)))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def row(cost: Cost) -> str:
    low, middle, high = statistics.quantiles(cost.wall, n=4)
    return (
        f"| {cost.nodes} | {cost.clients} | {cost.workers} | {cost.weights:,} | {cost.first:.1f} s | "
        f"{middle:.1f} s ({low:.1f}-{high:.1f}) | {cost.node_cpu:.1f} s | {cost.server_cpu:.1f} s | "
        f"{cost.node_memory:.0f} MB | {cost.server_memory:.0f} MB |"
    )


def measure(folder: Path, nodes: int, clients: int, workers: int, hidden: int, rounds: int) -> Cost:
    plan = folder / "plan.toml"
    plan.write_text(PLAN.format(rounds=rounds, hidden=hidden, clients=nodes * clients))
    deployment = Deployment(folder)
    try:
        deployment.start_superlink()
        for node in range(nodes):
            held = ",".join(str(node * clients + one) for one in range(clients))
            deployment.register(f"node-{node}")
            deployment.start_node(f"node-{node}", held, f"workers={workers}")
        wait(folder, nodes)
        assert deployment.superlink is not None
        at_rest = statistics.median(sum(map(pss, family(one.pid))) for one in deployment.nodes.values())
        command = [
            *(BIN / "lindt", "run", plan, "--engine", "flower", "--out", folder / "run", "--gather", "600"),
            *("--superlink", deployment.address, "--root-certificates", deployment.keys / "ca.crt"),
        ]
        began = time.perf_counter()
        with (folder / "run.log").open("wb") as log:
            run = subprocess.Popen([str(word) for word in command], env=environment(), stdout=log, stderr=log)
        servers = [deployment.superlink.pid, run.pid]
        times, on_nodes, on_servers, memory = [], [], [], 0.0
        while run.poll() is None:
            if played(folder) > len(times):
                times.append(time.perf_counter() - began)
                on_nodes.append(sum(processor_seconds(one.pid) for one in deployment.nodes.values()))
                on_servers.append(sum(map(processor_seconds, servers)))
                memory = max(memory, sum(pss(one) for pid in servers for one in family(pid)))
            time.sleep(0.05)
        if run.returncode or len(times) < 3:
            raise SystemExit(f"the run failed: {(folder / 'run.log').read_text()[-2000:]}")
        steps = len(times) - 1
        weights = (16 + 1) * hidden + (hidden + 1) * 2
        return Cost(
            nodes, clients, workers, weights, times[0],
            [late - early for early, late in itertools.pairwise(times)],
            (on_nodes[-1] - on_nodes[0]) / steps / nodes, (on_servers[-1] - on_servers[0]) / steps, at_rest, memory,
        )  # fmt: skip
    finally:
        deployment.stop()


def wait(folder: Path, nodes: int) -> None:
    """Until the SuperLink has admitted every node."""
    end = time.monotonic() + 60 + 10 * nodes
    while any("SuperNode ID" not in (folder / f"node-{node}.log").read_text() for node in range(nodes)):
        if time.monotonic() > end:
            raise SystemExit(f"not all nodes were admitted; see the logs in {folder}")
        time.sleep(0.2)


def played(folder: Path) -> int:
    lines = folder / "run" / "rounds.jsonl"
    return sum(1 for line in lines.read_text().splitlines() if json.loads(line)) if lines.exists() else 0


def processor_seconds(pid: int) -> float:
    """Of a process and its descendants, with those that have ended and were waited for."""
    ticks = 0
    for one in family(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended: its parent has its time, once it is waited for
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    main()
