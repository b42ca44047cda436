"""Plans as TOML: strict, typed, untrusted. Reading one builds frozen dataclasses and nothing else.

A component is chosen by `kind`, the name of its class in snake case, or by that name alone where its other
fields keep their defaults: `aggregator = "median"`. A method may be named: `method = "lindt"`.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

from lindt.data.sources import Text
from lindt.errors import PlanError, UserError, one_line
from lindt.plan.methods import METHODS
from lindt.plan.plan import Plan
from lindt.plan.toml import MOST_PARTS, read_toml
from lindt.registry import among, build, kind_of


def to_dict(value: Any) -> Any:
    """A plan as plain tables, lists and values, each component with its kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return fields if isinstance(value, _tables()) else {"kind": kind_of(value), **fields}
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    return value


@cache
def _tables() -> tuple[type, ...]:
    """The plan's fixed tables: what has no kind."""
    hints = typing.get_type_hints(Plan)
    return (Plan, Text, *(t for t in hints.values() if dataclasses.is_dataclass(t) and isinstance(t, type)))


def from_dict(table: Mapping[str, Any]) -> Plan:
    if isinstance(table, Mapping) and isinstance(name := table.get("method"), str):
        table = {**table, "method": to_dict(among(METHODS, name, "method"))}
    try:
        plan: Plan = build(Plan, table, "")
    except RecursionError:
        raise UserError("the plan's tables are nested too deeply") from None
    return plan


def with_fields(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan with other values in fields of its own, checked like those of a file."""
    hints = typing.get_type_hints(Plan)
    return dataclasses.replace(plan, **{name: build(hints[name], value, name) for name, value in given.items()})


def from_toml(text: str, name: str = "plan") -> dict[str, Any]:
    try:
        return read_toml(text)
    except ValueError as error:
        raise UserError(f"{name} is not valid TOML: {error}") from None


def override(table: Mapping[str, Any], assignment: str) -> dict[str, Any]:
    """`environment.privacy.sigma=0.003` set in a plan's tables; the value is read as TOML, or as a word."""
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise UserError(f"--set {one_line(assignment)}: write it as field.subfield=value")
    keys = path.strip().split(".")
    if len(keys) > MOST_PARTS:
        raise UserError(f"--set {one_line(assignment, 60)}...: no field of a plan lies {len(keys)} tables deep")
    try:
        value = read_toml(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
    return _assign(table, keys, value, path.strip())


def _assign(table: Mapping[str, Any], keys: list[str], value: Any, path: str) -> dict[str, Any]:
    key, rest = keys[0], keys[1:]
    inner = table.get(key, {})
    if rest and isinstance(inner, str):
        inner = to_dict(METHODS[inner]) if key == "method" and inner in METHODS else {"kind": inner}
    if rest and not isinstance(inner, Mapping):
        raise PlanError(path, value, f"{key} is a plain value, it has no fields")
    if not rest and isinstance(value, str) and isinstance(inner, Mapping) and inner.get("kind") == value:
        return dict(table)  # naming the kind it already has keeps its fields
    if keys == ["kind"] and table.get("kind") != value:
        return {"kind": value}  # another kind has other fields
    return {**table, key: _assign(inner, rest, value, path) if rest else value}
