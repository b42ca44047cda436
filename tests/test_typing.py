"""What is exported is typed: a script that uses every exported name, under mypy --strict."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lindt

SCRIPT = """\
from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import Tensor, nn

import lindt
from lindt import (
    METHODS,
    Detector,
    GainReport,
    GuardedPredictor,
    Intertwined,
    LazyClients,
    Method,
    Paired,
    Plan,
    PlanError,
    Problem,
    RoundResult,
    Run,
    RunState,
    UserError,
    Verdict,
    federate,
    intertwine,
    is_negative,
    resolve,
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


x, y = torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)
clients = [((x, y), (x, y)), ((x, y), (x, y))]
plan = resolve("digits-nfl", {"rounds": 10, "training.rate": 0.05})
assert_type(plan, Plan)
assert_type(resolve(plan, ["rounds=3"], seed=1), Plan)
assert_type(resolve(Path("plan.toml"), {"method": METHODS["lindt"]}), Plan)
assert_type(METHODS["lindt"], Method)
run = lindt.run(plan, overrides={"rounds": 3}, clients=clients, model=net, out="runs/mine", optimizer=torch.optim.Adam)
assert_type(run, Run)
assert_type(run.verdict.sentence, str)
assert_type(run.verdict.gain, float | None)
assert_type(run.verdict.clearly_worse, tuple[int, ...] | None)
assert_type(run.plan, Plan)
assert_type(run.folder, Path)
assert_type(run.predict(0, x), Tensor)
assert_type(run.model("Berlin"), nn.Module)
assert_type(run.global_model(), nn.Module)
assert_type(run.report("x.html"), Path)
assert_type(run.resume(), Run)
assert_type(len(run.scores), int)
print(run.scores[["client"]], run.rounds["round"], run.summary, run.export(0))
opened = lindt.open("runs/mine", clients=clients, model=net)
assert_type(opened, Run)
for state, result in federate(plan, problem=Problem(clients, net), folder=opened.folder):
    assert_type(state, RunState)
    assert_type(result, RoundResult)
lazy = LazyClients(3, lambda i: clients[i % 2])
assert_type(lindt.run(plan, clients=lazy, model=net), Run)
detector = Detector(rounds=3, clients=2)
found = detector.observe(gains={0: Paired(0.1, 0.2)}, samples=10)
assert_type(found, Verdict)
dual = intertwine(net(), net())
assert_type(dual, Intertwined)
assert_type(is_negative([0.1]), bool)
report: GainReport | GuardedPredictor | PlanError | UserError | None = None
print(lindt.__version__, report)
"""


def test_every_exported_name_is_used_in_it() -> None:
    assert [name for name in lindt.__all__ if not re.search(rf"\b{name}\b", SCRIPT)] == []


@pytest.mark.slow
def test_a_strict_script_has_no_error(tmp_path: Path) -> None:
    """Of the script alone: the errors of an installed package are not its users'."""
    (tmp_path / "use.py").write_text(SCRIPT)
    words = [
        "--strict",
        "--follow-imports=silent",
        "--config-file",
        "",
        "--cache-dir",
        str(tmp_path / "cache"),
        "use.py",
    ]
    env = {"MYPYPATH": str(Path(lindt.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-m", "mypy", *words], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
