"""`lindt methods`, `export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lindt.cli.options import Json, RunFolder, Task, console_for


def methods(as_json: Json = False) -> None:
    """The methods by name, each a composition."""
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
    client: Annotated[int, typer.Option(help="Whose model.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="A new folder; by default RUN/export/client-N.")
    ] = None,
    task: Task = None,
    as_json: Json = False,
) -> None:
    """Write the model a client predicts with: weights as safetensors, and a plain module without lindt.

    On the client's test data the plain module is compared with the run's model, and its score with the recorded one
    where the last round was scored.
    """
    from lindt.runs.export import export_client

    found = export_client(folder, client, out or folder / "export" / f"client-{client}", task)
    console = console_for(as_json)
    for said in found["warnings"]:
        typer.echo(f"warning: {said}", err=True)
    if as_json:
        console.print_json(json.dumps(found))
    else:
        recorded = "its score is the recorded one" if found["recorded_score"] is not None else "no score was recorded"
        checked = f"checked on {found['checked_samples']} test samples, {recorded}"
        text = f"client {client}: {found['model']} after round {found['round']}, {checked}\n{found['folder']}"
        console.print(text, highlight=False, soft_wrap=True)


def _brief(component: dict[str, Any]) -> str:
    fields = {k: _brief(v) if isinstance(v, dict) else v for k, v in component.items() if k != "kind" and v != []}
    rest = ", ".join(f"{name}={value}" for name, value in fields.items())
    return f"{component['kind']}({rest})" if rest else str(component["kind"])
