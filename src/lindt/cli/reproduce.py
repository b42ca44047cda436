"""`lindt reproduce`: the paper's tables and figures. The work is done in lindt_experiments, imported when asked."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer

from lindt.cli.options import Json, console_for
from lindt.errors import UserError

GRIDS: Final = {
    "attacks": "lindt_experiments.attacks.board",
    "recovery": "lindt_experiments.recovery.board",
    "settings": "lindt_experiments.recovery.settings",
}


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A name from --list, or `all`.")] = None,
    scale: Annotated[
        str | None,
        typer.Option(help="smoke (minutes), cpu (hours on two cores; the default), tenth (SHAKE) or paper (days)."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="How many seeds: 0, 1, ... are played, never chosen. By default 1.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task: cifar or shake; for `detectors` any task.")] = None,
    only: Annotated[str, typer.Option(help="Only these methods, with commas.")] = "",
    world: Annotated[
        str, typer.Option(help="Only these environments (nfl, active-0.3 ...) or attacks, with commas.")
    ] = "",
    jobs: Annotated[int | None, typer.Option(help="Runs at the same time; by default one per core.")] = None,
    hours: Annotated[
        float | None,
        typer.Option(
            help="Stop after so many hours; the same command continues. Without NAME: all, undecided claims first."
        ),
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="Where runs go; by default runs/reproduce/SCALE.")] = None,
    results: Annotated[Path, typer.Option(help="Where outcomes and tables are kept.")] = Path("results"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be played.")] = False,
    list_names: Annotated[bool, typer.Option("--list", help="Only list what can be reproduced.")] = False,
    replay: Annotated[
        bool, typer.Option("--replay", help="`detectors` only: judge all recorded runs again by today's code.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="`detectors` only: also play kept runs that lack the cosine of updates."),
    ] = False,
    claims: Annotated[
        bool,
        typer.Option("--claims", help="Check the paper's findings on stored results, at --scale or all but smoke."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Play the missing runs of a table or figure of the paper, and print the results beside the paper's.

    The same command again continues an interrupted run where it stopped. Runs that several tables share are played
    once. Outcomes are kept in RESULTS/SCALE.jsonl, tables in RESULTS/tables.

    Examples:

    `lindt reproduce table3 --scale smoke`

    `lindt reproduce table3 --scale cpu --task cifar --seeds 3`

    `lindt reproduce table5 --scale cpu --only lindt --world active-0.3 --seeds 3`

    `lindt reproduce detectors --scale smoke`

    `lindt reproduce attacks --scale cpu --seeds 3`

    `lindt reproduce recovery --scale smoke`

    `lindt reproduce --scale paper --hours 3`

    `lindt reproduce again --scale cpu`

    `lindt reproduce --claims`
    """
    from lindt_experiments import boards
    from lindt_experiments import reproduce as reproducing
    from lindt_experiments.detectors import scoreboard

    console = console_for(as_json)
    if claims:
        reproducing.show_claims(results, console, as_json, scale)
        return
    scale = scale or "cpu"
    if list_names:
        reproducing.list_exhibits(console, as_json)
        return
    in_order = name is None and hours is not None
    if in_order:
        name = "all"
    if name is None:
        raise UserError("NAME is missing: give the name of a table or figure; --list prints them")
    counted = 1 if seeds is None else seeds
    at_once = jobs if jobs is not None else len(os.sched_getaffinity(0))
    if name == "detectors":
        if only or world:
            raise UserError("--only and --world: `detectors` does not take them; choose by --task")
        board = scoreboard.Request(
            scale=scale,
            seeds=counted,
            jobs=at_once,
            runs=runs or Path("runs") / "detectors" / scale,
            results=results,
            task=task,
            replay=replay,
            again=again,
            hours=hours,
            as_json=as_json,
            console=console,
        )
        if dry_run:
            scoreboard.dry_run(board)
        elif code := scoreboard.reproduce(board):
            raise typer.Exit(code)
        return
    if replay or again:
        raise UserError(
            f"{'--replay' if replay else '--again'}: only `detectors` takes it, {name} does not; leave it out"
        )
    if name in GRIDS:
        if task:
            raise UserError(f"--task: `{name}` has only one; choose environments by --world and methods by --only")
        wanted = boards.GridRequest(
            grid=import_module(GRIDS[name]).GRID,
            scale=scale,
            seeds=counted,
            jobs=at_once,
            runs=runs or Path("runs") / name / scale,
            results=results,
            methods=_methods(only),
            worlds=_listed(world),
            hours=hours,
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
        seeds=seeds if in_order else counted,
        jobs=at_once,
        runs=runs or Path("runs") / "reproduce" / scale,
        results=results,
        task=task,
        only=_methods(only),
        worlds=_listed(world),
        hours=hours,
        in_order=in_order,
        as_json=as_json,
        console=console,
    )
    if name == "again":
        if only or world or task or hours is not None or seeds is not None or dry_run:
            raise UserError("again: it plays three cells with seed 0; give no option but --scale, --jobs and folders")
        if code := reproducing.play_again(request):
            raise typer.Exit(code)
        return
    if dry_run:
        reproducing.dry_run(request)
    elif code := reproducing.reproduce(request):
        raise typer.Exit(code)


def _listed(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _methods(names: str) -> tuple[str, ...]:
    """The names under which results are stored: the earliest name of each method."""
    from lindt.plan.plan import EARLIER_NAMES

    kept = {name: earlier for earlier, name in EARLIER_NAMES.items()}
    return tuple(kept.get(name, name) for name in _listed(names))
