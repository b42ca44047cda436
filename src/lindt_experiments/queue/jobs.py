"""The runs that some cells need, as jobs: each plan once, with its folder and its state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

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
from lindt_experiments.queue.shared_rounds import SharedRounds, shared_rounds
from lindt_experiments.queue.work import Work, work_of
from lindt_experiments.results.outcomes import Outcome, keep


def fetch_data(plans: Iterable[Plan]) -> None:
    """Refuse missing data once, before any run starts."""
    for source, test_share, text in {(plan.data.source, plan.data.test_share, plan.data.text) for plan in plans}:
        SOURCES[source](test_share, 0, text)


@final
@dataclass(frozen=True)
class Job:
    """One plan to play into one folder; several cells may show it."""

    cells: tuple[Cell, ...]
    plan: Plan
    key: str
    group: str  # the group of runs that share private models
    folder: Path
    work: Work
    shared: SharedRounds | None = None  # the first rounds, where other runs have the same
    batch: str = ""  # short runs of the same batch may be played by one process; by default those of a group

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def models(self) -> tuple[str, float]:
        """The key of the private models: a group shares the search for epochs, each `stretch` has its models."""
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
        """The number of rounds that were played before."""
        return sum(1 for _ in read_lines(self.folder / "rounds.jsonl"))

    def begun(self) -> bool:
        """Whether its folder holds a run."""
        return (self.folder / "plan.toml").exists()

    def waits_for(self, others: Iterable[Job]) -> bool:
        """Whether one of the others will keep the state that this run can begin with."""
        if self.shared is None or self.begun() or self.shared.branch(self.folder):
            return False
        return any(other.key in self.shared.sources for other in others)

    def task(self) -> dict[str, Any]:
        """The message to its worker process. The branch is looked up now: the run to branch from has played by now."""
        shared, begun = self.shared, self.begun()
        branch = None if shared is None or begun else shared.branch(self.folder)
        late = shared is not None and begun and self.played() > shared.round  # begun without keeping it
        return {
            "plan": str(self.plan_file),
            "folder": str(self.folder),
            "keep": [] if shared is None or late else [shared.round],
            "branch": None if branch is None else [str(branch.folder), branch.round],
        }

    def busy(self) -> bool:
        """Whether another process is working on it."""
        return is_locked(self.folder)


def jobs_for(cells: Sequence[Cell], scale: str, seeds: int, runs: Path) -> list[Job]:
    """The jobs of all cells with the seeds 0, 1, ..."""
    return jobs_of([(cell, seed) for seed in range(seeds) for cell in cells], scale, runs)


def jobs_of(wanted: Iterable[tuple[Cell, int]], scale: str, runs: Path) -> list[Job]:
    """The jobs of cells, each with its seed, in the given order."""
    found: dict[str, Job] = {}
    for cell, seed in wanted:
        plan = plan_for(*cell, scale=scale, seed=seed)
        key = content_key(plan)
        if key in found:
            found[key] = replace(found[key], cells=(*found[key].cells, cell))
            continue
        # The name has the plan's key: after a change of a scale, new runs have new folders.
        folder = runs / f"{plan.name}-seed{seed}-{key[:8]}"
        shared = shared_rounds(cell.task, scale, plan)
        found[key] = Job((cell,), plan, key, private_group(plan), folder, work_of(plan), shared)
    return list(found.values())


def to_play(jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> list[Job]:
    """The jobs without a stored outcome and without a finished run."""
    known = {outcome.plan for outcome in outcomes}
    return [job for job in jobs if job.key not in known and not ended(job.folder, job.key)]


def resume_jobs(
    jobs: Sequence[Job], outcomes: Sequence[Outcome], scale: str, results: Path, origin: Origin
) -> list[Job]:
    """Store known outcomes under every cell that shows them; returns the jobs that are left to play."""
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
