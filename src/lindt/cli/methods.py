"""`lindt methods`, `export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lindt.cli.options import Json, RunFolder, Task, console_for
from lindt.errors import plain


def methods(as_json: Json = False) -> None:
    """List the methods by name, each with its components."""
    from lindt.plan.file import to_dict
    from lindt.plan.plan import METHODS

    console = console_for(as_json)
    for name, method in METHODS.items():
        table = to_dict(method)
        if as_json:
            console.print_json(json.dumps({"method": name, **table}), indent=None)
        else:
            parts = [f"{part} {_brief(table[part])}" for part in ("adaptation", "aggregator", "penalty", "recovery")]
            console.print(f"[bold]{name:13}[/] {', '.join(parts)}", highlight=False, soft_wrap=True)


def export(
    folder: RunFolder,
    client: Annotated[int, typer.Option(help="The client whose model is written.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A new folder; by default RUN/export/client-N.")
    ] = None,
    task: Task = None,
    as_json: Json = False,
) -> None:
    """Write the model that a client predicts with: its weights as safetensors, and a module that works without lindt.

    The export of a run with --task needs that task; for a run of another machine or user, give --task again.

    On the client's test data the plain module is compared with the run's model, and its score with the recorded one
    where the last round was scored.
    """
    from lindt.cli.tasks import require_task
    from lindt.runs.export import export_client
    from lindt.runs.store import Store

    if task is None:
        about = Store.open(folder).about
        task = require_task(folder, about["run"], about.get("task"))
    found = export_client(folder, client, out or folder / "export" / f"client-{client}", task)
    console = console_for(as_json)
    for said in found["warnings"]:
        typer.echo(f"warning: {plain(said)}", err=True)
    if as_json:
        console.print_json(json.dumps(found))
    else:
        recorded = "its score is the recorded one" if found["recorded_score"] is not None else "no score was recorded"
        checked = f"checked on {found['checked_samples']} test samples, {recorded}"
        text = f"client {client}: {found['model']} after round {found['round']}, {checked}\n{found['folder']}"
        console.print(plain(text, "\n"), highlight=False, markup=False, soft_wrap=True)


def _brief(component: dict[str, Any]) -> str:
    fields = {k: _brief(v) if isinstance(v, dict) else v for k, v in component.items() if k != "kind" and v != []}
    rest = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"{component['kind']}({rest})" if rest else str(component["kind"])
