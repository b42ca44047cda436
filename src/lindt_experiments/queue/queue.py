"""Plays jobs in separate processes, several at a time, and yields events.

The longest jobs are played first, unless there is a time limit. Runs that share private models never train them at the
same time: the next run of such a group starts when the run before has played its first round, and uses the cache.
Runs with the same first rounds play them once (queue/shared_rounds.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, final

from lindt.errors import UserError
from lindt_experiments.queue.jobs import Job

Happening = Literal["started", "alone", "round", "ended", "failed", "waiting"]
PATIENCE = 10.0  # seconds that a process has to end
ROOT = Path(__file__).parents[2]


@final
@dataclass(frozen=True)
class JobEvent:
    """An event of a job. `round` is the last finished round; `clients` is set in the event "alone"."""

    happening: Happening
    job: Job
    round: int = 0
    clients: int = 0
    error: str = ""


@final
class WorkerProcess:
    """A process that plays a few jobs one after the other, and the thread that reads its lines."""

    def __init__(self, jobs: Sequence[Job], inbox: SimpleQueue[tuple[WorkerProcess, str | None]]) -> None:
        self.left, self.inbox = deque(jobs), inbox
        self.alone = True  # until its first round: private models are being trained
        self.group, self.log = jobs[0].group, jobs[0].log
        for job in jobs:
            job.write_plan()
        tasks = [json.dumps(job.task()) for job in jobs]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        with self.log.open("w") as log:
            # In a session of its own: Ctrl-C in the terminal reaches only this process, which then ends the others.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lindt_experiments.queue.worker", *tasks],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=os.environ | threads | path,
            )
        self.reader = Thread(target=self._follow, daemon=True)
        self.reader.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.inbox.put((self, line))
        self.process.wait()
        self.inbox.put((self, None))

    def hear(self, line: str) -> JobEvent | None:
        """The event in a line of the process, for its first job that has not ended."""
        if not line.startswith("{"):
            return None  # output of a library
        told: dict[str, Any] = json.loads(line)
        happening, job = told["event"], self.left[0]
        if happening in ("round", "ended"):
            self.alone = False
        if happening == "ended":
            self.left.popleft()
        return JobEvent(happening, job, told.get("round", 0), told.get("clients", 0))

    def failure(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        said = "\n".join(lines[-5:]) or "it printed no error"
        code = self.process.returncode
        return said if code > 0 else f"ended by signal {-code}: {said}"

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.reader.join()


def check_hours(hours: float | None) -> None:
    if hours is not None and not 0 < hours <= 10_000:
        raise UserError(f"--hours {hours:g}: give a number of hours above 0")


def deadline_after(hours: float | None) -> float | None:
    """The time after so many hours, on the clock of `time.monotonic`; None without a limit."""
    return None if hours is None else time.monotonic() + 3600 * hours


def passed(until: float | None) -> bool:
    return until is not None and time.monotonic() >= until


def play_all(
    jobs: Sequence[Job], at_once: int, together: int = 1, until: float | None = None
) -> Generator[JobEvent, None, None]:
    """Play all jobs and yield their events. A job that fails does not end the others. Closing it stops all processes.

    With `until`, a time of `time.monotonic`, jobs are played in the given order, so that the next call continues those
    that were begun. At that time no further job starts, and running jobs are stopped, to be resumed.
    """
    by_work = sorted(jobs, key=lambda job: -(job.work.alone + job.work.federation))
    pending = by_work if until is None else list(jobs)
    inbox: SimpleQueue[tuple[WorkerProcess, str | None]] = SimpleQueue()
    players: set[WorkerProcess] = set()
    waiting: set[str] = set()
    try:
        while (pending or players) and not passed(until):
            while len(players) < at_once and (batch := _next(pending, players, together)):
                pending = [job for job in pending if job not in batch]
                players.add(WorkerProcess(batch, inbox))
            if not players:  # all remaining jobs are being played by another process
                fresh = [job for job in pending if job.name not in waiting]
                waiting |= {job.name for job in fresh}
                yield from (JobEvent("waiting", job) for job in fresh)
            try:
                worker, line = inbox.get(timeout=1.0)
            except Empty:
                continue
            if line is not None:
                if events := worker.hear(line):
                    yield events
                continue
            players.remove(worker)
            if worker.left:
                yield JobEvent("failed", worker.left.popleft(), error=worker.failure())
                pending = [*worker.left, *pending]
    finally:
        for worker in players:
            worker.stop()


def _next(pending: Sequence[Job], players: Iterable[WorkerProcess], together: int) -> list[Job]:
    """The next job that may start, with others of its batch that the same process plays after it.

    A run that can begin with the rounds of another waits until that run has kept them.
    """
    players = list(players)
    training = {worker.group for worker in players if worker.alone}
    others = [*pending, *(job for worker in players for job in worker.left)]
    free = [job for job in pending if job.group not in training and not job.busy() and not job.waits_for(others)]
    return [job for job in free if _batch(job) == _batch(free[0])][:together] if free else []


def _batch(job: Job) -> str:
    return job.batch or job.group
