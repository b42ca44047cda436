"""The name of a task, `module:function`, and modules that cannot be one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lindt import UserError
from lindt.plan.problem import import_task, load_task

SCRIPT = """
import torch
from torch import nn

import lindt

def problem():
    pairs = []
    for i in range(4):
        x = torch.randn(40, 2, generator=torch.Generator().manual_seed(i))
        y = (x[:, 0] > 0).long()
        pairs.append(((x[:20], y[:20]), (x[20:], y[20:])))
    return lindt.Problem(pairs, lambda: nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)))

"""
RUN = (
    "lindt.run(task='{name}:problem', overrides={{'rounds': 1, 'alone.epochs': 1}}, out='{name}', engine='{engine}')\n"
)
FEDERATE = "list(lindt.federate(lindt.resolve('own-task', rounds=1), problem=problem(), preflight=False))\n"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("mine", "task mine: write it as package.module:function"),
        ("mine.py:problem", "task mine.py:problem: mine.py is the path of a file; write the module, mine:problem"),
        ("./tasks/mine:problem", "./tasks/mine is the path of a file; write the module, tasks.mine:problem"),
        ("tasks\\mine.py:problem", "tasks\\mine.py is the path of a file; write the module, tasks.mine:problem"),
        (
            "__main__:problem",
            "only this process has this __main__; name the module of a file, or give the lindt.Problem",
        ),
        ("no_such_task:problem", "No module named 'no_such_task'; run it from the folder that holds the module"),
        (
            "imports_nothing:problem",
            "imports_nothing cannot be imported (ModuleNotFoundError: No module named 'no_such_package'; "
            "imports_nothing.py, line 1, in <module>)",
        ),
        (
            "half_written:problem",
            "half_written cannot be imported (SyntaxError: invalid syntax (half_written.py, line 1))",
        ),
        ("a_number:problem", "it returned an object of type int; return a lindt.Problem"),
    ],
)
def test_a_name_that_is_no_task_says_what_to_write(
    name: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_nothing.py").write_text("import no_such_package\n")
    (tmp_path / "half_written.py").write_text("def problem(:\n")
    (tmp_path / "a_number.py").write_text("def problem():\n    return 3\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(complaint)):
        load_task(name)


@pytest.mark.parametrize("plays", [RUN.format(name="plays_at_once", engine="inprocess"), FEDERATE])
def test_a_module_that_plays_a_run_when_it_is_imported_is_refused(
    plays: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker imports the module: it would play a run in its turn, with workers of its own."""
    (tmp_path / "plays_at_once.py").write_text(SCRIPT + plays)
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("plays_at_once", None)
    with pytest.raises(UserError, match=r"its module plays a run when it is imported.*under `if __name__ == "):
        import_task("plays_at_once:problem")
    assert not (tmp_path / "plays_at_once").exists()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_that_is_its_own_task_needs_a_guard(guarded: bool, tmp_path: Path) -> None:
    guard, run = "if __name__ == '__main__':\n    ", RUN.format(name="script", engine="processes")
    (tmp_path / "script.py").write_text(SCRIPT + (guard if guarded else "") + run)
    env = os.environ | {"LINDT_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == (0 if guarded else 1), done.stderr
    if not guarded:
        assert "put that call under `if __name__" in done.stderr.splitlines()[-1]
    assert (tmp_path / "script").exists() == guarded
