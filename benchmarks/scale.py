"""Time and memory of a round, on the server and a client, as N, K and P grow: the numbers of docs/scale.md.

    python benchmarks/scale.py                  # some minutes; each line in a process of its own, for its peak memory
    python benchmarks/scale.py round private    # some kinds of measurement only

Legend: N clients, K answering, P parameters.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import numpy as np
import torch

from lindt.client.private_store import FolderStore
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian, NoPrivacy
from lindt.server.aggregation import ClippedUpdates, Krum, Mean, TrimmedMean
from lindt.server.detection.divergence import Distances

SIZES = [(10, 10**5), (10, 10**6), (10, 10**7), (30, 10**6), (100, 10**5), (100, 10**6), (300, 10**6), (1000, 10**5)]
TURNS = 5
LARGE = [(10, 10**6), (10, 10**7), (10, 10**8), (100, 10**6), (100, 10**7), (1000, 10**6)]  # K x P up to 4 GB


def memory(field: str) -> float:
    """VmRSS or VmHWM of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def timed(work: Callable[[], object]) -> float:
    """Seconds of this process's one thread, so that a busy machine changes little."""
    began = time.process_time()
    work()
    return round(time.process_time() - began, 4)


def updates(K: int, P: int) -> torch.Tensor:
    return torch.randn(K, P, generator=torch.Generator().manual_seed(0)).mul_(0.01)  # in place: the peak is its own


def beside(work: Callable[[], object], K: int, P: int) -> dict[str, object]:
    """Time of the work, and its memory beside the K x P: in MB and in vectors of P floats."""
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    seconds, added = timed(work), memory("VmHWM") - before
    vectors = round(added * 2**20 / (4 * P), 1)
    return {"seconds": seconds, "stack_MB": round(4 * K * P / 2**20), "beside_MB": round(added), "vectors": vectors}


def joining(kind: str, K: int, P: int) -> dict[str, object]:
    """One aggregator on K x P."""
    u_KP, sizes_K = updates(K, P), torch.ones(K)
    join = Krum(0.2) if kind == "krum" else TrimmedMean(0.2)
    return beside(lambda: join(u_KP, sizes_K), K, P)


class Nothing:
    """In place of `Distances`: measures nothing."""

    def add(self, *_: object, **__: object) -> None:
        pass


def judging(kind: str, K: int, P: int) -> dict[str, object]:
    """All that the server does with the updates of a round under a mean, as `play_round` does it, with and without the
    measurement of distances; a plain FedAvg in numpy beside it. `private`: clipping that shortens each update, and
    noise. In turns; seconds are medians, the share of detection the median over the turns."""
    w_P, u_KP = torch.zeros(P), updates(K, P)
    privacy = Gaussian(0.005 * P**0.5, 0.001) if kind == "private" else NoPrivacy()

    def play(distances: Any) -> None:
        clipped_KP = ClippedUpdates(u_KP, privacy.scales(u_KP))
        noise_P = privacy.noise(w_P, 0)
        step_P = clipped_KP.step(Mean(), torch.ones(K), noise_P, distances)
        w_P + step_P
        if isinstance(distances, Distances):
            distances.divergence(clipped_KP.share(), None)

    def plain() -> None:
        """The weighted mean as Flower's FedAvg adds it up, row by row, and the new w."""
        total_P = np.zeros(P, np.float32)
        for row_P in u_KP.numpy():
            total_P += row_P * np.float32(1 / K)
        w_P.numpy() + total_P

    found = beside(lambda: play(Distances(K)), K, P)
    turns = [(timed(plain), timed(lambda: play(Nothing())), timed(lambda: play(Distances(K)))) for _ in range(TURNS)]
    for place, name in enumerate(("numpy", "aggregation", "seconds")):
        found[name] = median(turn[place] for turn in turns)
    return found | {"detection": round(median(whole / bare - 1 for _, bare, whole in turns), 2)}


def keeping(_: str, __: int, P: int) -> dict[str, object]:
    """v_i on a client's disk: written (synced) and read back."""
    v = {"v": torch.randn(P)}
    with tempfile.TemporaryDirectory() as folder:
        versions = FolderStore(Path(folder), "run")
        write = timed(lambda: versions.write(0, 1, (v, {})))
        read = timed(lambda: versions.read(0, 1))
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))
    return {"write_seconds": write, "read_seconds": read, "MB": round(size / 2**20, 1)}


def sampling(_: str, N: int, K: int) -> dict[str, object]:
    """Drawing K of N clients for a round."""
    attackers, sampled = frozenset(range(0, N, 10)), Sampled(active_clients=K)
    before = memory("VmRSS")
    seconds = timed(lambda: sampled.active(0, range(N), attackers))
    return {"seconds": seconds, "beside_MB": round(memory("VmHWM") - before)}


KINDS = {
    "trimmed": joining, "krum": joining, "round": judging, "private": judging, "v_i": keeping, "sample": sampling,
}  # fmt: skip


def slopes(found: list[dict[str, Any]], grows: str, fixed: str, at: int) -> str:
    """How seconds and memory grow: slopes of the logarithms. 1 is proportional, 0 does not grow."""
    points = [one for one in found if one[fixed] == at]
    sizes = [math.log(one[grows]) for one in points]
    parts = [
        f"{name} {linear_regression(sizes, [math.log(max(one[name], 1e-9)) for one in points]).slope:.2f}"
        for name in ("numpy", "aggregation", "seconds", "beside_MB")
    ]
    return f"slopes with {grows} at {fixed} = {at:,}: {', '.join(parts)}\n"


def main() -> None:
    jobs = [("trimmed", K, P) for K, P in SIZES]
    jobs += [("krum", K, P) for K, P in [(10, 10**6), (10, 10**7), (30, 10**6)]]
    jobs += [(kind, K, P) for kind in ("round", "private") for K, P in LARGE]
    jobs += [("v_i", 1, P) for P in (10**5, 10**6, 10**7)]
    jobs += [("sample", N, 100) for N in (10**3, 10**4, 10**5, 10**6, 10**7)]
    for kind in KINDS:
        found = []
        for _, first, second in (job for job in jobs if job[0] == kind and kind in (sys.argv[1:] or KINDS)):
            words = [sys.executable, __file__, kind, str(first), str(second)]
            line = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            found.append(json.loads(line))
            sys.stdout.write(line)
            sys.stdout.flush()
        if KINDS[kind] is judging and found:
            sys.stdout.write(slopes(found, "P", "K", 10) + slopes(found, "K", "P", 10**6))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[-1].isdigit():
        name, first, second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        names = ("N", "K") if name == "sample" else ("K", "P")
        found = KINDS[name](name, first, second)
        sys.stdout.write(json.dumps({"what": name, names[0]: first, names[1]: second, **found}) + "\n")
    else:
        main()
