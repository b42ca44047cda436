"""How many modules a reader meets on each walk through the package (benchmarks/walks.py): it may only fall.

A ratchet: `MOST` is the count reached. When a walk gets shorter, lower its number; at the goal it stays at the goal.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

MOST = {
    "run": 42,  # goal 36; 39 before readers of runs needed no torch
    "update": 14,  # the goal
    "flower": 24,  # the goal
    "page": 8,  # the goal
    "round": 10,  # to open; the goal
    "whole_round": 22,
    "fields": 2,  # the goal
}


@pytest.fixture(scope="module")
def walks() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "walks.py"
    spec = importlib.util.spec_from_file_location("walks", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["walks"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", MOST)
def test_a_walk_gets_no_longer(name: str, walks: ModuleType, tmp_path: Path) -> None:
    if name == "flower":
        pytest.importorskip("flwr")
    walk = walks.WALKS[name]
    found = walk.to_open(walk.count(tmp_path))
    assert len(found) <= MOST[name], f"{walk.title}: {sorted(found)}"
    assert len(found) <= (walk.goal or 0) or len(found) == MOST[name], f"{len(found)} now: lower MOST[{name!r}]"


def test_every_walk_is_held(walks: ModuleType) -> None:
    assert MOST.keys() == walks.WALKS.keys()
    assert all(MOST[name] >= (walk.goal or 0) for name, walk in walks.WALKS.items())


def test_only_what_a_plain_round_enters_is_left_out_of_it(walks: ModuleType, tmp_path: Path) -> None:
    assert [name for name, walk in walks.WALKS.items() if walk.not_opened] == ["round"]
    assert walks.NOT_OPENED.keys() < walks.round_walk(tmp_path)


def test_imports_are_no_part_of_a_walk(walks: ModuleType, tmp_path: Path) -> None:
    """A module whose functions run only while it is imported was not entered."""
    (tmp_path / "imported.py").write_text("def f():\n    return 1\n\nONE = f()\n")
    found = walks.EnteredModules()
    walks._NAMES[str(tmp_path / "imported.py")] = "imported"
    spec = importlib.util.spec_from_file_location("imported", tmp_path / "imported.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with found.watching():
        spec.loader.exec_module(module)
    assert found.names == set()
    with found.watching():
        module.f()
    assert found.names == {"imported"}
