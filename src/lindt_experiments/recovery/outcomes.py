"""The stored outcomes of the scoreboard of recovery: results/recovery-<scale>.jsonl, one line per run. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from lindt_experiments.results.kept_lines import KeptLines


@final
@dataclass(frozen=True)
class RecoveryOutcome:
    """One run. Scores and gains are fractions, means over the last scored rounds; the values of single clients, and
    the counts, are those of the last scored round."""

    world: str
    method: str
    scale: str
    seed: int
    plan: str  # content key
    rounds: int
    central: float | None  # None where the method has no whole global model
    local: float | None
    beta: float | None
    median_gain: float | None
    worst_tenth: float | None
    locals: tuple[float, ...]  # of each honest client, in order
    betas: tuple[float, ...]
    harmed: int | None
    clearly_harmed: int | None
    clearly_better: int | None
    attack_local: float | None
    train_seconds: float | None  # of a client in a round: the median over rounds that are not scored
    score_seconds: float | None  # of a client to predict: the extra time of a scored round
    bytes: int  # that a client receives and sends in a round: the shared weights, twice
    command: str
    commit: str
    date: str
    seconds: float

    @property
    def cell(self) -> tuple[str, str]:
        return self.world, self.method

    @property
    def place(self) -> tuple[tuple[str, str], int]:
        return self.cell, self.seed


KEPT: Final = KeptLines("recovery", RecoveryOutcome, "a run of the scoreboard of recovery")
path_of, load, keep = KEPT.path_of, KEPT.load, KEPT.keep
