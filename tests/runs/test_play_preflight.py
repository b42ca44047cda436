"""The checks before training in a run's folder: refused before anything is written, kept, shown, and made once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from mistakes import IDS, MISTAKES, Mistake
from rich.console import Console
from typer.testing import CliRunner
from worlds import tiny

from lindt.cli import execution
from lindt.cli.main import app, main
from lindt.engines.flower.launch import FlowerOptions
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.errors import UserError
from lindt.plan.plan import Alone, Plan
from lindt.plan.problem import Problem, problem_for
from lindt.report.payload import PrivacySpent, whole_run
from lindt.report.reading import read_run
from lindt.report.terminal import show
from lindt.report.verdict import verdict
from lindt.runs import play
from lindt.runs.play import Event, RoundPlayed, RunEnded, open_run, run_plan
from lindt.runs.schema import ABOUT, SUMMARY, fits

PLAN = tiny(rounds=2, alone=Alone(private=False))
TASK = """
import torch
from torch import nn
import lindt

def samples(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return 3 * torch.nn.functional.one_hot(y, 5).float() + torch.randn(n, 5, generator=g), y

def net():
    return nn.Sequential(nn.Linear(5, 3))

def problem():
    clients = [(samples(30, 2 * i), samples(10, 2 * i + 1)) for i in range(4)]
    clients[WHERE] = (clients[FROM][0], clients[WHERE][1]) if TWICE else (clients[WHERE][0], clients[WHERE][0])
    return lindt.Problem(clients, net)
"""
FLAGS = ["--set", "method=fedavg", "--set", "detection=delta", "--set", "alone.private=false", "--rounds", "2"]


OWN = replace(PLAN, environment=Environment(Sampled(1.0)))  # without the attackers of the digits


def task(folder: Path, twice: bool, name: str) -> str:
    text = TASK.replace("WHERE", "2").replace("FROM", "1").replace("TWICE", str(twice))
    (folder / f"{name}.py").write_text(text)
    return f"{name}:problem"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("pretask_"):
            del sys.modules[name]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["run", *words, "--engine", "inprocess"])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_mistake_is_refused_with_code_2_before_anything_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--task", task(here, False, "pretask_same"), *FLAGS, "--out", "run"]
    monkeypatch.setattr("sys.argv", ["lindt", "run", *words])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as stopped_:
        main()
    assert stopped_.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: client 2: its test data are its training data")
    assert said.count("\n") == 1
    assert not Path("run").exists()
    assert "checks before training were left out" in " ".join(run(*words, "--no-preflight").split())
    about = json.loads(Path("run/run.json").read_text())
    assert about["checks"] == {"made": False, "warnings": [], "looked_at": {}}
    assert "the checks before training were left out" in verdict(read_run(Path("run"))).sentence
    assert json.loads(Path("run/summary.json").read_text())["checks"] == {"made": False, "warnings": []}


@pytest.mark.parametrize("engine", ["inprocess", "processes", "flower"])
@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
def test_every_engine_finds_each_mistake_before_anything_is_written(
    tmp_path: Path, mistake: Mistake, engine: str
) -> None:
    """What `run_plan` and `run_on_flower` begin with. `federate` and Dual have tests of their own."""
    if engine == "flower":
        pytest.importorskip("flwr")
    folder = tmp_path / "run"

    def opened() -> object:
        return open_run(OWN, folder, task=mistake.task, resume=False, engine=engine, device="cpu")

    if mistake.refused:
        with pytest.raises(UserError, match=re.escape(mistake.said)) as told:
            opened()
        assert "\n" not in str(told.value)
        assert not folder.exists()
    else:
        opened()
        (kept,) = json.loads((folder / "run.json").read_text())["checks"]["warnings"]
        assert mistake.said in kept


@pytest.mark.parametrize("mistake", [one for one in MISTAKES if not one.refused], ids=lambda one: one.task)
def test_a_finished_run_shows_each_warning(tmp_path: Path, mistake: Mistake) -> None:
    list(run_plan(OWN, tmp_path / "run", task=mistake.task, engine="inprocess"))
    found = read_run(tmp_path / "run")
    assert "the checks before training gave 1 warning" in verdict(found).sentence
    console = Console(record=True, width=400, file=StringIO())
    show(console, found)
    assert mistake.said in console.export_text()


def test_a_healthy_task_has_no_warning(tmp_path: Path) -> None:
    open_run(OWN, tmp_path / "run", task="mistakes:no_mistake", resume=False, engine="inprocess", device="cpu")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["checks"]["warnings"] == []


def test_a_warning_is_kept_and_shown(here: Path) -> None:
    folder = Path("run")
    said = " ".join(run("--task", task(here, True, "pretask_twice"), *FLAGS, "--out", "run").split())
    warning = "clients 1 and 2 have the same training samples"
    assert f"warning: {warning}" in said
    about, summary = (json.loads((folder / name).read_text()) for name in ("run.json", "summary.json"))
    assert warning in about["checks"]["warnings"][0]
    assert about["checks"]["looked_at"]["rows"] == "160 of 160 samples, 4 of 4 clients"
    assert summary["checks"] == {"made": True, "warnings": about["checks"]["warnings"]}
    assert fits(about, ABOUT)
    assert fits(summary, SUMMARY)
    found = read_run(folder)
    assert "the checks before training gave 1 warning" in verdict(found).sentence
    console = Console(record=True, width=300, file=StringIO())
    show(console, found)
    assert f"warning: {warning}" in console.export_text()
    assert warning in whole_run(found, "id", PrivacySpent(""))["said"][0]
    shown = CliRunner().invoke(app, ["show", "run", "--json"])
    assert warning in json.loads(shown.output)["checks"]["warnings"][0]


def test_a_healthy_run_says_nothing_of_it(tmp_path: Path) -> None:
    *_, ended = run_plan(PLAN, tmp_path / "run", engine="inprocess")
    assert isinstance(ended, RunEnded)
    assert ended.summary["checks"] == {"made": True, "warnings": []}
    assert "checks" not in verdict(read_run(tmp_path / "run")).sentence


def test_the_bytes_of_a_run_are_the_same_without_it(tmp_path: Path) -> None:
    for name, made in (("with", True), ("without", False)):
        torch.manual_seed(7)
        list(run_plan(PLAN, tmp_path / name, engine="inprocess", preflight=made))
    with_it, without = ((tmp_path / name / "rounds.jsonl").read_bytes() for name in ("with", "without"))
    assert with_it == without


def stopped(folder: Path) -> None:
    events = run_plan(PLAN, folder, engine="inprocess")
    while not isinstance(next(events), RoundPlayed):
        pass
    events.close()


def test_a_resumed_run_is_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path / "run")

    def fails(*_arguments: object) -> None:
        raise AssertionError("looked at again")

    monkeypatch.setattr(play, "look_before", fails)
    list(run_plan(None, tmp_path / "run", resume=True, engine="inprocess"))
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["checks"] == {"made": True, "warnings": []}


def unrecorded(folder: Path) -> None:
    """As an earlier version left it."""
    about = json.loads((folder / "run.json").read_text())
    del about["checks"]
    (folder / "run.json").write_text(json.dumps(about))


def test_a_run_of_an_earlier_version_is_looked_at_when_it_is_resumed(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    unrecorded(tmp_path / "run")
    assert "checks" not in verdict(read_run(tmp_path / "run")).sentence
    list(run_plan(None, tmp_path / "run", resume=True, engine="inprocess"))
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["checks"]["made"] is True
    assert {"rows", "labels", "metric", "step"} <= about["checks"]["looked_at"].keys()


def test_what_such_a_run_saved_stays_when_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path / "run")
    unrecorded(tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    healthy = problem_for(PLAN)
    broken = Problem([(train, train) for train, _ in healthy.data], healthy.model)
    monkeypatch.setattr(play, "problem_for", lambda _plan: broken)
    with pytest.raises(UserError, match="its test data are its training data"):
        list(run_plan(None, tmp_path / "run", resume=True, engine="inprocess"))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    list(run_plan(None, tmp_path / "run", resume=True, engine="inprocess", preflight=False))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["checks"]["made"] is False


@pytest.mark.parametrize("checks", [{"made": 1, "warnings": []}, {"made": True}, {"made": True, "warnings": [3]}, []])
def test_damaged_checks_are_told(tmp_path: Path, checks: object) -> None:
    list(run_plan(PLAN, tmp_path / "run", engine="inprocess"))
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(about | {"checks": checks}))
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        read_run(tmp_path / "run")


@pytest.mark.parametrize("made", [True, False])
def test_on_flower_the_folder_says_whether_it_was_made(
    made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run_on_flower` opens the run as every engine does, and is told whether to check."""
    pytest.importorskip("flwr")

    def opened(
        plan: Plan, folder: Path, _where: object, *, resume: bool, preflight: bool, **_rest: object
    ) -> Iterator[Event]:
        found = open_run(plan, folder, task=None, resume=resume, engine="flower", device="cpu", preflight=preflight)
        assert not isinstance(found, RunEnded)
        yield RunEnded(found.store, {"privacy": {"words": ""}})

    monkeypatch.setattr(execution, "run_on_flower", opened)
    options = FlowerOptions("somewhere")
    context = execution.CommandContext(Console(file=StringIO()), True, engine="flower", flower=options, preflight=made)
    execution.play(context, [("run", PLAN, tmp_path / "run")])
    assert json.loads((tmp_path / "run" / "run.json").read_text())["checks"]["made"] is made
    with pytest.raises(UserError, match="holds a run already"):
        execution.play(context, [("run", PLAN, tmp_path / "run")])


def test_each_run_of_a_comparison_leaves_it_out_where_asked(here: Path) -> None:
    words = ["compare", "--task", task(here, False, "pretask_compared"), *FLAGS[2:], "--methods", "fedavg,fedprox"]
    done = CliRunner().invoke(app, [*words, "--out", "compared", "--engine", "inprocess", "--no-preflight"])
    assert done.exit_code == 0, done.output
    made = [json.loads(path.read_text())["checks"]["made"] for path in sorted(Path("compared").glob("*/run.json"))]
    assert made == [False, False]


def test_a_rate_that_teaches_private_models_nothing_is_told_at_the_end(here: Path) -> None:
    """Else "hurts" or "helps" would compare two models at chance."""
    small = (
        "digits-control",
        "--rounds",
        "2",
        "--set",
        "method=fedavg",
        "--set",
        "model.kind=linear",
        "--set",
        "alone.epochs=5",
    )
    slow = run(*small, "--set", "training.rate=1e-9", "--out", "slow")
    assert "they are not clearly better, and a gain over them says little" in " ".join(slow.split())
    assert "they are not clearly better" in " ".join(CliRunner().invoke(app, ["show", "slow"]).output.split())
    assert "not clearly better" not in " ".join(run(*small, "--out", "usual").split())
