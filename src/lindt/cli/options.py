"""Options that several commands share, and their console."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lindt.plan.file import preset_names

PlanName = Annotated[
    str | None, typer.Argument(metavar="[PLAN]", help=f"A TOML file, or one of {', '.join(preset_names())}.")
]
Sets = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the plan; may be repeated.")
]
Seed = Annotated[int | None, typer.Option(help="The plan's seed.")]
Rounds = Annotated[int | None, typer.Option(help="The plan's number of rounds.")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines for machines instead of text for people.")]
Device = Annotated[str, typer.Option(help="Where models train: cpu or cuda.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out, or start it if there is none.")]
Engine = Annotated[
    str, typer.Option(help="inprocess, processes (one worker a core), flower, or auto: one of the first two.")
]
Task = Annotated[
    str | None, typer.Option(help="Your own data and model: package.module:function returning a lindt.Problem.")
]
Track = Annotated[
    list[str],
    typer.Option("--track", metavar="TRACKER", help="Log to a tracker: tensorboard, mlflow, wandb; may be repeated."),
]
NoPreflight = Annotated[
    bool, typer.Option("--no-preflight", help="Skip the checks for mistakes that give a believable but wrong result.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


def console_for(as_json: bool) -> Console:
    return Console(soft_wrap=as_json)
