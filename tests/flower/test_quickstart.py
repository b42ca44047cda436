"""examples/flower-quickstart: two lines, with their imports, turn a plain Flower app into one that recovers."""

from __future__ import annotations

import difflib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

HERE = Path(__file__).parent
ROOT = HERE.parents[1] / "examples" / "flower-quickstart"
PLAIN, OURS = ROOT / "plain", ROOT / "with-lindt"
FILES = sorted(
    path.relative_to(PLAIN) for path in PLAIN.rglob("*") if path.is_file() and "__pycache__" not in path.parts
)

PLAY = '''
import importlib, json, sys
import torch
from fake_grid import FakeGrid
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import Strategy

class Unsorted:
    """Labels that cannot be sorted by, so that each client gets its share of all ten."""

    def __init__(self, y):
        self.y = y

    def argsort(self, stable):
        return torch.arange(len(self.y))

    def __getitem__(self, rows):
        return self.y[rows]


torch.set_num_threads(1)
results, start = [], Strategy.start
Strategy.start = lambda self, *a, **k: (results.append(start(self, *a, **k)), results[-1])[1]
config = json.loads(sys.argv[1])
for app in sys.argv[2:]:  # they have modules of the same names
    app, _, control = app.partition(":")
    sys.path.insert(0, app)
    client, server = (importlib.import_module(f"quickstart.{side}_app") for side in ("client", "server"))
    if control:  # the same digits, dealt evenly: sorting them by a shuffled label shuffles them
        x, y = sys.modules["quickstart.task"].digits()
        mixed = torch.randperm(len(y), generator=torch.Generator().manual_seed(77))
        sys.modules["quickstart.task"].digits = lambda x=x[mixed], y=y[mixed]: (x, Unsorted(y))
    server.main(FakeGrid(client.app, 10, config), Context(1, 1, {}, RecordDict(), config))
    sys.path.remove(app)
    for name in [name for name in sys.modules if name.partition(".")[0] == "quickstart"]:
        del sys.modules[name]
found = [[r.train_metrics_clientapp, r.evaluate_metrics_clientapp] for r in results]
print("RESULT" + json.dumps([[{r: dict(m) for r, m in part.items()} for part in one] for one in found]))
'''


def play(private: Path, **config: Any) -> list[list[dict[str, Any]]]:
    """Both apps as they are, and ours with its data dealt evenly, on a Grid without a network.

    Of each the metrics of training and of evaluation, by round.
    """
    settings = tomllib.loads((OURS / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"] | config
    path = os.pathsep.join([str(HERE), *sys.path])  # the same lindt as here
    env = os.environ | {"PYTHONPATH": path, "LINDT_PRIVATE": str(private), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", PLAY, json.dumps(settings), str(PLAIN), str(OURS), f"{OURS}:control"]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[list[dict[str, Any]]] = json.loads(done.stdout.rpartition("RESULT")[2])
    return found


def changes() -> list[str]:
    lines: list[str] = []
    for file in FILES:
        before, after = ((app / file).read_text().splitlines() for app in (PLAIN, OURS))
        found = list(difflib.unified_diff(before, after, f"plain/{file}", f"with-lindt/{file}", lineterm="", n=0))
        lines += [line for line in found if not line.startswith("@@") and line != "+"]
    return lines


def test_two_lines_their_imports_and_a_dependency_are_changed() -> None:
    theirs = {path.relative_to(OURS) for path in OURS.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert theirs == set(FILES)
    added = [line for line in changes() if re.match(r"\+(?!\+\+)", line)]
    removed = [line for line in changes() if re.match(r"-(?!--)", line)]
    assert len(added) <= 5
    assert len(removed) <= len(added)
    assert all("lindt" in line.lower() or "NFLDetector" in line for line in added)


def test_the_readme_shows_exactly_these() -> None:
    shown = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert shown
    assert shown.group(1).splitlines() == changes()


@pytest.mark.slow
def test_both_run_and_ours_detects_and_recovers(tmp_path: Path) -> None:
    (_, plain), (trained, ours), (control, _) = play(tmp_path)
    flags = [trained[str(r)]["lindt-recovering"] for r in range(1, 31)]
    warned = flags.index(1) + 1
    assert 5 <= warned <= 15
    assert flags[warned - 1 :] == [1] * (31 - warned)
    assert trained["30"]["lindt-verdict"] == -1  # the shared model hurts
    assert trained["30"]["lindt-recovery-verdict"] == 1  # the adapted models are better than it
    assert [m["lindt-recovering"] for m in control.values()] == [0] * 30  # a healthy federation stays as it is
    assert [m["lindt-negative"] for m in control.values()] == [0] * 30
    assert control["30"]["lindt-verdict"] == 1
    for r in range(1, warned + 1):  # until then the app is the plain one, to the last digit
        kept = {k: v for k, v in ours[str(r)].items() if not k.startswith("lindt-")}
        assert kept == plain[str(r)]
    ill, well = ours[str(warned - 1)], ours["30"]  # at the warning clients turn to their private models at once
    assert ill["lindt-beta"] < -0.1  # the shared model is worse than what each learns alone
    assert well["lindt-beta"] > -0.05  # what the clients use is not
    assert well["lindt-local"] > well["eval_acc"] + 0.05
    assert len(list(tmp_path.glob("*/client-*/adapted"))) == 10
