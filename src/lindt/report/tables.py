"""A run's results as tables: for the terminal, and as flat rows for CSV and Parquet. Never imports torch.

Rows are one a round, or one a client and scored round. Rates and gains are fractions, as in rounds.jsonl. CSV needs
nothing; Parquet needs the extra `lindt[parquet]`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from lindt.errors import UserError
from lindt.report.reading import Run, check_file
from lindt.report.verdict import points
from lindt.runs.files import write_whole
from lindt.runs.schema import CLIENT_SCORE, ROUND, SCORES, kind


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


# A round's fields that are columns; of a list (asked, answered, refused) its length.
ROUND_FIELDS = {name: shape for name, shape in ROUND.items() if name not in ("quiet", "scores")}
CLIENT_FIELDS = {name: shape for name, shape in CLIENT_SCORE.items() if name not in ("client", "samples")}
# Each column by name and type; Parquet keeps the types where a column has no value at all.
ROUND_COLUMNS: dict[str, type] = {
    "run": str,
    "name": str,
    "seed": int,
    **{name: int if isinstance(shape, list) else kind(shape) for name, shape in ROUND_FIELDS.items()},
    "seconds": float,
    **{name: kind(shape) for name, shape in SCORES.items()},
}
CLIENT_COLUMNS: dict[str, type] = {
    "run": str, "name": str, "seed": int, "round": int, "client": int, "attacker": bool, "train": int, "test": int,
    "classes": int, "answered": bool, "recovering": bool,
    **{name: kind(shape) for name, shape in CLIENT_FIELDS.items()},
}  # fmt: skip


def round_rows(run: Run) -> Iterator[dict[str, Any]]:
    notes = note_columns(run)
    for line in run.rounds:
        scores = line.get("scores") or {}
        fields = {name: line.get(name) for name in ROUND_FIELDS}
        yield {
            **_whose(run),
            **{name: len(value) if isinstance(value, list) else value for name, value in fields.items()},
            "seconds": run.seconds.get(line["round"]),
            **{name: scores.get(name) for name in SCORES},
            **{name: (scores.get("notes") or {}).get(name) for name in notes},
        }


def note_columns(run: Run) -> list[str]:
    """What the method logs (scores and gradients at attach points, alpha): columns of their own."""
    return sorted({name for line in run.scored for name in line["scores"]["notes"]} - ROUND_COLUMNS.keys())


def client_rows(run: Run) -> Iterator[dict[str, Any]]:
    """The clients that were counted, in every scored round."""
    about = {one["client"]: one for one in run.about["clients"]}
    for line in run.scored:
        for one in line["scores"]["clients"]:
            who = about.get(one["client"], {})
            yield {
                **_whose(run),
                "round": line["round"],
                "client": one["client"],
                **{name: who.get(name) for name in ("attacker", "train", "test")},
                "classes": len(who["labels"]) if who.get("labels") else None,
                "answered": one["client"] in line["answered"],
                "recovering": line["recovering"],
                **{name: one.get(name) for name in CLIENT_FIELDS},
            }


def write_table(runs: Sequence[Run], per: str, out: Path) -> int:
    """Write rows of one run or several into a .csv or a .parquet file; returns how many."""
    if per not in ("round", "client"):
        raise UserError(f"--per {per}: choose among round, client")
    check_file(out)
    columns = dict(ROUND_COLUMNS if per == "round" else CLIENT_COLUMNS)
    if per == "round":
        columns |= {name: float for run in runs for name in note_columns(run)}
    rows = [row for run in runs for row in (round_rows(run) if per == "round" else client_rows(run))]
    if out.suffix == ".csv":
        write_whole(out, _csv(columns, rows))
    elif out.suffix == ".parquet":
        write_whole(out, _parquet(columns, rows))
    else:
        raise UserError(f"-o {out}: name a .csv or a .parquet file")
    return len(rows)


def _csv(columns: dict[str, type], rows: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    # A spreadsheet runs a text that begins like a formula: the names, the only texts, are kept from that.
    names = ("run", "name")
    writer.writerows({key: _no_formula(value) if key in names else value for key, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _no_formula(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _parquet(columns: dict[str, type], rows: Sequence[dict[str, Any]]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError("Parquet needs pyarrow: pip install 'lindt[parquet]', or name a .csv file") from None
    kinds = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    schema = pyarrow.schema([(name, kinds[kind]) for name, kind in columns.items()])
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), sink)
    return bytes(sink.getvalue().to_pybytes())


def _whose(run: Run) -> dict[str, Any]:
    seed = run.plan.get("seed")
    return {"run": run.folder.resolve().name, "name": run.name, "seed": seed if type(seed) is int else None}
