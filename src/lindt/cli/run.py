"""`lindt run`, `compare`, `demo`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lindt.cli.options import (
    Device,
    Engine,
    Json,
    NoPreflight,
    PlanName,
    Resume,
    Rounds,
    Seed,
    Sets,
    Task,
    Track,
)
from lindt.errors import UserError
from lindt.plan.file import resolve, table_of
from lindt.runs.files import require_plain

ALL_METHODS = "fedavg,fedprox,trimmed-mean,fb,apfl,lindt,lindt-tm"


def run(
    plan: PlanName = None,
    rounds: Rounds = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; by default runs/NAME-seedN.")] = None,
    engine: Engine = "auto",
    device: Device = "cpu",
    resume: Resume = False,
    task: Task = None,
    sets: Sets = [],  # noqa: B006  # typer copies it
    as_json: Json = False,
    superlink: Annotated[
        str | None,
        typer.Option(help="Flower: a running SuperLink, by connection name or HOST:PORT; else a simulation."),
    ] = None,
    root_certificates: Annotated[
        Path | None, typer.Option(help="Flower: the CA of --superlink HOST:PORT; without it plain text is spoken.")
    ] = None,
    noise: Annotated[
        str | None, typer.Option(help="Flower: noise and sampling from the plan's seed, or from the system (a secret).")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Flower: seconds after which a round goes on without answers.")] = 600,
    gather: Annotated[float, typer.Option(help="Flower: seconds to wait for all clients before the start.")] = 120,
    comeback: Annotated[float, typer.Option(help="Flower: seconds to wait for a node lost in a round.")] = 0,
    nodes: Annotated[
        Path | None, typer.Option(help="Flower: which SuperNode may hold which clients, a TOML file: ID = [0, 1].")
    ] = None,
    withhold: Annotated[
        bool, typer.Option("--withhold", help="Flower: keep who took part, and measures without noise, off the disk.")
    ] = False,
    track: Track = [],  # noqa: B006
    no_preflight: NoPreflight = False,
) -> None:
    """Run a plan: one federation, with detection and recovery as its method says.

    Without PLAN the default runs: digits-nfl, a federation that goes wrong, is caught and mended. With --task
    and no PLAN: own-task. A run is a folder: plan.toml, rounds.jsonl (one line a round), summary.json.

    Examples:

    `lindt run`

    `lindt run digits-nfl --seed 3 --set environment.privacy.sigma=0.003 --out runs/noisy`

    `lindt run digits-nfl --set method=lindt-tm --set data.allocation.kind=dirichlet`

    `lindt run --task mypackage.mydata:problem --set detection.alpha=0.01`

    `lindt run --out runs/noisy --resume`

    `lindt run digits-nfl --engine flower --superlink server.example:8000 --root-certificates ca.crt`
    """
    from lindt.cli.execution import CommandContext, play
    from lindt.engines.flower.launch import FlowerOptions

    if engine != "flower" and (superlink or root_certificates or noise or nodes or withhold):
        raise UserError("--superlink, --root-certificates, --noise, --nodes and --withhold go with --engine flower")
    flower = (
        FlowerOptions(superlink, root_certificates, noise, deadline, gather, comeback, nodes, withhold)
        if engine == "flower"
        else None
    )

    named = plan is not None or bool(sets) or seed is not None or rounds is not None
    context = CommandContext(
        Console(), as_json, resume, engine, device, task, flower, tuple(track), preflight=not no_preflight
    )
    if out and resume and not named and not _holds_run(out):
        raise UserError(f"--resume: {out} holds no run; name the folder of one, or a plan to begin it with")
    if out and not _holds_run(out):
        _require_free(out)
    if out and resume and not named:
        play(context, [(_name_in(out), None, out)])  # by its own plan, which the store parses
        return
    resolved = resolve(plan, sets, task=task, seed=seed, rounds=rounds)
    folder = out or Path("runs") / f"{resolved.name}-seed{resolved.seed}"
    kept = resume and not named and _holds_run(folder)
    play(context, [(_name_in(folder), None, folder) if kept else (resolved.name, resolved, folder)])


def _holds_run(folder: Path) -> bool:
    return (folder / "plan.toml").exists()


def _require_free(folder: Path) -> None:
    """A new run goes into a folder of its own: beside other files, nobody could tell which are the run's.

    What a run leaves that was killed before its plan was written does not stand in the way.
    """
    if not folder.is_dir():
        return
    from lindt.runs.store import NAMES  # it imports torch

    aside = tuple(f".{name}." for name in NAMES)  # how a file is called while it is written
    names = (entry.name for entry in folder.iterdir())
    others = sorted(name for name in names if name not in NAMES and not name.startswith(aside))
    if others:
        raise UserError(f"--out {folder}: it is neither empty nor a run (it holds {others[0]}); name another folder")


def _name_in(folder: Path) -> str:
    """The name of a folder's plan, which is checked when the run is opened."""
    from lindt.runs.store import NAMES  # it imports torch

    require_plain(folder, NAMES)
    return str(table_of(str(folder / "plan.toml")).get("name", folder.name))


def compare(
    plan: PlanName = None,
    methods: Annotated[str, typer.Option(help="Names from `lindt methods`, with commas.")] = ALL_METHODS,
    aggregators: Annotated[
        str, typer.Option(help="Play each method with each of these on the server, such as mean,median,krum.")
    ] = "",
    attacks: Annotated[
        str, typer.Option(help="Play all of it under each of these, such as no_threat,backdoor,sign_flip.")
    ] = "",
    rounds: Rounds = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="A folder of runs; by default runs/NAME-seedN-compared.")] = None,
    engine: Engine = "auto",
    device: Device = "cpu",
    resume: Resume = False,
    task: Task = None,
    sets: Sets = [],  # noqa: B006
    as_json: Json = False,
    track: Track = [],  # noqa: B006
    no_preflight: NoPreflight = False,
) -> None:
    """Run several methods in one environment and print a table like the paper's main one.

    Private training (each client alone) and centralized training are printed beside them as references.

    `lindt compare digits-nfl --methods fedavg,apfl,lindt --rounds 40`

    `lindt compare digits-nfl --methods fedavg,lindt --aggregators mean,krum --attacks backdoor,sign_flip`
    """
    from lindt.cli.comparison import ComparisonGrid, comparison_base
    from lindt.cli.execution import CommandContext, compare_methods

    for assignment in sets:
        if assignment.partition("=")[0].partition(".")[0].strip() == "method":
            raise UserError(f"--set {assignment}: compare takes its methods from --methods; use `lindt run` for this")
    base = comparison_base(plan, sets, task=task, seed=seed, rounds=rounds)
    folder = out or Path("runs") / f"{base.name}-seed{base.seed}-compared"
    context = CommandContext(
        Console(), as_json, resume, engine, device, task, track=tuple(track), preflight=not no_preflight
    )
    compare_methods(context, base, ComparisonGrid.named(methods, aggregators, attacks), folder)


def demo(
    out: Annotated[Path | None, typer.Option(help="A folder of runs; by default the next free runs/demo-N.")] = None,
    seed: Seed = None,
    rounds: Rounds = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """What `make run` shows: NFL under FedAvg, detected and mended; beside it two healthy federations."""
    from lindt.cli.execution import CommandContext, demonstrate

    free = (Path("runs") / f"demo-{n}" for n in itertools.count(1))
    folder = out or next(folder for folder in free if not folder.exists())
    demonstrate(CommandContext(Console(), as_json, resume), folder, seed, rounds)
