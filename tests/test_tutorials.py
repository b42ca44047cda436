"""The tutorials and notebooks: every file and command runs as printed, in an empty folder, and shows what it says."""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import notebooks
import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
PAGES = sorted(path.stem for path in TUTORIALS.glob("*.md"))
NOTEBOOKS = sorted(path.stem for path in TUTORIALS.glob("*.ipynb"))
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', flags=re.DOTALL | re.MULTILINE)
# Making an environment and installing lindt into it is what tests/test_install.py does.
SET_UP = ("python3 -m venv", ". .venv/bin/activate", "pip install")
MOST_WORDS = 660


@final
@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((TUTORIALS / f"{page}.md").read_text())]


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(folder)])
    return os.environ | {
        "LINDT_CACHE": str(folder / "cache"),
        "LINDT_PRIVATE": str(folder / "private"),
        "COLUMNS": "200",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "error,ignore:'click:DeprecationWarning",
    }


def command(line: str, folder: Path) -> str:
    """The output of one line of a shell block."""
    words = shlex.split(line)
    program = {"lindt": [sys.executable, "-m", "lindt.cli"], "python": [sys.executable]}[words[0]]
    done = subprocess.run(
        [*program, *words[1:]], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def play(page: str, folder: Path) -> dict[str, str]:
    """Follow a page from the top: write its files, call its commands. What each command printed, by its line."""
    said: dict[str, str] = {}
    for block in blocks(page):
        if block.title:
            (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.title).write_text(block.text)
        for line in block.text.splitlines() if block.language == "sh" else ():
            if not line.startswith(SET_UP):
                said[line] = command(line, folder)
    return said


def rounds(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_its_files_are_valid(page: str) -> None:
    assert len((TUTORIALS / f"{page}.md").read_text().split()) <= MOST_WORDS
    for block in blocks(page):
        assert block.language in ("sh", "python", "toml")
        if block.language == "python":
            assert block.title, "a snippet that no command runs"
            ast.parse(block.text)
        if block.language == "toml":
            tomllib.loads(block.text)


@pytest.mark.slow
def test_a_first_run(tmp_path: Path) -> None:
    said = list(play("first-run", tmp_path).values())
    ill, shown, control, short = said[0], said[1], said[4], said[-1]
    assert "hurts" in ill
    assert "hurts" in shown
    assert "helps" in control
    assert "helps" in said[5]  # lindt runs
    assert "shared model alone hurts" in short
    rows = list(csv.DictReader((tmp_path / "clients.csv").read_text().splitlines()))
    assert {"client", "beta"} <= rows[0].keys()
    assert (tmp_path / "both.html").stat().st_size > 100_000
    assert rounds(tmp_path / "runs/digits-backdoor-seed0")[-1]["flag"]
    assert not any(line["flag"] for line in rounds(tmp_path / "runs/digits-control-seed0"))  # recovery never starts
    assert len(rounds(tmp_path / "runs/short")) == 20


@pytest.mark.slow
def test_your_own_task(tmp_path: Path) -> None:
    said = play("your-own-task", tmp_path)
    found = said["python play.py"]
    assert "hurts" in found.splitlines()[0]
    gains = [float(gain) for gain in re.findall(r"^clinic \d: (\S+) points", found, flags=re.MULTILINE)]
    assert len(gains) == 8
    assert min(gains) > -6  # "no clinic is left clearly worse off": of 80 test samples at most 4
    scored = [line["scores"]["beta"] for line in rounds(tmp_path / "runs/mine") if line["scores"]]
    assert scored[0] < -0.1  # at first the shared model serves clinics worse than alone
    assert json.loads((tmp_path / "runs/clinics/summary.json").read_text())["recovery_rounds"] > 0
    names = [one["name"] for one in json.loads((tmp_path / "runs/clinics/run.json").read_text())["clients"]]
    assert names[:2] == ["clinic 0", "clinic 1"]
    problem = tmp_path / "clinics.py"
    [line] = [line for line in problem.read_text().splitlines() if "1 - y" in line]  # "leave out the line"
    problem.write_text(problem.read_text().replace(f"{line}\n", ""))
    assert "undecided" in command("lindt run --task clinics:problem --rounds 40 --out runs/control", tmp_path).lower()


def test_no_tutorial_shortens_the_training_that_gains_are_measured_against() -> None:
    """Models trained alone for too few epochs are weak, and then federation looks better than it is."""
    warned = ROOT / "docs" / "verdict.md"  # says what a smaller number does
    pages = {ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *TUTORIALS.glob("*.ipynb")} - {warned}
    for page in [*pages, *(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.toml")]:
        assert not re.search(r"alone\.epochs\W{1,5}\d", page.read_text()), page
    assert "then every gain is too large" in warned.read_text()


def accuracies(said: str) -> list[float]:
    """Alone, shared, and what clients use, as `loop_with_lindt.py` prints them."""
    return [float(found) for found in re.findall(r"^(?:alone|shared|what clients use): (\d\.\d+)$", said, re.MULTILINE)]


@pytest.mark.slow
def test_your_own_loop(tmp_path: Path) -> None:
    said = play("your-own-loop", tmp_path)
    assert 0.35 < float(said["python loop.py"].split()[-1]) < 0.65  # "about half of the predictions"
    after = said["python loop_with_lindt.py"]
    assert "federation: hurts; clients predict with dual models" in after
    alone, shared, used = accuracies(after)
    assert used >= alone - 0.03 > shared + 0.1
    call = re.search(r"`(lindt\.GuardedPredictor\(.+?\))`", (TUTORIALS / "your-own-loop.md").read_text())
    assert call
    mixed = f"from loop_with_lindt import *\n\ni = 4\nprint({call[1]}.weights['alone'])\n"
    (tmp_path / "mixed.py").write_text(mixed)
    assert float(command("python mixed.py", tmp_path).split()[-1]) > 0.9  # the shared model is right for half of them

    # The control: the camps agree, recovery never begins, and no client has a model of its own.
    loop = tmp_path / "loop.py"
    assert loop.read_text().count("< 0") == 1
    loop.write_text(loop.read_text().replace("< 0", "> 0"))
    (tmp_path / "needed.py").write_text("from loop_with_lindt import *\n\nprint(private, verdict.needed)\n")
    healthy = command("python needed.py", tmp_path)
    assert "federation: undecided; clients predict with the shared model" in healthy
    alone, shared, used = accuracies(healthy)
    assert used == shared > alone
    private, needed = healthy.splitlines()[-1].split()
    assert private == "{}"
    assert int(needed) > 420  # more held-out samples than six clients with 70


@pytest.mark.slow
def test_your_flower_app_on_flowers_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's app, submitted as `flwr run` does, on a SuperLink that simulates."""
    pytest.importorskip("ray")
    from deployments import status_at_end

    from lindt.engines.flower.superlink import simulating

    for name, value in environment(tmp_path).items():
        if name != "PYTHONWARNINGS":  # Ray's own warnings are not ours
            monkeypatch.setenv(name, value)
    app = tmp_path / "app"
    for block in blocks("your-flower-app"):
        if block.title:
            (app / block.title).parent.mkdir(parents=True, exist_ok=True)
            (app / block.title).write_text(block.text)
    monkeypatch.chdir(tmp_path)  # where the SuperLink is started: a relative folder lies there
    with simulating(tmp_path / "home", tmp_path / "log", 10) as superlink:
        id = superlink.submit(app)
        assert status_at_end(superlink, id, tmp_path / "runs/digits-app", 900) == "finished:completed"
    assert "hurts" in command("lindt show runs/digits-app", tmp_path)
    lines = rounds(tmp_path / "runs/digits-app")
    assert len(lines) == 24
    assert lines[-1]["flag"]
    assert lines[-1]["scores"]["beta"] > -0.05


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_one_and_has_its_outputs(name: str) -> None:
    notebook = notebooks.read(TUTORIALS / f"{name}.ipynb")
    assert notebook["nbformat"] == 4
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    page = notebooks.as_markdown(TUTORIALS / f"{name}.ipynb")
    assert page.startswith("# ")
    assert f"({name}.ipynb)" in page


def test_a_notebooks_cells_share_names_and_the_last_value_is_shown() -> None:
    cells = [{"cell_type": "code", "source": ["a = 2\n", "print('first')"]}, {"cell_type": "code", "source": ["a + 1"]}]
    assert notebooks.run({"cells": cells}) == ["first\n", "3\n"]


def said_by_the_notebook(path: Path, folder: Path) -> str:
    code = (
        "import json, sys, pathlib, notebooks\n"
        "print(json.dumps(notebooks.run(notebooks.read(pathlib.Path(sys.argv[1])))))"
    )
    env = environment(folder)
    env["PYTHONPATH"] += os.pathsep + str(ROOT / "docs" / "generate")
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], cwd=folder, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return "".join(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    said = said_by_the_notebook(TUTORIALS / f"{name}.ipynb", tmp_path)
    assert "hurts" in said
    cells = notebooks.read(TUTORIALS / f"{name}.ipynb")["cells"]
    kept = [line for cell in cells for output in cell.get("outputs", ()) for line in output["text"]]
    assert len(said.splitlines()) == len(kept)  # the outputs in the file are of this code; numbers vary by machine


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_where_federation_does_not_hurt(name: str, tmp_path: Path) -> None:
    """The control that a reader tries first: the clients that contradict the others are made to agree with them."""
    contradict, agree = {
        "adding-lindt-to-a-loop": ("y = y if number < 5 else 1 - y", "pass"),
        "does-federation-help": ("labels = y[own] if number < 6 else 9 - y[own]", "labels = y[own]"),
    }[name]
    notebook = notebooks.read(TUTORIALS / f"{name}.ipynb")
    cells = [notebooks.source(cell).replace(contradict, agree) for cell in notebook["cells"]]
    assert cells != [notebooks.source(cell) for cell in notebook["cells"]]
    control = [{**cell, "source": [source]} for cell, source in zip(notebook["cells"], cells, strict=True)]
    (tmp_path / "control.ipynb").write_text(json.dumps({"cells": control}))
    said = said_by_the_notebook(tmp_path / "control.ipynb", tmp_path)
    assert "hurts" not in said
    assert "helps" in said
    assert "None" not in said
