"""A Flower run in the folder format of our own runs, as far as the server knows it (store.py names the files).

What a server on Flower does not know stays empty: labels, attackers, and the sizes of clients that have not answered.
plan.toml holds the rule of detection and the number of rounds; there is no plan behind such a run, so
`lindt run --resume` refuses it. To go on, start the Flower app again.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, final
from weakref import WeakValueDictionary

import flwr
import tomli_w
import torch

import lindt
from lindt.disk import write_whole
from lindt.errors import UserError
from lindt.planfile import to_dict
from lindt.records import totals
from lindt.recovery import OnDetection
from lindt.store import FORMAT, RoundLog, Store

TASK = "a Flower app"

# Loops of the user's own have no end that the detector sees. A new one on the same folder ends the one before.
_OWN_LOOPS: Final[WeakValueDictionary[Path, Journal]] = WeakValueDictionary()


@final
class Journal:
    """One run's folder, taken up where it was left.

    A round's line is written when the round is evaluated. Where no evaluation comes it is written when the next round
    begins, and on `close` at the latest. In a loop of the user's own the last round is written at once, with the
    summary; an evaluation that still comes replaces both.
    """

    def __init__(self, folder: Path, name: str, rule: OnDetection, strategies: list[str]) -> None:
        self.folder, self.rule, self.log = folder, rule, RoundLog(folder)
        self._clock = time.perf_counter()
        self._lock, self._process, self._is_open = ExitStack(), 0, False
        self._pending: dict[str, Any] | None = None  # a round's line that is not written yet
        self._rounds, self._own_loop = 0, False
        self.lines = 0  # how many rounds have been played, those of earlier sessions too
        about = self._read()
        if about is None:
            versions = {"lindt": lindt.__version__, "torch": torch.__version__, "flwr": flwr.__version__}
            about = {
                "format": FORMAT,
                "run": uuid.uuid4().hex,
                "name": name,
                "task": TASK,
                "data": None,
                "class_names": [],
                "metric_in_percent": True,
                "clients": [],
                "versions": versions | {"python": platform.python_version()},
                "strategies": strategies,
            }
        elif about.get("strategies") != strategies:
            raise UserError(f"{folder} was run with {about.get('strategies')}; start it with the same, or name another")
        self.about: dict[str, Any] = about

    @property
    def run(self) -> str:
        return str(self.about["run"])

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def lock(self, *, own_loop: bool) -> None:
        """One server a folder, until `close`."""
        self.close()
        previous = _OWN_LOOPS.get(self.folder.absolute())
        if previous is not None:
            previous.close()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(Store(self.folder, self.about).locked())
        except OSError as error:
            raise UserError(f"folder = {self.folder}: cannot be written ({error.strerror}); name another") from None
        self._process, self._is_open, self._own_loop = os.getpid(), True, own_loop
        if own_loop:
            _OWN_LOOPS[self.folder.absolute()] = self

    def open(self, rounds: int, done: int, count: int | None, pending: dict[str, Any] | None) -> None:
        """Cut back to the checkpoint of round `done`; a round whose line was not written yet gets it now."""
        self.log.cut_back(done, count, pending)
        self.lines = len(self.log.lines())
        try:
            self._write_about()
            method = {"adaptation": {"kind": "dual"}, "recovery": to_dict(self.rule)}
            plan = {"name": self.about["name"], "rounds": rounds, "method": method}
            write_whole(self.folder / "plan.toml", tomli_w.dumps(plan).encode())
        except OSError as error:
            raise UserError(f"folder = {self.folder}: cannot be written ({error.strerror}); name another") from None
        (self.folder / "summary.json").unlink(missing_ok=True)
        self._rounds, self._clock = rounds, time.perf_counter()
        if self._own_loop and done >= rounds:
            self.finish()

    def played(self, line: dict[str, Any]) -> None:
        """A round was aggregated and is in the checkpoint."""
        self.flush()
        self._pending, self.lines = line, self.lines + 1
        if self._own_loop and line["round"] >= self._rounds:
            self.finish()

    def scored(self, line: dict[str, Any]) -> None:
        """The round was evaluated."""
        written, self._pending = self._pending is None, line if self._pending is not None else None
        self.flush()
        if written and self.log.lines()[-1] != json.loads(
            json.dumps(line)
        ):  # evaluated again, or the last round of a loop of the user's own
            self.log.replace_last(line)
            if (self.folder / "summary.json").exists():
                self.finish()

    def flush(self) -> None:
        """Write the line of a round that was not evaluated."""
        if not self._is_open:
            raise UserError(f"{self.folder}: the run was ended, or begun again by another detector; call begin() anew")
        if self._pending is not None:
            now, line, self._pending = time.perf_counter(), self._pending, None
            self.log.append(line, now - self._clock)
            self._clock = now

    def know(self, clients: list[dict[str, Any]], percent: bool) -> None:
        """Who takes part, as far as it has shown."""
        if clients != self.about["clients"] or percent != self.about["metric_in_percent"]:
            self.about |= {"clients": clients, "metric_in_percent": percent}
            self._write_about()

    def finish(self) -> None:
        self.flush()
        words = "not known here: ask the strategy, where it adds noise"
        summary = totals(self.log.lines(), 10, self.about["metric_in_percent"])
        summary["privacy"] = {"words": words, "epsilon": None, "delta": None}
        Store(self.folder, self.about).finish(summary)

    def close(self) -> None:
        """Write what is not written yet and give the folder free. A forked process leaves both to its parent."""
        if self._is_open and self._process == os.getpid():
            with self._lock:
                try:
                    self.flush()
                finally:
                    self._is_open = False

    def _write_about(self) -> None:
        write_whole(self.folder / "run.json", json.dumps(self.about, indent=2).encode())

    def _read(self) -> dict[str, Any] | None:
        if not (self.folder / "run.json").exists():
            return None
        about = dict(Store.open(self.folder).about)
        if about.get("task") != TASK:
            raise UserError(f"{self.folder} holds a run that is not a Flower app's; name another folder")
        return about
