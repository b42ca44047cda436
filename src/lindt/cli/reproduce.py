"""`lindt reproduce`: the paper's tables and figures. The work is done in lindt_experiments, imported when asked."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer

from lindt.cli.options import Json, console_for
from lindt.errors import UserError

GRIDS: Final = {"attacks": "lindt_experiments.attacks.board", "recovery": "lindt_experiments.recovery.board"}


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A name from --list, or `all`.")] = None,
    scale: Annotated[str, typer.Option(help="smoke (minutes), cpu (hours on two cores) or paper (days).")] = "cpu",
    seeds: Annotated[int, typer.Option(help="How many seeds: 0, 1, ... are played, never chosen.")] = 1,
    task: Annotated[str | None, typer.Option(help="cifar or shake: one half of it; of `detectors` any task.")] = None,
    only: Annotated[str, typer.Option(help="Only these methods, with commas.")] = "",
    world: Annotated[
        str, typer.Option(help="Only these environments (nfl, active-0.3 ...) or attacks, with commas.")
    ] = "",
    jobs: Annotated[int | None, typer.Option(help="Runs at once; by default one a core.")] = None,
    runs: Annotated[Path | None, typer.Option(help="Where runs go; by default runs/reproduce/SCALE.")] = None,
    results: Annotated[Path, typer.Option(help="Where outcomes and tables are kept.")] = Path("results"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be played.")] = False,
    list_names: Annotated[bool, typer.Option("--list", help="Only list what can be reproduced.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="`detectors` only: judge all recorded runs again by today's code.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="`detectors` only: also play kept runs that lack the cosine of updates."),
    ] = False,
    claims: Annotated[bool, typer.Option("--claims", help="Hold the paper's findings against what is kept.")] = False,
    as_json: Json = False,
) -> None:
    """Play the runs of a table or figure of the paper that are not played yet, and print it beside the paper's.

    A run that was cut off goes on where it stopped; the same command again does so. Runs that several tables share
    are played once. Outcomes are kept in RESULTS/SCALE.jsonl, tables in RESULTS/tables.

    Examples:

    `lindt reproduce table3 --scale smoke`

    `lindt reproduce table3 --scale cpu --task cifar --seeds 3`

    `lindt reproduce table5 --scale cpu --only lindt --world active-0.3 --seeds 3`

    `lindt reproduce detectors --scale smoke`

    `lindt reproduce attacks --scale cpu --seeds 3`

    `lindt reproduce recovery --scale smoke`

    `lindt reproduce --claims`
    """
    from lindt_experiments import boards
    from lindt_experiments import reproduce as reproducing
    from lindt_experiments.detectors import scoreboard

    console = console_for(as_json)
    if claims:
        reproducing.show_claims(results, console, as_json)
        return
    if list_names:
        reproducing.list_exhibits(console, as_json)
        return
    if name is None:
        raise UserError("name what to reproduce: --list lists it")
    at_once = jobs if jobs is not None else len(os.sched_getaffinity(0))
    if name == "detectors":
        if only or world:
            raise UserError("--only and --world: of `detectors` choose by --task")
        board = scoreboard.Request(
            scale=scale,
            seeds=seeds,
            jobs=at_once,
            runs=runs or Path("runs") / "detectors" / scale,
            results=results,
            task=task,
            replay=replay,
            again=again,
            as_json=as_json,
            console=console,
        )
        if dry_run:
            scoreboard.dry_run(board)
        elif code := scoreboard.reproduce(board):
            raise typer.Exit(code)
        return
    if replay or again:
        raise UserError(f"{'--replay' if replay else '--again'}: of `detectors` only, not of {name}")
    if name in GRIDS:
        if task:
            raise UserError(f"--task: `{name}` has one; choose environments by --world and methods by --only")
        wanted = boards.GridRequest(
            grid=import_module(GRIDS[name]).GRID,
            scale=scale,
            seeds=seeds,
            jobs=at_once,
            runs=runs or Path("runs") / name / scale,
            results=results,
            methods=_listed(only),
            worlds=_listed(world),
            as_json=as_json,
            console=console,
        )
        if dry_run:
            boards.dry_run_grid(wanted)
        elif code := boards.reproduce_grid(wanted):
            raise typer.Exit(code)
        return
    request = reproducing.Request(
        name=name,
        scale=scale,
        seeds=seeds,
        jobs=at_once,
        runs=runs or Path("runs") / "reproduce" / scale,
        results=results,
        task=task,
        only=_listed(only),
        worlds=_listed(world),
        as_json=as_json,
        console=console,
    )
    if dry_run:
        reproducing.dry_run(request)
    elif code := reproducing.reproduce(request):
        raise typer.Exit(code)


def _listed(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())
