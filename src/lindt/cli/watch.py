"""`lindt watch`: the live page."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def watch(
    folder: Annotated[Path, typer.Argument(metavar="[RUNS_DIR]", help="A folder of runs.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Where to listen. Except on loopback, visitors are asked for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 chooses a free one.")] = 8471,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LINDT_WATCH_TOKEN", help="Ask visitors for this token, instead of one drawn at the start."
        ),
    ] = None,
) -> None:
    """Serve a page about the runs in a folder, live: it follows a run round by round, and needs no reload.

    It only reads. Runs that start later appear by themselves. Ctrl-C stops it; runs go on.

    `lindt watch runs`
    """
    from lindt.watch.auth import is_loopback, token_for
    from lindt.watch.server import serve

    console = Console()

    def ready(address: str) -> None:
        console.print(f"watching {folder} at {address}", highlight=False, markup=False, soft_wrap=True)
        if not is_loopback(host):
            console.print(
                "the connection is not encrypted: on a network that you do not trust, use a TLS proxy or ssh -L"
            )

    os.nice(5)  # on a busy machine the runs come first
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the usual way to stop it
        serve(folder, host, port, token_for(host, token), ready)
