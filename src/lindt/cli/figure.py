"""`lindt figure`: the paper's figures from what is kept in results/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lindt.errors import UserError


def figure(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="As in the paper: 3, 3a, figure3; or all.")
    ] = None,
    scale: Annotated[str, typer.Option(help="The scale of the outcomes: smoke, cpu, tenth (SHAKE) or paper.")] = "cpu",
    results: Annotated[Path, typer.Option(help="Where outcomes are kept.")] = Path("results"),
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A folder; by default RESULTS/figures.")] = None,
    png: Annotated[bool, typer.Option("--png", help="Write a PNG, too.")] = False,
    partial: Annotated[bool, typer.Option("--partial", help="Draw what is there, even if runs are missing.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="List the figures.")] = False,
) -> None:
    """Draw a figure of the paper as SVG and PDF, from outcomes that `lindt reproduce` has kept. Nothing is trained.

    `lindt figure 3`

    `lindt figure 7b --scale paper --png -o pictures`
    """
    from lindt_experiments.figures.figures import names, write

    console = Console()
    if listed:
        for known, title in names().items():
            console.print(f"[bold]{known:4}[/] {title}", highlight=False, soft_wrap=True)
        return
    if name is None:
        raise UserError("NAME is missing: give a name from `lindt figure --list`, or all")
    for one in _wanted(name):
        try:
            paths = write(one, results, scale, out or results / "figures", png, partial)
        except UserError as error:
            if name != "all":
                raise
            console.print(str(error), style="yellow", markup=False, highlight=False, soft_wrap=True)
        else:
            console.print(" ".join(str(path) for path in paths), highlight=False, markup=False, soft_wrap=True)


def _wanted(name: str) -> list[str]:
    """The figures to draw: `all` means every whole figure, which includes its panels."""
    from lindt_experiments.figures.figures import TITLES

    return list(TITLES) if name == "all" else [name]
