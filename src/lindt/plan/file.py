"""Plans as TOML: strict, typed, untrusted. Reading one builds frozen dataclasses and nothing else.

A component is chosen by `kind`, the name of its class in snake case, or by that name alone where its other
fields keep their defaults: `aggregator = "median"`. A method may be named: `method = "lindt"`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from lindt.client import adaptations, penalties
from lindt.data import partition
from lindt.data.sources import Text
from lindt.environment import participation, privacy, threats
from lindt.errors import PlanError, UserError, one_line
from lindt.plan import models
from lindt.plan.methods import METHODS, Method
from lindt.plan.plan import Plan
from lindt.plan.toml import MOST_PARTS, read_toml
from lindt.protocols import Adaptation, Aggregator, Penalty, Recovery, Stop
from lindt.server import aggregation, recovery

# What a plan may name. A new component is one more entry here.
CHOICES: dict[type, tuple[type, ...]] = {
    Adaptation: (
        adaptations.GlobalOnly,
        adaptations.Dual,
        adaptations.FineTuneHead,
        adaptations.Apfl,
        adaptations.Separate,
    ),
    Aggregator: (
        aggregation.Mean,
        aggregation.WeightedMean,
        aggregation.TrimmedMean,
        aggregation.Median,
        aggregation.Krum,
        aggregation.MultiKrum,
        aggregation.GeometricMedian,
        aggregation.NormBound,
    ),
    Penalty: (penalties.NoPenalty, penalties.Proximal),
    Recovery: (recovery.Never, recovery.Always, recovery.OnDetection),
    Stop: (recovery.Persist, recovery.EveryoneTreated, recovery.QuietRounds),
    participation.Participation: (participation.Sampled,),
    threats.Threat: (
        threats.NoThreat,
        threats.Backdoor,
        threats.NextCharacter,
        threats.Until,
        threats.SignFlip,
        threats.AdditiveNoise,
        threats.FreeRider,
        threats.Colluding,
        threats.LabelFlip,
        threats.ModelReplacement,
    ),
    privacy.Privacy: (privacy.NoPrivacy, privacy.Gaussian),
    partition.Partition: (
        partition.Iid,
        partition.Classes,
        partition.Groups,
        partition.Dirichlet,
        partition.Roles,
        partition.Balanced,
    ),
    models.Model: (models.SmallCnn, models.Cnn, models.Lstm, models.Linear),
}


def kind_of(component: object) -> str:
    """`TrimmedMean(...)` is `trimmed_mean`."""
    name = component.__name__ if isinstance(component, type) else type(component).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def to_dict(value: Any) -> Any:
    """A plan as plain tables, lists and values, each component with its kind."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        component = any(type(value) in choices for choices in CHOICES.values())
        composed = component or not isinstance(value, _tables())
        return {"kind": kind_of(value), **fields} if composed else fields
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    return value


def _tables() -> tuple[type, ...]:
    """The plan's fixed tables: what has no kind."""
    hints = typing.get_type_hints(Plan)
    return (Plan, Text, *(t for t in hints.values() if dataclasses.is_dataclass(t) and isinstance(t, type)))


def from_dict(table: Mapping[str, Any]) -> Plan:
    try:
        plan: Plan = _build(Plan, table, "")
    except RecursionError:
        raise UserError("the plan's tables are nested too deeply") from None
    return plan


def with_fields(plan: Plan, given: Mapping[str, Any]) -> Plan:
    """The plan with other values in fields of its own, checked like those of a file."""
    hints = typing.get_type_hints(Plan)
    return dataclasses.replace(plan, **{name: _build(hints[name], value, name) for name, value in given.items()})


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


def _build(hint: Any, value: Any, field: str) -> Any:
    """A value of the wanted type, or a PlanError that names the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in CHOICES:
        return _component(hint, value, field)
    if hint is Method and isinstance(value, str):
        return _among(METHODS, value, field)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _dataclass(hint, value, field)
    if origin is typing.Literal:
        if value not in arguments:
            raise PlanError(field, value, f"choose among {list(arguments)}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise PlanError(field, value, "give a list")
        variable = len(arguments) == 2 and arguments[1] is Ellipsis
        if not variable and len(arguments) != len(value):
            raise PlanError(field, value, f"give a list of {len(arguments)}")
        inner = [arguments[0]] * len(value) if variable else arguments
        return tuple(_build(t, item, f"{field}[{i}]") for i, (t, item) in enumerate(zip(inner, value, strict=True)))
    if origin in (types.UnionType, typing.Union):
        raise TypeError(f"{field}: plans hold no unions")
    return _plain(hint, value, field)


def _plain(hint: Any, value: Any, field: str) -> Any:
    if isinstance(value, int) and value.bit_length() > 63:
        raise PlanError(field, f"a number of {value.bit_length()} bits", "give one of at most 63 bits, as TOML does")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        words = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
        raise PlanError(field, value, f"give {words.get(hint, hint)}, not a {type(value).__name__}")
    if hint is float and (value != value or value in (float("inf"), float("-inf"))):
        raise PlanError(field, value, "give a finite number")
    return value


def _component(protocol: type, value: Any, field: str) -> Any:
    kinds = {kind_of(choice): choice for choice in CHOICES[protocol]}
    table = {"kind": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        raise PlanError(field, value, f"give a table with `kind`, one of {sorted(kinds)}")
    if "kind" not in table:
        raise PlanError(f"{field}.kind", None, f"is missing; choose among {sorted(kinds)}")
    chosen = _among(kinds, table["kind"], f"{field}.kind")
    return _dataclass(chosen, {k: v for k, v in table.items() if k != "kind"}, field)


def _dataclass(cls: type, value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        raise PlanError(field, value, "give a table of fields")
    hints = typing.get_type_hints(cls)
    names = {f.name for f in dataclasses.fields(cls) if f.init}
    for key in value:
        if key not in names:
            raise PlanError(_join(field, key), value[key], f"no such field{_guess(key, names, kind_of(cls))}")
    arguments = {key: _build(hints[key], item, _join(field, key)) for key, item in value.items()}
    try:
        return cls(**arguments)
    except PlanError as error:
        raise (error.within(field) if field else error) from None
    except TypeError:
        required = [
            f.name
            for f in dataclasses.fields(cls)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        missing = [name for name in required if name not in arguments]
        raise PlanError(_join(field, missing[0]), None, f"is missing; {kind_of(cls)} needs it") from None


def _among(known: Mapping[str, Any], value: Any, field: str) -> Any:
    if not isinstance(value, str) or value not in known:
        guess = _guess(value, known) if isinstance(value, str) else ""
        raise PlanError(field, value, f"choose among {sorted(known)}{guess}")
    return known[value]


def _guess(word: str, known: typing.Iterable[str], owner: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; {owner} has {', '.join(sorted(known)) or 'no fields'}" if owner else ""


def _join(field: str, key: str) -> str:
    return f"{field}.{key}" if field else key
