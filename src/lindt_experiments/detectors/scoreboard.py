"""`lindt reproduce detectors`: play the missing runs, record them, replay every detector, write the page."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, final

from rich.console import Console

from lindt.errors import UserError
from lindt.server.detection.divergence import is_negative
from lindt_experiments.boards import check_counts, end, job_for, play, say, show
from lindt_experiments.detectors import null_levels, outcomes, page, records
from lindt_experiments.detectors.configurations import SLOW, TASKS, Configuration, configurations, seeds_of
from lindt_experiments.detectors.outcomes import DetectorOutcome
from lindt_experiments.detectors.records import Record
from lindt_experiments.detectors.replays import read_all
from lindt_experiments.plans.keys import content_key
from lindt_experiments.queue.gather import Origin, ended
from lindt_experiments.queue.jobs import Job, fetch_data
from lindt_experiments.queue.progress import Played, say_json
from lindt_experiments.queue.queue import deadline_after

LAST: Final = 10  # the number of last scored rounds that decide the label
NAME: Final = "detectors"
TITLE: Final = "every detector over the same federations: detected, false alarms, delay (smoke and cpu)"


@final
@dataclass(frozen=True)
class Wanted:
    """One run of a configuration, as a job of the queue."""

    configuration: Configuration
    index: int
    job: Job

    @property
    def cell(self) -> tuple[str, int]:
        return self.configuration.name, self.index


@final
@dataclass(frozen=True)
class Request:
    """The options of the command line."""

    scale: str
    seeds: int
    jobs: int
    runs: Path
    results: Path
    task: str | None = None
    replay: bool = False  # replay every detector on all records, not only on new ones
    again: bool = False  # also play runs whose stored line has no cosine
    hours: float | None = None  # the time limit, after which runs are stopped
    as_json: bool = False
    console: Console = field(default_factory=Console)

    def __post_init__(self) -> None:
        configurations(self.scale)
        if self.task not in (None, *TASKS, *SLOW):
            raise UserError(f"--task {self.task}: choose among {', '.join((*TASKS, *SLOW))}")
        check_counts(self.seeds, self.jobs, self.hours)

    @property
    def command(self) -> str:
        task, again = f" --task {self.task}" if self.task else "", " --again" if self.again else ""
        return f"lindt reproduce {NAME} --scale {self.scale} --seeds {self.seeds}{task}{again}"

    def wanted(self) -> list[Wanted]:
        return [
            Wanted(one, index, job_for(one.plan(index), index, self.runs, short=one.task not in SLOW))
            for one in configurations(self.scale)
            if self.task in (None, one.task)
            for index in range(seeds_of(one, self.seeds))
        ]


def reproduce(request: Request) -> int:
    """Play and record the runs, replay the detectors, write the page. Returns the exit code: 1 where a run failed."""
    origin = Origin.now(request.command)
    wanted = request.wanted()
    left = to_play(wanted, request)
    fetch_data(one.job.plan for one in left)
    if request.again:
        _forget(left, request.runs)
    _keep_known(wanted, request, origin)
    played = _play(left, request, origin)
    kept = current(outcomes.load(request.results, request.scale), request.scale)
    if kept:
        null_levels.measure(request.results, request.scale, again=request.replay)
        written = page.write(kept, request.scale, request.results)
        words = page.conclusions(kept, null_levels.read(request.results, request.scale))
        show(request, NAME, written, len(kept), [one.replace("**", "") for one in words])
    return end(request, played, len(left))


def to_play(wanted: Sequence[Wanted], request: Request) -> list[Wanted]:
    """The runs without a stored result, a record or a finished run; with --again also those without the cosine."""
    known = _known(request)
    return [
        one
        for one in wanted
        if (one.cell, one.job.key) not in known and not _is_recorded(one, request.runs, with_cosine=request.again)
    ]


def _known(request: Request) -> set[tuple[tuple[str, int], str]]:
    """The runs with a stored result; with --again only those with the cosine."""
    kept = outcomes.load(request.results, request.scale)
    return {(one.cell, one.plan) for one in kept if one.cosine is not None or not request.again}


def _is_recorded(wanted: Wanted, runs: Path, *, with_cosine: bool) -> bool:
    path = records.path_of(runs, wanted.job.key)
    if not path.exists() and not ended(wanted.job.folder, wanted.job.key):
        return False
    if not with_cosine:
        return True
    record = records.read(path) if path.exists() else records.record_of(wanted.job.folder)
    return record.cosines is not None


def _forget(left: Sequence[Wanted], runs: Path) -> None:
    """Delete the records and finished runs of runs to play again; an interrupted run is resumed."""
    for one in left:
        records.path_of(runs, one.job.key).unlink(missing_ok=True)
        if ended(one.job.folder, one.job.key):
            shutil.rmtree(one.job.folder)


def _keep_known(wanted: Sequence[Wanted], request: Request, origin: Origin) -> None:
    """Replay the detectors on recorded or finished runs: on those without a result, or with --replay on all."""
    known = _known(request)
    fresh, absent = [], 0
    for one in wanted:
        if (one.cell, one.job.key) in known and not request.replay:
            continue
        record = record_for(one, request.runs)
        if record is not None:
            fresh.append(outcome_of(one, record, request.scale, origin))
        absent += record is None and (one.cell, one.job.key) in known
    if fresh:
        outcomes.keep(request.results, request.scale, fresh)
        say(request, f"replayed all detectors on {len(fresh)} recorded runs")
    if absent:
        say(request, f"{absent} stored runs have no record in {request.runs}: their lines are not changed")


def record_for(wanted: Wanted, runs: Path) -> Record | None:
    """The record from its file, or from the folder of the finished run; None where neither exists."""
    path = records.path_of(runs, wanted.job.key)
    if path.exists():
        return records.read(path)
    if not ended(wanted.job.folder, wanted.job.key):
        return None
    record = records.record_of(wanted.job.folder)
    records.write(path, record)
    return records.read(path)  # as a later replay reads it


def _play(left: Sequence[Wanted], request: Request, origin: Origin) -> Played:
    by_key = {one.job.key: one for one in left}

    def keep(job: Job) -> None:
        one = by_key[job.key]
        record = record_for(one, request.runs)
        assert record is not None
        outcomes.keep(request.results, request.scale, [outcome_of(one, record, request.scale, origin)])

    return play(request, [one.job for one in left], keep, deadline_after(request.hours))


def outcome_of(wanted: Wanted, record: Record, scale: str, origin: Origin) -> DetectorOutcome:
    """The true label of a run and the reading of each detector."""
    betas = [beta for _, beta in record.betas]
    if not betas:
        raise UserError(f"{wanted.job.name}: no round has a beta, so that it has no label; delete the run")
    last = betas[-LAST:]
    return DetectorOutcome(
        configuration=wanted.configuration.name,
        part=wanted.configuration.part,
        task=wanted.configuration.task,
        scale=scale,
        index=wanted.index,
        plan=record.plan,
        rounds=len(record.rounds),
        clients=record.clients,
        attackers=len(record.attackers),
        samples=sum(report.samples for report in record.last_reports.values()),
        negative=is_negative(betas, LAST),
        beta=sum(last) / len(last),
        scored=tuple(round for round, _ in record.betas),
        beta_curve=tuple(betas),
        delta=tuple(None if played.seen is None else played.seen.delta for played in record.rounds),
        cosine=record.cosines,
        readings={name: asdict(reading) for name, reading in read_all(record).items()},
        command=origin.command,
        commit=origin.commit,
        date=origin.date,
        seconds=record.seconds,
    )


def current(kept: Sequence[DetectorOutcome], scale: str) -> list[DetectorOutcome]:
    """The lines whose plan is the present plan of their configuration."""
    known = {one.name: one for one in configurations(scale)}
    found = [one for one in kept if one.configuration in known]
    return [one for one in found if content_key(known[one.configuration].plan(one.index)) == one.plan]


def dry_run(request: Request) -> None:
    """Print the number of runs to play, by task and part."""
    wanted = request.wanted()
    left = to_play(wanted, request)
    counted = Counter((one.configuration.task, one.configuration.part) for one in left)
    for (task, part), number in sorted(counted.items()):
        if request.as_json:
            say_json({"event": "plan", "task": task, "part": part, "runs": number})
        else:
            say(request, f"{task:10} {part:7} {number:4} runs")
    say(request, f"{len(left)} of {len(wanted)} runs are left to play")
