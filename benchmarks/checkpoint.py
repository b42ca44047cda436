"""The time to store the state of the CIFAR federation: a checkpoint per round, and a v_i per client in recovery.

    .venv/bin/python benchmarks/checkpoint.py [FOLDER]     # on the disk of FOLDER

Compare it with the seconds of a round from `benchmarks/whole.py`. It needs no data: only the model's size matters.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

TIMES = 20


def main(where: str | None) -> None:
    from lindt.client.private_store import FolderStore
    from lindt.plan.models import Cnn
    from lindt.protocols import RecoveryState
    from lindt.runs.store import save_checkpoint
    from lindt.server.state import RunState
    from lindt.weights import read_buffers, read_w

    model = Cnn().build()
    w, buffers = read_w(model), read_buffers(model)
    with tempfile.TemporaryDirectory(dir=where) as aside:
        folder = Path(aside)
        versions = FolderStore(folder, "run")
        found = {
            "parameters": len(w),
            "ms a checkpoint": _ms(
                lambda r: save_checkpoint(folder / "c", RunState("run", r, w, buffers, RecoveryState()))
            ),
            "ms a v_i": _ms(lambda r: versions.write(0, r, (model.state_dict(), {}))),
        }
    sys.stdout.write(json.dumps(found) + "\n")


def _ms(write: Callable[[int], None]) -> float:
    taken = []
    for round in range(1, TIMES + 1):
        start = time.perf_counter()
        write(round)
        taken.append(time.perf_counter() - start)
    return 1000 * median(taken)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
