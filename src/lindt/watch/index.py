"""The runs below one folder, and no run outside it. Each is read on from where the last reading ended."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, final

from lindt.errors import UserError, in_short, plain
from lindt.report.payload import PrivacySpent, budget_is_open, privacy_spent, privacy_spent_so_far
from lindt.report.reading import Reader, Run, find_runs, is_locked
from lindt.report.terminal import by_time, last_change, run_row
from lindt.report.verdict import verdict

OPEN_RUNS = 32  # kept in memory with all their rounds
BUDGET_EVERY = 10  # rounds after which the budget of a running run is computed again


@final
class RunIndex:
    """The runs of a folder. Several threads may use it: only one reads files at a time."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; name a folder that holds runs")
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, tuple[Reader, object, Run]] = OrderedDict()
        self._briefs: dict[str, tuple[object, dict[str, Any]]] = {}
        self._budgets: dict[str, tuple[int, PrivacySpent]] = {}
        self._computing = threading.Lock()  # one budget at a time

    def folder(self, id: str) -> Path:
        """The folder of a run. Refuses an id that leads out of the runs' folder, by `..`, by `/` or by a link."""
        try:
            found = self.root / id
            # A run has one id: `one/`, `./one` and the like would each be kept as another run.
            inside = found.resolve(strict=True) == found and self.id_of(found) == id
        except (OSError, ValueError, RuntimeError):  # missing or outside, a NUL in its name, a loop of links
            inside = False
        if not inside or not (found / "plan.toml").is_file():
            raise UserError(f"there is no run {in_short(id)} here")
        return found

    def id_of(self, folder: Path) -> str:
        """The run's name in the page. A server started inside a run shows that run, as "."."""
        return "." if folder == self.root else folder.relative_to(self.root).as_posix()

    def run(self, id: str) -> Run:
        """The run as it is now: the same object as before where its files have not changed."""
        folder = self.folder(id)
        with self._lock:
            reader, kept, run = self._open.pop(id, (None, None, None))
            reader, now = reader or Reader(folder), _signature(folder)
            if run is None or kept != now:
                run = reader.read()
            self._open[id] = reader, now, run
            while len(self._open) > OPEN_RUNS:
                self._open.popitem(last=False)
            return run

    def told(self, error: UserError) -> str:
        """An error's text for visitors, without the path of the runs' folder on this machine."""
        return str(error).replace(f"{self.root}/", "").replace(str(self.root), "the run")

    def spent(self, id: str, run: Run) -> PrivacySpent:
        """The privacy budget. For a run that has not ended, the last one that a thread of its own has computed."""
        if not budget_is_open(run):
            return privacy_spent(run)
        step = math.ceil(len(run.rounds) / BUDGET_EVERY) if run.state == "running" else -len(run.rounds)
        known = self._budgets.get(id)
        if (known is None or known[0] != step) and self._computing.acquire(blocking=False):
            threading.Thread(target=self._compute, args=(id, run, step), daemon=True).start()
        return known[1] if known else privacy_spent(run)

    def _compute(self, id: str, run: Run, step: int) -> None:
        try:
            self._budgets[id] = (step, privacy_spent_so_far(run))
        finally:
            self._computing.release()

    def run_rows(self) -> list[dict[str, Any]]:
        """A row for every run, running ones first, then the latest; one that has not changed is not read again."""
        rows = []
        for folder in find_runs(self.root):
            id, now = self.id_of(folder), _signature(folder)
            if not is_text(id):
                rows.append(_unreadable(folder, plain(id), "its folder's name is not valid text"))
                continue
            kept = self._briefs.get(id)
            if kept is None or kept[0] != now:
                kept = self._briefs[id] = (now, self._brief(id))
            rows.append(kept[1])
        return sorted(rows, key=by_time)

    def _brief(self, id: str) -> dict[str, Any]:
        try:
            run = self.run(id)
        except UserError as error:
            return _unreadable(self.root / id, id, self.told(error))
        found = verdict(run)
        return {**run_row(run, id), "tone": found.tone, "headline": found.headline}


def _unreadable(folder: Path, shown: str, reason: str) -> dict[str, Any]:
    return {"run": shown, "state": "unreadable", "changed": last_change(folder), "verdict": reason}


def _signature(folder: Path) -> object:
    """A value that changes when a run's files change."""
    found: list[object] = [is_locked(folder)]
    for name in ("run.json", "plan.toml", "rounds.jsonl", "timing.jsonl", "summary.json"):
        try:
            status = os.lstat(folder / name)
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def is_text(name: str) -> bool:
    """Whether the name is valid Unicode and can be sent: a file's name may be any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
