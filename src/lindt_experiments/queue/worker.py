"""One process that plays runs one after the other, each resumed where it stopped: the queue's hands.

    python -m lindt_experiments.queue.worker PLAN.toml FOLDER [PLAN.toml FOLDER ...]

Each run is what `lindt run PLAN.toml --out FOLDER --resume --engine inprocess` plays. A line of JSON tells of every
private model, every round and every end. Where nobody reads the lines any more, the next one ends the process.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lindt.errors import UserError
from lindt.plan.file import resolve
from lindt.resources import keep_memory
from lindt.runs.play import PrivateModelTrained, RoundPlayed, RunEnded, RunStarted, cache_folder, run_plan


def play(plan: Path, folder: Path) -> None:
    # A run that exists goes on by its own plan: it may have been begun under another cell's name.
    begun = (folder / "plan.toml").exists()
    events = run_plan(
        None if begun else resolve(str(plan)), folder, resume=True, engine="inprocess", cache=cache_folder()
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


def main() -> None:
    keep_memory()
    paths = [Path(argument) for argument in sys.argv[1:]]
    try:
        for plan, folder in zip(paths[::2], paths[1::2], strict=True):
            play(plan, folder)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
