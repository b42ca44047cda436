"""The tasks that this user named on the command line, by run, so that `lindt export` does not need --task again.

run.json names a run's task too. But a task is code that is imported, and a folder may come from somebody whom the user
does not trust: only a task that the user has typed on this machine is imported without being typed again.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from lindt.errors import UserError
from lindt.runs.files import write_whole
from lindt.runs.play import cache_folder
from lindt.runs.schema import FROM_FLOWER, FROM_PYTHON


def remember_task(run: str, task: str) -> None:
    """Keep the task of a run that begins here, in the user's cache folder.

    Where that cannot be written, the run goes on: `lindt export` then asks for the task.
    """
    path = _place(run)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, task.encode())


def require_task(folder: Path, run: str, kept: str | None) -> str | None:
    """The task of the run in `folder`; `kept` is what its run.json says, and has to be what was remembered."""
    if kept is None or kept in (FROM_FLOWER, FROM_PYTHON):  # no code to import; Store.require_task refuses these
        return None
    try:
        remembered = _place(run).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        remembered = None
    if remembered != kept:
        raise UserError(
            f"{folder}: its run.json names the task {kept}, but you did not begin this run on this machine; give "
            f"--task {kept} to import that code"
        )
    return kept


def _place(run: str) -> Path:
    return cache_folder().parent / "tasks" / hashlib.sha256(run.encode()).hexdigest()
