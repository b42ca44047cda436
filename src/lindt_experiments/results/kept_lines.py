"""A board's file of results, one line per run. Never imports torch."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, final

from lindt.errors import UserError
from lindt.runs.files import write_whole
from lindt_experiments.results.outcomes import checked, locked, rounded


class KeptLine(Protocol):
    """The outcome of a run, a dataclass. Each `place` occurs at most once in a file."""

    @property
    def place(self) -> Any: ...


T = TypeVar("T", bound=KeptLine)


def plain_line(outcome: Any) -> str:
    table = rounded({field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}, digits=4)
    return json.dumps(table, allow_nan=False, separators=(",", ":"))


@final
@dataclass(frozen=True)
class KeptLines(Generic[T]):
    """results/NAME-SCALE.jsonl: one line per run, sorted. `what` is the name of a line in an error."""

    name: str
    outcome: type[T]
    what: str
    line: Callable[[T], str] = plain_line
    read: Callable[[dict[str, Any], str], T] | None = None  # from a table; by default the fields as they are

    def path_of(self, folder: Path, scale: str) -> Path:
        return folder / f"{self.name}-{scale}.jsonl"

    def load(self, folder: Path, scale: str) -> list[T]:
        path = self.path_of(folder, scale)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [self._outcome(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]

    def keep(self, folder: Path, scale: str, outcomes: Iterable[T]) -> None:
        """Add the outcomes, or replace the lines of the same runs; the file is replaced as a whole."""
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            found = {one.place: one for one in (*self.load(folder, scale), *outcomes)}
            text = "".join(f"{self.line(found[place])}\n" for place in sorted(found))
            write_whole(self.path_of(folder, scale), text.encode())

    def _outcome(self, line: str, where: str) -> T:
        try:
            table = json.loads(line)
        except ValueError:
            raise UserError(f"{where}: no valid JSON; take the file back from version control") from None
        if not isinstance(table, dict):
            raise UserError(f"{where}: not the fields of {self.what}; use the lindt that wrote it")
        return self.read(table, where) if self.read else self.fields(table, where)

    def fields(self, table: dict[str, Any], where: str) -> T:
        hints = typing.get_type_hints(self.outcome)
        if set(table) != set(hints):
            raise UserError(f"{where}: not the fields of {self.what}; use the lindt that wrote it")
        return self.outcome(**{name: checked(hint, table[name], f"{where}, {name}") for name, hint in hints.items()})
