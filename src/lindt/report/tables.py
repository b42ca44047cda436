"""A run's results as tables: for the terminal, and as flat rows for CSV and Parquet. Does not import torch.

There is one row a round, or one row for each client in each scored round. Rates and gains are fractions, as in
rounds.jsonl. Parquet needs the extra `lindt[parquet]`.
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
from lindt.report.verdict import detection_of, interval, points
from lindt.runs.files import write_whole
from lindt.runs.schema import CLIENT_SCORE, REPORTED, ROUND, SCORES, kind


def comparison(rows: Sequence[tuple[str, Mapping[str, Any]]], title: str) -> Table:
    """A table like the paper's main table: central, local, beta; and how many clients are worse off than alone."""
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
    tested = any(summary.get("detection") for _, summary in rows)
    names = ("central", "local", "alone", "beta", "worse off", "backdoor", *([] if tested else ["flagged"]))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for label, summary in rows:
        found = cells(summary)
        table.add_row(label, *(found[:-1] if tested else found))
    return table


def verdict_table(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Table | None:
    """The results of the test of the clients' reports for each run; None where no run has reports."""
    if not any(summary.get("detection") for _, summary in rows):
        return None
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.caption_justify = "left"
    table.caption = (
        "by the clients' reports on validation data, with two standard errors; w: what clients\n"
        "predict with in recovery against w; alone: against training alone"
    )
    table.add_column("", no_wrap=True)
    for name in ("verdict", "since", "gain", "warning", "w", "alone"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, summary in rows:
        if "rounds" in summary:
            table.add_row(label, *verdict_cells(summary))
    return table


def alarm_table(rows: Sequence[tuple[str, Mapping[str, int | None]]], patience: int) -> Table:
    """The round in which each detector first calls a run negative, over the same runs."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    table.caption_justify = "left"
    table.caption = (
        "first round that each detector calls negative; warning: of the gain test; delta: the\n"
        f"paper's rule, Delta above 0.1 in more than {patience} rounds; -: the run has no reports"
    )
    table.add_column("", no_wrap=True)
    names = ("gain", "warning", "fl_guard", "delta")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for label, alarms in rows:
        table.add_row(label, *("-" if name not in alarms else str(alarms[name] or "never") for name in names))
    return table


def verdict_cells(summary: Mapping[str, Any]) -> list[str]:
    detection = detection_of(summary)
    if detection is None:
        flagged = summary.get("detected_at")
        return [f"flagged {flagged[0]}" if flagged else "-" if flagged is None else "not flagged", *["-"] * 5]
    verdict = detection["verdict"]
    recovery, recovered = ((detection.get(name) or {}).get("state", "-") for name in ("recovery", "recovered"))
    return [
        verdict["state"],
        "-" if verdict.get("since") is None else str(verdict["since"]),
        interval(verdict, summary.get("metric_in_percent", True)).removesuffix(" points"),
        "-" if detection.get("warning") is None else str(detection["warning"]),
        recovery,
        recovered,
    ]


def cells(summary: Mapping[str, Any]) -> list[str]:
    percent = summary.get("metric_in_percent", True)
    worse = "-"
    if summary.get("harmed") is not None:
        clearly = "-" if summary["clearly_harmed"] is None else summary["clearly_harmed"]
        worse = f"{summary['harmed']} ({clearly})/{summary['counted_clients']}"
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


# A round's fields that are columns. The value of a list (asked, answered, refused) is its length.
ROUND_FIELDS = {name: shape for name, shape in ROUND.items() if name not in ("quiet", "scores", *REPORTED)}
# The test's results after a round: its state, the round of the decision, the gain on validation data, its error.
VERDICT_COLUMNS: dict[str, type] = {
    "verdict": str, "since": int, "gain": float, "gain_error": float, "reporting_clients": int,
    "validation_samples": int, "needed_samples": int, "warning": int, "recovery": str, "recovered": str,
}  # fmt: skip
CLIENT_FIELDS = {name: shape for name, shape in CLIENT_SCORE.items() if name not in ("client", "samples")}
# Each column by name and type; Parquet keeps the types where a column has no value at all.
ROUND_COLUMNS: dict[str, type] = {
    "run": str,
    "name": str,
    "seed": int,
    **{name: int if isinstance(shape, list) else kind(shape) for name, shape in ROUND_FIELDS.items()},
    "seconds": float,
    **VERDICT_COLUMNS,
    **{name: kind(shape) for name, shape in SCORES.items()},
}
CLIENT_COLUMNS: dict[str, type] = {
    "run": str, "name": str, "seed": int, "round": int, "client": int, "client_name": str,
    "attacker": bool, "train": int, "test": int, "classes": int, "answered": bool, "recovering": bool,
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
            **_tested(line),
            **{name: scores.get(name) for name in SCORES},
            **{name: (scores.get("notes") or {}).get(name) for name in notes},
        }


def _tested(line: Mapping[str, Any]) -> dict[str, Any]:
    detection = detection_of(line)
    if detection is None:
        return dict.fromkeys(VERDICT_COLUMNS)
    verdict = detection["verdict"]
    recovery, recovered = ((detection.get(name) or {}).get("state") for name in ("recovery", "recovered"))
    return {
        "verdict": verdict["state"],
        "since": verdict.get("since"),
        "gain": verdict.get("gain"),
        "gain_error": verdict.get("error"),
        "reporting_clients": verdict["clients"],
        "validation_samples": verdict["samples"],
        "needed_samples": verdict.get("needed"),
        "warning": detection.get("warning"),
        "recovery": recovery,
        "recovered": recovered,
    }


def note_columns(run: Run) -> list[str]:
    """The columns for numbers that the method logs (scores and gradients at attach points, alpha)."""
    return sorted({name for line in run.scored for name in line["scores"]["notes"]} - ROUND_COLUMNS.keys())


def client_rows(run: Run) -> Iterator[dict[str, Any]]:
    """A row for each counted client in each scored round."""
    about = {one["client"]: one for one in run.about["clients"]}
    for line in run.scored:
        for one in line["scores"]["clients"]:
            who = about.get(one["client"], {})
            yield {
                **_whose(run),
                "round": line["round"],
                "client": one["client"],
                "client_name": who.get("name"),
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
    # A spreadsheet executes a text that begins like a formula. Only the names come from a run's files, so that they are
    # marked as plain text.
    names = ("run", "name", "client_name")
    writer.writerows({key: _no_formula(value) if key in names else value for key, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _no_formula(text: str | None) -> str | None:
    return f"'{text}" if text and text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


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
