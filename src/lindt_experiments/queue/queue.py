"""Plays jobs in processes of their own, some at once, and tells what happens.

Longest first. Runs that share private models never train them at the same time: the next of such a group starts when
the one before has played its first round, and finds them in the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, final

from lindt_experiments.queue.jobs import Job

Happening = Literal["started", "alone", "round", "ended", "failed", "waiting"]
PATIENCE = 10.0  # seconds for a process that was asked to end
ROOT = Path(__file__).parents[2]


@final
@dataclass(frozen=True)
class JobEvent:
    """Something that happened to a job. `round` is the last one played; `clients` goes with "alone"."""

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
        paths = [str(path) for job in jobs for path in (job.plan_file, job.folder)]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        path = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        with self.log.open("w") as log:
            # A session of its own: Ctrl-C in the terminal reaches only us, and we end it in order.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lindt_experiments.queue.worker", *paths],
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
        """What a line of the process says of its first job that has not ended."""
        if not line.startswith("{"):
            return None  # chatter of a library
        told: dict[str, Any] = json.loads(line)
        happening, job = told["event"], self.left[0]
        if happening in ("round", "ended"):
            self.alone = False
        if happening == "ended":
            self.left.popleft()
        return JobEvent(happening, job, told.get("round", 0), told.get("clients", 0))

    def failure(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        said = "\n".join(lines[-5:]) or "it said nothing"
        code = self.process.returncode
        return said if code > 0 else f"ended by signal {-code}: {said}"

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.reader.join()


def play_all(jobs: Sequence[Job], at_once: int, together: int = 1) -> Generator[JobEvent, None, None]:
    """Play all jobs and tell of each; one that fails is told of and the others go on. Closing it stops everything."""
    pending = sorted(jobs, key=lambda job: -(job.work.alone + job.work.federation))
    inbox: SimpleQueue[tuple[WorkerProcess, str | None]] = SimpleQueue()
    players: set[WorkerProcess] = set()
    waiting: set[str] = set()
    try:
        while pending or players:
            while len(players) < at_once and (batch := _next(pending, players, together)):
                pending = [job for job in pending if job not in batch]
                players.add(WorkerProcess(batch, inbox))
            if not players:  # all that is left is in the hands of another process
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
    """The next job that may start, with others of its batch that the same process plays after it."""
    training = {worker.group for worker in players if worker.alone}
    free = [job for job in pending if job.group not in training and not job.busy()]
    return [job for job in free if _batch(job) == _batch(free[0])][:together] if free else []


def _batch(job: Job) -> str:
    return job.batch or job.group
