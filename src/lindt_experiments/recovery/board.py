"""`lindt reproduce recovery`: the outcome of a run, and the grid of all methods in all environments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from lindt.plan.plan import Plan
from lindt.protocols import private_names
from lindt.runs.store import Store, read_lines
from lindt.weights import parameter_sizes
from lindt_experiments.boards import Grid, GridRequest, Wanted
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job
from lindt_experiments.queue.work import work_of
from lindt_experiments.recovery import page
from lindt_experiments.recovery.cells import RecoveryCell, cells, plan_for
from lindt_experiments.recovery.outcomes import KEPT, RecoveryOutcome

NAME: Final = "recovery"
TITLE: Final = "every method of recovery in the same federations: gains, clients worse off, costs"
CLASSES: Final = 10  # of CIFAR-10
FLOAT: Final = 4  # bytes


def outcome_of(cell: RecoveryCell, job: Job, scale: str, origin: Origin) -> RecoveryOutcome:
    """The outcome of the finished run."""
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
    """Seconds of a client to train in a round, and to be scored: the extra time of a scored round, over all clients."""
    plain = [timing[n] / len(line["answered"]) for line in lines
             if not line["scores"] and line["answered"] and (n := line["round"]) in timing]  # fmt: skip
    if not plain:
        return None, None
    train = median(plain)
    scoring = [(timing[n] - train * len(line["answered"])) / clients for line in lines
               if line["scores"] and (n := line["round"]) in timing]  # fmt: skip
    return train, max(0.0, median(scoring)) if scoring else None


def exchanged_bytes(plan: Plan) -> int:
    """The bytes of the weights that a client receives and sends in a round. Private layers are not sent."""
    sizes = parameter_sizes(plan.model.build(CLASSES))
    private = private_names(plan.method.adaptation, [name for name, _ in sizes])
    return 2 * FLOAT * sum(size for name, size in sizes if name not in private)


def estimate(request: GridRequest, left: Sequence[Wanted], wanted: int) -> str:
    """The work of the remaining runs, the number of runs in each environment, and the hours that they take.

    Private models are counted once for the runs that share them. The pace is the median of the kept runs.
    """
    alone = {(one.job.group, one.job.plan.detection.reports): one.job.work.alone for one in left}
    work = sum(one.job.work.federation for one in left) + sum(alone.values())
    worlds = [f"{world:18} {number:4} runs" for world, number in Counter(one.cell.world for one in left).items()]
    said = f"{len(left)} of {wanted} runs are left to play, {work:,.0f} units of work"
    pace = seconds_per_unit(request)
    hours = f", about {work * pace / 3600 / request.jobs:.1f} hours with --jobs {request.jobs}" if pace and left else ""
    return "\n".join([*worlds, f"{said}{hours}; a unit is one epoch of FedAvg over one client's data"])


def seconds_per_unit(request: GridRequest) -> float | None:
    """The median of the kept runs, whose seconds have no private training; None without any."""
    grid, scale = request.grid, request.scale
    known: dict[Any, Any] = {cell: cell for cell in grid.cells(scale)}
    kept = grid.current(grid.kept.load(request.results, scale), scale)
    paces = [one.seconds / work_of(grid.plan_for(known[one.cell], scale, one.seed)).federation for one in kept]
    return median(paces) if paces else None


def _is_short(scale: str) -> bool:
    return scale == "smoke"


GRID: Final = Grid(NAME, cells, plan_for, KEPT, outcome_of, page.write, page.conclusions, estimate, _is_short)
