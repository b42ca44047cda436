"""The shape of the package, held by tests: imports point one way, files stay small, one training loop."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import lindt

PACKAGE = Path(lindt.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the protocols up to the command line; a module may import from its own layer and from those before it.
LAYERS = [
    {"errors", "seeds", "disk"},
    {"data", "weights", "detection", "aggregators"},
    {"fit", "penalties", "intertwining", "models", "metrics"},
    {"recovery", "adaptations", "environment"},
    {"methods"},
    {"plan"},
    {"problem", "engines.base"},
    {"parties", "replies", "versions", "alone", "tasks"},
    {"federation"},
    {"client", "checkpoint", "records", "references", "planfile"},
    {"engines", "store"},
    {"running", "presets"},
    {"export", "report"},
    {"commands"},
    {"cli"},
]


def layer(module: str) -> int:
    parts = module.removeprefix("lindt.").split(".")
    for name in (".".join(parts[:2]), parts[0]):
        for index, names in enumerate(LAYERS):
            if name in names:
                return index
    raise AssertionError(f"{module} stands in no layer; put it into one")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_at_the_top(path: Path) -> set[str]:
    """Modules of ours that importing the file imports: what stands inside functions or TYPE_CHECKING is left out."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lindt":
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = {n for n in names if (PACKAGE.parent / Path(*n.split("."))).with_suffix(".py").exists()}
            found |= inner or {node.module}
    return found - {"lindt"}


@pytest.mark.parametrize("path", [f for f in FILES if module_name(f) != "lindt"], ids=module_name)
def test_imports_point_one_way(path: Path) -> None:
    mine = module_name(path)
    for imported in imports_at_the_top(path):
        assert layer(imported) <= layer(mine), f"{mine} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 250


def test_there_is_one_training_loop() -> None:
    callers = [path.name for path in FILES if ".batches(" in path.read_text()]
    assert callers == ["fit.py"]


def test_what_reads_runs_for_people_does_not_import_torch_itself() -> None:
    for path in (PACKAGE / "report").glob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        names = {a.name for node in tree if isinstance(node, ast.Import) for a in node.names}
        assert "torch" not in names, path.name


def test_every_exported_name_is_there() -> None:
    assert sorted(lindt._HOMES) == sorted(lindt.__all__)
    for name in lindt.__all__:
        assert getattr(lindt, name).__module__.startswith("lindt.") if name != "METHODS" else lindt.METHODS
    with pytest.raises(AttributeError):
        lindt.nothing  # noqa: B018
