"""The shape of the package, held by tests: imports point one way, files stay small, one training loop."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

import lindt

PACKAGE = Path(lindt.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# From the protocols up to the command line; a module may import from its own layer and from those before it.
LAYERS = [
    {"errors", "seeds", "disk", "memory", "sealed", "toml", "attaching"},
    {"data", "weights", "detection", "aggregators", "robust"},
    {"fit", "penalties", "intertwining", "models", "metrics"},
    {"recovery", "adaptations", "environment"},
    {"methods"},
    {"plan"},
    {"problem", "engines.base"},
    {"parties", "replies", "versions", "alone", "tasks"},
    {"federation"},
    {"client", "checkpoint", "records", "references", "planfile"},
    {"engines", "store"},
    {"running", "engines.flower_apps", "engines.flower_launch", "presets", "flower"},
    {"trackers"},
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
    for path in (PACKAGE / "report").rglob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        names = {a.name for node in tree if isinstance(node, ast.Import) for a in node.names}
        assert "torch" not in names, path.name


def test_every_exported_name_is_there() -> None:
    assert sorted(lindt._HOMES) == sorted(lindt.__all__)
    for name in lindt.__all__:
        assert getattr(lindt, name).__module__.startswith("lindt.") if name != "METHODS" else lindt.METHODS
    with pytest.raises(AttributeError):
        lindt.nothing  # noqa: B018


# The paper's evaluation is a package of its own, above: `lindt` knows of it only where a command is asked for it.
EXPERIMENTS = PACKAGE.parent / "lindt_experiments"
EXPERIMENT_FILES = sorted(EXPERIMENTS.glob("*.py"))
EXPERIMENT_LAYERS = [
    {"outcomes", "paper", "titles", "sheets", "traces_kept"},
    {"variants", "worlds", "keys", "work"},
    {"scales", "catalog"},
    {"gather", "client_sizes"},
    {"jobs", "tables", "traces"},
    {"claims", "figures", "queue", "pages"},
    {"telling"},
    {"reproduce", "playing"},
]


def experiment_layer(name: str) -> int:
    for index, names in enumerate(EXPERIMENT_LAYERS):
        if {name, name.partition("_")[0]} & names:  # claims_tables stands with claims
            return index
    raise AssertionError(f"lindt_experiments.{name} stands in no layer; put it into one")


def of_experiments(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of lindt_experiments that these statements import; "" is the package itself."""
    found: set[str] = set()
    for node in nodes:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and node.module == "lindt_experiments":
            found |= set(names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lindt_experiments."):
            found.add((node.module or "").split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {name.partition(".")[2] for name in names if name.split(".")[0] == "lindt_experiments"}
    return found


@pytest.mark.parametrize("path", [f for f in EXPERIMENT_FILES if f.stem != "__init__"], ids=lambda path: path.stem)
def test_imports_among_the_experiments_point_one_way(path: Path) -> None:
    for imported in of_experiments(ast.parse(path.read_text()).body):
        assert experiment_layer(imported) <= experiment_layer(path.stem), f"{path.stem} imports {imported}"


@pytest.mark.parametrize("path", EXPERIMENT_FILES, ids=lambda path: path.stem)
def test_a_file_of_the_experiments_holds_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 250


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_package_knows_nothing_of_the_experiments_but_in_commands(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not of_experiments(tree.body)
    if path.parent.name != "commands":
        assert not of_experiments(ast.walk(tree))
