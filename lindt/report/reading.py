"""A run's folder as people read it: whatever state it is in, without torch, with nothing in it believed unchecked.

`lindt.store` reads a folder to go on with the run and refuses a damaged one. Here a damaged line is passed over,
counted and said.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from lindt.errors import UserError
from lindt.report.kept_plan import whole_at
from lindt.report.lines import Lines, open_file, read_small
from lindt.report.shapes import ABOUT, ROUND, SUMMARY, TIMING, parsed
from lindt.toml import read_toml

State = Literal["running", "ended", "crashed"]
DEEPEST = 4  # folders of runs inside folders of runs: runs/compared/lindt is two
MOST_FOLDERS = 20_000  # looked into when runs are searched for


@final
@dataclass(frozen=True)
class Run:
    """What a folder holds at one moment. `rounds` are the lines of rounds.jsonl that could be read, in order."""

    folder: Path
    state: State
    about: dict[str, Any]
    plan: dict[str, Any]
    plan_text: str
    rounds: tuple[dict[str, Any], ...]
    seconds: dict[int, float]
    summary: dict[str, Any] | None
    said: tuple[str, ...]  # what could not be read
    anew: int = 0  # how often rounds.jsonl was begun anew while it was followed

    @property
    def name(self) -> str:
        return str(self.about["name"])

    @property
    def percent(self) -> bool:
        return bool(self.about["metric_in_percent"])

    @property
    def planned(self) -> int | None:
        """The plan's number of rounds."""
        return whole_at(self.plan, "rounds")

    @property
    def scored(self) -> list[dict[str, Any]]:
        return [line for line in self.rounds if line.get("scores")]


@final
class Reader:
    """Reads one run, and on: each `read` looks only at what is new in the files that grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounds = Lines(folder / "rounds.jsonl", ROUND)
        self.timing = Lines(folder / "timing.jsonl", TIMING)

    def read(self) -> Run:
        about_text, plan_text = read_small(self.folder / "run.json"), read_small(self.folder / "plan.toml")
        if about_text is None or plan_text is None:
            raise UserError(f"{self.folder} is no run: it has no readable run.json and plan.toml")
        about = parsed(about_text, ABOUT)
        if about is None:
            raise UserError(f"{self.folder}: run.json is damaged, or of another version of lindt")
        said: list[str] = []
        # The state first: a run that ends while it is read is then called running, not crashed.
        held = is_locked(self.folder)
        ending = read_small(self.folder / "summary.json")
        summary = None if ending is None else parsed(ending, SUMMARY)
        if ending is not None and summary is None:
            said.append("summary.json is damaged and was left out")
        plan = _plan(plan_text)
        if not plan:
            said.append("plan.toml is damaged and was left out")
        self.rounds.read()
        self.timing.read()
        state: State = "ended" if ending is not None else "running" if held else "crashed"
        said += self._passed_over(state)
        return Run(
            self.folder,
            state,
            about,
            plan,
            plan_text.decode("utf-8", "replace"),
            tuple(self.rounds.found[r] for r in sorted(self.rounds.found)),
            {r: line["seconds"] for r, line in self.timing.found.items()},
            summary,
            tuple(said),
            self.rounds.anew,
        )

    def _passed_over(self, state: State) -> Iterator[str]:
        for lines in (self.rounds, self.timing):
            # Half a line is how a round looks while it is being written; it is broken only once nobody writes.
            broken = lines.broken + (lines.half and state != "running")
            if broken:
                yield f"{broken} broken line{'s' if broken > 1 else ''} of {lines.path.name} left out"
            if lines.cut:
                yield f"{lines.path.name} is too large; the rounds after {max(lines.found, default=0)} were left out"


def read_run(folder: Path) -> Run:
    return Reader(folder).read()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs at and below some folders, each once, however often it is named."""
    found = list(dict.fromkeys(run for folder in folders for run in find_runs(folder)))
    if not found:
        raise UserError(f"{', '.join(map(str, folders))}: no run in there; name a run's folder, or one that holds runs")
    return [read_run(folder) for folder in found]


def find_runs(root: Path) -> list[Path]:
    """The runs at and below a folder, by path. Links to folders are not followed; a run holds no other runs."""
    if not root.is_dir():
        raise UserError(f"{root} is no folder; name one that holds runs")
    found, waiting, looked = [], [(root, 0)], 0
    while waiting and looked < MOST_FOLDERS:
        folder, depth = waiting.pop()
        looked += 1
        try:
            entries = list(os.scandir(folder))
        except OSError:  # a folder that may not be read holds no runs for us
            continue
        if any(entry.name == "plan.toml" for entry in entries) and any(entry.name == "run.json" for entry in entries):
            found.append(folder)
        elif depth < DEEPEST:
            waiting += [(Path(entry.path), depth + 1) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted(found)


def is_locked(folder: Path) -> bool:
    """Whether a process works on the run. The lock is tried and given back at once; `Store.locked` waits that out."""
    descriptor = open_file(folder / "lock")
    if descriptor is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _plan(text: bytes) -> dict[str, Any]:
    try:
        return read_toml(text.decode("utf-8"), bits=1024)  # Python does not write out a number of 20,000
    except ValueError:
        return {}


def check_file(out: Path) -> None:
    """Raise a UserError where no file `out` can be written, before the work is done."""
    if not out.parent.is_dir():
        raise UserError(f"-o {out}: there is no folder {out.parent}; make it, or name another place")
    if out.is_dir():
        raise UserError(f"-o {out}: that is a folder; name a file")
