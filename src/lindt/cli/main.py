"""The command line: each command's name, and what its mistakes look like.

Nothing here imports torch before a command needs it, so that help answers at once.
"""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from lindt import __version__
from lindt.cli import data, figure, methods, reproduce, run, show, vault, watch
from lindt.errors import UserError, mendable

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Notices federated learning that hurts the people who join it, while it runs, and mends it.",
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
    """Mistakes the user can mend are one line and exit code 2; an interrupted run is 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if (said := mendable(error)) is None:
            raise
        typer.echo(f"error: {said}", err=True)
        sys.exit(2)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
