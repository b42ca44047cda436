"""The fields of a plan: each has a meaning, `lindt plan` prints all of them, and the page of them is that of the code.

Run this file as a script to write docs/plan-fields.md.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lindt import registry
from lindt.cli.main import app
from lindt.plan.fields import KINDS, MEANINGS, _about, _tables, fields_page, plan_fields
from lindt.plan.file import from_dict, preset_names, resolve

PAGE = Path(__file__).parents[2] / "docs" / "plan-fields.md"


def owners() -> dict[str, type]:
    """The tables of a plan and the package's own components, by class name."""
    found = {cls.__name__: cls for _, cls in _tables()}
    for protocol in registry._HOMES:
        for cls in registry.kinds(protocol).values():
            if dataclasses.is_dataclass(cls) and cls.__module__.startswith("lindt."):
                assert isinstance(cls, type)
                named = {field.name for field in dataclasses.fields(cls) if field.init}
                if named:
                    assert found.setdefault(cls.__name__, cls) is cls, f"two classes {cls.__name__} share MEANINGS"
    return found


def test_every_field_has_a_meaning_and_every_meaning_a_field() -> None:
    fields = {name: {f.name for f in dataclasses.fields(cls) if f.init} for name, cls in owners().items()}
    assert {name: set(meanings) for name, meanings in MEANINGS.items()} == fields
    for meanings in MEANINGS.values():
        for text in meanings.values():
            assert text
            assert not text.endswith(".")


def test_every_component_is_described() -> None:
    kept = {}
    for protocol in registry._HOMES:
        for kind, cls in registry.kinds(protocol).items():
            if dataclasses.is_dataclass(cls) and getattr(cls, "__module__", "").startswith("lindt."):
                assert _about(kind, cls), kind
                kept[kind] = _about(kind, cls)
    assert {kind: kept[kind] for kind in KINDS} == KINDS
    assert all(text.endswith(".") and not text.endswith((" al.", "Eq.", "Alg.")) for text in kept.values())


def test_the_page_of_the_docs_is_that_of_the_code() -> None:
    assert PAGE.read_text() == fields_page(), "write it anew: python tests/plan/test_fields.py"


@pytest.mark.parametrize("name", preset_names())
def test_the_fields_of_a_plan_give_the_plan_again(name: str) -> None:
    """No field is left out: a plan that is built from the printed values is the same."""
    plan, tables = resolve(name), {}
    for field in plan_fields(plan):
        *above, last = field.path.split(".")
        table: dict[str, Any] = tables
        for word in above:
            inner = table.get(word, {})
            table[word] = {"kind": inner} if isinstance(inner, str) else inner
            table = table[word]
        table[last] = json.loads(field.value)
    assert from_dict(tables) == plan


def test_values_defaults_and_choices_by_hand() -> None:
    found = {field.path: field for field in plan_fields(resolve("digits-nfl", ["training.rate=0.5"]))}
    rate = found["training.rate"]
    assert (rate.value, rate.default, rate.changed, rate.choices) == ("0.5", "0.1", True, "a number")
    assert rate.meaning == "eta, the learning rate in round 1"
    assert not found["training.epochs"].changed
    assert found["scoring.weighting"].choices == "equal | size | given"
    assert "trimmed_mean" in found["method.aggregator"].choices
    assert (
        found["data.source"].choices.split(" | ")[:1] == ["breast-cancer"] or "digits" in found["data.source"].choices
    )
    # A field of a component is held against the default of its kind.
    trimmed = {field.path: field for field in plan_fields(resolve("digits-nfl", ["method=trimmed-mean"]))}
    assert (trimmed["method.aggregator"].value, trimmed["method.aggregator"].default) == ('"trimmed_mean"', '"mean"')
    assert trimmed["method.aggregator.share"].default == "0.2"


def test_the_command_prints_each_field_within_80_columns() -> None:
    result = CliRunner().invoke(app, ["plan", "digits-nfl", "--set", "rounds=7"])
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[:3] == ['name = "digits-nfl"', "    The name of the run, and of its folder.", "    A text."]
    assert "rounds = 7   (default 80)" in lines
    printed = [line.partition(" = ")[0] for line in lines if not line.startswith(" ")]
    assert printed == [field.path for field in plan_fields(resolve("digits-nfl"))]
    assert max(len(line) for line in lines if line.startswith(" ")) < 80


def test_the_command_prints_a_plan_that_can_be_read_again() -> None:
    result = CliRunner().invoke(app, ["plan", "cifar-nfl", "--toml"])
    assert from_dict(tomllib.loads(result.output)) == resolve("cifar-nfl")
    lines = [json.loads(line) for line in CliRunner().invoke(app, ["plan", "--json"]).output.splitlines()]
    assert lines[0]["path"] == "name"
    assert all(line["meaning"] for line in lines)


if __name__ == "__main__":
    PAGE.write_text(fields_page())
