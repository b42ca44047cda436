"""`lindt reproduce recovery`: play the cells that are missing, keep them, write the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, final

from rich.console import Console

from lindt.plan.plan import Plan
from lindt.protocols import private_names
from lindt.runs.store import Store, read_lines
from lindt.weights import parameter_sizes
from lindt_experiments.boards import check_counts, check_names, end, job_for, play, say, show
from lindt_experiments.plans.keys import content_key
from lindt_experiments.queue.gather import Origin, ended
from lindt_experiments.queue.jobs import Job, fetch_data
from lindt_experiments.queue.progress import say_json
from lindt_experiments.recovery import outcomes, page
from lindt_experiments.recovery.cells import RecoveryCell, cells, plan_for
from lindt_experiments.recovery.outcomes import RecoveryOutcome

NAME: Final = "recovery"
TITLE: Final = "every method of recovery in the same federations: who gains, who is worse off, at what cost"
CLASSES: Final = 10  # of CIFAR-10
FLOAT: Final = 4  # bytes


@final
@dataclass(frozen=True)
class Wanted:
    """One run of a cell, as a job of the queue."""

    cell: RecoveryCell
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
    worlds: tuple[str, ...] = ()
    as_json: bool = False
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        for option, chosen, at in (("--only", self.methods, 1), ("--world", self.worlds, 0)):
            check_names(option, chosen, list(dict.fromkeys(cell[at] for cell in cells(self.scale))))
        check_counts(self.seeds, self.jobs)

    @property
    def command(self) -> str:
        only = f" --only {','.join(self.methods)}" if self.methods else ""
        world = f" --world {','.join(self.worlds)}" if self.worlds else ""
        return f"lindt reproduce {NAME} --scale {self.scale} --seeds {self.seeds}{only}{world}"

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(cell, job_for(plan_for(cell, self.scale, seed), seed, self.runs, short=self.scale == "smoke"))
            for seed in range(self.seeds)
            for cell in cells(self.scale)
            if (not self.methods or cell.method in self.methods) and (not self.worlds or cell.world in self.worlds)
        ]


def reproduce(request: Request) -> int:
    """Play, keep, show. Returns the exit code: 1 where a run failed."""
    origin, wanted = Origin.now(request.command), request.wanted()
    left = to_play(wanted, request)
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
        written = page.write(kept, request.scale, request.results)
        show(request, NAME, written, len(kept), page.conclusions(kept))
    return end(request, len(left), failed)


def to_play(wanted: Sequence[Wanted], request: Request) -> list[Wanted]:
    """Runs of which neither the results nor a finished run know."""
    known = _known(request)
    return [one for one in wanted if one.job.key not in known and not ended(one.job.folder, one.job.key)]


def _known(request: Request) -> frozenset[str]:
    return frozenset(one.plan for one in outcomes.load(request.results, request.scale))


def outcome_of(cell: RecoveryCell, job: Job, scale: str, origin: Origin) -> RecoveryOutcome:
    """What the finished run left."""
    store = Store.open(job.folder)
    summary, lines = store.summary(), store.rounds()
    timing = {line["round"]: float(line["seconds"]) for line in read_lines(job.folder / "timing.jsonl")}
    scored = [line["scores"] for line in lines if line["scores"]]
    clients = scored[-1]["clients"] if scored else []
    train, score = client_seconds(lines, timing, len(store.about["clients"]))
    return RecoveryOutcome(
        *cell,
        scale=scale,
        seed=job.plan.seed,
        plan=job.key,
        rounds=job.plan.rounds,
        central=summary["central"],
        local=summary["local"],
        beta=summary["beta"],
        median_gain=summary["median_gain"],
        worst_tenth=summary["worst_tenth"],
        attack_local=summary["attack_local"],
        harmed=summary["harmed"],
        clearly_harmed=summary["clearly_harmed"],
        clearly_better=summary["clearly_better"],
        locals=tuple(one["local"] for one in clients),
        betas=tuple(one["beta"] for one in clients if one["beta"] is not None),
        train_seconds=train,
        score_seconds=score,
        bytes=exchanged_bytes(job.plan),
        command=origin.command,
        commit=origin.commit,
        date=origin.date,
        seconds=round(sum(timing.values()), 1),
    )


def client_seconds(
    lines: Sequence[Mapping[str, Any]], timing: Mapping[int, float], clients: int
) -> tuple[float | None, float | None]:
    """Seconds of a client to train in a round, and to be scored: what a scored round takes longer, over all clients."""
    plain = [timing[n] / len(line["answered"]) for line in lines
             if not line["scores"] and line["answered"] and (n := line["round"]) in timing]  # fmt: skip
    if not plain:
        return None, None
    train = median(plain)
    scoring = [(timing[n] - train * len(line["answered"])) / clients for line in lines
               if line["scores"] and (n := line["round"]) in timing]  # fmt: skip
    return train, max(0.0, median(scoring)) if scoring else None


def exchanged_bytes(plan: Plan) -> int:
    """The weights that a client shares, to it and back. Private layers need not travel."""
    sizes = parameter_sizes(plan.model.build(CLASSES))
    private = private_names(plan.method.adaptation, [name for name, _ in sizes])
    return 2 * FLOAT * sum(size for name, size in sizes if name not in private)


def current(kept: Sequence[RecoveryOutcome], scale: str) -> list[RecoveryOutcome]:
    """Lines whose plan is still that of their cell."""
    known = set(cells(scale))
    found = [one for one in kept if one.cell in known]
    return [one for one in found if content_key(plan_for(RecoveryCell(*one.cell), scale, one.seed)) == one.plan]


def dry_run(request: Request) -> None:
    """How many runs would be played, and how much work they are."""
    wanted = request.wanted()
    left = to_play(wanted, request)
    work = sum(one.job.work.federation for one in left)
    if request.as_json:
        say_json({"event": "plan", "runs": len(left), "wanted": len(wanted), "work": work})
    for world, number in Counter(one.cell.world for one in left).items():
        say(request, f"{world:18} {number:4} runs")
    said = f"{len(left)} of {len(wanted)} runs are left to play, {work:,.0f} units of work"
    say(request, f"{said}; a unit is one epoch of FedAvg over one client's data")
