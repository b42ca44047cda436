"""The outcomes of finished runs, stored in the repository: results/<scale>.jsonl, one line per run. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, final

from lindt.errors import UserError
from lindt.runs.files import locked_folder, write_whole

Cell = tuple[str, str, str, int]  # task, world, method, seed
SCALES = ("smoke", "cpu", "tenth", "paper")
ROUND_BY_ROUND, SCORED = ("delta", "w_div", "clean"), ("local_curve", "central_curve", "beta_curve")


@final
@dataclass(frozen=True)
class Outcome:
    """The outcome of one finished run, small enough for the repository. Scores and gains are fractions.

    `central` to `attack_local` are means over the last scored rounds, `harmed` and `clearly_harmed` are those of
    the last scored round. The last four tuples have one entry per scored round, `delta` to `flag` one entry per round.
    """

    task: str  # "cifar" or "shake"
    world: str  # "nfl" is the paper's default environment; plans/worlds.py names the others
    method: str
    scale: str
    seed: int
    plan: str  # content key of the plan: the same plan in two tables runs once
    rounds: int
    epsilon: float  # of the run, or of detection at this scale
    patience: int  # r'
    central: float | None
    local: float | None
    beta: float | None
    private: float | None
    worst_tenth: float | None
    attack_central: float | None
    attack_local: float | None
    harmed: int | None
    clearly_harmed: int | None
    counted_clients: int
    detected_at: tuple[int, ...] | None  # None: the method does not detect
    stopped_at: tuple[int, ...]
    delta: tuple[float | None, ...]  # None where no valid update came back
    w_div: tuple[float | None, ...]
    clean: tuple[float | None, ...]
    flag: tuple[bool, ...]  # whether the clients recovered in this round
    scored: tuple[int, ...]  # the scored rounds
    local_curve: tuple[float, ...]
    central_curve: tuple[float | None, ...]
    beta_curve: tuple[float | None, ...]
    notes: dict[str, float]  # attach scores and v's gradient norms at the run's end; "clipped", the share of updates
    command: str
    commit: str
    date: str
    seconds: float
    reduced: str  # the settings that the scale reduces, as text

    @property
    def cell(self) -> Cell:
        """The key of the outcome: it occurs at most once in a file."""
        return self.task, self.world, self.method, self.seed


def load(folder: Path, scale: str | None = None) -> list[Outcome]:
    """The stored outcomes of a scale, or of all scales. A scale without a file has none."""
    if scale is not None and scale not in SCALES:
        raise UserError(f"scale {scale!r}: choose among {', '.join(SCALES)}")
    return [outcome for name in ([scale] if scale else SCALES) for outcome in _read(path_of(folder, name))]


def keep(folder: Path, outcome: Outcome) -> None:
    """Add the outcome, or replace the line of the same cell; the sorted file is replaced as a whole.

    A line of another plan or commit goes to results/earlier/<scale>.jsonl before it is replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, outcome.scale)
    with locked(folder):
        found = {_cell(table, where): (text, table) for where, text, table in _tables(path)}
        if outcome.cell in found:
            text, table = found[outcome.cell]
            if (table.get("plan"), table.get("commit")) != (outcome.plan, outcome.commit):
                _keep_earlier(path_of(folder / "earlier", outcome.scale), text)
        lines = {cell: text for cell, (text, _) in found.items()} | {outcome.cell: _line(outcome)}
        write_whole(path, "".join(f"{lines[cell]}\n" for cell in sorted(lines)).encode())


def find(
    outcomes: Iterable[Outcome], *, task: str, world: str, method: str, scale: str, seed: int | None = None
) -> list[Outcome]:
    """The outcomes of one cell, by seed."""
    wanted = (task, world, method, scale)
    found = [o for o in outcomes if (o.task, o.world, o.method, o.scale) == wanted and seed in (None, o.seed)]
    return sorted(found, key=lambda outcome: outcome.seed)


def path_of(folder: Path, scale: str) -> Path:
    return folder / f"{scale}.jsonl"


def locked(folder: Path) -> AbstractContextManager[None]:
    """Allow one writer at a time; the lock is on the folder itself and ends with the process."""
    return locked_folder(folder, wait=math.inf, busy=f"{folder} is locked")


def _keep_earlier(path: Path, line: str) -> None:
    path.parent.mkdir(exist_ok=True)
    known = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if line not in known:
        write_whole(path, "".join(f"{one}\n" for one in [*known, line]).encode())


def _line(outcome: Outcome) -> str:
    table = {f.name: getattr(outcome, f.name) for f in dataclasses.fields(outcome)}
    table["flag"] = _spans(outcome.flag)
    return json.dumps(rounded(table), allow_nan=False, separators=(",", ":"))


def rounded(value: Any, digits: int = 5) -> Any:
    """Round to five significant digits: far below the spread over seeds, and a line of 500 rounds stays small."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else value
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, tuple | list) else value


def _spans(flags: tuple[bool, ...]) -> list[list[int]]:
    """The rounds with the flag on as [first, last] pairs."""
    runs = [(on, [round for round, _ in run]) for on, run in groupby(enumerate(flags, 1), key=lambda pair: pair[1])]
    return [[rounds[0], rounds[-1]] for on, rounds in runs if on]


def _tables(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Each line: its place, its text, its content."""
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else (), 1):
        where = f"{path}, line {number}"
        try:
            yield where, text, json.loads(text)
        except ValueError:
            raise UserError(f"{where}: no valid JSON; take the file back from version control") from None


def _cell(table: Any, where: str) -> Cell:
    if not isinstance(table, dict):
        raise UserError(f"{where}: not the fields of an outcome (no table); use the lindt that wrote it")
    names, seed = [str(table.get(name)) for name in ("task", "world", "method")], table.get("seed")
    return names[0], names[1], names[2], checked(int, seed, f"{where}, seed")


def _read(path: Path) -> Iterator[Outcome]:
    for where, _, table in _tables(path):
        outcome = _outcome(table, where)
        if outcome.scale != path.stem:
            raise UserError(f"{where}: an outcome of scale {outcome.scale!r} in the wrong file; move the line")
        yield outcome


def _outcome(table: Any, where: str) -> Outcome:
    names = [f.name for f in dataclasses.fields(Outcome)]
    if not isinstance(table, dict) or set(table) != set(names):
        odd = sorted(set(names) ^ set(table)) if isinstance(table, dict) else "no table"
        raise UserError(f"{where}: not the fields of an outcome ({odd}); use the lindt that wrote it")
    hints = typing.get_type_hints(Outcome)
    spans = checked(tuple[tuple[int, int], ...], table["flag"], f"{where}, flag")
    rounds = range(1, len(checked(hints["delta"], table["delta"], f"{where}, delta")) + 1)
    table = table | {"flag": [any(first <= round <= last for first, last in spans) for round in rounds]}
    outcome = Outcome(**{name: checked(hints[name], table[name], f"{where}, {name}") for name in names})
    for wanted, curves in ((outcome.rounds, ROUND_BY_ROUND), (len(outcome.scored), SCORED)):
        for name in curves:
            if len(getattr(outcome, name)) != wanted:
                raise UserError(f"{where}, {name}: not {wanted} entries; take the file back from version control")
    return outcome


def checked(hint: Any, value: Any, where: str) -> Any:
    """The value as the given type, or an error that names the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if value is None else checked(arguments[0], value, where)
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        if len(kinds) == len(value):
            return tuple(checked(kind, item, where) for kind, item in zip(kinds, value, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: checked(arguments[1], item, where) for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise UserError(f"{where}: {str(value)[:40]!r} is not {hint}; take the file back from version control")
    return value
