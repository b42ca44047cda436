"""What every engine checks before it carries tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lindt.protocols import Task

CLOSED: Final = "the engine is closed; build another"


def check_tasks(tasks: Sequence[Task], clients: int) -> None:
    """Refuse tasks for clients that do not exist; a negative id would be a client counted from the end."""
    for task in tasks:
        if not 0 <= task.client < clients:
            raise ValueError(f"client {task.client} does not exist: the problem has clients 0 to {clients - 1}")
