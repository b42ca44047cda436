"""What a round costs the server and a client as N, K and P grow: the figures of docs/scale.md.

    python benchmarks/scale.py            # a minute or two; each line in a process of its own, for its peak memory

Legend: N clients, K answering, P parameters.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lindt.client.private_store import FolderStore
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.server import aggregation
from lindt.server.detection.divergence import measure

SIZES = [(10, 10**5), (10, 10**6), (10, 10**7), (30, 10**6), (100, 10**5), (100, 10**6), (300, 10**6), (1000, 10**5)]


def memory() -> float:
    """The most this process has held so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def timed(work: Callable[[], object]) -> float:
    """Seconds of this process's one thread, so that a busy machine changes little."""
    began = time.process_time()
    work()
    return round(time.process_time() - began, 4)


def updates(K: int, P: int) -> torch.Tensor:
    return torch.randn(K, P, generator=torch.Generator().manual_seed(0)).mul_(0.01)  # in place: the peak is its own


def joining(kind: str, K: int, P: int) -> dict[str, object]:
    """One aggregator on K x P, and what it holds beside its input. `whole` sorts all coordinates at once."""
    u_KP, sizes_K = updates(K, P), torch.ones(K)
    if kind == "whole":
        aggregation.AT_A_TIME = K * P
    join = aggregation.Mean() if kind == "mean" else aggregation.TrimmedMean(0.2)
    before = memory()
    seconds = timed(lambda: join(u_KP, sizes_K))
    return {"seconds": seconds, "stack_MB": round(u_KP.nbytes / 2**20), "beside_MB": round(memory() - before)}


def judging(kind: str, K: int, P: int) -> dict[str, object]:
    """Clipping, or w_div and its relatives."""
    u_KP, privacy = updates(K, P), Gaussian(15.0, 0.001)
    noise_P = privacy.noise(u_KP[0], 0)
    clipped_KP = u_KP if kind == "divergence" else None
    before = memory()
    if clipped_KP is not None:
        seconds = timed(lambda: measure(u_KP, u_KP.mean(0) + noise_P, noise_P, clipped_KP, 0.0))
    else:
        seconds = timed(lambda: privacy.clip(u_KP))
    return {"seconds": seconds, "stack_MB": round(u_KP.nbytes / 2**20), "beside_MB": round(memory() - before)}


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
    before = memory()
    seconds = timed(lambda: sampled.active(0, range(N), attackers))
    return {"seconds": seconds, "beside_MB": round(memory() - before)}


KINDS = {
    "mean": joining, "trimmed": joining, "whole": joining, "clip": judging, "divergence": judging,
    "v_i": keeping, "sample": sampling,
}  # fmt: skip


def main() -> None:
    jobs = [(kind, K, P) for kind in ("mean", "trimmed", "whole", "clip", "divergence") for K, P in SIZES]
    jobs += [("v_i", 1, P) for P in (10**5, 10**6, 10**7)]
    jobs += [("sample", N, 100) for N in (10**3, 10**4, 10**5, 10**6, 10**7)]
    for kind, first, second in jobs:
        words = [sys.executable, __file__, kind, str(first), str(second)]
        sys.stdout.write(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        name, first, second = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        names = ("N", "K") if name == "sample" else ("K", "P")
        found = KINDS[name](name, first, second)
        sys.stdout.write(json.dumps({"what": name, names[0]: first, names[1]: second, **found}) + "\n")
    else:
        main()
