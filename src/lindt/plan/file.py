"""Plans as TOML, from a file or a preset. Files are not trusted: fields and types are checked strictly.

Reading TOML is bounded in size, in depth and in time. The limit on time is needed: Python's reader takes quadratic time
for `a.a.a.a = 1`, and minutes for such a file of 100 KB. Building a plan from the tables creates frozen dataclasses and
nothing else.

A component is chosen by `kind`, the name of its class in snake case, or by that name alone where its other
fields have their defaults: `aggregator = "median"`. A method may be chosen by name: `method = "lindt-always"`.

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

from lindt.errors import PlanError, UserError, in_short, one_line, require_type
from lindt.registry import among, build, is_component, kind_of

if TYPE_CHECKING:
    from lindt.plan.plan import Plan

PRESETS: Final = Path(__file__).parent / "presets"
DEFAULT: Final = "digits-nfl"
OWN: Final = "own-task"  # the plan for data and a model of the user's own

MOST_CHARACTERS: Final = 2 << 20  # the weights of 100,000 clients
MOST_PARTS: Final = 32  # the most parts of a dotted key
DEEPEST: Final = 64  # the deepest nesting of tables; a plan has 5
# Bare or quoted parts, each with the dot after it. The pattern is possessive, so that matching takes linear time.
_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY: Final = re.compile(rf"(?<![A-Za-z0-9_\\-])(?:{_PART}){{{MOST_PARTS}}}")


def read_toml(text: str, bits: int | None = None) -> dict[str, Any]:
    """The tables of a TOML text, or ValueError; with `bits`, also where a whole number has more bits."""
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
            raise ValueError(f"a number has {value.bit_length()} bits, more than {bits}")
    return found


def to_dict(value: Any, *, whole: bool = False) -> Any:
    """A plan as plain tables, lists and values, each component with its kind.

    Fields marked `OMITTED` are left out where they have their defaults; `whole` writes them, too.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: to_dict(getattr(value, f.name), whole=whole)
            for f in dataclasses.fields(value)
            if f.init and (whole or not _omitted(f, getattr(value, f.name)))
        }
        # Components first: a Flower server writes its detection without importing the modules of the plan.
        is_table = not is_component(type(value)) and isinstance(value, _tables())
        return fields if is_table else {"kind": kind_of(value), **fields}
    if isinstance(value, tuple | list):
        return [to_dict(item, whole=whole) for item in value]
    return value


def _omitted(field: dataclasses.Field[Any], value: Any) -> bool:
    if "omitted" not in field.metadata:
        return False
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return bool(value == default)


@cache
def _tables() -> tuple[type, ...]:
    """The plan's fixed tables, which have no kind."""
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


def from_run(table: Mapping[str, Any]) -> Plan:
    """The plan of a run that was begun, maybe by an earlier version: fields that it lacks have no effect.

    Before `alone.with_validation` there was one P_i, trained without V_i. So a run of that time keeps its reference.
    """
    plan, alone = from_dict(table), table.get("alone")
    if plan.detection.reports and isinstance(alone, Mapping) and "with_validation" not in alone:
        return dataclasses.replace(plan, alone=dataclasses.replace(plan.alone, with_validation=False))
    return plan


def _with_method(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same tables, with a method's name replaced by its components."""
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
        reason = getattr(error, "strerror", None) or "it is not a text file"
        raise UserError(f"plan {plan!r}: {reason}; name a TOML file or one of {', '.join(preset_names())}") from None


def resolve(
    plan: Plan | str | Path | None = None,
    overrides: Sequence[str] | Mapping[str, object] = (),
    *,
    task: str | None = None,
    **flags: int | None,
) -> Plan:
    """A plan from a preset, a file or another plan, with overrides and flags.

    The fields are set in the file's tables, and the plan is built from them once: a component that an override replaces
    is never built.

    Args:
        plan: The name of a preset, the path of a TOML file, or another plan. Without it `digits-nfl`, or with a task
            `own-task`, a plan without attackers or noise.
        overrides: A dict of dotted fields, `{"rounds": 10, "training.rate": 0.05}`, whose values may be components too,
            or a list of texts as after `--set`, `["rounds=10"]`.
        task: The user's own `package.module:function`. Its module is imported first: the plan may name its components.
        **flags: Fields of the plan by name, such as `rounds=40` or `seed=3`; None leaves a field as it is.

    Returns:
        The plan.

    Raises:
        UserError: There is no such preset or file, or a field is wrong (`PlanError`).

    Examples:
        >>> import lindt
        >>> plan = lindt.resolve("digits-nfl", ["training.rate=0.05", "method=lindt-always"], rounds=40)
        >>> plan.rounds, plan.training.rate, plan.method == lindt.METHODS["lindt-always"]
        (40, 0.05, True)
    """
    if isinstance(overrides, str) or not isinstance(overrides, Mapping | Sequence):
        raise UserError(f"overrides: {in_short(overrides)} is not a dict; give fields, such as {{'rounds': 10}}")
    if task:
        from lindt.plan.problem import import_task

        import_task(task)
    if plan is None or isinstance(plan, str | Path):
        table = table_of(str(plan or (OWN if task else DEFAULT)))
    else:
        require_type("plan", plan, _plan_fields()[0], "give a Plan, a preset's name or the path of a TOML file")
        table = to_dict(plan)
    assignments = overrides.items() if isinstance(overrides, Mapping) else (_read_assignment(one) for one in overrides)
    reached = set()
    for path, value in assignments:
        if not isinstance(path, str):
            raise UserError(
                f"overrides: {in_short(path)} is not a field of a plan; write text, such as 'training.rate'"
            )
        keys = _keys(path, f"overrides: {one_line(path, 60)}")
        if len(keys) > 1 and keys[0] not in reached:
            table = _with_defaults(table, keys[0])
        reached.add(keys[0])
        table = _assign(table, keys, _plain(value), path.strip())
    return from_dict(table | {name: value for name, value in flags.items() if value is not None})


def _plain(value: object) -> Any:
    """A value as in a file: components as tables, numpy's numbers as Python's."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return to_dict(value)


def _with_defaults(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tables with one field of the plan written out: every component's kind, and the defaults."""
    cls, hints = _plan_fields()
    if name not in hints:
        return dict(table)
    given = _with_method(table)
    rounds = given.get("rounds")
    default = cls(rounds=rounds) if type(rounds) is int else cls()  # a method's r' may follow the rounds
    value = build(hints[name], given[name], name) if name in given else getattr(default, name)
    return {**table, name: to_dict(value, whole=True)}


def override(table: Mapping[str, Any], assignment: str) -> dict[str, Any]:
    """`environment.privacy.sigma=0.003` set in a plan's tables."""
    path, value = _read_assignment(assignment)
    return _assign(table, path.split("."), value, path)


def _read_assignment(assignment: str) -> tuple[str, Any]:
    """The field and the value of `environment.privacy.sigma=0.003`; the value is read as TOML, or as a word."""
    path, equals, text = assignment.partition("=")
    if not equals or not path.strip():
        raise UserError(f"--set {one_line(assignment)}: write it as field.subfield=value")
    _keys(path, f"--set {one_line(assignment, 60)}")
    try:
        value = read_toml(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
    return path.strip(), value


def _keys(path: str, shown: str) -> list[str]:
    keys = path.strip().split(".")
    if len(keys) > MOST_PARTS:
        raise UserError(f"{shown}...: it has {len(keys)} parts; no field of a plan has so many")
    return keys


def _assign(table: Mapping[str, Any], keys: list[str], value: Any, path: str) -> dict[str, Any]:
    key, rest = keys[0], keys[1:]
    inner = table.get(key, {})
    if rest and isinstance(inner, str):
        from lindt.plan.plan import METHODS

        inner = to_dict(METHODS[inner]) if key == "method" and inner in METHODS else {"kind": inner}
    if rest and not isinstance(inner, Mapping):
        raise PlanError(path, value, f"{key} is a plain value without fields; set {key} itself")
    if not rest and isinstance(value, str) and isinstance(inner, Mapping) and inner.get("kind") == value:
        return dict(table)  # the kind is the same: its fields are kept
    if keys == ["kind"] and table.get("kind") != value:
        return {"kind": value}  # another kind has other fields
    return {**table, key: _assign(inner, rest, value, path) if rest else value}
