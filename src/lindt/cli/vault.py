"""`lindt vault list`, `clear`: the models that the clients of Flower apps keep on this machine."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lindt.cli.options import Json, console_for
from lindt.errors import UserError
from lindt.runs.files import locked

Folder = Annotated[
    Path | None, typer.Option("--folder", help="The vault; by default LINDT_PRIVATE, or the user's data folder.")
]


def list_(folder: Folder = None, as_json: Json = False) -> None:
    """List what clients of Flower apps keep here: each experiment, its clients, size and last change."""
    home, console = _home(folder), console_for(as_json)
    found = sorted(_experiments(home), key=lambda row: -row["changed"])
    if as_json:
        for row in found:
            console.print_json(json.dumps(row), indent=None)
        return
    if not found:
        console.print(f"{home}: no client keeps a model here", highlight=False, markup=False, soft_wrap=True)
        return
    table = Table("experiment", "clients", "size", "changed", box=None, pad_edge=False)
    for row in found:
        day = f"{datetime.fromtimestamp(row['changed']):%Y-%m-%d %H:%M}"
        table.add_row(*(Text(cell) for cell in (row["experiment"], str(row["clients"]), _size(row["bytes"]), day)))
    console.print(table)
    console.print(f"in {home}", highlight=False, markup=False, soft_wrap=True)


def clear(
    experiments: Annotated[
        list[str] | None, typer.Argument(help="Experiments, as `lindt vault list` names them.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All experiments.")] = False,
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", help="Experiments unchanged for so many days.")
    ] = None,
    folder: Folder = None,
) -> None:
    """Delete the models that clients keep of an experiment. Where one of its clients is training, nothing is deleted.

    If the experiment goes on, a client trains a new model: it starts again from the shared model.
    """
    home, named = _home(folder), experiments or []
    if sum((bool(named), everything, older_than is not None)) != 1:
        raise UserError("lindt vault clear: name experiments, or give --all, or --older-than DAYS")
    if older_than is not None and not 0 <= older_than < float("inf"):
        raise UserError(f"lindt vault clear --older-than {older_than:g}: give a number of days, 0 or more")
    changed = {row["experiment"]: row["changed"] for row in _experiments(home)}
    known = set(changed)
    if unknown := [name for name in named if name not in known]:
        raise UserError(
            f"lindt vault clear {unknown[0]}: {home} holds no such experiment; `lindt vault list` lists them"
        )
    chosen = sorted(known) if everything else named
    if older_than is not None:
        limit = time.time() - older_than * 86400
        chosen = sorted(name for name in known if changed[name] < limit)
        if not chosen:
            text = f"{home}: no experiment was left unchanged for {older_than:g} days; nothing was deleted"
            Console().print(text, highlight=False, markup=False, soft_wrap=True)
    with ExitStack() as held:
        for client in (one for name in chosen for one in _clients(home / name)):
            busy = f"{client}: a process trains this client; stop it first. Nothing was deleted"
            held.enter_context(locked(client / "lock", wait=0, busy=busy))
        for name in chosen:
            shutil.rmtree(home / name)
    for name in chosen:
        Console().print(f"{name}: deleted", highlight=False, markup=False, soft_wrap=True)


def _home(folder: Path | None) -> Path:
    try:
        from lindt.flower.vault import default_folder
    except ModuleNotFoundError:
        raise UserError("lindt vault: it needs Flower, which is not installed; pip install 'lindt[flower]'") from None
    return folder or default_folder()


def _experiments(home: Path) -> Iterator[dict[str, Any]]:
    """The experiments: folders that hold clients' folders and nothing else. Links are not followed.

    LINDT_PRIVATE or --folder may name a folder with other data of the user's, which must not be deleted.
    """
    from lindt.flower.vault import is_client_home

    for folder in sorted(home.iterdir()) if home.is_dir() else ():
        clients = [] if folder.is_symlink() or not folder.is_dir() else _clients(folder)
        if clients and len(clients) == len(list(folder.iterdir())) and all(map(is_client_home, clients)):
            files = [path.lstat() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
            yield {
                "experiment": folder.name,
                "clients": len(clients),
                "bytes": sum(one.st_size for one in files),
                "changed": max((one.st_mtime for one in files), default=0.0),
            }


def _clients(experiment: Path) -> list[Path]:
    return sorted(path for path in experiment.glob("client-*") if path.is_dir() and not path.is_symlink())


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"
