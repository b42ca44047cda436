"""The shape of the package: imports point one way, one training loop, readers of runs need no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import lindt

PACKAGE = Path(lindt.__file__).parent
EXPERIMENTS = PACKAGE.parent / "lindt_experiments"

# From the protocols up to the command line: a module imports from its own layer and from those before it.
LAYERS = {
    "base": ("errors", "seeds", "resources", "user_code"),
    "protocols": ("gains", "protocols", "registry", "weights"),
    "data, environment": ("data", "environment"),
    "plan": ("plan",),
    "client": ("client",),
    "server": ("server",),
    "engines": ("engines",),
    # Run files can be read and written without torch; the two Flower apps play whole runs.
    "runs": ("runs", "flower", "engines.flower.apps", "engines.flower.launch"),
    "readers": ("report", "watch", "trackers"),
    "command line": ("cli", "opening", "session"),  # `lindt run`, lindt.open and lindt.run
}
ORDER = list(LAYERS)
# Modules of `runs` that import nothing above `errors`: files and their fields, for anyone.
FILES = {"lindt.runs.files", "lindt.runs.schema"}


def layer(module: str) -> str:
    name = module.removeprefix("lindt.")
    found = [
        (len(prefix), key)
        for key, prefixes in LAYERS.items()
        for prefix in prefixes
        if name == prefix or name.startswith(prefix + ".")
    ]
    assert found, f"{module} stands in no layer; put it into one"
    return max(found)[1]


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(nodes: Iterable[ast.AST], package: str) -> set[str]:
    """Modules of a package that these statements import; what stands inside TYPE_CHECKING is none of them."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == package}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = {m for m in whole if (PACKAGE.parent / Path(*m.split("."))).with_suffix(".py").exists()}
            found |= inner or {str(node.module)}
    return found


@pytest.mark.parametrize("name", ORDER)
def test_a_layer_imports_from_those_before_it_only(name: str) -> None:
    seen = 0
    for module, path in modules(PACKAGE):
        if module == "lindt" or layer(module) != name:
            continue
        seen += 1
        for other in imported(ast.parse(path.read_text()).body, "lindt") - {"lindt"} - FILES:
            assert ORDER.index(layer(other)) <= ORDER.index(name), f"{module} imports {other}"
    assert seen


@pytest.mark.parametrize(("name", "others"), [("plan", ("client", "server")), ("client", ("server",))])
def test_components_are_reached_through_the_registry(name: str, others: tuple[str, ...]) -> None:
    """Not by an import inside a function either."""
    for module, path in modules(PACKAGE):
        if module != "lindt" and layer(module) == name:
            found = imported(ast.walk(ast.parse(path.read_text())), "lindt") - {"lindt"} - FILES
            assert not [other for other in found if layer(other) in others], module


def test_files_of_a_run_and_their_fields_need_nothing_above_the_base() -> None:
    for module, path in modules(PACKAGE):
        if module in FILES:
            above = imported(ast.parse(path.read_text()).body, "lindt") - FILES
            assert all(layer(other) == "base" for other in above), f"{module} imports {above}"


def test_the_package_knows_of_the_experiments_only_inside_commands() -> None:
    for module, path in modules(PACKAGE):
        tree = ast.parse(path.read_text())
        assert not imported(tree.body, "lindt_experiments"), module
        if not module.startswith("lindt.cli."):
            assert not imported(ast.walk(tree), "lindt_experiments"), module


def test_imports_among_the_experiments_point_one_way() -> None:
    order = ["results", "plans", "queue", "tables", "claims", "figures"]
    order += ["boards", "detectors", "attacks", "recovery", "again", "reproduce"]
    below = {"lindt_experiments.tables.titles", "lindt_experiments.tables.paper", "lindt_experiments.tables.sheets"}
    for module, path in modules(EXPERIMENTS):
        name = module.split(".")[1] if "." in module else ""
        for other in imported(ast.parse(path.read_text()).body, "lindt_experiments") - below if name else ():
            assert order.index(other.split(".")[1]) <= order.index(name), f"{module} imports {other}"


def test_there_is_one_training_loop() -> None:
    callers = [module for module, path in modules(PACKAGE) if ".batches(" in path.read_text()]
    assert callers == ["lindt.client.training"]


READERS = [module for module, _ in modules(PACKAGE) if module.startswith(("lindt.report", "lindt.watch"))]
EXTRAS_UNUSED = "import sys\nassert not {'torch', 'numpy', 'safetensors'} & sys.modules.keys()"
TESTS_GAINS = "import lindt\nlindt.Detector(rounds=10, clients=2).observe(gains=[0.1, 0.2], samples=50)"


@pytest.mark.parametrize("package", ["lindt.report", "lindt.watch"])
def test_what_reads_runs_needs_neither_torch_nor_numpy(package: str) -> None:
    """In a fresh process, whatever they import on the way. The picture of labels is drawn with matplotlib and numpy."""
    names = [module for module in READERS if module.startswith(package) and module != "lindt.report.labels"]
    subprocess.run([sys.executable, "-c", f"import {', '.join(names)}\n{EXTRAS_UNUSED}"], check=True)


def test_the_test_of_gains_needs_neither_torch_nor_numpy() -> None:
    subprocess.run([sys.executable, "-c", f"{TESTS_GAINS}\n{EXTRAS_UNUSED}"], check=True)


def test_every_exported_name_is_there() -> None:
    assert sorted(lindt._HOMES) == sorted(lindt.__all__)
    for name in lindt.__all__:
        assert getattr(lindt, name).__module__.startswith("lindt.") if name != "METHODS" else lindt.METHODS
    with pytest.raises(AttributeError):
        lindt.nothing  # noqa: B018
