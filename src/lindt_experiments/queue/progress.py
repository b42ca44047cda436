"""The output of the queue: one progress bar for all runs, or a line of JSON for each event."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol, final

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lindt_experiments.queue.jobs import Job
from lindt_experiments.queue.queue import JobEvent, passed, play_all


class ProgressReporter(Protocol):
    def report(self, events: JobEvent) -> None: ...


@final
class Lines:
    """Events as lines of JSON."""

    def report(self, events: JobEvent) -> None:
        line: dict[str, object] = {"event": events.happening, "run": events.job.name}
        if events.happening in ("started", "round"):
            line |= {"round": events.round, "rounds": events.job.plan.rounds}
        if events.error:
            line["error"] = events.error
        say_json(line)


@final
class Bar:
    """A progress bar: the share of the work that is done, the time left, and the present runs."""

    def __init__(self, console: Console, progress: Progress, task: TaskID, jobs: Sequence[Job]) -> None:
        self.console, self.progress, self.task = console, progress, task
        self.before = {job.key: job.played() for job in jobs}
        # Of the runs that share private models only one trains them; a resumed run has them already.
        first = {job.models: job.key for job in reversed(jobs) if not self.before[job.key]}
        self.alone = {job.key: job.work.alone if first.get(job.models) == job.key else 0.0 for job in jobs}
        self.total = {j.key: self.alone[j.key] + j.work.round * (j.plan.rounds - self.before[j.key]) for j in jobs}
        self.done = dict.fromkeys(self.total, 0.0)
        self.playing: dict[str, str] = {}
        self.ended, self.jobs = 0, len(jobs)
        progress.update(task, total=sum(self.total.values()))

    def report(self, events: JobEvent) -> None:
        job, work = events.job, events.job.work
        alone, played = self.alone[job.key], f"{events.round}/{job.plan.rounds}"
        if events.happening == "alone":
            self.done[job.key] = min(self.done[job.key] + alone / max(events.clients, 1), alone)
            self.playing[job.key] = f"{job.plan.name} each client alone"
        elif events.happening in ("started", "round"):
            new = events.round - self.before[job.key]
            self.done[job.key] = work.round * new + alone if new > 0 else 0.0
            self.playing[job.key] = f"{job.plan.name} {played}"
        elif events.happening == "waiting":
            self._say(f"{job.name}: another process is playing it; waiting for its end")
        else:
            self.playing.pop(job.key, None)
            self.done[job.key] = self.total[job.key]
            self.ended += 1
        if events.happening == "failed":
            self._say(f"[red]failed[/] {job.name}:\n{escape(events.error)}")
            self._say(f"  alone: lindt run {job.plan_file} --out {job.folder} --resume --engine inprocess")
        state = f"{self.ended}/{self.jobs} runs  {', '.join(self.playing.values())}"
        self.progress.update(self.task, completed=sum(self.done.values()), state=state)
        if events.happening == "ended" and not self.console.is_terminal:  # a file shows no bar
            left = self.progress.tasks[0].time_remaining
            time = "" if left is None else f", {timedelta(seconds=round(left))} left"
            self._say(f"{job.name} ended: {self.ended} of {self.jobs} runs{time}")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def progress_for(console: Console, as_json: bool, jobs: Sequence[Job]) -> Iterator[ProgressReporter]:
    if as_json or not jobs:
        yield Lines()
        return
    progress = Progress(
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left  {task.fields[state]}"),
        console=console,
        transient=True,
        speed_estimate_period=900,
    )
    with progress:
        yield Bar(console, progress, progress.add_task("all", state=f"0/{len(jobs)} runs"), jobs)


@final
@dataclass(frozen=True)
class Audience:
    """The output of the runs, and the command that continues after Ctrl-C."""

    console: Console
    as_json: bool
    command: str


class Played(NamedTuple):
    """How many runs have ended, and how many have failed."""

    ended: int
    failed: int


def play_jobs(
    jobs: Sequence[Job],
    at_once: int,
    together: int,
    keep: Callable[[Job], None],
    audience: Audience,
    until: float | None = None,
) -> Played:
    """Play the jobs, up to the time `until`, and call `keep` for each that ends."""
    failed = ended = 0
    with progress_for(audience.console, audience.as_json, jobs) as progress:
        events = play_all(jobs, at_once, together, until)
        try:
            for event in events:
                if event.happening == "ended":
                    keep(event.job)
                ended += event.happening == "ended"
                failed += event.happening == "failed"
                progress.report(event)
        except KeyboardInterrupt:
            events.close()  # ends the processes
            hint = f"stopped; finished rounds are kept: `{audience.command}` continues from there\n"
            (sys.stderr if audience.as_json else sys.stdout).write(hint)
            sys.exit(130)
        finally:
            events.close()
    if passed(until) and ended + failed < len(jobs):
        text = f"time limit reached: {ended} of {len(jobs)} runs ended; `{audience.command}` continues from there\n"
        (sys.stderr if audience.as_json else sys.stdout).write(text)
    return Played(ended, failed)


def say_json(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
