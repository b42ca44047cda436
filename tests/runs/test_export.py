"""A client's model out of a run, where the run or the client is small or has failed."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import cross_entropy
from worlds import tiny

from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.errors import UserError
from lindt.plan.plan import Alone, Plan, Scoring
from lindt.plan.problem import Problem
from lindt.runs import export, files
from lindt.runs.play import Event, RunStarted, run_plan
from lindt.runs.store import Store


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


def test_a_model_without_finite_outputs_is_named_as_such(tmp_path: Path, task: str) -> None:
    sys.modules["mine"].problem = lambda: problem(float("inf"))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no valid update"):
        list(run_plan(plan(), tmp_path / "run", task=task, engine="inprocess", preflight=False))
    with pytest.raises(UserError, match="client 0: the model gives NaN or infinity for its test samples"):
        export.export_client(tmp_path / "run", 0, tmp_path / "out", task)
    assert not (tmp_path / "out").exists()


def test_other_data_than_the_runs_are_refused(tmp_path: Path, task: str) -> None:
    list(played(tmp_path / "run", task))
    sys.modules["mine"].problem = lambda: problem(2.0)  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="returns other data than"):
        export.export_client(tmp_path / "run", 0, tmp_path / "out", task)


def test_a_run_without_a_round_has_nothing_to_export(tmp_path: Path, task: str) -> None:
    events = played(tmp_path / "run", task, replace(plan(), rounds=2))
    assert isinstance(next(events), RunStarted)
    events.close()  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no round has been played yet"):
        export.export_client(tmp_path / "run", 0, tmp_path / "out", task)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of APFL: every client that answers keeps a v_i."""
    folder = tmp_path_factory.mktemp("adapted") / "run"
    list(run_plan(tiny("apfl", scoring=Scoring(every=1, last=1)), folder, engine="inprocess"))
    return folder


def trained(folder: Path) -> int:
    """A client with a v_i."""
    store = Store.open(folder)
    return min(int(path.name.removeprefix("client-")) for path in (store.private / store.run).iterdir())


def test_the_export_scores_what_the_run_recorded(adapted: Path, tmp_path: Path) -> None:
    client = trained(adapted)
    about = export.export_client(adapted, client, tmp_path / "out")
    recorded = {one["client"]: one["local"] for one in Store.open(adapted).rounds()[-1]["scores"]["clients"]}
    assert about["recorded_score"] == recorded[client] == about["score"]
    assert about["model"] == "the client's own (shared and private weights)"


def test_an_export_that_scores_otherwise_than_the_run_is_refused(adapted: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(adapted, tmp_path / "run"))
    client, path = trained(folder), folder / "rounds.jsonl"
    *lines, last = path.read_text().splitlines()
    line = json.loads(last)
    (score,) = (one for one in line["scores"]["clients"] if one["client"] == client)
    score["local"] -= 0.25
    path.write_text("\n".join([*lines, json.dumps(line)]) + "\n")
    with pytest.raises(UserError, match=rf"client {client}: .* scores .* the run recorded .* after round 4"):
        export.export_client(folder, client, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_a_recorded_score_no_comparison_is_claimed(tmp_path: Path, task: str) -> None:
    list(run_plan(plan(), tmp_path / "run", task=task, engine="inprocess"))
    path = tmp_path / "run" / "rounds.jsonl"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"scores": None}) + "\n")
    about = export.export_client(tmp_path / "run", 0, tmp_path / "out", task)
    assert about["recorded_score"] is None


@pytest.mark.parametrize("known", [True, False], ids=["named by the checkpoint", "elsewhere, as on Flower"])
def test_a_missing_v_i_is_not_replaced_by_the_global_model(
    adapted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    folder = Path(shutil.copytree(adapted, tmp_path / "run"))
    client = trained(folder)
    shutil.rmtree(folder / "private")
    if not known:
        monkeypatch.setattr(Store, "private_rounds", property(lambda _: {}))
    with pytest.raises(UserError, match=rf"client {client}: its v_i of round \d is not in .*private"):
        export.export_client(folder, client, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_client_that_never_trained_has_the_global_model_and_it_says_so(tmp_path: Path) -> None:
    environment = Environment(Sampled(rate=0.5))
    list(run_plan(tiny("apfl", rounds=1, environment=environment), tmp_path / "run", engine="inprocess"))
    (line,) = Store.open(tmp_path / "run").rounds()
    client = min(set(range(6)) - {*line["answered"]})
    about = export.export_client(tmp_path / "run", client, tmp_path / "out")
    assert about["model"] == "the global model: this client has trained no v_i"


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt2", "export.json"])
def test_a_full_disk_leaves_nothing_and_the_next_export_succeeds(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    list(played(tmp_path / "run", task))

    def watch(step: str, path: Path) -> None:
        if (step, path.name) == ("written", name):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(files, "watch", watch)
        with pytest.raises(UserError, match=r"out: cannot be written \(No space left on device\)"):
            export.export_client(tmp_path / "run", 0, tmp_path / "made" / "out", task)
    assert list((tmp_path / "made").iterdir()) == []
    export.export_client(tmp_path / "run", 0, tmp_path / "made" / "out", task)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]


def test_the_command_knows_the_task_of_a_run_that_was_begun_here(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lindt.cli.execution import CommandContext, play
    from lindt.cli.methods import export as command

    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    play(CommandContext(Console(), task=task, engine="inprocess"), [("mine", plan(), tmp_path / "run")])
    command(tmp_path / "run", 2, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["client"] == 2
    # The name of a task is code: one that this user did not type is not imported.
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    for forged in ({"task": "os:abort"}, {"run": "0" * 32, "task": "os:abort"}):
        (tmp_path / "run" / "run.json").write_text(json.dumps(about | forged))
        with pytest.raises(UserError, match=r"names the task os:abort, .*give --task os:abort"):
            command(tmp_path / "run", 2, tmp_path / "again")


def test_a_run_from_elsewhere_is_exported_with_its_task_named(
    tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lindt.cli.methods import export as command

    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    list(played(tmp_path / "run", task))
    with pytest.raises(UserError, match=r"but you did not begin this run on this machine; give --task mine:problem"):
        command(tmp_path / "run", 2, tmp_path / "out")
    command(tmp_path / "run", 2, tmp_path / "out", task)
    assert (tmp_path / "out" / "model.pt2").exists()
