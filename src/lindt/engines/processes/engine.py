"""The engine for all cores of one machine: workers with one thread each, started when first needed.

The results are bitwise those of the in-process engine with `threads = 1`. Clients with much data train first, so that
no core waits long at a round's end. Replies are returned in the order of the tasks, so that no result depends on which
worker was faster.
"""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, final

from lindt.client.private_store import private_store
from lindt.data.clients import VisitedData
from lindt.engines.inprocess import CLOSED, check_tasks
from lindt.engines.processes.worker import Line, SharedWeights, problem_hashes, shared_file, task_line
from lindt.errors import UserError
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan, attackers_of
from lindt.plan.problem import Problem
from lindt.protocols import Reply, Task
from lindt.resources import keep_memory
from lindt.server.updates import ScoreFormat, unpack_reply
from lindt.weights import first_model, initial_weights

TRIES = 3  # of a task whose worker dies


@final
class _Worker:
    """One process and the connection to it."""

    def __init__(self, setup: dict[str, object], shared: int) -> None:
        ours, theirs = socket.socketpair()
        numbers = (theirs.fileno(), shared, os.getpid())
        command = [sys.executable, "-m", "lindt.engines.processes.__main__", *(str(number) for number in numbers)]
        # The import path of this process, so that a --task found here is found there.
        env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(), shared), env=env)
        theirs.close()
        self.line = Line(ours)
        with suppress(ConnectionError):  # if it has died already, the next receive raises EOFError
            self.line.send(setup)
        self.ready = False
        self.stopped = False
        self.task: int | None = None  # the index of the task that it works on

    def stop(self) -> None:
        self.stopped = True
        self.process.kill()
        self.process.wait()
        self.line.close()  # last: a worker that finds it closed would print an error


@final
class Processes:
    """Worker processes on this machine. Each builds the problem itself: the plan's own, or that of `task`.

    `task` names a function that returns `problem`, as "module:function". Without it `problem` has to be the plan's
    own, `problem_for(plan)`. A worker whose problem differs from `problem` refuses to start. `workers` is their number;
    None is one worker a core. `far_away` is that of `InProcess`.
    """

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        *,
        task: str | None = None,
        run: str = "",
        folder: Path | None = None,
        cache: Path | None = None,
        device: str = "cpu",
        workers: int | None = None,
        far_away: bool = False,
    ) -> None:
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            raise UserError(f"workers = {workers}: give a whole number from 1 on, or None for one worker a core")
        self._scratch = tempfile.TemporaryDirectory(prefix="lindt-")
        scratch = Path(self._scratch.name)
        folder, cache = folder or scratch / "private", cache or scratch / "cache"
        model = first_model(problem, plan)
        first = initial_weights(problem, plan, model)
        shape = (first.w_P.numel(), first.buffers.floats_F.numel(), first.buffers.counts_I.numel())
        self.count = os.cpu_count() or 1 if workers is None else workers
        self._file = shared_file()
        self.weights = SharedWeights(self._file.fileno(), *shape, 2 * self.count)
        self._setup = {
            "plan": to_dict(plan), "task": task, "run": run, "folder": str(folder.resolve()),
            "cache": str(cache.resolve()), "device": device, "shape": shape, "slots": 2 * self.count,
            "far_away": far_away,
            "problem": problem_hashes(plan, problem, model),
        }  # fmt: skip
        epochs = getattr(plan.environment.threat, "epochs", plan.training.epochs)
        hostile = attackers_of(plan, len(problem.data))
        self._cost: Sequence[int] | None = None  # of each client; not known of lazy clients, which are given in order
        if not isinstance(problem.data, VisitedData):
            self._cost = [len(train) * (epochs if i in hostile else 1) for i, (train, _) in enumerate(problem.data)]
        self._clients = len(problem.data)
        self._versions, self._run = private_store(folder, run, len(problem.data)), run
        self._expected = ScoreFormat.of(plan, problem, model)
        self._workers: list[_Worker] = []
        self._dispatch = object()  # identifies the dispatch that the workers' answers belong to
        self._failed_starts = 0  # workers killed one after the other before they were ready
        self._end = weakref.finalize(self, _stop, self._workers, self._file, self._scratch)

    def available(self) -> Sequence[int]:
        return range(self._clients)

    def forget_after(self, round: int) -> None:
        self._finish_abandoned()  # a worker still at work would write its v_i afterwards
        self._versions.drop_after(round)

    def close(self) -> None:
        """Stop the workers. The engine cannot be used afterwards."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        self._check_open()
        check_tasks(tasks, self._clients, self._run)
        return self._replies(tasks)

    def _replies(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        if not tasks:
            return
        self._check_open()
        self._finish_abandoned()
        this = self._dispatch
        self._start()
        self.weights.put(0, tasks[0].w, tasks[0].buffers)
        waiting = self._by_cost(tasks)  # popped from the end
        done: dict[int, Reply] = {}
        tries = [0] * len(tasks)
        returned = 0
        with selectors.DefaultSelector() as selector:
            for index, worker in enumerate(self._workers):
                selector.register(worker.line.connection, selectors.EVENT_READ, index)
                if worker.ready:
                    self._give(worker, index, waiting, tasks)
            while returned < len(tasks):
                for key, _ in selector.select():
                    worker = self._workers[key.data]
                    try:
                        self._receive(worker, key.data, done, tasks)
                    except EOFError:
                        selector.unregister(worker.line.connection)
                        worker = self._replace(key.data, waiting, tries)
                        selector.register(worker.line.connection, selectors.EVENT_READ, key.data)
                        continue
                    self._give(worker, key.data, waiting, tasks)
                while returned in done:
                    yield done.pop(returned)
                    returned += 1
                    if returned < len(tasks):
                        self._check_open()
                        if this is not self._dispatch:
                            raise RuntimeError("this dispatch is over: another one, or forget_after, was called since")

    def _by_cost(self, tasks: Sequence[Task]) -> list[int]:
        cost = self._cost
        if cost is None:
            return list(reversed(range(len(tasks))))
        return sorted(range(len(tasks)), key=lambda place: cost[tasks[place].client])

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RuntimeError(CLOSED)

    def _start(self) -> None:
        keep_memory()  # as in the workers: every round allocates K x P numbers, and P for each of K answers
        for index in range(self.count):
            if index == len(self._workers):
                self._workers.append(self._new_worker(index))
            elif self._workers[index].stopped:  # by the error that ended the last dispatch
                self._workers[index] = self._new_worker(index)

    def _new_worker(self, index: int) -> _Worker:
        return _Worker(self._setup | {"slot": index + 1}, self._file.fileno())

    def _finish_abandoned(self) -> None:
        """Receive and drop the answers that the caller of the last dispatch did not wait for."""
        self._dispatch = object()
        for worker in self._workers:
            if worker.task is not None and not worker.stopped:
                with suppress(EOFError):  # if it has died, the next dispatch notices it and replaces it
                    worker.line.receive()
                worker.task = None

    def _give(self, worker: _Worker, index: int, waiting: list[int], tasks: Sequence[Task]) -> None:
        if not waiting:
            return
        place = waiting.pop()
        task, slot = tasks[place], 0
        if task.w is not tasks[0].w or task.buffers is not tasks[0].buffers:
            slot = self.count + 1 + index
            self.weights.put(slot, task.w, task.buffers)
        worker.task = place
        with suppress(ConnectionError):  # if it has died, the next receive raises EOFError and the task is given again
            worker.line.send(task_line(task) | {"weights": slot})

    def _receive(self, worker: _Worker, index: int, done: dict[int, Reply], tasks: Sequence[Task]) -> None:
        found = worker.line.receive()
        if "error" in found or "failure" in found:
            worker.task = None  # it has answered: the next dispatch has nothing to wait for
            if not worker.ready:
                worker.stop()  # it could not start; the next dispatch starts another
            if "error" in found:
                raise UserError(found["error"])
            raise RuntimeError(f"a worker failed:\n{found['failure']}")
        if "ready" in found:
            worker.ready, self._failed_starts = True, 0
            return
        assert worker.task is not None
        task = tasks[worker.task]
        done[worker.task] = unpack_reply(found, task, self._expected, lambda: self.weights.get(index + 1))
        worker.task = None

    def _replace(self, index: int, waiting: list[int], tries: list[int]) -> _Worker:
        """Replace a worker that died (out of memory, killed) by a new one, and give its task again."""
        dead = self._workers[index]
        with suppress(subprocess.TimeoutExpired):
            dead.process.wait(1)  # its connection is closed, so it is about to end; its exit code is needed below
        dead.stop()
        if dead.task is not None:
            tries[dead.task] += 1
            if tries[dead.task] >= TRIES:
                raise RuntimeError(f"{TRIES} workers died one after the other on the same task")
            waiting.append(dead.task)
        elif not dead.ready:
            self._failed_starts += 1
            # A worker that was killed from outside is tried again; one that ended by itself would end again.
            if dead.process.returncode >= 0 or self._failed_starts >= TRIES:
                self._failed_starts = 0
                raise RuntimeError("a worker died before it was ready; see its message above")
        self._workers[index] = self._new_worker(index)
        return self._workers[index]


def _stop(workers: list[_Worker], file: object, scratch: tempfile.TemporaryDirectory[str]) -> None:
    for worker in workers:
        worker.stop()
    workers.clear()
    file.close()  # type: ignore[attr-defined]
    scratch.cleanup()
