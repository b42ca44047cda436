"""The command line: its commands, and how errors are printed.

Nothing here imports torch before a command needs it, so that --help is fast.
"""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated

import typer

from lindt import __version__
from lindt.cli import data, figure, methods, plan, reproduce, run, show, vault, watch
from lindt.errors import UserError, is_interrupt, mendable, missing_extra, plain
from lindt.user_code import user_traceback

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Detects federated learning that hurts its clients, while it runs, and recovers from it.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"lindt {__version__}")
        raise typer.Exit


@app.callback()
def options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


for command in (
    run.run,
    run.compare,
    run.demo,
    show.runs,
    show.show,
    show.report,
    show.table,
    watch.watch,
    plan.plan,
    methods.methods,
    methods.export,
):
    app.command()(command)
app.command()(figure.figure)
app.command()(reproduce.reproduce)


data_app = typer.Typer(no_args_is_help=True, help="The data a plan allocates to its clients.")
for of_data in (data.describe, data.fetch, data.sizes):
    data_app.command()(of_data)
app.add_typer(data_app, name="data")


vault_app = typer.Typer(no_args_is_help=True, help="The models that clients of Flower apps keep on this machine.")
vault_app.command("list")(vault.list_)
vault_app.command()(vault.clear)
app.add_typer(vault_app, name="vault")


def main() -> None:
    """Run a command. An error that the user can correct prints one line and exits with 2; an interrupted run, with 130.

    Where the user's own code raised an exception, its part of the traceback is printed above that line.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path or name may have characters that it cannot encode
    try:
        app()
    except UserError as error:
        typer.echo(f"{user_traceback(error.__cause__)}error: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is None:
            raise
        typer.echo(f"error: {missing}", err=True)
        sys.exit(2)
    except OSError as error:
        if (said := mendable(error)) is None:
            raise
        typer.echo(f"error: {plain(said)}", err=True)
        sys.exit(2)
    except Exception as error:  # Ctrl-C while a module is imported
        if not is_interrupt(error):
            raise
        sys.exit(130)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
