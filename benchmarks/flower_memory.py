"""The memory and time that NFLDetector adds to an aggregation of a Flower strategy.

    python benchmarks/flower_memory.py --clients 10 --weights 20000000

Each case runs in a process of its own: FedAvg, and FedAvg under DP with clipping on the server, each alone and with the
detector (and, with --folder, with the run kept on disk). Two further cases are parts that the detector cannot leave
out. One reads all replies once, which it takes to refuse NaN before the strategy. The other computes the norms of the
replies' differences from another vector, chunk by chunk, as Eq. 5 needs them once the new w is known. Printed are the
peak of resident memory above what was there when the replies had come, in vectors of P floats, and the time. The cases
take turns, and times are medians over the repetitions: other programs on the machine change them less. Linux only
(/proc).

Legend: K clients answering, P weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

READ = "read replies once"
DIFFER = "norms of differences"
CASES = (READ, DIFFER, "FedAvg", "FedAvg + detector", "DP", "DP + detector")


def memory(field: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def play(case: str, clients: int, weights: int, layers: int, folder: str | None) -> dict[str, float]:
    """One aggregation of random replies."""
    import numpy as np
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
    from flwr.supercore.task_identity import TaskIdentity

    from lindt.flower import NFLDetector
    from lindt.flower.vectors import distances, record_vector

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    strategy = FedAvg()
    if case.startswith("DP"):
        strategy = DifferentialPrivacyServerSideFixedClipping(strategy, 0.1, 1.0, clients)
    if case.endswith("detector"):
        strategy = NFLDetector(strategy, replies="weights", folder=folder)  # else the first round reads them once more
    generator = np.random.default_rng(0)
    sizes = [weights // layers] * (layers - 1) + [weights - weights // layers * (layers - 1)]
    names = [f"layer{place:03d}.weight" for place in range(layers)]

    def drawn(scale: float, base: ArrayRecord | None = None) -> ArrayRecord:
        found = ArrayRecord()
        for name, size in zip(names, sizes, strict=True):
            values = generator.standard_normal(size, dtype=np.float32)
            values *= scale
            found[name] = Array(values if base is None else values + base[name].numpy())
        return found

    class NoGrid:
        def get_node_ids(self) -> list[int]:
            return list(range(1, clients + 1))

    arrays = drawn(0.02)
    if case.endswith("detector"):
        _, arrays = strategy.begin(arrays, 10)
    asked = list(strategy.configure_train(1, arrays, ConfigRecord(), NoGrid()))
    replies = []
    for message in asked:
        content = RecordDict({"arrays": drawn(0.001, arrays), "metrics": MetricRecord({"num-examples": 10})})
        replies.append(Message(content, reply_to=message))
    del asked, message, content
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    wall, cpu = time.perf_counter(), time.process_time()
    if case == READ:
        for reply in replies:
            for array in reply.content["arrays"].values():
                values = np.frombuffer(array.data, np.float32, offset=len(array.data) - 4 * array.shape[0])
                for start in range(0, len(values), 2**16):
                    np.dot(values[start : start + 2**16], values[start : start + 2**16])
    elif case == DIFFER:
        names_of_w = frozenset(names)
        rows = [record_vector(reply.content["arrays"], names_of_w) for reply in replies]
        distances(rows, record_vector(arrays, names_of_w))
    else:
        strategy.aggregate_train(1, replies)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"vectors": (memory("VmHWM") - before) / (4 * weights), "wall": wall, "cpu": cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10, help="K")
    parser.add_argument("--weights", type=int, default=20_000_000, help="P")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--folder", action="store_true", help="the detector keeps the run in a folder")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--at", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.case:
        say(json.dumps(play(asked.case, asked.clients, asked.weights, asked.layers, asked.at)))
        return
    size = 4 * asked.weights / 1e6
    say(f"K = {asked.clients}, P = {asked.weights:,}, {asked.layers} layers; a vector has {size:.0f} MB")
    say(f"{'':20}{'vectors added':>14}{'CPU s':>8}{'wall s':>8}")
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for _ in range(asked.repeat):
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                sizes = {"--clients": asked.clients, "--weights": asked.weights, "--layers": asked.layers}
                words = [str(word) for pair in sizes.items() for word in pair]
                at = ["--at", folder] if asked.folder else []
                command = [sys.executable, __file__, "--case", case, *words, *at]
                done = subprocess.run(command, check=False, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                runs[case].append(json.loads(done.stdout.splitlines()[-1]))
    found = {
        case: {key: statistics.median(run[key] for run in each) for key in ("cpu", "wall")}
        | {"vectors": max(run["vectors"] for run in each)}
        for case, each in runs.items()
    }
    for case, row in found.items():
        say(f"{case:20}{row['vectors']:14.2f}{row['cpu']:8.2f}{row['wall']:8.2f}")
    for alone in ("FedAvg", "DP"):
        bare, with_detector = found[alone], found[f"{alone} + detector"]
        vectors = with_detector["vectors"] - bare["vectors"]
        shares = []
        for key, name in (("cpu", "CPU"), ("wall", "wall")):
            added = with_detector[key] - bare[key]
            floors = ((case, found[case][key]) for case in (READ, DIFFER))
            parts = (f"{case} {floor:.2f} s or {floor / bare[key]:.0%}" for case, floor in floors)
            least = "of which " + ", ".join(parts)
            shares.append(f"{added:+.2f} s or {added / bare[key]:+.0%} {name} time ({least})")
        say(f"the detector adds to {alone}: {vectors:+.2f} vectors; " + "; ".join(shares))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
