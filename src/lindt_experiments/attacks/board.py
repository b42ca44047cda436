"""`lindt reproduce attacks`: play the cells that are missing, keep them, write the page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

from rich.console import Console

from lindt.runs.store import Store, read_lines
from lindt_experiments.attacks import outcomes, page
from lindt_experiments.attacks.grid import GridCell, cells, plan_for
from lindt_experiments.attacks.outcomes import AttackOutcome
from lindt_experiments.boards import check_counts, check_names, end, job_for, play, say, show
from lindt_experiments.plans.keys import content_key
from lindt_experiments.queue.gather import Origin, ended
from lindt_experiments.queue.jobs import Job, fetch_data
from lindt_experiments.queue.progress import say_json

SECONDS: Final = {"smoke": 1.0, "cpu": 7.0}  # of a run, before any is kept
NAME: Final = "attacks"
TITLE: Final = "every attack against every aggregator, with and without recovery (smoke and cpu)"


@final
@dataclass(frozen=True)
class Wanted:
    """One run of a cell, as a job of the queue."""

    cell: GridCell
    job: Job


@final
@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    scale: str
    seeds: int
    jobs: int
    runs: Path
    results: Path
    methods: tuple[str, ...] = ()  # none: all
    attacks: tuple[str, ...] = ()
    as_json: bool = False
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        for option, chosen, at in (("--only", self.methods, 2), ("--world", self.attacks, 0)):
            check_names(option, chosen, list(dict.fromkeys(cell[at] for cell in cells(self.scale))))
        check_counts(self.seeds, self.jobs)

    @property
    def command(self) -> str:
        only = f" --only {','.join(self.methods)}" if self.methods else ""
        world = f" --world {','.join(self.attacks)}" if self.attacks else ""
        return f"lindt reproduce {NAME} --scale {self.scale} --seeds {self.seeds}{only}{world}"

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(cell, job_for(plan_for(cell, self.scale, seed), seed, self.runs))
            for seed in range(self.seeds)
            for cell in cells(self.scale)
            if (not self.methods or cell.method in self.methods) and (not self.attacks or cell.attack in self.attacks)
        ]


def reproduce(request: Request) -> int:
    """Play, keep, show. Returns the exit code: 1 where a run failed."""
    origin, wanted = Origin.now(request.command), request.wanted()
    left = to_play(wanted, request)
    say(request, estimate(request, left, len(wanted)))
    fetch_data(one.job.plan for one in left)
    cell_of = {one.job.key: one.cell for one in wanted}

    def keep(job: Job) -> None:
        outcomes.keep(request.results, request.scale, [outcome_of(cell_of[job.key], job, request.scale, origin)])

    known = _known(request)
    for one in wanted:
        if one not in left and one.job.key not in known:  # played, but not kept
            keep(one.job)
    failed = play(request, [one.job for one in left], keep)
    kept = current(outcomes.load(request.results, request.scale), request.scale)
    if kept:
        worst = [f"{'/'.join(one.cell)}: beta {one.words}" for one in page.means(kept)[:5]]
        show(request, NAME, page.write(kept, request.scale, request.results), len(kept), worst)
    return end(request, len(left), failed)


def to_play(wanted: Sequence[Wanted], request: Request) -> list[Wanted]:
    """Runs of which neither the results nor a finished run know."""
    known = _known(request)
    return [one for one in wanted if one.job.key not in known and not ended(one.job.folder, one.job.key)]


def _known(request: Request) -> frozenset[str]:
    return frozenset(one.plan for one in outcomes.load(request.results, request.scale))


def outcome_of(cell: GridCell, job: Job, scale: str, origin: Origin) -> AttackOutcome:
    """What the finished run left."""
    store = Store.open(job.folder)
    summary = store.summary()
    return AttackOutcome(
        *cell,
        scale=scale,
        seed=job.plan.seed,
        plan=job.key,
        rounds=job.plan.rounds,
        beta=summary["beta"],
        clearly_harmed=summary["clearly_harmed"],
        counted_clients=summary["counted_clients"],
        attack_central=summary["attack_central"],
        attack_local=summary["attack_local"],
        recovering_from=next((line["round"] for line in store.rounds() if line["recovering"]), None),
        command=origin.command,
        commit=origin.commit,
        date=origin.date,
        seconds=round(sum(line["seconds"] for line in read_lines(job.folder / "timing.jsonl")), 1),
    )


def current(kept: Sequence[AttackOutcome], scale: str) -> list[AttackOutcome]:
    """Lines whose plan is still that of their cell."""
    known = set(cells(scale))
    found = [one for one in kept if one.cell in known]
    return [one for one in found if content_key(plan_for(GridCell(*one.cell), scale, one.seed)) == one.plan]


def estimate(request: Request, left: Sequence[Wanted], wanted: int) -> str:
    """How long it takes, by the runs that are kept."""
    done = [one.seconds for one in outcomes.load(request.results, request.scale)]
    each = statistics.fmean(done) if done else SECONDS[request.scale]
    minutes = len(left) * each / request.jobs / 60
    return f"{len(left)} of {wanted} runs are left to play, about {minutes:.0f} minutes with --jobs {request.jobs}"


def dry_run(request: Request) -> None:
    wanted = request.wanted()
    left = to_play(wanted, request)
    if request.as_json:
        say_json({"event": "plan", "runs": len(left), "wanted": len(wanted)})
    say(request, estimate(request, left, len(wanted)))
