"""`lindt plan`: the fields of a plan."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Annotated

import typer

from lindt.cli.options import Json, PlanName, Sets, Task

WIDTH = 79


def plan(
    name: PlanName = None,
    sets: Sets = [],  # noqa: B006  # typer copies it
    task: Task = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print the plan as a TOML file.")] = False,
    as_json: Json = False,
) -> None:
    """Print every field of a plan: its value, what it means, its default and its choices.

    `lindt plan digits-nfl`

    `lindt plan digits-nfl --set method=lindt-always --toml > mine.toml`
    """
    import tomli_w

    from lindt.plan.fields import plan_fields
    from lindt.plan.file import resolve, to_dict

    found = resolve(name, sets, task=task)
    if toml:
        typer.echo(tomli_w.dumps(to_dict(found)), nl=False)
        return
    for field in plan_fields(found):
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(field)))
            continue
        default = f"   (default {field.default})" if field.changed and field.default else ""
        typer.echo(f"{field.path} = {field.value}{default}")
        choices = f"Choices: {field.choices}." if " | " in field.choices else f"{field.choices}."
        for text in filter(None, (field.meaning and f"{field.meaning}.", choices)):
            typer.echo(_indented(text[0].upper() + text[1:]))


def _indented(text: str) -> str:
    indent = " " * 4
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
