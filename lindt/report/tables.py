"""Tables for the terminal, from summaries. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from lindt.report.words import points


def comparison(rows: Sequence[tuple[str, Mapping[str, Any]]], title: str) -> Table:
    """Like the paper's main table: central, local, beta; and who is worse off than alone."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        pad_edge=False,
        collapse_padding=True,
    )
    table.caption = (
        "means over the last scored rounds; worse off: beta_i < 0 in the last one,\n"
        "in brackets those clearly so (paired test, 95%)"
    )
    table.add_column("", no_wrap=True)
    for name in ("central", "local", "alone", "beta", "worse off", "backdoor", "flagged"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, summary in rows:
        table.add_row(label, *cells(summary))
    return table


def cells(summary: Mapping[str, Any]) -> list[str]:
    percent = summary.get("metric_in_percent", True)
    worse = "-"
    if summary.get("harmed") is not None:
        worse = f"{summary['harmed']} ({summary['clearly_harmed']})/{summary['counted_clients']}"
    flagged = summary.get("detected_at")
    return [
        points(summary.get("central"), percent),
        points(summary.get("local"), percent),
        points(summary.get("private"), percent),
        points(summary.get("beta"), percent, sign=True),
        worse,
        points(summary.get("attack_local"), True),
        "-" if flagged is None else ("no" if not flagged else str(flagged[0])),
    ]
