"""Runs of more than MANY clients: files that cover visited clients and the panel only, stopped and resumed."""

from __future__ import annotations

import json
import sqlite3
from itertools import islice
from pathlib import Path

import pytest

from lindt.client.private_store import SHARDS
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import SignFlip
from lindt.errors import UserError
from lindt.plan.models import Mlp
from lindt.plan.plan import METHODS, Alone, Data, Plan, Scoring
from lindt.protocols import MANY
from lindt.report.reading import read_run
from lindt.report.verdict import verdict
from lindt.runs.play import RunEnded, run_plan
from lindt.runs.store import Store

N, K = MANY + 1, 6


def plan() -> Plan:
    return Plan(
        rounds=3,
        data=Data("two-camps-crowd", clients=N),
        model=Mlp(16, 4),
        environment=Environment(Sampled(active_clients=K), SignFlip(share=0.34)),
        method=METHODS["lindt-always"],
        alone=Alone(epochs=1, patience=1),
        scoring=Scoring(every=9, last=1, panel=5),
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many") / "run"
    *_, last = run_plan(plan(), folder)
    assert isinstance(last, RunEnded)
    return folder


def stopped(folder: Path) -> Path:
    events = run_plan(plan(), folder)
    trained = 5 - sum(one["attacker"] for one in json.loads((folder.parent / "about.json").read_text())["clients"])
    list(islice(events, 1 + trained + 2))  # the start, P_i, two rounds
    events.close()
    return folder


def test_its_files_cover_the_visited_clients_and_the_panel(played: Path) -> None:
    run = read_run(played)
    panel = [one["client"] for one in run.about["clients"]]
    assert (len(panel), run.about["population"]) == (5, N)
    asked = {client for line in run.rounds for client in line["asked"]}
    visited = [json.loads(line) for line in (played / "clients.jsonl").read_text().splitlines()]
    assert sorted(one["client"] for one in visited) == sorted(asked)
    assert all(one["train"] + one["test"] == 20 for one in visited)
    attackers = {one["client"] for one in visited if one["attacker"]}
    assert [len(attackers & set(line["asked"])) for line in run.rounds] == [2, 2, 2]
    scores = run.scored[-1]["scores"]
    counted = [one["client"] for one in run.about["clients"] if not one["attacker"]]
    assert [one["client"] for one in scores["clients"]] == counted
    assert (scores["panel"]["clients"], scores["panel"]["of"]) == (len(counted), N - round(0.34 * N))
    assert run.summary is not None
    assert run.summary["panel"]["beta_low"] == pytest.approx(scores["panel"]["beta_low"])
    assert f"a random panel of {N - round(0.34 * N):,} clients, whose mean gain is" in verdict(run).sentence
    assert len(list((played / "private").rglob("*.sqlite"))) <= SHARDS
    assert Store.open(played).versions.newest_rounds(9).keys() == asked - attackers


def test_stopped_and_resumed_is_straight_through(played: Path, tmp_path: Path) -> None:
    (tmp_path / "about.json").write_bytes((played / "run.json").read_bytes())
    folder = stopped(tmp_path / "run")
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2
    with (folder / "clients.jsonl").open("a") as file:  # of a round whose checkpoint was not written
        file.write(json.dumps({"round": 3, "client": 1}) + "\n")
    *_, last = run_plan(None, folder, resume=True)
    assert isinstance(last, RunEnded)
    for name in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        assert (folder / name).read_bytes() == (played / name).read_bytes()


def test_a_lost_v_i_and_changed_data_are_refused_when_a_run_is_resumed(played: Path, tmp_path: Path) -> None:
    (tmp_path / "about.json").write_bytes((played / "run.json").read_bytes())
    folder = stopped(tmp_path / "run")
    lines = (folder / "clients.jsonl").read_text().splitlines()
    again = set(json.loads((played / "rounds.jsonl").read_text().splitlines()[2])["asked"])
    changed = [json.loads(line) for line in lines]
    changed.append({**changed[0], "client": min(again), "data": "0" * 16})
    (folder / "clients.jsonl").write_text("".join(json.dumps(one) + "\n" for one in changed))
    with pytest.raises(UserError, match=r"its data differ from those of an earlier visit"):
        list(run_plan(None, folder, resume=True))
    (folder / "clients.jsonl").write_text("".join(line + "\n" for line in lines))
    (shard, *_) = sorted((folder / "private").rglob("*.sqlite"))
    with sqlite3.connect(shard) as connection:
        connection.execute("DELETE FROM v WHERE rowid = (SELECT MIN(rowid) FROM v)")
    connection.close()
    with pytest.raises(UserError, match="it has the v_i of"):
        list(run_plan(None, folder, resume=True))
