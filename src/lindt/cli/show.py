"""`lindt runs`, `show`, `report`, `table`: read stored runs. These commands do not import torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lindt.cli.options import Json, RunFolder, console_for
from lindt.errors import UserError, plain

if TYPE_CHECKING:
    from lindt.report.reading import Run


def runs(
    words: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR | rm RUN...]", help="A folder of runs; by default runs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List runs: running ones first, then by time, with method, gain, clients worse off, and the verdict.

    A run is running, ended, stopped (by the user) or crashed; `lindt run --out RUN --resume` continues the last two.

    `lindt runs rm RUN...` deletes runs, each named by its folder, with their checkpoints and clients' models.
    """
    from lindt.report.terminal import run_rows, runs_table

    words = words or [Path("runs")]
    if words[0] == Path("rm") and not Path("rm").is_dir():
        _remove(words[1:])
        return
    if len(words) > 1:
        raise UserError(f"lindt runs: {len(words)} folders given; name one, or `rm` and the runs to delete")
    folder = words[0]
    console, rows = console_for(as_json), list(run_rows(folder))
    if as_json:
        for row in rows:
            console.print_json(json.dumps(row), indent=None)
    elif rows:
        console.print(runs_table(rows, console.width))
    else:
        console.print(f"no runs in {folder} yet; `lindt run` makes one", highlight=False, markup=False, soft_wrap=True)


def _remove(folders: Sequence[Path]) -> None:
    """Delete runs. All of them are checked first, so that nothing is deleted where one of them is refused."""
    from lindt.report.reading import read_run

    if not folders:
        raise UserError("lindt runs rm: name the folders of the runs to delete")
    for folder in folders:
        if folder.is_symlink() or read_run(folder).state == "running":
            wrong = "it is a link; name the folder itself" if folder.is_symlink() else "it is running; stop it first"
            raise UserError(f"lindt runs rm {folder}: {wrong}; nothing was deleted")
    for folder in folders:
        shutil.rmtree(folder)
        _say([f"{folder}: deleted"])


def show(folder: RunFolder, as_json: Json = False) -> None:
    """Print a run's verdict in one sentence, and draw Delta and the gain over its rounds."""
    from lindt.report.reading import read_run
    from lindt.report.terminal import run_row
    from lindt.report.terminal import show as draw

    run, console = read_run(folder), console_for(as_json)
    if as_json:
        console.print_json(json.dumps({**run_row(run, str(folder)), "left_out": list(run.said)}), indent=None)
    else:
        draw(console, run)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders of runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The file to write.")] = Path("report.html"),
) -> None:
    """Write one page about one run or several: a single file that opens offline and can be sent to anyone.

    It shows the verdict, which clients the federation helps and hurts, and the effect of recovery. Several runs are
    compared.

    `lindt report runs/digits-nfl-seed0 -o report.html`

    `lindt report runs/demo-1 -o demo.html`
    """
    from lindt.report.page import write_report

    runs = write_report(folders, out)
    held = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
    _say([*_left_out(runs), f"{out}: {held}, {out.stat().st_size / 1000:,.0f} kB"])


def table(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders of runs.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="A .csv or a .parquet file.")],
    per: Annotated[str, typer.Option(help="A row per round, or per client and scored round.")] = "round",
) -> None:
    """Write the results of runs as a table: CSV, or Parquet with the extra `lindt[parquet]`.

    `lindt table runs/demo-1 -o rounds.csv`

    `lindt table runs/demo-1 --per client -o clients.parquet`
    """
    from lindt.report.reading import read_runs
    from lindt.report.tables import write_table

    runs = read_runs(folders)
    rows = write_table(runs, per, out)
    _say([*_left_out(runs), f"{out}: {rows} rows"])


def _left_out(runs: Sequence[Run]) -> list[str]:
    """The notes about files of the runs that could not be read."""
    return [f"{run.folder}: {note}" for run in runs for note in run.said]


def _say(texts: Sequence[str]) -> None:
    console = Console()
    for text in texts:
        console.print(plain(text), highlight=False, markup=False, soft_wrap=True)
