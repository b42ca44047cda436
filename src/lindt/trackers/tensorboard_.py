"""TensorBoard: event files in the run's folder. `tensorboard --logdir runs` finds them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import final


def open_run(folder: Path, run: str, name: str, plan: Mapping[str, object], done: int) -> TensorBoard:
    return TensorBoard(folder / "tensorboard", plan, done)


@final
class TensorBoard:
    def __init__(self, folder: Path, plan: Mapping[str, object], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Remove what an interrupted run wrote about rounds that are played again.
        self.writer = SummaryWriter(str(folder), purge_step=done + 1 if done else None)
        self.last = done  # a run that is resumed after its last round ends without another round
        if not done:
            lines = "\n".join(f"    {field} = {value!r}" for field, value in plan.items())
            self.writer.add_text("plan", lines)

    def round(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, round)
        self.writer.flush()
        self.last = round

    def end(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, self.last)

    def close(self) -> None:
        self.writer.close()
