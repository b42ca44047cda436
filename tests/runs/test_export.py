"""A client's model out of a run, where the run or the client is small or has failed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from worlds import tiny

from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.errors import UserError
from lindt.plan.plan import Alone, Plan
from lindt.plan.problem import Problem
from lindt.runs import export
from lindt.runs.play import Event, RunStarted, run_plan


def problem(scale: float = 1.0) -> Problem:
    """Clients with one test sample each."""
    x = scale * torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(9) % 3
    clients = [((one[:8], y[:8]), (one[8:], y[8:])) for one in x]
    return Problem(clients, lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), cross_entropy)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("mine")
    module.problem = problem  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mine", module)
    return "mine:problem"


def plan() -> Plan:
    return tiny(rounds=1, environment=Environment(Sampled(rate=1.0)), alone=Alone(private=False))


def played(folder: Path, task: str, changed: Plan | None = None) -> Iterator[Event]:
    return run_plan(changed or plan(), folder, task=task, engine="inprocess")


def test_a_client_with_one_test_sample_is_exported(tmp_path: Path, task: str) -> None:
    list(played(tmp_path / "run", task))
    about = export.export_client(tmp_path / "run", 2, tmp_path / "out", task)
    assert about["checked_samples"] == 1
    assert json.loads((tmp_path / "out" / "export.json").read_text())["client"] == 2
    module = torch.export.load(tmp_path / "out" / "model.pt2").module()
    assert [module(torch.zeros(n, 4)).shape for n in (1, 2, 7)] == [(1, 3), (2, 3), (7, 3)]


def test_a_model_without_finite_outputs_is_named_as_such(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    list(played(tmp_path / "run", task))
    monkeypatch.setattr(export, "load_task", lambda _name: problem(float("inf")))
    with pytest.raises(UserError, match="client 0: the model gives NaN or infinity for its test samples"):
        export.export_client(tmp_path / "run", 0, tmp_path / "out", task)
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_round_has_nothing_to_export(tmp_path: Path, task: str) -> None:
    events = played(tmp_path / "run", task, replace(plan(), rounds=2))
    assert isinstance(next(events), RunStarted)
    events.close()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no round has been played yet"):
        export.export_client(tmp_path / "run", 0, tmp_path / "out", task)
