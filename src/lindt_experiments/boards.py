"""The common code of the boards (`lindt reproduce detectors`, `attacks`, `recovery`): jobs, their runs, messages.

A board has cells, each of which is played with several seeds; the outcome of a run is one line of results
(results/kept_lines.py). The boards of attacks and of recovery are a `Grid`: a cell is an environment and a method.
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
from lindt_experiments.queue.progress import Audience, Played, play_jobs, say_json
from lindt_experiments.queue.queue import check_hours, deadline_after, passed
from lindt_experiments.queue.work import work_of
from lindt_experiments.results.kept_lines import KeptLine, KeptLines

TOGETHER: Final = 12  # the number of short runs that one process plays


class BoardRequest(Protocol):
    """The options of every board on the command line."""

    @property
    def jobs(self) -> int: ...
    @property
    def as_json(self) -> bool: ...
    @property
    def console(self) -> Console: ...
    @property
    def command(self) -> str: ...
    @property
    def hours(self) -> float | None: ...


def check_counts(seeds: int, jobs: int, hours: float | None = None) -> None:
    check_hours(hours)
    for option, number in (("--seeds", seeds), ("--jobs", jobs)):
        if number < 1:
            raise UserError(f"{option} {number}: give at least 1")


def check_names(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    for name in chosen:
        if name not in known:
            raise UserError(f"{option} {name}: choose among {', '.join(known)}")


def say(request: BoardRequest, text: str) -> None:
    """Print a text, unless the output is JSON."""
    if not request.as_json:
        request.console.print(text, highlight=False, markup=False, soft_wrap=True)


def job_for(plan: Plan, number: int, runs: Path, *, short: bool = True) -> Job:
    """A run as a job of the queue. `number` is its seed or index; one process plays several short runs."""
    key = content_key(plan)
    folder = runs / f"{plan.name}-{number}-{key[:8]}"
    return Job((), plan, key, private_group(plan), folder, work_of(plan), batch="short" if short else "")


def play(request: BoardRequest, jobs: Sequence[Job], keep: Callable[[Job], None], until: float | None) -> Played:
    """Play the jobs until a deadline, and call `keep` for each that ends."""
    told = Audience(request.console, request.as_json, request.command)
    return play_jobs(jobs, request.jobs, TOGETHER, keep, told, until)


def show(request: BoardRequest, name: str, page: Path, runs: int, words: Iterable[str]) -> None:
    """Print the path of the page and its conclusions."""
    if request.as_json:
        say_json({"event": "page", "name": name, "file": str(page), "runs": runs})
    for text in (*words, str(page)):
        say(request, text)


def end(request: BoardRequest, played: Played, wanted: int) -> int:
    """Print how many of the runs failed. Returns the exit code: 1 where a run failed."""
    if request.as_json:
        say_json({"event": "end", "played": played.ended, "failed": played.failed})
    if played.failed:
        say(request, f"{played.failed} of {wanted} runs failed; the same command tries them again")
    return 1 if played.failed else 0


class Cell(Protocol):
    """A named tuple of words. The first is the environment: a world, or an attack."""

    @property
    def method(self) -> str: ...
    def __getitem__(self, place: int, /) -> str: ...


class CellOutcome(KeptLine, Protocol):
    """The outcome of one run of a cell."""

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
    """Cells with their plans, the outcome that is stored of a run, and the page that is written from outcomes."""

    name: str
    cells: Callable[[str], Sequence[C]]  # of a scale
    plan_for: Callable[[C, str, int], Plan]  # of a cell, a scale and a seed
    kept: KeptLines[T]
    outcome_of: Callable[[C, Job, str, Origin], T]  # the outcome of a finished run
    write: Callable[[Sequence[T], str, Path], Path]  # the page
    conclusions: Callable[[Sequence[T]], Sequence[str]]
    estimate: Callable[
        [GridRequest, Sequence[Wanted], int], str
    ]  # the time of the remaining runs, of how many in total
    short: Callable[[str], bool] = lambda _scale: True  # whether its runs are short
    first_seed: int = 0
    needed: Callable[[C, Sequence[T]], bool] | None = None  # whether a cell is played, by stored results; None: all are

    def current(self, kept: Sequence[T], scale: str) -> list[T]:
        """The stored lines whose plan is the present plan of their cell."""
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
    """The options of a grid on the command line."""

    grid: Grid[Any, Any]
    scale: str
    seeds: int
    jobs: int
    runs: Path
    results: Path
    methods: tuple[str, ...] = ()  # empty: all
    worlds: tuple[str, ...] = ()  # environments, or attacks; empty: all
    hours: float | None = None  # the time limit, after which runs are stopped
    as_json: bool = False
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        cells = self.grid.cells(self.scale)
        check_names("--only", self.methods, list(dict.fromkeys(cell.method for cell in cells)))
        check_names("--world", self.worlds, list(dict.fromkeys(cell[0] for cell in cells)))
        check_counts(self.seeds, self.jobs, self.hours)

    @property
    def command(self) -> str:
        only = f" --only {','.join(self.methods)}" if self.methods else ""
        world = f" --world {','.join(self.worlds)}" if self.worlds else ""
        return f"lindt reproduce {self.grid.name} --scale {self.scale} --seeds {self.seeds}{only}{world}"

    def wanted(self) -> list[Wanted]:
        grid, short = self.grid, self.grid.short(self.scale)
        kept = grid.current(grid.kept.load(self.results, self.scale), self.scale) if grid.needed else []
        return [
            Wanted(cell, job_for(grid.plan_for(cell, self.scale, seed), seed, self.runs, short=short))
            for seed in range(grid.first_seed, grid.first_seed + self.seeds)
            for cell in grid.cells(self.scale)
            if (grid.needed is None or grid.needed(cell, kept))
            and (not self.methods or cell.method in self.methods)
            and (not self.worlds or cell[0] in self.worlds)
        ]

    def known(self) -> frozenset[str]:
        return frozenset(one.plan for one in self.grid.kept.load(self.results, self.scale))

    def to_play(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """The runs without a stored result and without a finished run folder."""
        known = self.known()
        return [one for one in wanted if one.job.key not in known and not ended(one.job.folder, one.job.key)]


def reproduce_grid(request: GridRequest) -> int:
    """Play the runs, store their outcomes, write the page. Returns the exit code: 1 where a run failed.

    Runs that the outcomes show to be needed are played next.
    """
    grid, total, asked, to_play = request.grid, Played(0, 0), -1, 0
    until = deadline_after(request.hours)
    while len(wanted := request.wanted()) > asked and not (total.failed or passed(until)):
        left, asked = request.to_play(wanted), len(wanted)
        played = _play_grid(request, wanted, left, until)
        total, to_play = Played(total.ended + played.ended, total.failed + played.failed), to_play + len(left)
    every = grid.kept.load(request.results, request.scale)
    kept = grid.current(every, request.scale)
    if len(kept) < len(every):
        say(request, f"{len(every) - len(kept)} stored runs are of earlier plans; they are left out")
    if kept:
        written = grid.write(kept, request.scale, request.results)
        show(request, grid.name, written, len(kept), grid.conclusions(kept))
    return end(request, total, to_play)


def _play_grid(request: GridRequest, wanted: Sequence[Wanted], left: Sequence[Wanted], until: float | None) -> Played:
    grid, origin = request.grid, Origin.now(request.command)
    say(request, grid.estimate(request, left, len(wanted)))
    fetch_data(one.job.plan for one in left)
    cell_of = {one.job.key: one.cell for one in wanted}

    def keep(job: Job) -> None:
        outcome = grid.outcome_of(cell_of[job.key], job, request.scale, origin)
        grid.kept.keep(request.results, request.scale, [outcome])

    known = request.known()
    for one in wanted:
        if one not in left and one.job.key not in known:  # played, but not stored yet
            keep(one.job)
    return play(request, [one.job for one in left], keep, until)


def dry_run_grid(request: GridRequest) -> None:
    """Print the number of runs to play, and the time that they take."""
    wanted = request.wanted()
    left = request.to_play(wanted)
    if request.as_json:
        say_json({"event": "plan", "runs": len(left), "wanted": len(wanted)})
    say(request, request.grid.estimate(request, left, len(wanted)))
