"""The runs that some cells ask for: each plan once, with its folder, and what is known of it already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import tomli_w

from lindt.data.sources import SOURCES
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan
from lindt.report.reading import is_locked
from lindt.runs.files import write_whole
from lindt.runs.store import read_lines
from lindt_experiments.plans.catalog import Cell
from lindt_experiments.plans.keys import content_key, private_group
from lindt_experiments.plans.scales import plan_for
from lindt_experiments.queue.gather import Origin, ended, outcome_of
from lindt_experiments.queue.work import Work, work_of
from lindt_experiments.results.outcomes import Outcome, keep


def fetch_data(plans: Iterable[Plan]) -> None:
    """Data that have to be fetched first are said once, not by every run."""
    for source, test_share, text in {(plan.data.source, plan.data.test_share, plan.data.text) for plan in plans}:
        SOURCES[source](test_share, 0, text)


@final
@dataclass(frozen=True)
class Job:
    """One plan to play into one folder, whatever the number of cells that show it."""

    cells: tuple[Cell, ...]
    plan: Plan
    key: str
    group: str  # of runs that share private models
    folder: Path
    work: Work
    batch: str = ""  # of short runs that one process may play one after the other; by default those of a group

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def models(self) -> tuple[str, float]:
        """Runs that train the very same private models: a group shares the search, each stretch of epochs its own."""
        return self.group, self.plan.alone.stretch

    @property
    def plan_file(self) -> Path:
        return self.folder.parent / "plans" / f"{self.name}.toml"

    @property
    def log(self) -> Path:
        return self.folder.parent / "logs" / f"{self.name}.txt"

    def write_plan(self) -> None:
        for folder in (self.plan_file.parent, self.log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.plan_file, tomli_w.dumps(to_dict(self.plan)).encode())

    def played(self) -> int:
        """Rounds that an earlier start has left."""
        return sum(1 for _ in read_lines(self.folder / "rounds.jsonl"))

    def busy(self) -> bool:
        """Whether another process is working on it."""
        return is_locked(self.folder)


def jobs_for(cells: Iterable[Cell], scale: str, seeds: int, runs: Path) -> list[Job]:
    found: dict[str, Job] = {}
    for seed in range(seeds):
        for cell in cells:
            plan = plan_for(*cell, scale=scale, seed=seed)
            key = content_key(plan)
            if key in found:
                found[key] = replace(found[key], cells=(*found[key].cells, cell))
                continue
            # The key is in the name: a scale that was changed since starts anew beside the old runs.
            folder = runs / f"{plan.name}-seed{seed}-{key[:8]}"
            found[key] = Job((cell,), plan, key, private_group(plan), folder, work_of(plan))
    return list(found.values())


def to_play(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Job]:
    """The jobs of which neither the results nor a finished run know."""
    known = {outcome.plan for outcome in outcomes}
    return [job for job in jobs if job.key not in known and not ended(job.folder, job.key)]


def resume_jobs(
    jobs: Sequence[Job], outcomes: Sequence[Outcome], scale: str, results: Path, origin: Origin
) -> list[Job]:
    """Keep what is known already under every cell that shows it; the jobs that are left have to be played."""
    by_key = {outcome.plan: outcome for outcome in outcomes}
    kept = {(outcome.cell, outcome.plan) for outcome in outcomes}
    left = to_play(jobs, outcomes)
    for job in jobs:
        missing = [cell for cell in job.cells if ((*cell, job.plan.seed), job.key) not in kept]
        if job.key in by_key:
            for cell in missing:
                keep(results, replace(by_key[job.key], task=cell.task, world=cell.world, method=cell.method))
        elif job not in left:
            keep_job(job, scale, results, origin)
    return left


def keep_job(job: Job, scale: str, results: Path, origin: Origin) -> None:
    for cell in job.cells:
        keep(results, outcome_of(job.folder, cell, scale, origin))
