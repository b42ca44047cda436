"""What people expect beside the code is valid, and agrees with it: citation, workflow, templates, lower bounds."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from conftest import HEAVY

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def loaded(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def workflow_steps() -> list[dict[str, Any]]:
    return [step for job in loaded(".github/workflows/ci.yml")["jobs"].values() for step in job["steps"]]


def made(text: str) -> set[str]:
    """The make targets that a script calls."""
    return set(re.findall(r"\bmake ([a-z-]+)", re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)))


def test_the_workflow_calls_the_makefiles_targets_and_all_of_ci_run() -> None:
    called = set().union(*(made(step["run"]) for step in workflow_steps() if "run" in step))
    assert called <= TARGETS
    assert made((ROOT / ".ci" / "run").read_text()) <= called
    assert {"docs", "package"} <= called
    jobs = loaded(".github/workflows/ci.yml")["jobs"]
    versions = jobs["check"]["strategy"]["matrix"]["python"]
    assert all(isinstance(version, str) for version in versions)  # 3.10 as a number would be 3.1
    assert f">={versions[0]}" == PROJECT["requires-python"]
    for job in jobs.values():
        assert job["runs-on"]
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])


def test_every_target_is_phony_and_explained() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, flags=re.MULTILINE)
    assert set(phony.split()) == TARGETS
    assert set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, flags=re.MULTILINE)) == TARGETS


def test_issue_templates_ask_by_unique_ids() -> None:
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name == "config.yml":
            continue
        assert form["name"]
        assert form["description"]
        ids = [part["id"] for part in form["body"]]
        assert len(set(ids)) == len(ids)
        assert all(part["attributes"]["label"] for part in form["body"])


def test_the_citation_names_paper_and_software() -> None:
    citation = loaded("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]
    paper = citation["preferred-citation"]
    assert paper["title"] == "LINDT: Tackling Negative Federated Learning with Local Adaptation"
    assert [author["family-names"] for author in paper["authors"]] == ["Lin", "Shou", "Chen", "Chen", "Wu"]
    assert paper["title"] in (ROOT / "docs" / "reading-guide.md").read_text()


def lowest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lowest", ROOT / ".ci" / "lowest.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    found = lowest().lowest((ROOT / "pyproject.toml").read_text())
    assert "torch" not in found
    extras = [PROJECT["optional-dependencies"][extra] for extra in lowest().EXTRAS]
    assert len(found) == len(PROJECT["dependencies"]) + sum(map(len, extras)) - 1  # all but torch
    assert f"numpy>={found['numpy']}" in PROJECT["optional-dependencies"]["simulation"]
    text = '[project]\ndependencies = ["torch>=2", "rich"]\n[project.optional-dependencies]'
    text += "".join(f"\n{extra}=[]" for extra in lowest().EXTRAS)
    with pytest.raises(ValueError, match="rich: it has no lower bound"):
        lowest().lowest(text)


def test_the_tests_with_the_lowest_versions_exist() -> None:
    named = re.search(r"^BOUNDED := \$\(addprefix tests/, (.*?)\)$", MAKEFILE, flags=re.DOTALL | re.MULTILINE)
    assert named
    files = named[1].replace("\\", " ").split()
    assert len(files) > 5
    assert [file for file in files if not (ROOT / "tests" / file).is_file()] == []


def test_all_tests_of_a_file_that_the_quick_suite_leaves_out_are_slow() -> None:
    for name in HEAVY:
        (path,) = (ROOT / "tests").rglob(name)
        assert re.search(r"^pytestmark = (\[\s*)?pytest\.mark\.slow\b", path.read_text(), flags=re.MULTILINE), name


def test_make_torture_runs_each_file_that_has_torture_tests() -> None:
    lists = re.findall(r"^(?:TORTURE|WEB) := (.*?[^\\])$", MAKEFILE, flags=re.DOTALL | re.MULTILINE)
    assert len(lists) == 2
    listed = {Path(file).name.removeprefix("test_") for file in re.findall(r"[\w/]+\.py", " ".join(lists))}
    marked = {p for p in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.torture" in p.read_text()} - {
        Path(__file__)
    }
    assert len(marked) > 5
    assert {path.name for path in marked if path.name.removeprefix("test_") not in listed} == set()
