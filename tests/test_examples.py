"""The examples and the README's code run as printed, and show what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


def run(arguments: list[str], folder: Path, timeout: int = 300) -> str:
    env = os.environ | {
        "LINDT_CACHE": str(folder / "cache"),
        "COLUMNS": "200",
        "PYTHONPATH": f"{ROOT / 'examples'}{os.pathsep}{ROOT / 'src'}",
    }
    env |= {"PYTHONWARNINGS": "error,ignore:'click:DeprecationWarning", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_plain_loop_is_caught_and_mended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import plain_loop

    verdict, shared, used = plain_loop.main(rounds=20)
    assert verdict.negative
    assert used > shared + 5
    alone = float(capsys.readouterr().out.splitlines()[0].rpartition(" ")[2])
    assert used > alone > shared  # negative without recovery, positive with it
    control, shared, used = plain_loop.main(rounds=20, skewed=False)
    assert not control.negative
    assert used == shared


def test_its_marked_lines_are_all_that_knows_lindt() -> None:
    for line in (ROOT / "examples" / "plain_loop.py").read_text().split('"""', 2)[2].splitlines():
        if re.search(r"lindt|private|recovering:|detector|verdict =", line.partition("#")[0]):
            assert "# lindt" in line or "verdict.negative !=" in line, line


def test_own_task_from_the_command_line(tmp_path: Path) -> None:
    call = ["-m", "lindt.cli", "run", "--task", "own_task:problem", "--rounds", "2", "--out", "mine"]
    said = run([*call, "--set", "alone.epochs=2"], tmp_path)
    assert "Too early to say" in said  # two rounds
    about = json.loads((tmp_path / "mine" / "run.json").read_text())
    assert about["task"] == "own_task:problem"
    assert len(about["clients"]) == 12
    assert all(len(one["labels"]) == 10 for one in about["clients"])  # no label count shows what is wrong
    assert len((tmp_path / "mine" / "rounds.jsonl").read_text().splitlines()) == 2


def test_the_readmes_own_data_are_hurt_detected_and_mended(tmp_path: Path) -> None:
    assert len([line for line in BLOCKS[0].splitlines() if line]) <= 13
    said = run(["-c", BLOCKS[0]], tmp_path)
    assert said.startswith("The shared model alone hurts since round ")
    rows = [line.split() for line in said.splitlines() if re.match(r" *[0-3] ", line)]
    assert len(rows) == 4
    assert all(float(beta) >= -1 / 40 for *_, beta in rows)  # at most one of 40 test samples behind training alone
    assert re.search(r"worse off \d \(clearly 0\)", said)
    assert (tmp_path / "runs" / "mine" / "summary.json").exists()


def test_the_readmes_own_loop_runs(tmp_path: Path) -> None:
    assert len(BLOCKS) == 2
    assert run(["-c", BLOCKS[1]], tmp_path).startswith("too early -0.02 False")
