"""The command line: each command's name, and what its mistakes look like.

Nothing here imports torch before a command needs it, so that help answers at once.
"""

from __future__ import annotations

import errno
import signal
import sys

import typer

from lindt.cli import data, figure, methods, reproduce, run, show, watch
from lindt.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Notices federated learning that hurts the people who join it, while it runs, and mends it.",
)
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


def main() -> None:
    """Mistakes the user can mend are one line and exit code 2; an interrupted run is 130."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if not _is_mendable(error):
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        typer.echo(f"error: {where}{error.strerror or error}", err=True)
        sys.exit(2)


# A full disk or a port in use is the user's to mend, whichever call met it.
_ANYWHERE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EADDRINUSE, errno.EADDRNOTAVAIL}
# These are the user's to mend where they name a path: without one they come from processes and sockets.
_AT_A_PATH = {
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}


def _is_mendable(error: OSError) -> bool:
    """Whether one line says enough. Any other error of the system is ours, and keeps its traceback."""
    return error.errno in _ANYWHERE or (error.errno in _AT_A_PATH and error.filename is not None)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
