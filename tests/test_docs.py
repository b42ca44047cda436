"""The documentation names things that exist: files, modules, names inside files, links and their anchors."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import cast

import click
import command_line
import offline
import pytest
import repository
import typer.main
import yaml

from lindt.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "lindt"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "benchmarks" / "README.md", *sorted((ROOT / "examples").glob("*/README.md"))]
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


def nav(entry: object) -> Iterator[str]:
    """The pages in mkdocs.yml, below an entry of its nav."""
    if isinstance(entry, str):
        yield entry
        return
    for inner in entry.values() if isinstance(entry, dict) else cast(list[object], entry):
        yield from nav(inner)


def test_every_page_is_in_the_sites_nav_once() -> None:
    shown = list(nav(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    docs = ROOT / "docs"
    written = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    written += [path.relative_to(docs).with_suffix(".md").as_posix() for path in docs.rglob("*.ipynb")]
    written += [f"repository/{name}" for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
    assert sorted(shown) == sorted(written)


def test_a_page_that_loads_from_another_host_is_found() -> None:
    for text in (
        '<script async src="https://unpkg.com/x.js">',
        "<link rel=preconnect href=//fonts.gstatic.com>",
        '<link href="https://a.example/b.css" rel="stylesheet">',
        "@font-face{src:url(https://a.example/b.woff)}",
        '<img alt="x" src="http://a.example/b.png">',
    ):
        assert offline.fetched_from_elsewhere(text)
    own = '<a href="https://flower.ai"><script src="assets/x.js"><link rel="canonical" href="https://a.example/">'
    assert offline.fetched_from_elsewhere(own + '<link rel="stylesheet" href="assets/x.css">') is None


def test_links_out_of_docs_become_parts_of_the_site(tmp_path: Path) -> None:
    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "examples" / "app").mkdir(parents=True)
    (tmp_path / "examples" / "app" / "README.md").write_text("[back](../../docs/a.md) [data](d.csv)")
    (tmp_path / "examples" / "app" / "d.csv").write_text("1")
    (tmp_path / "examples" / "loop.py").write_text("print(1)\n")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "t.md").write_text("# T")
    text = (
        "[app](../../examples/app) [loop](../../examples/loop.py) [tables](../../tables) [a](../a.md#x)\n"
        "```python\nlinks[0](../../not/a/link)\n```\n[out](https://example.org/x)\n"
    )
    parts = {part.uri: part for part in repository.linked_parts({"docs/deep/b.md": text}, tmp_path)}
    assert sorted(parts) == [
        "repository/examples/app/README.md",
        "repository/examples/app/d.csv",
        "repository/examples/loop.py.md",
        "repository/tables/index.md",
        "repository/tables/t.md",
    ]
    assert parts["repository/examples/app/README.md"].markdown == "[back](../../../a.md) [data](d.csv)"
    assert "[t.md](t.md)" in (parts["repository/tables/index.md"].markdown or "")
    assert repository.rewritten(text, "docs/deep/b.md", tmp_path) == (
        "[app](../repository/examples/app/README.md) [loop](../repository/examples/loop.py.md) "
        "[tables](../repository/tables/index.md) [a](../a.md#x)\n"
        "```python\nlinks[0](../../not/a/link)\n```\n[out](https://example.org/x)\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_every_path_exists(name: str) -> None:
    for path in PATH.findall(text_of(name)):
        found = [file for base in (ROOT, (ROOT / name).parent) for file in base.glob(path)]
        assert found, f"{name} names {path}"
    for path in SHORT.findall(text_of(name)):
        shown = f'{path}"\n' in text_of(name)  # a file that the page itself has the reader write
        there = source(path) or ((ROOT / name).parent / path).is_file() or shown
        assert there or path in FOREIGN, f"{name} names {path}"


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


COMMANDS = dict(command_line.commands(typer.main.get_command(app)))
SECTIONS = re.split(r"^## ", text_of("docs/plan-fields.md"), flags=re.MULTILINE)
# By their full names: under a heading such as `method.adaptation` the fields of components stand without it.
FIELDS = {
    field if "." in field or section.startswith("The plan") else f"{section.splitlines()[0]}.{field}"
    for section in SECTIONS
    for field in re.findall(r"^\| `([\w.]+)` \|", section, flags=re.MULTILINE)
}
PRESETS = {path.stem for path in (PACKAGE / "plan" / "presets").glob("*.toml")}
ABRIDGED = {"..."}  # stands for words that a page leaves out


def calls(markdown: str) -> Iterator[list[str]]:
    """The calls of lindt in blocks and spans of code, as words. A backslash at the end of a line continues it."""
    for piece in repository.FENCE.split(re.sub(r"\\\n\s*", " ", markdown)):
        start = "" if piece.lstrip().startswith("```") else "    "
        found = re.findall(rf"^{start}(lindt \w.*)", piece, flags=re.MULTILINE)
        found += re.findall(r"`(lindt [\w-][^`]*)`", piece) if start else []
        for line in found:
            yield shlex.split(line, comments=True)


def wrong_words(words: list[str]) -> list[str]:
    """The words of a call that lindt does not know: commands, options, fields of a plan, presets."""
    command, rest = COMMANDS["lindt"], words[1:]
    name = "lindt"
    while rest and f"{name} {rest[0]}" in COMMANDS:
        name = f"{name} {rest[0]}"
        command, rest = COMMANDS[name], rest[1:]
    if isinstance(command, click.Group) and rest[:1] != ["--help"]:
        return [word for word in rest[:1] if not word.isupper()]  # COMMAND stands for any
    options = {one: option for option in command.params if isinstance(option, click.Option) for one in option.opts}
    wrong, given = [], iter(rest)
    for number, word in enumerate(given):
        if word.startswith("-"):
            option = options.get(word)
            if option is None and word != "--help":
                wrong.append(word)
            elif option is not None and not option.is_flag:
                value = next(given, "")
                field = value.partition("=")[0]
                if word == "--set" and value not in ABRIDGED and field.islower() and field not in FIELDS:
                    wrong.append(value)
        elif number == 0 and name in ("lindt run", "lindt plan", "lindt compare"):
            known = word in PRESETS or word.endswith(".toml") or word.isupper()
            wrong += [] if known else [word]
    return wrong


def test_wrong_words_of_a_call_are_found() -> None:
    assert list(calls("    lindt runs  # list\n`lindt run`\n    lindt run \\\n        a.toml\n")) == [
        ["lindt", "runs"],
        ["lindt", "run", "a.toml"],
        ["lindt", "run"],
    ]
    assert len(list(calls(text_of("README.md")))) > 10
    for line, wrong in {
        "lindt run digits-nfl --seed 3 --set environment.privacy.sigma=0.003": [],
        "lindt run digits --set environment.privacy.noise=1 --seeds 3": [
            "digits",
            "environment.privacy.noise=1",
            "--seeds",
        ],
        "lindt vault drop": ["drop"],
        "lindt wath runs": ["wath"],
    }.items():
        assert wrong_words(line.split()) == wrong


@pytest.mark.parametrize("name", NAMES)
def test_every_call_of_lindt_has_commands_options_and_fields_that_exist(name: str) -> None:
    assert [(words, wrong) for words in calls(text_of(name)) if (wrong := wrong_words(words))] == []


# Each number in the table of results of the README, as the page of results has it.
RESULTS = {
    "docs/detectors.md": (
        r"On (372) federations .* detects (61%) of the negative ones, with false alarms in (0.9%) of the healthy",
        r"The paper's rule detects (78%), with false alarms in (74%)",
        r"(161) negative and 211 healthy runs",
    ),
    "docs/attacks.md": (r"All (294) cells are played",),
    "docs/recovery.md": (
        r"(24) federations of five small tasks",
        r"(479)\s+honest clients, LINDT from the first round",
        r"\| the dual model \| held out \| (\+6.4) \| (84) \| (4) \|",
        r"guarded\*\* \| given back \| (\+9.5) \| \*\*(34)\*\* \| 0 \|",
    ),
    "docs/reproduction.md": (
        r"CIFAR, NFL, FedAvg \| `paper`, 1 .* (-8.4) \| (-17.8) \|",
        r"CIFAR, NFL, LINDT \| `paper`, 1 .* (\+13.3) \| (\+7.6) \|",
    ),
    "docs/performance.md": (
        r"Flower / lindt, 2 workers \| (1.96) ",
        r"pfl-research, 2 processes / lindt, 2 workers \| (1.30) ",
        r"pfl-research, 2 threads / lindt, 2 workers \| (2.52) ",
    ),
}


@pytest.mark.parametrize("page", RESULTS)
def test_the_readmes_results_are_those_of_the_pages(page: str) -> None:
    (row,) = [line for line in text_of("README.md").splitlines() if line.startswith("|") and f"({page})" in line]
    for pattern in RESULTS[page]:
        found = re.search(pattern, text_of(page))
        assert found, f"{page} no longer has {pattern}: change the README and this test"
        for number in found.groups():
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]*\d)", row), (
                f"{number} of {page} is not in the README"
            )


def test_the_readmes_counts_of_clients_under_attack_are_those_of_the_page() -> None:
    page, readme = text_of("docs/attacks.md"), text_of("README.md")
    (together,) = re.findall(r"In all cells together (\S+ of \S+ \([\d.]+%\)) are clearly worse off", page)
    assert f"with the default recovery {together} honest clients are clearly worse off than alone" in readme
    (table,) = re.findall(r"in all attacks \|\n.*\n((?:\|.*\n)+)", page)
    counts = [re.findall(r"(\d+) of (\d+) ", line)[-1] for line in table.splitlines()]
    assert len(counts) == 7
    most, counted = max((int(harmed), int(counted)) for harmed, counted in counts)
    assert f"under each aggregator at most {most} of {counted}" in readme
