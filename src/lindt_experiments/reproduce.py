"""`lindt reproduce`: play what is missing, keep it, and show the paper's tables beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

from rich.console import Console

from lindt.errors import UserError
from lindt_experiments.attacks import board
from lindt_experiments.attacks.grid import cells
from lindt_experiments.claims import claims
from lindt_experiments.detectors import scoreboard
from lindt_experiments.detectors.configurations import configurations
from lindt_experiments.figures import record_traces
from lindt_experiments.plans.catalog import EXHIBITS, Exhibit, cells_of, named
from lindt_experiments.plans.scales import plan_for, size_of
from lindt_experiments.plans.worlds import TASKS
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job, fetch_data, jobs_for, keep_job, resume_jobs, to_play
from lindt_experiments.queue.progress import Audience, play_jobs, say_json
from lindt_experiments.queue.work import seconds_a_unit, work_of
from lindt_experiments.recovery import board as recovery_board
from lindt_experiments.recovery.cells import cells as recovery_cells
from lindt_experiments.results.outcomes import Outcome, load
from lindt_experiments.tables.pages import is_current, page_of, write_page
from lindt_experiments.tables.sheets import Sheet, as_rich


@final
@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    name: str
    scale: str
    seeds: int
    jobs: int
    runs: Path
    results: Path
    task: str | None = None
    only: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()
    as_json: bool = False
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        size_of("cifar", self.scale)
        if self.task not in (None, *TASKS):
            raise UserError(f"--task {self.task}: choose among {', '.join(TASKS)}")
        for name, number in (("--seeds", self.seeds), ("--jobs", self.jobs)):
            if number < 1:
                raise UserError(f"{name} {number}: at least 1")

    @property
    def command(self) -> str:
        """The command again, as whoever wants the same would write it."""
        task = f" --task {self.task}" if self.task else ""
        only = f" --only {','.join(self.only)}" if self.only else ""
        world = f" --world {','.join(self.worlds)}" if self.worlds else ""
        return f"lindt reproduce {self.name} --scale {self.scale} --seeds {self.seeds}{task}{only}{world}"

    @property
    def exhibits(self) -> tuple[Exhibit, ...]:
        return named(self.name)

    def wanted(self) -> list[Job]:
        cells = cells_of(self.exhibits, self.task, self.only, self.worlds)
        return jobs_for(cells, self.scale, self.seeds, self.runs)

    def kept(self) -> list[Outcome]:
        return load(self.results, self.scale)

    def say(self, text: str) -> None:
        if not self.as_json:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def reproduce(request: Request) -> int:
    """Play, keep, show. Returns the exit code: 1 where a run failed."""
    origin = Origin.now(request.command)
    left = resume_jobs(request.wanted(), request.kept(), request.scale, request.results, origin)
    fetch_data(job.plan for job in left)
    failed = _play(request, left, origin)
    _trace(request)
    kept = request.kept()
    for exhibit in request.exhibits:
        _show(request, exhibit, kept, origin)
    if request.as_json:
        say_json({"event": "end", "played": len(left) - failed, "failed": failed})
    if failed:
        request.say(f"{failed} of {len(left)} runs failed; the same command tries them again")
    return 1 if failed else 0


def _play(request: Request, jobs: Sequence[Job], origin: Origin) -> int:
    def keep(job: Job) -> None:
        keep_job(job, request.scale, request.results, origin)

    together = max(size_of(task, request.scale).together for task in TASKS)
    return play_jobs(jobs, request.jobs, together, keep, Audience(request.console, request.as_json, request.command))


def _trace(request: Request) -> None:
    """Figure 1 needs weights, which no run keeps: its rounds are played here, and only points in the plane are kept."""
    picked = request.task == "shake" or request.only or request.worlds
    if not picked and any(exhibit.kind == "traces" for exhibit in request.exhibits):
        for seed in range(request.seeds):
            record_traces.reproduce(request.scale, seed, request.results, request.say)


def show_claims(results: Path, console: Console, as_json: bool) -> None:
    """`--claims`: the paper's findings held against what today's plans have made; a page a scale is kept."""
    kept = [outcome for outcome in load(results) if is_current(outcome)]
    if as_json:
        for row in claims.report(kept):
            say_json({"event": "claim", **asdict(row)})
    else:
        console.print(claims.render(kept))
    for path in claims.write_pages(kept, results):
        if not as_json:
            console.print(str(path), highlight=False, soft_wrap=True)


def _show(request: Request, exhibit: Exhibit, kept: Sequence[Outcome], origin: Origin) -> None:
    scale = request.scale
    if exhibit.kind in ("figure", "traces"):
        draws = f"`lindt figure {exhibit.name} --scale {scale}` draws it from what was kept"
        request.say(f"{exhibit.name}: {exhibit.title}. {draws}.")
        return
    whole = page_of(exhibit, kept, scale)
    path = write_page(whole, exhibit, scale, request.results, origin)
    if request.as_json:
        say_json({"event": "table", "name": exhibit.name, "file": str(path), "remarks": list(whole.remarks)})
        return
    page = page_of(exhibit, kept, scale, request.seeds, request.task)
    for sheet in page.sheets:
        request.console.print(as_rich(sheet))
    for remark in page.remarks:
        request.say(remark)
    request.say(str(path))


def dry_run(request: Request) -> None:
    """The runs that would be played, and how much work they are."""
    wanted, kept = request.wanted(), request.kept()
    left = to_play(wanted, kept)
    done = [outcome for outcome in kept if is_current(outcome)]
    pace = seconds_a_unit((o, work_of(plan_for(o.task, o.world, o.method, o.scale, o.seed))) for o in done)
    trained: set[tuple[str, float]] = set()
    rows, total = [], 0.0
    for job in sorted(left, key=lambda job: -job.work.federation):
        played = job.played()
        alone = 0.0 if job.models in trained or played else job.work.alone
        trained.add(job.models)
        units = alone + job.work.round * (job.plan.rounds - played)
        total += units
        rows.append((job.plan.name, str(job.plan.seed), f"{played}/{job.plan.rounds}", f"{units:,.0f}", job.key[:8]))
        if request.as_json:
            say_json({"event": "plan", "run": job.name, "played": played, "rounds": job.plan.rounds, "work": units})
    hours = f", about {total * pace / 3600 / request.jobs:.1f} hours with --jobs {request.jobs}" if pace else ""
    remarks = [
        f"{len(left)} of {len(wanted)} runs are left to play, {total:,.0f} units of work{hours}.",
        "A unit is one epoch of FedAvg over one client's data; private models that runs share are counted once.",
        *(f"{option} chooses among {', '.join(names)}." for option, names in _names(request).items() if len(names) > 1),
    ]
    columns = ("run", "seed", "rounds played", "work", "plan")
    if not request.as_json:
        request.console.print(as_rich(Sheet(request.command, columns, tuple(rows), tuple(remarks))))


def _names(request: Request) -> dict[str, list[str]]:
    cells = cells_of(request.exhibits, request.task)
    return {
        "--only": list(dict.fromkeys(cell.method for cell in cells)),
        "--world": list(dict.fromkeys(cell.world for cell in cells)),
    }


def list_exhibits(console: Console, as_json: bool) -> None:
    for exhibit in EXHIBITS.values():
        if as_json:
            say_json({"name": exhibit.name, "runs_a_seed": len(exhibit.cells), "title": exhibit.title})
        else:
            line = f"{exhibit.name:9} {len(exhibit.cells):3} runs a seed   {exhibit.title}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    boards = {
        scoreboard.NAME: (len(configurations("cpu")), scoreboard.TITLE),
        board.NAME: (len(cells("cpu")), board.TITLE),
        recovery_board.NAME: (len(recovery_cells("cpu")), recovery_board.TITLE),
    }
    for name, (runs, title) in boards.items():
        if as_json:
            say_json({"name": name, "runs_a_seed": runs, "title": title})
        else:
            console.print(f"{name:9} {runs:3} runs a seed   {title}", highlight=False, markup=False, soft_wrap=True)
