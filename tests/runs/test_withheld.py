"""A folder that may be shown: with --withhold it does not tell who took part, nor anything measured without noise."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from worlds import tiny_runtime

from lindt.engines.flower.launch import FlowerOptions
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.errors import UserError
from lindt.plan.plan import Alone, Plan, Scoring
from lindt.plan.problem import Problem
from lindt.report.page import write_report
from lindt.report.reading import read_run
from lindt.report.tables import write_table
from lindt.report.terminal import show
from lindt.runs.files import unseal
from lindt.runs.play import OpenedRun, open_run, run_plan
from lindt.runs.schema import DIVERGENCE, NOT_NAMED
from lindt.runs.store import Store
from lindt.server.recovery import OnDetection

PRIVATE = Environment(Sampled(active_clients=2), privacy=Gaussian(S=1.0, sigma=3.0))


def plan(**changes: Any) -> Plan:
    """Recovery from round 2 on: some clients are treated. The noise is random, so the divergence without it decides."""
    short = replace(tiny_runtime(patience=0), rounds=3, alone=Alone(private=False), scoring=Scoring(every=3, last=1))
    recovery = OnDetection(epsilon=1e-6, patience=0, statistic="clean")
    return replace(short, method=replace(short.method, recovery=recovery), environment=PRIVATE, **changes)


def deployed(folder: Path, withhold: bool, **changes: Any) -> Store:
    """A run as a deployment plays it, its clients in this process."""

    def engine(plan: Plan, problem: Problem) -> InProcess:
        return InProcess(plan, problem, run=Store.open(folder).run, folder=folder.parent / "nodes")

    list(run_plan(plan(**changes), folder, make_engine=engine, secret=True, withhold=withhold))
    return Store.open(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    found = {withhold: tmp_path_factory.mktemp("deployed") / "run" for withhold in (False, True)}
    for withhold, folder in found.items():
        deployed(folder, withhold)
    return found


@pytest.fixture
def told(folders: dict[bool, Path]) -> Store:
    return Store.open(folders[False])


@pytest.fixture
def withheld(folders: dict[bool, Path]) -> Store:
    return Store.open(folders[True])


def checkpoints(store: Store) -> list[dict[str, Any]]:
    found = [unseal(path.read_bytes())[1]["about"] for path in sorted((store.folder / "checkpoint").iterdir())]
    return [json.loads(words) for words in found]


def test_by_default_the_folder_tells_all_and_the_summary_says_so(told: Store) -> None:
    assert all(len(line["asked"]) == 2 and line["w_div"] > 0 for line in told.rounds())
    assert "secret" in checkpoints(told)[-1]
    assert checkpoints(told)[-1]["recovery"]["treated"]
    words = told.summary()["privacy"]["words"]
    assert "this folder names the clients of each round" in words
    assert "--withhold" in words


def test_a_withheld_folder_tells_neither_who_took_part_nor_what_was_measured_without_noise(withheld: Store) -> None:
    store = withheld
    for line in store.rounds():
        assert line["asked"] == line["answered"] == [NOT_NAMED] * 2
        assert not {*DIVERGENCE, "buffer_div", "reports"} & line.keys()
        assert line["scores"] is None or line["scores"]["clients"] == []
    assert all(one["labels"] == {} for one in store.about["clients"])
    (last,) = checkpoints(store)  # the one before the last is gone, which held the sampling's seed too
    assert "secret" not in last
    assert last["recovery"]["treated"] == []
    assert last["private"] == []
    assert not (store.folder / "private").exists()
    found = store.summary()
    assert "this folder does not name the clients of a round" in found["privacy"]["words"]
    assert found["privacy"]["epsilon"] is not None
    assert found["central"] is not None


def test_readers_take_a_withheld_folder(withheld: Store, tmp_path: Path) -> None:
    run = read_run(withheld.folder)
    assert not run.said
    text = io.StringIO()
    show(Console(file=text, width=200), run)
    assert "does not name the clients" in text.getvalue()
    write_report([withheld.folder], tmp_path / "report.html")
    write_table([run], "round", tmp_path / "rounds.csv")


def test_a_withheld_run_goes_on_withheld_and_no_other_begins_to(told: Store, withheld: Store, tmp_path: Path) -> None:
    for store in (told, withheld):
        shutil.copytree(store.folder, tmp_path / store.run)
        (tmp_path / store.run / "summary.json").unlink()
    resumed: dict[str, Any] = {"task": None, "resume": True, "engine": "flower", "device": "cpu", "noise": "system"}
    opened = open_run(None, tmp_path / withheld.run, **resumed)
    assert isinstance(opened, OpenedRun)
    assert opened.store.about["withheld"] is True
    with pytest.raises(UserError, match="was begun without --withhold"):
        open_run(None, tmp_path / told.run, withhold=True, **resumed)


def test_a_simulation_has_nothing_to_withhold(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--withhold needs a deployment"):
        list(run_plan(plan(), tmp_path / "run", withhold=True))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="--withhold needs a deployment"):
        FlowerOptions(superlink="here", noise="plan", withhold=True)
    with pytest.raises(UserError, match="--withhold needs a deployment"):
        FlowerOptions(noise="system", withhold=True)
