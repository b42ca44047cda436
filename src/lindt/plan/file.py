"""Plans as TOML, by file or by a preset's name: strict, typed, untrusted.

Reading TOML is bounded in size, in depth and in time. The time is no formality: Python's reader takes quadratic time
for `a.a.a.a = 1`, and a file of 100 KB holds it for minutes. Building a plan from the tables makes frozen dataclasses
and nothing else.

A component is chosen by `kind`, the name of its class in snake case, or by that name alone where its other
fields keep their defaults: `aggregator = "median"`. A method may be named: `method = "lindt"`.

Components, and torch with them, are imported where a plan is built: `report` and `watch` read tables without it.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lindt.errors import PlanError, UserError, one_line
from lindt.registry import among, build, kind_of

if TYPE_CHECKING:
    from lindt.plan.plan import Plan

PRESETS: Final = Path(__file__).parent / "presets"
DEFAULT: Final = "digits-nfl"

MOST_CHARACTERS: Final = 2 << 20  # the weights of 100,000 clients
MOST_PARTS: Final = 32  # of a dotted key
DEEPEST: Final = 64  # tables in tables; a plan's reach to 5
# Bare or quoted parts, each with the dot after it. Possessive, and begun only where a part can begin: linear.
_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY: Final = re.compile(rf"(?<![A-Za-z0-9_\\-])(?:{_PART}){{{MOST_PARTS}}}")


def read_toml(text: str, bits: int | None = None) -> dict[str, Any]:
    """The tables, or ValueError; with `bits`, also where a whole number in them has more."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MOST_PARTS} parts")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
    waiting: list[tuple[Any, int]] = [(found, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise ValueError("its lists or tables are nested too deeply")
        if isinstance(value, dict | list):
            waiting += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]
        elif bits is not None and isinstance(value, int) and value.bit_length() > bits:
            raise ValueError(f"a number of {value.bit_length()} bits")
    return found


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
    from lindt.data.sources import Text

    plan, hints = _plan_fields()
    return (plan, Text, *(t for t in hints.values() if dataclasses.is_dataclass(t) and isinstance(t, type)))


@cache
def _plan_fields() -> tuple[type[Plan], dict[str, Any]]:
    from lindt.plan.plan import Plan

    return Plan, typing.get_type_hints(Plan)


def from_dict(table: Mapping[str, Any]) -> Plan:
    cls, _ = _plan_fields()
    try:
        plan: Plan = build(cls, _with_method(table), "")
    except RecursionError:
        raise UserError("the plan's tables are nested too deeply") from None
    return plan


def _with_method(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same tables, a method's name replaced by its parts."""
    if isinstance(table, Mapping) and isinstance(name := table.get("method"), str):
        from lindt.plan.plan import METHODS

        return {**table, "method": to_dict(among(METHODS, name, "method"))}
    return table


def from_toml(text: str, name: str = "plan") -> dict[str, Any]:
    try:
        return read_toml(text)
    except ValueError as error:
        raise UserError(f"{name} is not valid TOML: {error}") from None


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def table_of(plan: str) -> dict[str, Any]:
    """The tables of a preset, or of a TOML file."""
    path = PRESETS / f"{plan}.toml" if plan in preset_names() else Path(plan)
    try:
        return from_toml(path.read_text(encoding="utf-8"), str(plan))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UserError(f"plan {plan!r}: {reason}; name a TOML file or one of {', '.join(preset_names())}") from None


def resolve(
    plan: str | None = None, overrides: Sequence[str] = (), *, task: str | None = None, **flags: int | None
) -> Plan:
    """A plan from a preset or a file, with `--set` overrides and the flags that stand for a field.

    `task` is the user's own `package.module:function`. Its module is imported first: the plan may name its components.
    Without `plan` it is DEFAULT, or with a task own-task, a plan without attackers or noise.
    The fields are set in the file's tables, and the plan is built from them once: a component that a flag replaces is
    never built.
    """
    if task:
        from lindt.plan.problem import import_task

        import_task(task)
    table, reached = table_of(plan or ("own-task" if task else DEFAULT)), set()
    for assignment in overrides:
        name, dot, _ = assignment.partition("=")[0].strip().partition(".")
        if dot and name not in reached:
            table = _with_defaults(table, name)
        reached.add(name)
        table = override(table, assignment)
    return from_dict(table | {name: value for name, value in flags.items() if value is not None})


def _with_defaults(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tables with one field of the plan written out: every component's kind, and what the file leaves out."""
    cls, hints = _plan_fields()
    if name not in hints:
        return dict(table)
    given = _with_method(table)
    value = build(hints[name], given[name], name) if name in given else getattr(cls(), name)
    return {**table, name: to_dict(value)}


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
        from lindt.plan.plan import METHODS

        inner = to_dict(METHODS[inner]) if key == "method" and inner in METHODS else {"kind": inner}
    if rest and not isinstance(inner, Mapping):
        raise PlanError(path, value, f"{key} is a plain value, it has no fields")
    if not rest and isinstance(value, str) and isinstance(inner, Mapping) and inner.get("kind") == value:
        return dict(table)  # naming the kind it already has keeps its fields
    if keys == ["kind"] and table.get("kind") != value:
        return {"kind": value}  # another kind has other fields
    return {**table, key: _assign(inner, rest, value, path) if rest else value}
