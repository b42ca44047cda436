"""A Flower run in the folder format of our own runs, as far as the server knows it (store.py names the files).

What a server on Flower does not know stays empty: labels, attackers, and the sizes of clients that have not answered.
plan.toml holds the rule of detection and the number of rounds; there is no plan behind such a run, so
`lindt run --resume` refuses it. To go on, start the Flower app again.
"""

from __future__ import annotations

import json
import platform
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import flwr
import tomli_w
import torch

import lindt
from lindt.disk import append_line, write_whole
from lindt.errors import UserError
from lindt.planfile import to_dict
from lindt.records import totals
from lindt.recovery import OnDetection
from lindt.store import FORMAT, Store, read_lines

TASK = "a Flower app"


@final
class Journal:
    """One run's folder, taken up where it was left."""

    def __init__(self, folder: Path, name: str, rule: OnDetection, strategies: list[str]) -> None:
        self.folder, self.rule = folder, rule
        self._clock = time.perf_counter()
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

    def open(self, rounds: int, done: int, pending: dict[str, Any] | None) -> None:
        """Cut back to the checkpoint; a round whose line was not written yet gets it now."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(self.folder / "run.json", json.dumps(self.about, indent=2).encode())
            method = {"adaptation": {"kind": "dual"}, "recovery": to_dict(self.rule)}
            plan = {"name": self.about["name"], "rounds": rounds, "method": method}
            write_whole(self.folder / "plan.toml", tomli_w.dumps(plan).encode())
        except OSError as error:
            raise UserError(f"folder = {self.folder}: cannot be written ({error.strerror}); name another") from None
        for name in ("rounds.jsonl", "timing.jsonl"):
            path = self.folder / name
            kept = [line for line in read_lines(path) if line["round"] <= done]
            if name == "rounds.jsonl" and pending and (not kept or kept[-1]["round"] < done):
                kept.append(pending)
            if kept or path.exists():
                write_whole(path, b"".join(_json(line) + b"\n" for line in kept))
        (self.folder / "summary.json").unlink(missing_ok=True)
        self._clock = time.perf_counter()

    def append(self, line: dict[str, Any]) -> None:
        now = time.perf_counter()
        append_line(self.folder / "rounds.jsonl", _json(line) + b"\n")
        timing = {"round": line["round"], "seconds": round(now - self._clock, 4)}
        append_line(self.folder / "timing.jsonl", _json(timing) + b"\n")
        self._clock = now

    def know(self, clients: list[dict[str, Any]], percent: bool) -> None:
        """Who takes part, as far as it has shown."""
        if clients != self.about["clients"] or percent != self.about["metric_in_percent"]:
            self.about |= {"clients": clients, "metric_in_percent": percent}
            write_whole(self.folder / "run.json", json.dumps(self.about, indent=2).encode())

    def finish(self) -> None:
        lines = list(read_lines(self.folder / "rounds.jsonl"))
        words = "not known here: ask the strategy, where it adds noise"
        summary = totals(lines, 10, self.about["metric_in_percent"])
        summary["privacy"] = {"words": words, "epsilon": None, "delta": None}
        write_whole(self.folder / "summary.json", json.dumps(summary, indent=2).encode())

    def _read(self) -> dict[str, Any] | None:
        path = self.folder / "run.json"
        if not path.exists():
            return None
        try:
            about = json.loads(path.read_bytes())
        except (OSError, ValueError):
            about = None
        if not isinstance(about, dict) or about.get("format") != FORMAT or not isinstance(about.get("run"), str):
            raise UserError(f"{path} is damaged or of another format; name another folder")
        if about.get("task") != TASK:
            raise UserError(f"{self.folder} holds a run that is not a Flower app's; name another folder")
        return about

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One server a folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with Store(self.folder, self.about).locked():
            yield


def _json(line: dict[str, Any]) -> bytes:
    return json.dumps(line, sort_keys=True, allow_nan=False).encode()
