"""The stored outcomes of the scoreboard: results/detectors-<scale>.jsonl, one line per run. Never imports torch."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

from lindt.errors import UserError
from lindt_experiments.results.kept_lines import KeptLines
from lindt_experiments.results.outcomes import checked, rounded

WHAT: Final = "a detector's outcome"
Said = dict[str, Any]  # alarm, state and evidence: `replays.Reading`


@final
@dataclass(frozen=True)
class DetectorOutcome:
    """One run: its true label, and the reading of each detector. Gains are fractions."""

    configuration: str
    part: str  # "design", "judged" or "stress"
    task: str
    scale: str
    index: int  # 0, 1, ...: the number of the run in its configuration; both decide its seed
    plan: str  # content key
    rounds: int
    clients: int
    attackers: int
    samples: int  # of all V_i together
    negative: bool  # the label: the mean beta of the last ten scored rounds is below 0
    beta: float  # that mean
    scored: tuple[int, ...]
    beta_curve: tuple[float, ...]
    delta: tuple[float | None, ...]  # of every round
    readings: dict[str, Any]  # by detector
    command: str
    commit: str
    date: str
    seconds: float
    cosine: tuple[float | None, ...] | None = None  # of every round; absent in lines from before it was measured

    @property
    def cell(self) -> tuple[str, int]:
        return self.configuration, self.index

    @property
    def place(self) -> tuple[str, int]:
        return self.cell

    def alarm(self, detector: str) -> int | None:
        found: int | None = self.readings[detector]["alarm"]
        return found

    def evidence(self, detector: str) -> Sequence[float | None]:
        found: Sequence[float | None] = self.readings[detector]["evidence"]
        return found

    def beta_at(self, round: int) -> float:
        """The true beta in the nearest scored round."""
        place = min(range(len(self.scored)), key=lambda at: abs(self.scored[at] - round))
        return self.beta_curve[place]

    def with_reading(self, detector: str, said: Said) -> DetectorOutcome:
        return replace(self, readings=self.readings | {detector: said})


def _line(outcome: DetectorOutcome) -> str:
    table = rounded({field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}, digits=4)
    if outcome.cosine is None:
        del table["cosine"]
    for curve in table.keys() & {"beta_curve", "delta", "readings", "cosine"}:  # most of a line
        table[curve] = rounded(table[curve], digits=3)
    return json.dumps(table, allow_nan=False, separators=(",", ":"))


def _read(table: dict[str, Any], where: str) -> DetectorOutcome:
    hints = typing.get_type_hints(DetectorOutcome)
    names = [field.name for field in dataclasses.fields(DetectorOutcome)]
    if {*table, "cosine"} != set(names):
        raise UserError(f"{where}: not the fields of {WHAT}; use the lindt that wrote it")
    table.setdefault("cosine", None)
    plain = {name: checked(hints[name], table[name], f"{where}, {name}") for name in names if name != "readings"}
    return DetectorOutcome(**plain, readings=_readings(table["readings"], f"{where}, readings"))


def _readings(table: Any, where: str) -> dict[str, Any]:
    for name, said in checked(dict[str, dict], table, where).items():  # type: ignore[type-arg]
        if not isinstance(said, dict) or set(said) != {"alarm", "state", "evidence"}:
            raise UserError(f"{where}, {name}: not a reading; take the file back from version control")
        checked(int | None, said["alarm"], f"{where}, {name}, alarm")
        checked(str, said["state"], f"{where}, {name}, state")
        checked(tuple[float | None, ...], said["evidence"], f"{where}, {name}, evidence")
    found: dict[str, Any] = table
    return found


KEPT: Final = KeptLines("detectors", DetectorOutcome, WHAT, _line, _read)
path_of, load, keep = KEPT.path_of, KEPT.load, KEPT.keep
