"""A test's own components: registered inside a `with` and removed after it. Other tests see the package's alone."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from lindt import registry
from lindt.plan.plan import METHODS


@contextmanager
def own_components() -> Iterator[None]:
    methods = list(METHODS)  # imports the components, which register them
    components = {protocol: list(registry.kinds(protocol)) for protocol in registry._HOMES}
    try:
        yield
    finally:
        for protocol, entries in registry._COMPONENTS.items():
            for kind, component in list(entries.items()):
                if kind not in components.get(protocol, ()) and not component.__module__.startswith("lindt."):
                    del entries[kind]
        for name in set(registry._METHODS) - set(methods):
            del registry._METHODS[name]


def by_path(path: Path) -> ModuleType:
    """A module from a file that is in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
