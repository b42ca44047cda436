"""A checkpoint knows the plan, model, loss and versions it came from: another one is noticed on resume and export."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from worlds import tiny

from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.errors import UserError
from lindt.plan.plan import Alone, Plan
from lindt.plan.problem import Problem
from lindt.runs import export, play
from lindt.runs.files import seal, unseal
from lindt.runs.play import RunStarted, run_plan


class Net(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], p: float) -> None:
        super().__init__()
        self.a, self.b, self._act, self._p = nn.Linear(4, 5), nn.Linear(5, 3), act, p

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(dropout(self._act(self.a(x)), self._p, self.training))
        return out


def smoothed(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, label_smoothing=0.3)


def problem(act: Callable[[Tensor], Tensor] = torch.relu, loss: Any = cross_entropy, p: float = 0.2) -> Problem:
    x = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(9) % 3
    return Problem([((one[:6], y[:6]), (one[6:], y[6:])) for one in x], lambda: Net(act, p), loss)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("mine")
    module.problem = problem  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def plan() -> Plan:
    environment = Environment(Sampled(rate=1.0), privacy=Gaussian(S=15.0, sigma=0.005))
    return tiny(rounds=3, environment=environment, alone=Alone(private=False))


@pytest.fixture
def folder(tmp_path: Path, task: ModuleType) -> Path:
    """Stopped after two rounds of three."""
    events = run_plan(plan(), tmp_path / "run", task="mine:problem", engine="inprocess")
    for _ in islice(events, 1 + 2):
        pass
    events.close()
    return tmp_path / "run"


def resumed(folder: Path) -> list[str]:
    """What a resumed run says."""
    events = run_plan(None, folder, task="mine:problem", engine="inprocess", resume=True)
    started = next(events)
    assert isinstance(started, RunStarted)
    list(events)
    return started.store.said


def test_the_same_run_goes_on_without_a_word(folder: Path) -> None:
    assert resumed(folder) == []


def test_an_edited_plan_is_refused_and_its_field_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "plan.toml"
    text = path.read_text()
    assert text.count("sigma = 0.005") == 1
    path.write_text(text.replace("sigma = 0.005", "sigma = 50.0"))
    before = (folder / "rounds.jsonl").read_bytes()
    wanted = r"environment\.privacy\.sigma is 50\.0, and was 0\.005 in the rounds played"
    with pytest.raises(UserError, match=wanted):
        resumed(folder)
    with pytest.raises(UserError, match=wanted):
        export.export_client(folder, 0, tmp_path / "out", "mine:problem")
    assert (folder / "rounds.jsonl").read_bytes() == before
    path.write_text(text)
    resumed(folder)


@pytest.mark.parametrize(
    ("changed", "part"),
    [({"act": torch.tanh}, "model"), ({"loss": smoothed}, "loss"), ({"loss": lambda o, y: 2 * smoothed(o, y)}, "loss")],
    ids=["activation", "loss", "lambda"],
)
def test_another_model_or_loss_is_refused(
    folder: Path, task: ModuleType, tmp_path: Path, changed: dict[str, Any], part: str
) -> None:
    task.problem = lambda: problem(**changed)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=f"the {part} differs from that of the rounds played"):
        resumed(folder)
    with pytest.raises(UserError, match=f"the {part} differs from that of the rounds played"):
        export.export_client(folder, 0, tmp_path / "out", "mine:problem")


def test_a_model_that_trains_otherwise_is_said(folder: Path, task: ModuleType) -> None:
    task.problem = lambda: problem(p=0.7)  # type: ignore[attr-defined]
    (said,) = resumed(folder)
    assert "in training mode the model's outputs differ from those in the rounds played" in said


def test_other_versions_are_said_and_not_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = play.software_versions()
    monkeypatch.setattr(play, "software_versions", lambda: found | {"torch": "9.9.9"})
    (said,) = resumed(folder)
    assert f"torch is 9.9.9, and was {found['torch']} in the rounds played" in said


def test_a_checkpoint_of_an_earlier_version_still_loads(folder: Path) -> None:
    for path in (folder / "checkpoint").iterdir():
        tensors, words = unseal(path.read_bytes())
        about = json.loads(words["about"])
        del about["origin"]
        path.write_bytes(seal(tensors, {"about": json.dumps(about)}))
    (said,) = resumed(folder)
    assert said.endswith(
        "an earlier lindt wrote its checkpoint, without the plan, model and loss: they are not compared with yours"
    )


@pytest.mark.parametrize("name", ["floats", "counts", "w"])
def test_a_checkpoint_with_other_sizes_than_the_model_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    for path in (folder / "checkpoint").iterdir():
        tensors, words = unseal(path.read_bytes())
        path.write_bytes(
            seal(tensors | {name: torch.cat([tensors[name], tensors["counts"].new_ones(2).to(tensors[name])])}, words)
        )
    with pytest.raises(UserError, match=r"its checkpoint has \d+ .*, the model has \d+"):
        resumed(folder)
    with pytest.raises(UserError, match=r"its checkpoint has \d+ .*, the model has \d+"):
        export.export_client(folder, 0, tmp_path / "out", "mine:problem")


@pytest.mark.parametrize("kept", ["{", "[]", '{"plan": 3}', '{"plan": {}, "parts": {"model": 3}, "versions": {}}', 7])
def test_an_origin_that_is_none_is_damage(folder: Path, kept: object) -> None:
    shutil.rmtree(folder / "private", ignore_errors=True)
    for path in (folder / "checkpoint").iterdir():
        tensors, words = unseal(path.read_bytes())
        path.write_bytes(seal(tensors, {"about": json.dumps(json.loads(words["about"]) | {"origin": kept})}))
    with pytest.raises(UserError, match="is damaged"):
        resumed(folder)
