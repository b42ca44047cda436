"""The stored outcomes of the grid of attacks: results/attacks-<scale>.jsonl, one line per run. Never imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from lindt_experiments.results.kept_lines import KeptLines


@final
@dataclass(frozen=True)
class AttackOutcome:
    """One run. `beta` and the success of the attackers are fractions, means over the last scored rounds;
    `clearly_harmed` is that of the last scored round."""

    attack: str
    aggregator: str
    method: str
    scale: str
    seed: int
    plan: str  # content key
    rounds: int
    beta: float | None
    clearly_harmed: int | None  # clients clearly worse off than alone
    counted_clients: int
    attack_central: float | None  # how often w predicts the attackers' label; None where they want no label
    attack_local: float | None  # how often the models that clients predict with predict it
    recovering_from: int | None  # the first round with recovery on
    command: str
    commit: str
    date: str
    seconds: float

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.attack, self.aggregator, self.method

    @property
    def place(self) -> tuple[tuple[str, str, str], int]:
        return self.cell, self.seed


KEPT: Final = KeptLines("attacks", AttackOutcome, "a run under attack")
path_of, load, keep = KEPT.path_of, KEPT.load, KEPT.keep
