"""What users write keeps its name: exported names, commands and their flags, presets, methods, components, plan fields.

`kept_names.json` lists what has been there. A name that changes stays under its earlier name, with a warning that says
the new one; then it is still found here. To add names, run this file as a script.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import typing
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main

from lindt import registry
from lindt.cli.main import app
from lindt.plan.file import preset_names
from lindt.plan.plan import EARLIER_NAMES, METHODS, Plan

KEPT = Path(__file__).parent / "kept_names.json"
EXPORTED = ("lindt", "lindt.flower")


def flags(command: click.Command, words: str = "lindt") -> dict[str, list[str]]:
    """Of a command and its subcommands, by the words that call it."""
    found = {words: sorted(flag for parameter in command.params for flag in parameter.opts if flag.startswith("-"))}
    for name, inner in getattr(command, "commands", {}).items():
        found |= flags(inner, f"{words} {name}")
    return found


def fields(cls: Any) -> list[str]:
    return sorted(field.name for field in dataclasses.fields(cls) if field.init)


def components() -> dict[str, dict[str, list[str]]]:
    """The fields of each of the package's own components, by protocol and kind."""
    found = {}
    for protocol in registry._HOMES:
        own = {kind: cls for kind, cls in registry.kinds(protocol).items() if cls.__module__.startswith("lindt.")}
        found[protocol.__name__] = {k: fields(v) if dataclasses.is_dataclass(v) else [] for k, v in own.items()}
    return found


def tables() -> dict[str, list[str]]:
    """The fields of a plan and of its fixed tables."""
    hints = typing.get_type_hints(Plan)
    inner = {name: cls for name, cls in hints.items() if isinstance(cls, type) and dataclasses.is_dataclass(cls)}
    return {"": fields(Plan), **{name: fields(cls) for name, cls in inner.items() if not registry.is_protocol(cls)}}


def names() -> dict[str, Any]:
    return {
        "exported": {module: sorted(importlib.import_module(module).__all__) for module in EXPORTED},
        "flags": flags(typer.main.get_command(app)),
        "presets": preset_names(),
        "methods": sorted({*METHODS, *EARLIER_NAMES}),
        "tables": tables(),
        "components": components(),
    }


def missing(kept: Any, found: Any, where: str = "") -> list[str]:
    """What `kept` lists and `found` does not have."""
    if isinstance(kept, dict):
        gone = [f"{where}{name}" for name in kept if name not in found]
        return gone + [m for name in kept if name in found for m in missing(kept[name], found[name], f"{where}{name} ")]
    return [f"{where}{name}" for name in kept if name not in found]


def test_no_name_that_users_write_is_gone() -> None:
    pytest.importorskip("flwr")
    kept = json.loads(KEPT.read_text())
    for module, exported in kept["exported"].items():
        for name in exported:
            assert getattr(importlib.import_module(module), name) is not None
    assert missing({part: kept[part] for part in kept if part != "exported"}, names()) == []


def test_the_list_is_not_empty_anywhere_and_a_name_that_goes_is_named() -> None:
    kept = json.loads(KEPT.read_text())
    assert {"Detector", "federate"} <= set(kept["exported"]["lindt"])
    assert {"--set", "--resume", "--superlink"} <= set(kept["flags"]["lindt run"])
    assert "patience" in kept["components"]["Recovery"]["on_detection"]
    found = names()
    found["flags"]["lindt run"].remove("--resume")
    del found["components"]["Recovery"]["on_detection"]
    del found["flags"]["lindt watch"]
    assert missing(kept, found) == ["flags lindt watch", "flags lindt run --resume", "components Recovery on_detection"]


if __name__ == "__main__":
    KEPT.write_text(json.dumps(names(), indent=1) + "\n")
