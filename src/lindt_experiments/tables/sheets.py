"""A table as it is printed and as it is kept: columns, rows and remarks. Never imports torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from rich import box
from rich.table import Table


@final
@dataclass(frozen=True)
class Sheet:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()


def ours(values: Iterable[float | None], sign: bool = False) -> str:
    """Fractions of several seeds in percent: the mean and, from two on, the standard deviation over the seeds."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{statistics.fmean(known):{'+' if sign else ''}.1f}"
    return f"{mean} ±{statistics.stdev(known):.1f}" if len(known) > 1 else mean


def papers(value: float | None, sign: bool = False) -> str:
    """A number of the paper, which is in percent already."""
    return "-" if value is None else f"{value:{'+' if sign else ''}.1f}"


def as_rich(sheet: Sheet) -> Table:
    table = Table(
        title=sheet.title,
        title_justify="left",
        caption="\n".join(sheet.remarks) or None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )
    for index, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*row)
    return table


def as_markdown(sheets: Sequence[Sheet], heading: str, origin: Sequence[str]) -> str:
    """A page of sheets under one heading. `origin`: paragraphs that stand before them."""
    parts = [f"# {heading}", *origin]
    for sheet in sheets:
        parts += [f"## {sheet.title}", table_lines(sheet.columns, sheet.rows), *sheet.remarks]
    return "\n\n".join(parts) + "\n"


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; all columns but the first are aligned to the right."""
    rule = ["---", *["--:"] * (len(columns) - 1)]
    return "\n".join(_line(row) for row in (columns, rule, *rows))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
