"""Put on the path of a process that is to break: kills it, or fails its disk, at one durable step
(src/lindt/runs/files.py).

LINDT_BREAK = "FAMILY|STEP|NTH|FAULT|MARK": at the NTH time that STEP is reached for a file of FAMILY; FAULT is
`kill` or the number of an OSError. MARK is a file that is made then, so that the same does not happen twice. Worker
processes inherit it, so that a step of theirs is found as well.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path


def family(path: Path) -> str:
    if path.parent.name == "checkpoint":
        return "checkpoint"
    if path.parent.name.startswith("client-"):
        return "v_i"
    return path.name if path.suffix in (".json", ".jsonl", ".toml") else "private model"


def break_at(wanted: str, step: str, nth: int, fault: str, mark: Path) -> None:
    from lindt.runs import files

    seen = 0

    def watch(reached: str, path: Path) -> None:
        nonlocal seen
        if (family(path), reached) != (wanted, step) or mark.exists():
            return
        seen += 1
        if seen == nth:
            mark.touch()
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(int(fault), os.strerror(int(fault)), str(path))

    files.watch = watch


if "LINDT_BREAK" in os.environ:
    wanted, step, nth, fault, mark = os.environ["LINDT_BREAK"].split("|")
    break_at(wanted, step, int(nth), fault, Path(mark))
