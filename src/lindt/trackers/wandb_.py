"""Weights & Biases: offline unless WANDB_MODE says otherwise, so that nothing leaves the machine by default.

`wandb sync RUN/wandb/offline-run-*` sends the run later.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final


def open_run(folder: Path, run: str, name: str, plan: Mapping[str, object], done: int) -> WandB:
    wandb: Any = importlib.import_module("wandb")  # typed or not, as it is installed or not
    tracked = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "lindt"),
        id=run,  # the same for a resumed run
        name=folder.name,
        group=name,
        config=dict(plan),
        dir=str(folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        resume="allow",
        settings=wandb.Settings(console="off", silent=True, disable_git=True, save_code=False),
    )
    return WandB(tracked)


@final
class WandB:
    def __init__(self, run: Any) -> None:
        self.run, self.code = run, 1  # until the run has ended

    def round(self, round: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=round)

    def end(self, values: Mapping[str, float]) -> None:
        self.run.summary.update(dict(values))
        self.code = 0

    def close(self) -> None:
        self.run.finish(exit_code=self.code)
