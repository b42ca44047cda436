"""What the boards share (`lindt reproduce detectors`, `attacks`, `recovery`): jobs, playing them, saying how it went.

A board has cells, each of which is played with several seeds; what a run showed is one line of results
(results/kept_lines.py). Those of attacks and of recovery are a `Grid`: an environment and a method a cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar, final

from rich.console import Console

from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt_experiments.plans.keys import content_key, private_group
from lindt_experiments.queue.gather import Origin, ended
from lindt_experiments.queue.jobs import Job, fetch_data
from lindt_experiments.queue.progress import Audience, play_jobs, say_json
from lindt_experiments.queue.work import work_of
from lindt_experiments.results.kept_lines import KeptLine, KeptLines

TOGETHER: Final = 12  # short runs that one process plays


class BoardRequest(Protocol):
    """What every board is asked for on the command line."""

    @property
    def jobs(self) -> int: ...
    @property
    def as_json(self) -> bool: ...
    @property
    def console(self) -> Console: ...
    @property
    def command(self) -> str: ...


def check_counts(seeds: int, jobs: int) -> None:
    for option, number in (("--seeds", seeds), ("--jobs", jobs)):
        if number < 1:
            raise UserError(f"{option} {number}: at least 1")


def check_names(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    for name in chosen:
        if name not in known:
            raise UserError(f"{option} {name}: choose among {', '.join(known)}")


def say(request: BoardRequest, text: str) -> None:
    """To people; machines read lines of JSON."""
    if not request.as_json:
        request.console.print(text, highlight=False, markup=False, soft_wrap=True)


def job_for(plan: Plan, number: int, runs: Path, *, short: bool = True) -> Job:
    """A run as a job of the queue. `number` is its seed or index; one process plays several short runs."""
    key = content_key(plan)
    folder = runs / f"{plan.name}-{number}-{key[:8]}"
    return Job((), plan, key, private_group(plan), folder, work_of(plan), "short" if short else "")


def play(request: BoardRequest, jobs: Sequence[Job], keep: Callable[[Job], None]) -> int:
    """Play them and `keep` each as it ends; returns how many failed."""
    told = Audience(request.console, request.as_json, request.command)
    return play_jobs(jobs, request.jobs, TOGETHER, keep, told)


def show(request: BoardRequest, name: str, page: Path, runs: int, words: Iterable[str]) -> None:
    """Where the page is, and what it says in short."""
    if request.as_json:
        say_json({"event": "page", "name": name, "file": str(page), "runs": runs})
    for text in (*words, str(page)):
        say(request, text)


def end(request: BoardRequest, played: int, failed: int) -> int:
    """Say how it ended. Returns the exit code: 1 where a run failed."""
    if request.as_json:
        say_json({"event": "end", "played": played - failed, "failed": failed})
    if failed:
        say(request, f"{failed} of {played} runs failed; the same command tries them again")
    return 1 if failed else 0


class Cell(Protocol):
    """A named tuple of words. The first is the environment: a world, or an attack."""

    @property
    def method(self) -> str: ...
    def __getitem__(self, place: int, /) -> str: ...


class CellOutcome(KeptLine, Protocol):
    """What one run of a cell showed."""

    @property
    def cell(self) -> tuple[str, ...]: ...
    @property
    def seed(self) -> int: ...
    @property
    def plan(self) -> str: ...


C = TypeVar("C", bound=Cell)
T = TypeVar("T", bound=CellOutcome)


@final
@dataclass(frozen=True)
class Grid(Generic[C, T]):
    """Cells with their plans, what is kept of a run, and the page that is written from it."""

    name: str
    cells: Callable[[str], Sequence[C]]  # of a scale
    plan_for: Callable[[C, str, int], Plan]  # of a cell, a scale and a seed
    kept: KeptLines[T]
    outcome_of: Callable[[C, Job, str, Origin], T]  # what the finished run left
    write: Callable[[Sequence[T], str, Path], Path]  # the page
    conclusions: Callable[[Sequence[T]], Sequence[str]]
    estimate: Callable[[GridRequest, Sequence[Wanted], int], str]  # of what is left to play, among how many
    short: Callable[[str], bool] = lambda _scale: True  # whether its runs are short

    def current(self, kept: Sequence[T], scale: str) -> list[T]:
        """Lines whose plan is still that of their cell."""
        known: dict[Any, C] = {cell: cell for cell in self.cells(scale)}
        found = [one for one in kept if one.cell in known]
        return [one for one in found if content_key(self.plan_for(known[one.cell], scale, one.seed)) == one.plan]


@final
@dataclass(frozen=True)
class Wanted:
    """One run of a cell, as a job of the queue."""

    cell: Any
    job: Job


@final
@dataclass(frozen=True)
class GridRequest:
    """What was asked of a grid on the command line."""

    grid: Grid[Any, Any]
    scale: str
    seeds: int
    jobs: int
    runs: Path
    results: Path
    methods: tuple[str, ...] = ()  # none: all
    worlds: tuple[str, ...] = ()  # or attacks
    as_json: bool = False
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        cells = self.grid.cells(self.scale)
        check_names("--only", self.methods, list(dict.fromkeys(cell.method for cell in cells)))
        check_names("--world", self.worlds, list(dict.fromkeys(cell[0] for cell in cells)))
        check_counts(self.seeds, self.jobs)

    @property
    def command(self) -> str:
        only = f" --only {','.join(self.methods)}" if self.methods else ""
        world = f" --world {','.join(self.worlds)}" if self.worlds else ""
        return f"lindt reproduce {self.grid.name} --scale {self.scale} --seeds {self.seeds}{only}{world}"

    def wanted(self) -> list[Wanted]:
        grid, short = self.grid, self.grid.short(self.scale)
        return [
            Wanted(cell, job_for(grid.plan_for(cell, self.scale, seed), seed, self.runs, short=short))
            for seed in range(self.seeds)
            for cell in grid.cells(self.scale)
            if (not self.methods or cell.method in self.methods) and (not self.worlds or cell[0] in self.worlds)
        ]

    def known(self) -> frozenset[str]:
        return frozenset(one.plan for one in self.grid.kept.load(self.results, self.scale))

    def to_play(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Runs of which neither the results nor a finished run know."""
        known = self.known()
        return [one for one in wanted if one.job.key not in known and not ended(one.job.folder, one.job.key)]


def reproduce_grid(request: GridRequest) -> int:
    """Play, keep, show. Returns the exit code: 1 where a run failed."""
    grid, origin, wanted = request.grid, Origin.now(request.command), request.wanted()
    left = request.to_play(wanted)
    say(request, grid.estimate(request, left, len(wanted)))
    fetch_data(one.job.plan for one in left)
    cell_of = {one.job.key: one.cell for one in wanted}

    def keep(job: Job) -> None:
        outcome = grid.outcome_of(cell_of[job.key], job, request.scale, origin)
        grid.kept.keep(request.results, request.scale, [outcome])

    known = request.known()
    for one in wanted:
        if one not in left and one.job.key not in known:  # played, but not kept
            keep(one.job)
    failed = play(request, [one.job for one in left], keep)
    kept = grid.current(grid.kept.load(request.results, request.scale), request.scale)
    if kept:
        written = grid.write(kept, request.scale, request.results)
        show(request, grid.name, written, len(kept), grid.conclusions(kept))
    return end(request, len(left), failed)


def dry_run_grid(request: GridRequest) -> None:
    """How many runs would be played, and how long that takes."""
    wanted = request.wanted()
    left = request.to_play(wanted)
    if request.as_json:
        say_json({"event": "plan", "runs": len(left), "wanted": len(wanted)})
    say(request, request.grid.estimate(request, left, len(wanted)))
