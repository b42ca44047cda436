"""What the grid of attacks keeps in the repository: results/attacks-<scale>.jsonl, one line a run. Never imports
torch."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lindt.errors import UserError
from lindt.runs.files import write_whole
from lindt_experiments.results.outcomes import checked, locked, rounded


@final
@dataclass(frozen=True)
class AttackOutcome:
    """One run. `beta` and the success of the attackers are fractions, means over the last scored rounds;
    `clearly_harmed` is of the last one."""

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
    attack_central: float | None  # how often w says what the attackers want; None where they want no label
    attack_local: float | None  # ... and what the clients predict with
    recovering_from: int | None  # the first round with recovery on
    command: str
    commit: str
    date: str
    seconds: float

    @property
    def cell(self) -> tuple[str, str, str]:
        return self.attack, self.aggregator, self.method


def path_of(folder: Path, scale: str) -> Path:
    return folder / f"attacks-{scale}.jsonl"


def load(folder: Path, scale: str) -> list[AttackOutcome]:
    path = path_of(folder, scale)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [_outcome(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def keep(folder: Path, scale: str, outcomes: Iterable[AttackOutcome]) -> None:
    """Put each in the place of the same run's line; the file is replaced whole, sorted."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        found = {(one.cell, one.seed): one for one in (*load(folder, scale), *outcomes)}
        text = "".join(f"{json.dumps(_table(found[key]), separators=(',', ':'))}\n" for key in sorted(found))
        write_whole(path_of(folder, scale), text.encode())


def _table(outcome: AttackOutcome) -> dict[str, object]:
    table: dict[str, object] = rounded(dataclasses.asdict(outcome), digits=4)
    return table


def _outcome(line: str, where: str) -> AttackOutcome:
    hints = typing.get_type_hints(AttackOutcome)
    try:
        table = json.loads(line)
    except ValueError:
        raise UserError(f"{where}: no valid JSON; take the file back from version control") from None
    if not isinstance(table, dict) or set(table) != set(hints):
        raise UserError(f"{where}: not the fields of a run under attack; use the lindt that wrote it")
    return AttackOutcome(**{name: checked(hint, table[name], f"{where}, {name}") for name, hint in hints.items()})
