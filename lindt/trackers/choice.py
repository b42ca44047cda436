"""Which trackers a run tells, and what happens when one cannot be told: the run goes on without it, and says so."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from lindt.errors import UserError
from lindt.trackers.values import Tracker, end_values, round_values, settings

# The package that each needs; its extra and its module here have the tracker's name.
TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def check_trackers(names: Sequence[str]) -> None:
    """Before anything is written: is there such a tracker, and is it installed?"""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--track {name}: choose among {', '.join(TRACKERS)}")
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise UserError(f"--track {name} needs a package that is not there: pip install 'lindt[{name}]'")


@final
class Tracking:
    """A run's trackers. `say` takes a sentence where one of them fails."""

    def __init__(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        self.names, self.say = list(dict.fromkeys(names)), say
        self.trackers: dict[str, Tracker] = {}

    def begin(self, folder: Path, run: str, plan: Mapping[str, Any], done: int) -> None:
        """`run` is the run's id, the same when it goes on after `done` rounds."""
        for name in self.names:
            module = importlib.import_module(f"lindt.trackers.{name}_")
            self._safely(name, partial(module.open_run, folder, run, str(plan["name"]), settings(plan), done))

    def round(self, line: Mapping[str, Any]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._safely(name, partial(tracker.round, line["round"], round_values(line)))

    def end(self, summary: Mapping[str, Any]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._safely(name, partial(tracker.end, end_values(summary)))

    def close(self) -> None:
        for name, tracker in list(self.trackers.items()):
            self._safely(name, tracker.close)
        self.trackers.clear()

    def _safely(self, name: str, tell: Callable[[], Tracker | None]) -> None:
        try:
            if (opened := tell()) is not None:
                self.trackers[name] = opened
        except Exception as error:  # noqa: BLE001  # a tracker's server that is gone must not cost a night's run
            self.trackers.pop(name, None)
            reason = str(error).splitlines()[0] if str(error) else ""
            self.say(f"--track {name} failed and is left out from here on: {type(error).__name__} {reason}")
