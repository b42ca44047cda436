"""The reference of the command line, from the commands themselves.

python docs/generate/command_line.py        # prints it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click
import typer.main

from lindt.cli.main import app


def commands(command: click.Command, words: str = "lindt") -> Iterator[tuple[str, click.Command]]:
    """A command and those inside it, each with the words that call it."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{words} {name}")


def markdown() -> str:
    """A section for each command: what it does, how it is called, its arguments and options."""
    return "\n".join(_section(words, command) for words, command in commands(typer.main.get_command(app)))


def _section(words: str, command: click.Command) -> str:
    context = click.Context(command, info_name=words)
    usage = " ".join([words, *command.collect_usage_pieces(context)])
    lines = [f"## {words}", "", (command.help or "").strip(), "", "```text", usage, "```", ""]
    parts = [one for one in command.params if not getattr(one, "hidden", False)]
    if parts:
        lines += ["| argument or option | default | meaning |", "|---|---|---|", *map(_row, parts), ""]
    inner = getattr(command, "commands", {})
    if inner:
        rows = [f"| [`{words} {name}`](#{_anchor(f'{words} {name}')}) | {_first(one)} |" for name, one in inner.items()]
        lines += ["| command | what it does |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def _row(parameter: click.Parameter) -> str:
    metavar = parameter.metavar or ("" if getattr(parameter, "is_flag", False) else parameter.type.name.upper())
    if parameter.param_type_name == "option":
        names = f"{', '.join(f'`{name}`' for name in parameter.opts)} {_cell(metavar)}".strip()
    else:
        names = f"`{_cell(metavar)}`"
    return f"| {names} | {_default(parameter.default)} | {_cell(getattr(parameter, 'help', None) or '')} |"


def _default(value: Any) -> str:
    unset = value is None or value is False or callable(value) or type(value).__name__ == "Sentinel"
    return "" if unset or value in ("", [], ()) else f"`{_cell(str(value))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _first(command: click.Command) -> str:
    return _cell((command.help or "").strip().partition("\n\n")[0])


def _anchor(heading: str) -> str:
    return heading.replace(" ", "-")


if __name__ == "__main__":
    sys.stdout.write(markdown())
