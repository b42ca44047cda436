"""The engine for one process: clients answer one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import final

import torch

from lindt.alone import Cache
from lindt.client import Client, Place
from lindt.engines.base import Reply, Task
from lindt.fit import at_work, with_threads
from lindt.parties import attackers_of, backdoor_of
from lindt.plan import Plan
from lindt.problem import Problem, first_model
from lindt.versions import Behind, InFolder, InMemory, Versions, forget_after


@final
class InProcess:
    """`folder` keeps v_i on disk, under the run's id; without it they live in memory."""

    def __init__(
        self,
        plan: Plan,
        problem: Problem,
        *,
        run: str = "",
        folder: Path | None = None,
        cache: Path | None = None,
        device: str = "cpu",
    ) -> None:
        versions: Versions = InMemory() if folder is None else Behind(InFolder(folder, run))
        place = Place(
            plan=plan,
            problem=problem,
            shared=at_work(
                first_model(problem, plan), torch.device(device), problem.data[0][0].take(torch.arange(1))[0]
            ),
            versions=versions,
            cache=Cache(cache),
            device=torch.device(device),
            attackers=attackers_of(plan, len(problem.data)),
            backdoor=backdoor_of(plan, problem),
        )
        self.versions = versions
        self._threads = plan.threads
        self.clients = [Client(id, place) for id in range(len(problem.data))]

    def available(self) -> Sequence[int]:
        return range(len(self.clients))

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        """When it has ended, every v_i of it is kept for good."""
        try:
            for task in tasks:
                with with_threads(self._threads), torch.enable_grad():  # not around the yield: the caller has its own
                    reply = self.clients[task.client].handle(task)
                yield reply
        finally:
            self.versions.settle()

    def close(self) -> None:
        """Nothing to stop: everything is in this process, and a dispatch leaves nothing unwritten."""

    def forget_after(self, round: int) -> None:
        for client in self.clients:
            forget_after(self.versions, client.id, round)
