"""The documentation names things that exist: files, modules, names inside files, links and their anchors."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lindt"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "examples").glob("*/README.md"))
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]

PATH = re.compile(r"(?<![\w/.-])((?:src|tests|benchmarks|docs|examples)/[\w./*-]*[\w/*])")
# `server/updates.py`, with or without the package's own path before it.
SHORT = re.compile(r"`([\w/]+\.py)`")
MODULE = re.compile(r"(?<![\w./-])(lindt(?:_experiments)?(?:\.[A-Za-z_]\w*)+)")
IN_FILE = re.compile(r"((?:`[\w.]+`(?:, | and )?)+) in\s+`([\w/]+\.py)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FOREIGN = {"setup.py"}  # of an archive that docs/data.md speaks of
ELSEWHERE = ("http://", "https://")


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def source(path: str) -> Path | None:
    """The file that a page means by `server/updates.py`: of the package, or of the repository."""
    return next((found for found in (PACKAGE / path, ROOT / path) if found.is_file()), None)


@cache
def defined(path: Path) -> frozenset[str]:
    """Classes, functions, methods as Class.method, assigned names and fields; imported names are not defined here."""
    found: set[str] = set()

    def visit(body: list[ast.stmt], inside: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.update((inside + node.name, node.name))
                visit(node.body if isinstance(node, ast.ClassDef) else [], f"{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(inside + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(path.read_text()).body, "")
    return frozenset(found)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_every_path_exists(name: str) -> None:
    for path in PATH.findall(text_of(name)):
        found = [file for base in (ROOT, (ROOT / name).parent) for file in base.glob(path)]
        assert found, f"{name} names {path}"
    for path in SHORT.findall(text_of(name)):
        assert source(path) or (ROOT / name).with_name(path).is_file() or path in FOREIGN, f"{name} names {path}"


@pytest.mark.parametrize("name", NAMES)
def test_every_module_and_its_names_exist(name: str) -> None:
    for dotted in MODULE.findall(text_of(name)):
        module, _, rest = dotted.partition(".")
        value = importlib.import_module(module)
        for part in rest.split("."):
            if not hasattr(value, part):
                importlib.import_module(f"{value.__name__}.{part}")  # raises where there is no such module
            value = getattr(value, part)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_defined_in_the_file_that_is_named(name: str) -> None:
    for names, path in IN_FILE.findall(text_of(name)):
        file = source(path)
        assert file is not None, f"{name} names {path}"
        missing = [one for one in re.findall(r"`([\w.]+)`", names) if one not in defined(file)]
        assert not missing, f"{name}: {missing} not in {path}"


@pytest.mark.parametrize("name", [*NAMES, "CHANGELOG.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for link in LINK.findall(text_of(name)):
        if link.startswith(ELSEWHERE):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name} links {link}"
        assert not anchor or anchor in anchors(target), f"{name} links {link}"
