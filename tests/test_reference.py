"""The reference holds every exported name, command, option and field; its examples run as printed."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any

import command_line
import comments
import pytest
import run_folder
import typer.main
import yaml

from lindt.cli.main import app
from lindt.runs.schema import DIVERGENCE, MEANINGS, SCORES

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PAGES = {page.name: page.read_text() for page in REFERENCE.glob("*.md")}
EXPORTED = [
    f"{module}.{name}" for module in ("lindt", "lindt.flower") for name in importlib.import_module(module).__all__
]


def home_of(name: str) -> str:
    module, _, own = name.rpartition(".")
    return f"{module}.{importlib.import_module(module)._HOMES[own]}"


def exported(name: str) -> Any:
    if name.startswith("lindt.flower."):
        pytest.importorskip("flwr")
    module, _, own = name.rpartition(".")
    return getattr(importlib.import_module(module), own)


def docstring_of(name: str) -> str:
    """Of a class or function its own; of a value the string under its assignment."""
    value = exported(name)
    if inspect.isclass(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    body = ast.parse(inspect.getsource(importlib.import_module(home_of(name)))).body
    for here, after in itertools.pairwise(body):
        if isinstance(here, ast.AnnAssign) and getattr(here.target, "id", "") == name.rpartition(".")[2]:
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            return str(after.value.value)
    raise AssertionError(name)


def section(docstring: str, title: str) -> str:
    """The lines under `title:`, in Google's form."""
    found = re.search(rf"^{title}:\n((?:(?:    .*)?\n?)*)", docstring, flags=re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_name_stands_on_one_page(name: str) -> None:
    found = [page for page, text in PAGES.items() for one in re.findall(r"^::: (\S+)$", text, re.M) if one == name]
    assert len(found) == 1, f"{name} stands on {found}; put it on one page of docs/reference"


@pytest.mark.parametrize("name", EXPORTED)
def test_the_example_of_an_exported_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    text = docstring_of(name)
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert len(test.examples) >= 2, f"{name} has no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", EXPORTED)
def test_arguments_and_results_are_explained(name: str) -> None:
    value = exported(name)
    if dataclasses.is_dataclass(value):
        source, start = inspect.getsourcelines(value)
        file = Path(inspect.getsourcefile(value) or "")
        (tree,) = ast.parse("".join(source)).body
        assert isinstance(tree, ast.ClassDef)
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
                first, last = node.lineno + start - 1, (node.end_lineno or 0) + start - 1
                assert comments.comment_on(file, first, last), f"{name}.{node.target.id} has no comment"
        return
    for one in [value, *(vars(value).values() if inspect.isclass(value) else ())]:
        text = inspect.getdoc(one) or ""
        if not callable(one) or one is exported("lindt.UserError"):  # an exception: its argument is its text
            continue
        if one is not value and "\nArgs:" not in text:
            continue  # Flower's own methods, and those that the class's text explains
        parameters = [p for p in inspect.signature(one).parameters if p != "self"]
        missing = [p for p in parameters if not re.search(rf"^    \*{{0,2}}{p}: ", section(text, "Args"), re.M)]
        assert not missing, f"{name}: {one.__name__}: {missing} not explained"
        assert inspect.isclass(one) or section(text, "Returns") or section(text, "Yields"), f"{name}: {one.__name__}"


def test_every_command_and_option_is_on_the_page() -> None:
    page = command_line.markdown()
    for words, command in command_line.commands(typer.main.get_command(app)):
        own = page.split(f"\n## {words}\n")[-1].partition("\n## ")[0] if words != "lindt" else page
        assert f"## {words}\n" in page
        for parameter in command.params:
            for word in parameter.opts if parameter.param_type_name == "option" else [parameter.metavar or ""]:
                shown = word.replace("|", "\\|")
                assert f"`{shown}`" in own, f"{words}: {word}"
    assert "<!-- generated: command line -->" in PAGES["command-line.md"]


def test_the_command_lines_page_says_defaults_of_zero_and_escapes_bars() -> None:
    page = command_line.markdown()
    assert "| `--comeback` FLOAT | `0` |" in page
    assert "| `[DIR \\| rm RUN...]` |" in page


def test_every_field_of_a_runs_files_has_a_meaning_and_is_on_the_page() -> None:
    page = run_folder.markdown()
    for name, (shape, meanings) in MEANINGS.items():
        assert sorted(shape) == sorted(meanings), name
        own = page.split(f"# {name}\n")[1].partition("\n##")[0]
        assert [field for field in shape if f"| `{field}` | " not in own] == []
    assert "<!-- generated: run folder -->" in PAGES["run-folder.md"]


@pytest.mark.parametrize("field", [*SCORES, *DIVERGENCE])
def test_every_metric_of_a_round_is_in_the_glossary(field: str) -> None:
    assert f"`{field}`" in PAGES["metrics.md"]


def test_a_dataclass_is_shown_with_its_arguments_and_one_table_of_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mkdocs.yml asks for it: the signature needs the fields, which the extension then leaves to its table."""
    griffe = pytest.importorskip("griffe")
    root = REFERENCE.parents[1]
    handlers = yaml.safe_load((root / "mkdocs.yml").read_text())["plugins"][1]["mkdocstrings"]["handlers"]
    monkeypatch.chdir(root)
    extensions = griffe.load_extensions(*handlers["python"]["options"]["extensions"])
    package = griffe.load("lindt", search_paths=[str(root / "src")], extensions=extensions)
    paired, method = package["protocols.Paired"], package["plan.plan.Method"]
    assert [(one.name, str(one.annotation)) for one in paired.parameters][1:] == [
        ("mean", "float"),
        ("square", "float"),
    ]
    assert "mean" not in paired.members
    assert "Attributes:\n    mean (float): of d\n    square (float): the mean of d squared" in paired.docstring.value
    assert {one.name: one.default for one in method.parameters}["aggregator"] == "..."
    assert "keeps_adapted" in method.members  # a property is no field
