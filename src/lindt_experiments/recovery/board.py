"""`lindt reproduce recovery`: what is kept of a run, and the grid of all methods in all environments."""

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
from lindt_experiments.recovery import page
from lindt_experiments.recovery.cells import RecoveryCell, cells, plan_for
from lindt_experiments.recovery.outcomes import KEPT, RecoveryOutcome

NAME: Final = "recovery"
TITLE: Final = "every method of recovery in the same federations: who gains, who is worse off, at what cost"
CLASSES: Final = 10  # of CIFAR-10
FLOAT: Final = 4  # bytes


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


def estimate(_request: GridRequest, left: Sequence[Wanted], wanted: int) -> str:
    """How much work it is, and in which environments."""
    work = sum(one.job.work.federation for one in left)
    worlds = [f"{world:18} {number:4} runs" for world, number in Counter(one.cell.world for one in left).items()]
    said = f"{len(left)} of {wanted} runs are left to play, {work:,.0f} units of work"
    return "\n".join([*worlds, f"{said}; a unit is one epoch of FedAvg over one client's data"])


def _is_short(scale: str) -> bool:
    return scale == "smoke"


GRID: Final = Grid(NAME, cells, plan_for, KEPT, outcome_of, page.write, page.conclusions, estimate, _is_short)
