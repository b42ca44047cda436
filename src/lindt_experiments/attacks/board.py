"""`lindt reproduce attacks`: the outcome of a run under attack, and the grid of all runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from lindt.runs.store import Store, read_lines
from lindt_experiments.attacks import page
from lindt_experiments.attacks.grid import GridCell, cells, plan_for
from lindt_experiments.attacks.outcomes import KEPT, AttackOutcome
from lindt_experiments.boards import Grid, GridRequest, Wanted
from lindt_experiments.queue.gather import Origin
from lindt_experiments.queue.jobs import Job

SECONDS: Final = {"smoke": 1.0, "cpu": 7.0}  # of a run, before any result is stored
NAME: Final = "attacks"
TITLE: Final = "every attack against every aggregator, with and without recovery (smoke and cpu)"


def outcome_of(cell: GridCell, job: Job, scale: str, origin: Origin) -> AttackOutcome:
    """The outcome of the finished run."""
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


def estimate(request: GridRequest, left: Sequence[Wanted], wanted: int) -> str:
    """The time that the remaining runs take, from the stored runs."""
    done = [one.seconds for one in KEPT.load(request.results, request.scale)]
    each = statistics.fmean(done) if done else SECONDS[request.scale]
    minutes = len(left) * each / request.jobs / 60
    return f"{len(left)} of {wanted} runs are left to play, about {minutes:.0f} minutes with --jobs {request.jobs}"


def conclusions(kept: Sequence[AttackOutcome]) -> list[str]:
    """The five cells in which benign clients lose most."""
    return [f"{'/'.join(one.cell)}: beta {one.words}" for one in page.means(kept)[:5]]


GRID: Final = Grid(NAME, cells, plan_for, KEPT, outcome_of, page.write, conclusions, estimate)
