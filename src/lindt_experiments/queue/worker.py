"""A worker process of the queue: it plays runs one after the other, and resumes each where it stopped.

    python -m lindt_experiments.queue.worker TASK [TASK ...]

A task is JSON: `plan` and `folder`, the rounds to `keep`, and the folder and round to `branch` from, or null. Its run
is that of `lindt run` with --resume, --engine inprocess, --keep-checkpoint and --branch. It prints a line of JSON for
every private model, every round and every end. If the reader of the lines has ended, the next line ends the process.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from lindt.errors import UserError
from lindt.plan.file import resolve
from lindt.resources import keep_memory
from lindt.runs.branch import Branch
from lindt.runs.play import PrivateModelTrained, RoundPlayed, RunEnded, RunStarted, cache_folder, run_plan


def play(plan: Path, folder: Path, keep: Sequence[int], branch: Branch | None) -> None:
    # A run that exists continues with its own plan: it may have been begun under the name of another cell.
    begun = (folder / "plan.toml").exists()
    events = run_plan(
        None if begun else resolve(str(plan)),
        folder,
        resume=True,
        engine="inprocess",
        cache=cache_folder(),
        keep=keep,
        branch=branch,
    )
    for event in events:
        if isinstance(event, RunStarted):
            report(event="started", run=folder.name, round=event.round)
        elif isinstance(event, PrivateModelTrained):
            report(event="alone", run=folder.name, clients=event.clients)
        elif isinstance(event, RoundPlayed):
            report(event="round", run=folder.name, round=event.result.round)
        elif isinstance(event, RunEnded):
            report(event="ended", run=folder.name)


def report(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> None:
    signal.signal(signal.SIGTERM, _interrupt)  # how the queue stops it: the run is marked as stopped
    keep_memory()
    tasks = [json.loads(argument) for argument in sys.argv[1:]]
    try:
        for task in tasks:
            branch = None if task["branch"] is None else Branch(Path(task["branch"][0]), task["branch"][1])
            play(Path(task["plan"]), Path(task["folder"]), task["keep"], branch)
    except KeyboardInterrupt:
        sys.exit(130)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
