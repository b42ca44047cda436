"""`lindt run`, `compare`, `demo`."""

from __future__ import annotations

import itertools
from dataclasses import replace
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

ALL_METHODS = "fedavg,fedprox,trimmed-mean,fb,apfl,lindt-always,lindt-tm"


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
        Path | None, typer.Option(help="Flower: the CA of --superlink HOST:PORT; without it there is no encryption.")
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
        bool, typer.Option("--withhold", help="Flower: write no client names, and no measurements without noise.")
    ] = False,
    track: Track = [],  # noqa: B006
    no_preflight: NoPreflight = False,
    keep_checkpoint: Annotated[
        list[int],
        typer.Option(metavar="ROUND", help="Keep the state after this round, for --branch; may be repeated."),
    ] = [],  # noqa: B006
    branch: Annotated[
        Path | None,
        typer.Option(help="Begin with a kept checkpoint of the run in this folder; without PLAN by its plan."),
    ] = None,
    at: Annotated[int | None, typer.Option(help="The round of the kept checkpoint; by default the last one.")] = None,
) -> None:
    """Run a plan: one federation, with detection and recovery as its method says.

    Without PLAN it runs digits-nfl, a federation that hurts its clients, is detected and recovers. With --task and no
    PLAN it runs own-task. A run is a folder: plan.toml, rounds.jsonl (one line a round), summary.json.

    Examples:

    `lindt run`

    `lindt run digits-nfl --seed 3 --set environment.privacy.sigma=0.003 --out runs/noisy`

    `lindt run digits-nfl --set method=lindt-tm --set data.allocation.kind=dirichlet`

    `lindt run --task mypackage.mydata:problem --set detection.alpha=0.01`

    `lindt run --out runs/noisy --resume`

    `lindt run cifar-nfl --keep-checkpoint 250 --out runs/first`

    `lindt run --branch runs/first --set method.recovery.stop=everyone_treated --out runs/second`

    `lindt run digits-nfl --engine flower --superlink server.example:8000 --root-certificates ca.crt`
    """
    from lindt.cli.execution import CommandContext, play
    from lindt.engines.flower.launch import FlowerOptions
    from lindt.runs.branch import Branch  # it imports torch

    if engine != "flower" and (superlink or root_certificates or noise or nodes or withhold):
        raise UserError("--superlink, --root-certificates, --noise, --nodes and --withhold need --engine flower")
    if engine == "flower" and (keep_checkpoint or branch):
        raise UserError("--keep-checkpoint and --branch: not with --engine flower; use another engine")
    flower = (
        FlowerOptions(superlink, root_certificates, noise, deadline, gather, comeback, nodes, withhold)
        if engine == "flower"
        else None
    )
    if at is not None and branch is None:
        raise UserError("--at: it is the round of --branch; name the run to branch from")
    named = plan is not None or bool(sets) or seed is not None or rounds is not None
    context = CommandContext(
        Console(), as_json, resume, engine, device, task, flower, tuple(track), preflight=not no_preflight
    )
    context = replace(context, keep=tuple(keep_checkpoint), branch=None if branch is None else Branch(branch, at))
    if branch and not out:
        raise UserError("--branch: name the folder of the new run by --out")
    if branch and not _holds_run(branch):
        raise UserError(f"--branch {branch}: it holds no run; name the folder of a run")
    if out and resume and not named and not _holds_run(out):
        raise UserError(f"--resume: {out} holds no run; name the folder of a run, or a plan to begin one with")
    if out and not _holds_run(out):
        from lindt.runs.store import require_free  # it imports torch

        require_free(out, "--out")
    if out and resume and not named:
        play(context, [(_name_in(out), None, out)])  # by its own plan, which the store parses
        return
    if branch and plan is None:
        plan = str(branch / "plan.toml")
    resolved = resolve(plan, sets, task=task, seed=seed, rounds=rounds)
    folder = out or Path("runs") / f"{resolved.name}-seed{resolved.seed}"
    kept = resume and not named and _holds_run(folder)
    play(context, [(_name_in(folder), None, folder) if kept else (resolved.name, resolved, folder)])


def _holds_run(folder: Path) -> bool:
    return (folder / "plan.toml").exists()


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

    `lindt compare digits-nfl --methods fedavg,apfl,lindt-always --rounds 40`

    `lindt compare digits-nfl --methods fedavg,lindt-always --aggregators mean,krum --attacks backdoor,sign_flip`
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
    """Show NFL under FedAvg, its detection and recovery, and two healthy federations for comparison."""
    from lindt.cli.execution import CommandContext, demonstrate

    free = (Path("runs") / f"demo-{n}" for n in itertools.count(1))
    folder = out or next(folder for folder in free if not folder.exists())
    demonstrate(CommandContext(Console(), as_json, resume), folder, seed, rounds)
