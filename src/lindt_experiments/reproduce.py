"""`lindt reproduce`: play the missing runs, store their outcomes, and show the paper's tables beside ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import final

from rich.console import Console

from lindt.errors import UserError
from lindt_experiments import again
from lindt_experiments.attacks import board
from lindt_experiments.attacks.grid import cells
from lindt_experiments.claims import claims, reproduction
from lindt_experiments.detectors import scoreboard
from lindt_experiments.detectors.configurations import configurations
from lindt_experiments.figures import record_traces
from lindt_experiments.plans.catalog import EXHIBITS, Cell, Exhibit, cells_of, named
from lindt_experiments.plans.keys import content_key, private_group
from lindt_experiments.plans.order import Cost, OpenClaim, Run, ordered
from lindt_experiments.plans.scales import SIZES, check_scale, only_task, plan_for, size_of
from lindt_experiments.plans.worlds import TASKS
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job, fetch_data, jobs_for, jobs_of, keep_job, resume_jobs, to_play
from lindt_experiments.queue.progress import Audience, Played, play_jobs, say_json
from lindt_experiments.queue.queue import check_hours, deadline_after, passed
from lindt_experiments.queue.work import Pace, work_of
from lindt_experiments.recovery import board as recovery_board
from lindt_experiments.recovery import settings
from lindt_experiments.recovery.cells import cells as recovery_cells
from lindt_experiments.results.outcomes import SCALES, Outcome, load
from lindt_experiments.tables.pages import is_current, page_of, path_of, write_page
from lindt_experiments.tables.sheets import Sheet, as_rich


@final
@dataclass(frozen=True)
class Request:
    """The arguments of the command line."""

    name: str
    scale: str
    seeds: int | None  # None: as many as the order has
    jobs: int
    runs: Path
    results: Path
    task: str | None = None
    only: tuple[str, ...] = ()
    worlds: tuple[str, ...] = ()
    hours: float | None = None  # after which no run goes on
    in_order: bool = False  # all exhibits, in the order of plans/order.py
    as_json: bool = False
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        check_scale(self.scale)
        check_hours(self.hours)
        if self.task not in (None, *TASKS):
            raise UserError(f"--task {self.task}: choose among {', '.join(TASKS)}")
        for name, number in (("--seeds", self.seeds), ("--jobs", self.jobs)):
            if number is not None and number < 1:
                raise UserError(f"{name} {number}: at least 1")

    @property
    def one_task(self) -> str | None:
        """The only task of the request or of its scale; None: both."""
        return self.task or only_task(self.scale)

    @property
    def command(self) -> str:
        """The command that repeats this one."""
        task = f" --task {self.task}" if self.task else ""
        only = f" --only {','.join(self.only)}" if self.only else ""
        world = f" --world {','.join(self.worlds)}" if self.worlds else ""
        if self.in_order:
            seeds = f" --seeds {self.seeds}" if self.seeds else ""
            return f"lindt reproduce --scale {self.scale} --hours {self.hours:g}{seeds}{task}{only}{world}"
        return f"lindt reproduce {self.name} --scale {self.scale} --seeds {self.seeds}{task}{only}{world}"

    @property
    def exhibits(self) -> tuple[Exhibit, ...]:
        return named(self.name)

    def wanted(self) -> list[Job]:
        cells = cells_of(self.exhibits, self.one_task, self.only, self.worlds)
        if self.in_order:
            current = [outcome for outcome in self.kept() if is_current(outcome)]
            undecided = [
                OpenClaim(tuple(Cell(*cell) for cell in open_cells), seeds)
                for open_cells, seeds in claims.open_claims(current, self.scale)
            ]
            runs = ordered(self.scale, undecided, _costs(current, self.scale))
            few = [(c, seed) for c, seed in runs if c in cells and (not self.seeds or seed < self.seeds)]
            return jobs_of(few, self.scale, self.runs)
        return jobs_for(cells, self.scale, self.seeds or 1, self.runs)

    def kept(self) -> list[Outcome]:
        return load(self.results, self.scale)

    def say(self, text: str) -> None:
        if not self.as_json:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _pace(current: Sequence[Outcome], scale: str) -> Callable[[Cell], tuple[float, float]]:
    """Seconds of a unit of work of a cell's rounds, and of its private models."""
    pace = Pace((o, work_of(plan_for(o.task, o.world, o.method, o.scale, o.seed))) for o in current)

    def seconds(cell: Cell) -> tuple[float, float]:
        usual = size_of(cell.task, scale).pace
        return pace.of(cell.task, cell.method) or usual, pace.of(cell.task, "fedavg") or usual

    return seconds


def _costs(current: Sequence[Outcome], scale: str) -> Callable[[Run], Cost]:
    """The time of a run, from the time of the stored runs of its scale; a stored run takes none."""
    stored, pace = {outcome.plan for outcome in current}, _pace(current, scale)

    def cost(run: Run) -> Cost:
        cell, seed = run
        plan = plan_for(*cell, scale=scale, seed=seed)
        if content_key(plan) in stored:
            return Cost(0.0)
        work, (federation, private) = work_of(plan), pace(cell)
        return Cost(federation * work.federation, private_group(plan), private * work.alone)

    return cost


def reproduce(request: Request) -> int:
    """Play, keep, show. Returns the exit code: 1 where a run failed."""
    origin = Origin.now(request.command)
    until = deadline_after(request.hours)
    left = resume_jobs(request.wanted(), request.kept(), request.scale, request.results, origin)
    if request.in_order:
        left.sort(key=lambda job: not job.begun())  # what was begun is finished first
    fetch_data(job.plan for job in left)
    played = _play(request, left, origin, until)
    if not passed(until):
        _trace(request)
    kept = request.kept()
    for exhibit in request.exhibits:
        _show(request, exhibit, kept, origin)
    if request.as_json:
        say_json({"event": "end", "played": played.ended, "failed": played.failed})
    if played.failed:
        request.say(f"{played.failed} of {len(left)} runs failed; the same command tries them again")
    return 1 if played.failed else 0


def play_again(request: Request) -> int:
    """`lindt reproduce again`. Returns the exit code."""
    return again.reproduce(request, lambda jobs, keep: _play_jobs(request, jobs, keep, None))


def _play(request: Request, jobs: Sequence[Job], origin: Origin, until: float | None) -> Played:
    def keep(job: Job) -> None:
        keep_job(job, request.scale, request.results, origin)

    return _play_jobs(request, jobs, keep, until)


def _play_jobs(request: Request, jobs: Sequence[Job], keep: Callable[[Job], None], until: float | None) -> Played:
    together = max(size.together for (scale, _), size in SIZES.items() if scale == request.scale)
    told = Audience(request.console, request.as_json, request.command)
    return play_jobs(jobs, request.jobs, together, keep, told, until)


def _trace(request: Request) -> None:
    """Figure 1 needs weights, which no run keeps: its rounds are played here, and only points in the plane are kept."""
    picked = request.one_task == "shake" or request.only or request.worlds
    if not picked and any(exhibit.kind == "traces" for exhibit in request.exhibits):
        for seed in range(request.seeds or 1):
            record_traces.reproduce(request.scale, seed, request.results, request.say)


def show_claims(results: Path, console: Console, as_json: bool, scale: str | None = None) -> None:
    """`--claims`: check the paper's claims on the stored results of present plans, a page a scale.

    If docs/reproduction.md exists beside results/, its tables are written again. Without `scale`: all scales but
    `smoke`, whose runs are too small to decide a claim.
    """
    if scale is not None:
        check_scale(scale)
    if not results.is_dir():
        raise UserError(f"--results {results}: there is no such folder; name the folder of the kept results")
    wanted = {scale} if scale else set(SCALES) - {"smoke"}
    kept = [outcome for outcome in load(results) if outcome.scale in wanted and is_current(outcome)]
    if as_json:
        for row in claims.report(kept, scale):
            say_json({"event": "claim", **asdict(row)})
    else:
        console.print(claims.render(kept, scale))
    pages = [*claims.write_pages(kept, results), *write_tables(kept, results)]
    if scale is None and (page := reproduction.write(kept, results)):
        pages.append(page)
    for path in pages:
        if not as_json:
            console.print(str(path), highlight=False, soft_wrap=True)


def write_tables(kept: Sequence[Outcome], results: Path) -> list[Path]:
    """Write the pages under results/tables again that `lindt reproduce NAME` has written."""
    pages = []
    for scale in dict.fromkeys(outcome.scale for outcome in kept):
        for exhibit in EXHIBITS.values():
            if exhibit.cells and path_of(exhibit, scale, results).is_file():
                pages.append(write_page(page_of(exhibit, kept, scale), exhibit, scale, results))
    return pages


def _show(request: Request, exhibit: Exhibit, kept: Sequence[Outcome], origin: Origin) -> None:
    scale = request.scale
    if exhibit.kind in ("figure", "traces"):
        draws = f"`lindt figure {exhibit.name} --scale {scale}` draws it from the stored results"
        request.say(f"{exhibit.name}: {exhibit.title}. {draws}.")
        return
    whole = page_of(exhibit, kept, scale)
    path = write_page(whole, exhibit, scale, request.results, origin)
    if request.as_json:
        say_json({"event": "table", "name": exhibit.name, "file": str(path), "remarks": list(whole.remarks)})
        return
    page = page_of(exhibit, kept, scale, request.seeds, request.one_task)
    for sheet in page.sheets:
        request.console.print(as_rich(sheet))
    for remark in page.remarks:
        request.say(remark)
    request.say(str(path))


def dry_run(request: Request) -> None:
    """The runs that would be played, and how much work they are."""
    wanted, kept = request.wanted(), request.kept()
    left = to_play(wanted, kept)
    pace = _pace([outcome for outcome in kept if is_current(outcome)], request.scale)
    trained: set[tuple[str, float]] = set()
    rows, total, seconds, fit = [], 0.0, 0.0, 0
    if request.in_order:
        left.sort(key=lambda job: not job.begun())
    for job in left if request.in_order else sorted(left, key=lambda job: -job.work.federation):
        played = job.played()
        taken = 0 if played or job.shared is None else _taken_over(job, left)
        alone = 0.0 if job.models in trained or played else job.work.alone
        trained.add(job.models)
        rounds = job.work.round * (job.plan.rounds - played - taken)
        federation, private = pace(job.cells[0])
        own = federation * rounds + private * alone
        total += rounds + alone
        seconds += own
        fit += seconds <= 3600 * request.jobs * (request.hours or 0)
        minutes = f"{own / 60:,.0f}" if own else "-"
        rows.append((job.plan.name, str(job.plan.seed), f"{played}/{job.plan.rounds}", minutes, job.key[:8]))
        if request.as_json:
            told = {"run": job.name, "played": played, "rounds": job.plan.rounds, "work": rounds + alone}
            say_json({"event": "plan", **told, "minutes": round(own / 60, 1)})
    hours = f", about {seconds / 3600 / request.jobs:.1f} hours with --jobs {request.jobs}" if seconds else ""
    remarks = [
        f"{len(left)} of {len(wanted)} runs are left to play, {total:,.0f} units of work{hours}.",
        "A unit is one epoch of FedAvg over one client's data; private models that runs share are counted once.",
        *([f"About the first {fit} of them fit into {request.hours:g} hours."] if request.hours and seconds else ()),
        *(f"{option} chooses among {', '.join(names)}." for option, names in _names(request).items() if len(names) > 1),
    ]
    columns = ("run", "seed", "rounds played", "minutes", "plan")
    if not request.as_json:
        request.console.print(as_rich(Sheet(request.command, columns, tuple(rows), tuple(remarks))))


def _taken_over(job: Job, left: Sequence[Job]) -> int:
    """The rounds that a new run will take from another one."""
    assert job.shared is not None
    first = any(other.key in job.shared.sources for other in left)
    return job.shared.round if first or job.shared.branch(job.folder) else 0


def _names(request: Request) -> dict[str, list[str]]:
    cells = cells_of(request.exhibits, request.one_task)
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
        settings.NAME: (len(settings.CANDIDATES), settings.TITLE),
        again.NAME: (len(again.CELLS), again.TITLE),
    }
    for name, (runs, title) in boards.items():
        if as_json:
            say_json({"name": name, "runs_a_seed": runs, "title": title})
        else:
            console.print(f"{name:9} {runs:3} runs a seed   {title}", highlight=False, markup=False, soft_wrap=True)
