"""The engine of one process: clients train one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self, final

import torch

from lindt.client.client import Client, WorkerContext
from lindt.client.optimizers import optimization_of
from lindt.client.private_models import PrivateModelCache
from lindt.client.private_store import BackgroundWriter, MemoryStore, PrivateStore, private_store
from lindt.client.training import prepare_model
from lindt.data.clients import VisitedData
from lindt.errors import UserError
from lindt.plan.plan import Plan, attackers_of, scored_clients
from lindt.plan.problem import Problem, backdoor_of, steps_differ
from lindt.protocols import Reply, Task
from lindt.seeds import with_threads
from lindt.user_code import note_user_code
from lindt.weights import first_model

_DOING: Final = {"train": "training", "evaluate": "evaluated", "private": "training alone"}
CLOSED: Final = "the engine is closed; build another"


@final
class InProcess:
    """All clients in this process. `folder` keeps v_i on disk, under the run's id; without it they stay in memory.

    `far_away` is true where the server is on another machine: it knows the plan and with it every seed.
    """

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        *,
        run: str = "",
        folder: Path | None = None,
        cache: Path | None = None,
        device: str = "cpu",
        far_away: bool = False,
    ) -> None:
        versions: PrivateStore = MemoryStore()
        if folder is not None:
            versions = BackgroundWriter(private_store(folder, run, len(problem.data)))
        lazy = isinstance(problem.data, VisitedData)
        worker = WorkerContext(
            plan=plan,
            problem=problem,
            shared=prepare_model(
                first_model(problem, plan), torch.device(device), problem.data[0][0].take(torch.arange(1))[0]
            ),
            versions=versions,
            cache=PrivateModelCache(cache),
            device=torch.device(device),
            attackers=attackers_of(plan, len(problem.data)),
            backdoor=backdoor_of(plan, problem),
            far_away=far_away,
            optimization=optimization_of(plan, problem) if steps_differ(plan, problem) else None,
            panel=frozenset(scored_clients(plan, len(problem.data))) if lazy else frozenset(),
        )
        self.versions, self.run = versions, run
        self._threads, self._closed = plan.threads, False
        self.clients: Sequence[Client] = (
            _Visited(worker) if lazy else [Client(id, worker) for id in range(len(problem.data))]
        )

    def available(self) -> Sequence[int]:
        return range(len(self.clients))

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        """The clients' replies, in order. Once the iterator has ended, every v_i of it is on disk."""
        if self._closed:
            raise RuntimeError(CLOSED)
        check_tasks(tasks, len(self.clients), self.run)
        return self._replies(tasks)

    def _replies(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        try:
            for task in tasks:
                with with_threads(self._threads), torch.enable_grad():  # not around the yield: the caller has its own
                    reply = self._handle(task)
                yield reply
        finally:
            self.versions.flush()

    def _handle(self, task: Task) -> Reply:
        try:
            return self.clients[task.client].handle(task)
        except UserError:
            raise
        except Exception as error:
            note_user_code(error, f"client {task.client} was {_DOING.get(task.kind, task.kind)} in round {task.round}")
            raise

    def close(self) -> None:
        """Refuse further tasks. There is no process to stop, and a dispatch leaves nothing unwritten."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def forget_after(self, round: int) -> None:
        self.versions.drop_after(round)


@final
class _Visited(Sequence[Client]):
    """Lazy clients, each built anew at every visit."""

    def __init__(self, worker: WorkerContext) -> None:
        self._worker = worker

    def __len__(self) -> int:
        return len(self._worker.problem.data)

    def __getitem__(self, id: int) -> Client:  # type: ignore[override]  # no slices
        return Client(id, self._worker)


def check_tasks(tasks: Sequence[Task], clients: int, run: str) -> None:
    """Refuse tasks for clients that do not exist, and tasks of another run than the engine's.

    A negative id must be refused: as an index it would count from the end.
    """
    for task in tasks:
        if task.run != run:
            raise ValueError(f"a task of run {task.run!r}: this engine keeps the v_i of run {run!r}")
        if not 0 <= task.client < clients:
            raise ValueError(f"client {task.client} does not exist: the problem has clients 0 to {clients - 1}")
