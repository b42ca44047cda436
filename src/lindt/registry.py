"""Components by name: each class registers itself where it is defined, and plans choose among the registered classes.

A protocol names the module with the package's own components (`components_in`). It is imported when its components are
first needed, so that neither this module nor `plan` imports a component. Where the protocol names a package, every
module in it is imported: a new file there is found without an edit elsewhere.

A component is a dataclass. Its kind is its class name in snake case. `build` makes a component from plain tables: a
wrong field, value or type is a PlanError that names the field.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, final

from lindt.errors import PlanError, UserError

T = TypeVar("T")

# Metadata of a field that a plan's tables leave out where it has its default. So a plan that does not set the field has
# the same tables and keys as before the field was added; repr=False does the same for keys that use a repr.
OMITTED: Mapping[str, bool] = types.MappingProxyType({"omitted": True})

_HOMES: dict[type, str] = {}  # a protocol -> the module or package of the package's own components
_COMPONENTS: dict[type, dict[str, Any]] = {}  # a protocol -> its components by kind
_IMPORTED: set[str] = set()  # the homes whose components are registered
_METHODS: dict[str, dict[str, Any]] = {}  # a method's name -> its table in a plan


def components_in(home: str) -> Callable[[T], T]:
    """Decorator of a protocol: plans choose a component of it by kind; the package's own are in the module `home`."""

    def place(protocol: T) -> T:
        assert isinstance(protocol, type)
        _HOMES[protocol], _COMPONENTS[protocol] = home, {}
        return protocol

    return place


def register(protocol: type) -> Callable[[type[T]], type[T]]:
    """Class decorator: make a dataclass a component of the protocol, under its name in snake case.

    Write it above `@dataclass`. A class of the same module and name replaces the earlier one, as a notebook's cell may
    run twice. Raises a UserError where another class has the kind, or where a method of the protocol is missing.
    """

    def enter(cls: type[T]) -> type[T]:
        if "__dataclass_fields__" not in vars(cls):
            raise UserError(f"{cls.__name__} is not a dataclass; write @register above @dataclass(frozen=True)")
        fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # checked above
        missing = [name for name in _members(protocol) if name not in fields and not hasattr(cls, name)]
        if missing:
            raise UserError(f"{cls.__name__} is not a component of {protocol.__name__}: define {', '.join(missing)}")
        add(protocol, kind_of(cls), cls)
        return cls

    return enter


def add(protocol: type, kind: str, component: Any) -> None:
    """Register a class or a function under a kind. Raises a UserError where another component has the kind."""
    if protocol not in _HOMES:
        raise UserError(f"{protocol.__name__} is not a protocol that plans choose a component of")
    home = _HOMES[protocol]
    if not f"{component.__module__}.".startswith(f"{home}."):
        _import(home)  # the package's own components first, so that a user's class of the same kind is refused
    there = _COMPONENTS[protocol].get(kind)
    if there is not None and _path(there) != _path(component):
        raise UserError(
            f"two components of {protocol.__name__} have the kind {kind!r}: {_path(there)} and {_path(component)}; "
            "give one of them another name"
        )
    _COMPONENTS[protocol][kind] = component


def kinds(protocol: type) -> dict[str, Any]:
    """The components of a protocol by kind: the package's own and those of users."""
    _import(_HOMES[protocol])
    return dict(_COMPONENTS[protocol])


def component(protocol: type, kind: str, **fields: Any) -> Any:
    """A component by its kind. Fields may be plain tables; a wrong field is a PlanError that names it."""
    return build(protocol, {"kind": kind, **fields}, "")


def is_protocol(hint: Any) -> bool:
    """Whether a plan chooses a component of this type."""
    return isinstance(hint, type) and hint in _HOMES


def register_method(name: str, **parts: Any) -> None:
    """Register a method by name: its parts as in a plan's tables.

    `register_method("apfl", adaptation={"kind": "apfl", "alpha": 0.01})`. Other parts have the defaults of Method.
    Raises a UserError where another method has the name.
    """
    if _METHODS.setdefault(name, parts) != parts:
        raise UserError(f"two methods have the name {name!r}: {_METHODS[name]} and {parts}; give one another name")


def method_tables() -> dict[str, dict[str, Any]]:
    """The methods registered so far, as tables."""
    return dict(_METHODS)


def is_component(cls: type) -> bool:
    """Whether the class is registered for any protocol."""
    return any(cls in components.values() for components in _COMPONENTS.values())


def kind_of(component: object) -> str:
    """`TrimmedMean(...)` is `trimmed_mean`."""
    name = component.__name__ if isinstance(component, type) else type(component).__name__
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@final
class Named(Mapping[str, T]):
    """A read-only mapping, which includes names that are registered later.

    `earlier` maps earlier names to present names: they are found, but not listed.
    """

    def __init__(
        self,
        names: Callable[[], Iterable[str]],
        get: Callable[[str], T],
        earlier: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        self._names, self._get, self._earlier = names, get, earlier

    def __getitem__(self, name: str) -> T:
        name = self._earlier.get(name, name)
        if name not in self._names():
            raise KeyError(name)
        return self._get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(list(self._names()))

    def __repr__(self) -> str:
        return repr(dict(self))


def _import(home: str) -> None:
    """Import a module, or a package with every module in it."""
    if home in _IMPORTED:
        return
    package = importlib.import_module(home)
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        if not module.name.startswith("_"):
            importlib.import_module(f"{home}.{module.name}")
    _IMPORTED.add(home)


def _members(protocol: type) -> list[str]:
    return sorted(name for name in vars(protocol) if name == "__call__" or not name.startswith("_"))


def _path(component: Any) -> str:
    return f"{component.__module__}.{component.__qualname__}"


def build(hint: Any, value: Any, field: str) -> Any:
    """A value of the wanted type from plain tables, lists and values, or a PlanError that names the field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_protocol(hint):
        return _component(hint, value, field)
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
        return tuple(build(t, item, f"{field}[{i}]") for i, (t, item) in enumerate(zip(inner, value, strict=True)))
    if origin in (types.UnionType, typing.Union):
        raise TypeError(f"{field}: plans hold no unions")
    return _plain(hint, value, field)


def among(known: Mapping[str, Any], value: Any, field: str) -> Any:
    """The entry of that name, or a PlanError that lists the names."""
    if not isinstance(value, str) or value not in known:
        guess = _guess(value, known) if isinstance(value, str) else ""
        raise PlanError(field, value, f"choose among {sorted(known)}{guess}")
    return known[value]


def _component(protocol: type, value: Any, field: str) -> Any:
    known = kinds(protocol)
    table = {"kind": value} if isinstance(value, str) else value
    if not isinstance(table, Mapping):
        raise PlanError(field, value, f"give a table with `kind`, one of {sorted(known)}")
    if "kind" not in table:
        raise PlanError(_join(field, "kind"), None, f"is missing; choose among {sorted(known)}")
    chosen = among(known, table["kind"], _join(field, "kind"))
    fields = {k: v for k, v in table.items() if k != "kind"}
    own = field_names(chosen)
    for key in fields:
        others = sorted(kind for kind, other in known.items() if key in field_names(other)) if key not in own else []
        if others:
            words = f"{kind_of(chosen)} has no such field; {', '.join(others)} has it: set {_join(field, 'kind')} too"
            raise PlanError(_join(field, key), fields[key], words)
    return _dataclass(chosen, fields, field)


def _dataclass(cls: type, value: Any, field: str) -> Any:
    if not isinstance(value, Mapping):
        raise PlanError(field, value, "give a table of fields")
    hints = typing.get_type_hints(cls)
    check_fields(cls, value, field)
    arguments = {key: build(hints[key], item, _join(field, key)) for key, item in value.items()}
    try:
        return cls(**arguments)
    except PlanError as error:
        raise (error.within(field) if field else error) from None
    except TypeError:
        required = [
            f.name
            for f in dataclasses.fields(cls)
            if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        missing = [name for name in required if name not in arguments]
        if not missing:
            raise
        raise PlanError(_join(field, missing[0]), None, f"is missing; {kind_of(cls)} needs it") from None


def field_names(cls: Any) -> frozenset[str]:
    """The fields that a table may set; empty for a component that is a function."""
    return (
        frozenset(f.name for f in dataclasses.fields(cls) if f.init) if dataclasses.is_dataclass(cls) else frozenset()
    )


def check_fields(cls: type, table: Mapping[str, Any], field: str) -> None:
    """Raise a PlanError where the table names a field that the dataclass does not have."""
    names = field_names(cls)
    for key in table:
        if key not in names:
            raise PlanError(_join(field, key), table[key], f"no such field{_guess(key, names, kind_of(cls))}")


def _plain(hint: Any, value: Any, field: str) -> Any:
    if isinstance(value, int) and value.bit_length() > 63:
        raise PlanError(field, f"a number of {value.bit_length()} bits", "give a number of at most 63 bits, as in TOML")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not hint:
        words = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
        raise PlanError(field, value, f"give {words.get(hint, hint)}, not a {type(value).__name__}")
    if hint is float and (value != value or value in (float("inf"), float("-inf"))):
        raise PlanError(field, value, "give a finite number")
    return value


def _guess(word: str, known: Iterable[str], owner: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; {owner} has {', '.join(sorted(known)) or 'no fields'}" if owner else ""


def _join(field: str, key: str) -> str:
    return f"{field}.{key}" if field else key
