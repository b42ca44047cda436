"""A run's results as Python values: the verdict, tables of rounds and clients, and a small view for notebooks.

This module does not import torch. A table is a pandas DataFrame where pandas is installed, otherwise a `PlainTable`,
which has the same calls: `len`, `columns`, `table["beta"]`, `table[["client", "beta"]]`, iteration over column names,
and `to_dict("records")`.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, final, overload

from lindt.errors import plain
from lindt.report.reading import Run
from lindt.report.tables import (
    CLIENT_COLUMNS,
    ROUND_COLUMNS,
    client_rows,
    note_columns,
    round_rows,
)
from lindt.report.verdict import Tone, detection_of, gain_summary, points, verdict

MOST_ROWS = 20  # of a printed table; of the others only the number is printed
WIDTH = 110  # characters of a line that is printed


@final
@dataclass(frozen=True)
class RunVerdict:
    """Whether federation helps or hurts. `str(verdict)` is the sentence that `lindt show` prints.

    `state` is the result of the test of the clients' reports: too early, undecided, helps or hurts. Where clients
    report nothing it is the verdict's tone. `tone` and `headline` also weigh the scores: where these contradict a good
    result, or private models have not learned, `tone` is "unknown". Gains and errors are fractions.
    """

    state: str
    tone: Tone
    headline: str  # in two or three words
    sentence: str
    gain: float | None  # on validation data, by the clients' reports
    error: float | None  # its standard error
    since: int | None  # the round since which the state holds
    warning: int | None  # the round of the early warning
    recovery: str | None  # the test's result for recovery against w
    recovered: str | None  # the test's result for recovery against training alone
    round: int | None  # the last scored round; the fields below belong to it
    beta: float | None  # the mean gain over training alone on test data
    median_gain: float | None
    better: int | None  # how many clients are better off than alone
    unchanged: int | None
    worse: int | None
    # The clients by the paired test; None where there is no score per sample, which the test needs.
    clearly_better: tuple[int, ...] | None
    clearly_worse: tuple[int, ...] | None
    warnings: tuple[str, ...]  # of the checks before training, and of private models that have not learned

    def __str__(self) -> str:
        return self.sentence

    def _repr_html_(self) -> str:
        return f"<div><p><b>{_text(self.headline)}</b></p><p>{_text(self.sentence)}</p></div>"


def run_verdict(run: Run) -> RunVerdict:
    found, now = verdict(run), gain_summary(run)
    detection = detection_of(run.rounds[-1]) if run.rounds else None
    decision: Mapping[str, Any] = detection["verdict"] if detection else {}
    effects = [(detection.get(name) or {}).get("state") if detection else None for name in ("recovery", "recovered")]
    clients = _gains(run)
    betas = [one["beta"] for one in clients]
    clear = None if now is None or now.clearly_harmed is None else [one for one in clients if one["clear"]]
    return RunVerdict(
        state=decision.get("state") or found.tone,
        tone=found.tone,
        headline=found.headline,
        sentence=found.sentence,
        gain=decision.get("gain"),
        error=decision.get("error"),
        since=decision.get("since"),
        warning=detection.get("warning") if detection else None,
        recovery=effects[0],
        recovered=effects[1],
        round=now.round if now else None,
        beta=now.beta if now else None,
        median_gain=now.median if now else None,
        better=sum(beta > 0 for beta in betas) if betas else None,
        unchanged=sum(beta == 0 for beta in betas) if betas else None,
        worse=sum(beta < 0 for beta in betas) if betas else None,
        clearly_better=None if clear is None else tuple(one["client"] for one in clear if one["beta"] > 0),
        clearly_worse=None if clear is None else tuple(one["client"] for one in clear if one["beta"] < 0),
        warnings=(*run.warnings, *([] if run.weak is None else [run.weak])),
    )


def _gains(run: Run) -> list[Mapping[str, Any]]:
    """The clients of the last scored round whose gain is known."""
    last = run.final["scores"]["clients"] if run.final else []
    return [one for one in last if one.get("beta") is not None]


class Table(Protocol):
    """What pandas.DataFrame and `PlainTable` have in common."""

    @property
    def columns(self) -> Any: ...

    def __len__(self) -> int: ...

    def __getitem__(self, columns: Any) -> Any: ...

    def __iter__(self) -> Iterator[Any]: ...

    def to_dict(self, orient: Any) -> Any: ...


@final
class PlainTable:
    """Rows of plain values under named columns. `to_dict("records")` gives the rows."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        self._columns = list(columns)
        self._rows = [{name: row.get(name) for name in self._columns} for row in rows]

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    @overload
    def __getitem__(self, columns: str) -> list[Any]: ...

    @overload
    def __getitem__(self, columns: list[str]) -> PlainTable: ...

    def __getitem__(self, columns: str | list[str]) -> list[Any] | PlainTable:
        """A column's values by its name, or a table of some columns by a list of names."""
        names = [columns] if isinstance(columns, str) else columns
        for name in names if isinstance(names, list) else [names]:
            if name not in self._columns:
                raise KeyError(f"{name!r} is not a column; choose among {', '.join(self._columns)}")
        if isinstance(columns, str):
            return [row[columns] for row in self._rows]
        return PlainTable(self._rows, columns)

    def to_dict(self, orient: str = "records") -> list[dict[str, Any]]:
        if orient != "records":
            raise ValueError(f"orient = {orient!r}: without pandas a table has only 'records'; use that")
        return [dict(row) for row in self._rows]

    def __repr__(self) -> str:
        """As many columns as fit. Those without a value, and those that name the run, come last."""
        empty = {name for name in self._columns if all(row[name] is None for row in self._rows)}
        last = empty | {"run", "name", "seed"} if len(self._columns) > 3 else empty
        order = [name for name in self._columns if name not in last]
        order += [name for name in self._columns if name in last]
        lines = [""] * (1 + min(len(self._rows), MOST_ROWS))
        shown = 0
        for name in order:
            cells = [name, *(_cell(row[name]) for row in self._rows[:MOST_ROWS])]
            room = max(map(len, cells)) + (2 if shown else 0)
            if shown and len(lines[0]) + room > WIDTH:
                break
            lines = [f"{line}{cell:>{room}}" for line, cell in zip(lines, cells, strict=True)]
            shown += 1
        if len(self._rows) > MOST_ROWS:
            lines.append(f"and {len(self._rows) - MOST_ROWS} more rows")
        if shown < len(order):
            lines.append(f"and {len(order) - shown} more columns: {', '.join(order[shown:])}")
        return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if type(value) is float:
        return f"{value:.4g}"
    return plain(str(value))


def score_table(run: Run) -> Table:
    """One row a client of the last scored round, with the columns of `lindt table --per client`."""
    last = run.final["round"] if run.final else None
    return _table([row for row in client_rows(run) if row["round"] == last], CLIENT_COLUMNS)


def round_table(run: Run) -> Table:
    """One row a round, with the columns of `lindt table`."""
    return _table(list(round_rows(run)), ROUND_COLUMNS | dict.fromkeys(note_columns(run), float))


def _table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, type]) -> Table:
    if find_spec("pandas") is None:
        return PlainTable(rows, list(columns))
    import pandas

    # pandas' nullable types: with other types, whole numbers and flags with missing values become floats and objects.
    kinds = {int: "Int64", bool: "boolean", float: "float64", str: "object"}
    frame: Table = pandas.DataFrame(
        {name: pandas.Series([row.get(name) for row in rows], dtype=kinds[kind]) for name, kind in columns.items()}
    )
    return frame


def results_html(run: Run) -> str:
    """The verdict, how many clients are better and worse off, and the last scores, for a notebook."""
    found = run_verdict(run)
    at = run.rounds[-1]["round"] if run.rounds else 0
    where = f"{run.name}, {run.state}, round {at}" + (f" of {run.planned}" if run.planned else "")
    parts = [f"<p><b>{_text(found.headline)}</b> <small>{_text(where)}</small></p><p>{_text(found.sentence)}</p>"]
    if found.better is not None:
        clearly = ""
        if found.clearly_better is not None and found.clearly_worse is not None:
            clearly = f"; clearly better off {len(found.clearly_better)}, clearly worse off {len(found.clearly_worse)}"
        parts.append(
            f"<p>better off {found.better}, unchanged {found.unchanged}, worse off {found.worse}{clearly} "
            f"<small>(test data, round {found.round})</small></p>"
        )
    parts += [f"<p><small>warning: {_text(said)}</small></p>" for said in (*run.warnings, *run.said)]
    return f"<div>{''.join(parts)}{_score_html(run)}</div>"


def _score_html(run: Run) -> str:
    last = run.final["round"] if run.final else None
    rows = [row for row in client_rows(run) if row["round"] == last]
    if not rows:
        return ""
    names = {one["client"]: one.get("name") for one in run.about["clients"]}
    head = "".join(f"<th>{name}</th>" for name in ("client", "train", "test", "local", "alone", "gain", ""))
    lines = [
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in _score_cells(row, names, run.percent)) + "</tr>"
        for row in rows[:MOST_ROWS]
    ]
    more = f"<p><small>and {len(rows) - MOST_ROWS} more clients</small></p>" if len(rows) > MOST_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>{more}"


def _score_cells(row: Mapping[str, Any], names: Mapping[int, Any], percent: bool) -> list[str]:
    name = names.get(row["client"])
    beta, clear = row["beta"], ""
    if beta and row["clear"]:
        clear = "clearly better off" if beta > 0 else "clearly worse off"
    return [
        f"{row['client']} {name}" if isinstance(name, str) else str(row["client"]),
        *("-" if row[field] is None else str(row[field]) for field in ("train", "test")),
        *(points(row[field], percent) for field in ("local", "private")),
        points(beta, percent, sign=True),
        clear,
    ]


def _text(value: str) -> str:
    return html.escape(plain(value))
