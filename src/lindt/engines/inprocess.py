"""The engine for one process: clients answer one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Self, final

import torch

from lindt.client.client import Client, WorkerContext
from lindt.client.private_models import PrivateModelCache
from lindt.client.private_store import BackgroundWriter, FolderStore, MemoryStore, PrivateStore, forget_after
from lindt.client.training import prepare_model
from lindt.plan.plan import Plan, attackers_of
from lindt.plan.problem import Problem, backdoor_of
from lindt.protocols import Reply, Task
from lindt.seeds import with_threads
from lindt.weights import first_model

CLOSED: Final = "the engine is closed; build another"


@final
class InProcess:
    """`folder` keeps v_i on disk, under the run's id; without it they live in memory.

    `far_away`: these clients answer a server in another place, which knows the plan and with it every seed.
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
        versions: PrivateStore = MemoryStore() if folder is None else BackgroundWriter(FolderStore(folder, run))
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
        )
        self.versions, self.run = versions, run
        self._threads, self._closed = plan.threads, False
        self.clients = [Client(id, worker) for id in range(len(problem.data))]

    def available(self) -> Sequence[int]:
        return range(len(self.clients))

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        """When it has ended, every v_i of it is kept for good."""
        if self._closed:
            raise RuntimeError(CLOSED)
        check_tasks(tasks, len(self.clients), self.run)
        return self._replies(tasks)

    def _replies(self, tasks: Sequence[Task]) -> Iterator[Reply]:
        try:
            for task in tasks:
                with with_threads(self._threads), torch.enable_grad():  # not around the yield: the caller has its own
                    reply = self.clients[task.client].handle(task)
                yield reply
        finally:
            self.versions.flush()

    def close(self) -> None:
        """Nothing to stop: everything is in this process, and a dispatch leaves nothing unwritten."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def forget_after(self, round: int) -> None:
        for client in self.clients:
            forget_after(self.versions, client.id, round)


def check_tasks(tasks: Sequence[Task], clients: int, run: str) -> None:
    """Refuse tasks for clients that do not exist, and tasks of another run than the engine keeps the v_i of.

    A negative id would be a client counted from the end.
    """
    for task in tasks:
        if task.run != run:
            raise ValueError(f"a task of run {task.run!r}: this engine keeps the v_i of run {run!r}")
        if not 0 <= task.client < clients:
            raise ValueError(f"client {task.client} does not exist: the problem has clients 0 to {clients - 1}")
