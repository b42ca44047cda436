"""One client, one name, one v_i: a name is one node's, and a client keeps its number when its node comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from small_apps import arrays, heard

from lindt.flower import NFLDetector, wrap
from lindt.flower.protocol import ClientReport
from lindt.protocols import ClientTally
from lindt.report.reading import read_run

NODES = [11, 22, 33]


def app_of(names: dict[int, str | None], since: int = 1) -> Any:
    """Node 33 reports from round `since` on, under the name that the table gives it."""

    def app(message: Message, context: Context) -> Message:
        node, round = context.node_id, int(message.content["config"]["server-round"])
        if message.metadata.message_type == "evaluate":
            reply = Message(RecordDict({"m": MetricRecord({"num-examples": 4, "acc": 0.5})}), reply_to=message)
            if node != 33 or round >= since:
                own = torch.tensor([4.0 if node == 33 else 1.0, 4.0], dtype=torch.float64)
                tally = ClientTally(4, own, own, torch.tensor([2.0, 4.0], dtype=torch.float64), wins=0, losses=0)
                ClientReport(str(names[node]), tally).attach(reply.content)
            return reply
        w = Array(message.content["arrays"]["w"].numpy())
        metrics = MetricRecord({"num-examples": 4})
        return Message(RecordDict({"arrays": ArrayRecord({"w": w}), "metrics": metrics}), reply_to=message)

    return app


def play(
    folder: Path, app: Any, rounds: int, nodes: list[int] = NODES
) -> tuple[dict[str, str], dict[int, float], list[str]]:
    """The name of each node, beta_i by client number in the last round, and the log."""
    with heard() as said:
        NFLDetector(FedAvg(), 0.5, 2, folder=folder).start(FakeGrid(app, nodes), arrays(w=[0.0]), num_rounds=rounds)
    run = read_run(folder)
    names = {str(one["node"]): str(one.get("name", "")) for one in run.about["clients"]}
    scores = run.rounds[-1]["scores"] or {"clients": []}
    return names, {one["client"]: one["beta"] for one in scores["clients"]}, list(said)


def test_a_node_that_takes_anothers_name_is_refused_and_changes_nothing_of_the_other(tmp_path: Path) -> None:
    app = app_of({11: "ward-a", 22: "ward-b", 33: "ward-a"}, since=2)
    names, betas, said = play(tmp_path, app, 3)
    assert names == {"11": "ward-a", "22": "ward-b", "33": ""}
    assert betas == {0: -0.25, 1: -0.25}
    warnings = [text for text in said if "node 33 calls itself 'ward-a', which is node 11's" in text]
    assert len(warnings) == 1  # once, not in every round
    assert "a partition-id or client_id of its own" in warnings[0]
    (note,) = read_run(tmp_path).about["notes"]
    assert note in warnings[0]


def test_of_two_that_report_one_name_at_the_same_time_neither_has_it(tmp_path: Path) -> None:
    names, betas, said = play(tmp_path, app_of({11: "ward-a", 22: "ward-b", 33: "ward-a"}), 1)
    assert names == {"11": "", "22": "ward-b", "33": ""}
    assert betas == {1: -0.25}
    assert any("node 11 calls itself 'ward-a', and so does node 33: each reports nothing" in text for text in said)


def test_names_are_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    play(tmp_path, app_of({11: "ward-a", 22: "ward-b", 33: None}, since=9), 1)
    names, _, _ = play(tmp_path, app_of({11: "ward-a", 22: "ward-b", 33: "ward-b"}), 2)
    assert names == {"11": "ward-a", "22": "ward-b", "33": ""}


def test_a_client_keeps_its_number_when_its_node_comes_back_under_another_id(tmp_path: Path) -> None:
    old = {11: "ward-a", 22: "ward-b", 33: "ward-c"}
    play(tmp_path, app_of(old), 1)
    assert [one["name"] for one in read_run(tmp_path).about["clients"]] == ["ward-a", "ward-b", "ward-c"]
    # All three come back, two of them in another order of ids; node 22 is itself.
    new: dict[int, str | None] = {44: "ward-c", 22: "ward-b", 55: "ward-a"}
    names, betas, said = play(tmp_path, app_of(new), 2, nodes=[44, 22, 55])
    assert names == {"55": "ward-a", "22": "ward-b", "44": "ward-c"}
    assert [one["client"] for one in read_run(tmp_path).about["clients"]] == [0, 1, 2]
    assert betas == {0: -0.25, 1: -0.25, 2: -0.25}
    assert not any("calls itself" in text for text in said)


def test_partitions_that_change_places_take_their_numbers_along(tmp_path: Path) -> None:
    play(tmp_path, app_of({11: "0", 22: "1", 33: "2"}), 1)
    names, betas, said = play(tmp_path, app_of({11: "2", 22: "1", 33: "0"}), 2)
    assert names == {"11": "2", "22": "1", "33": "0"}
    assert [(one["client"], one["name"]) for one in read_run(tmp_path).about["clients"]] == [
        (0, "0"),
        (1, "1"),
        (2, "2"),
    ]
    assert betas == {0: 0.5, 1: -0.25, 2: -0.25}  # node 33 reports 0.5, and is client 0
    assert not any("calls itself" in text for text in said)


def own_app(seen: dict[int, list[bool]]) -> ClientApp:
    """An app of numpy alone. `seen` has, of each node, how often each function was called."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.setdefault(context.node_id, []).append(True)
        w = Array(message.content["arrays"]["w"].numpy() + np.float32(1.0))
        metrics = MetricRecord({"num-examples": int(context.run_config.get("examples", 4))})
        return Message(RecordDict({"arrays": ArrayRecord({"w": w}), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": 4, "acc": 0.5})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def without_partitions(app: Any, nodes: list[int]) -> FakeGrid:
    grid = FakeGrid(app, nodes)
    for context in grid.contexts.values():
        context.node_config.clear()
    return grid


def test_without_a_partition_id_a_name_is_made_once_and_kept(tmp_path: Path) -> None:
    vaults = {11: tmp_path / "a", 22: tmp_path / "b", 77: tmp_path / "a"}
    wrapped = {node: wrap(own_app({}), folder=folder) for node, folder in vaults.items()}

    def each(message: Message, context: Context) -> Message:
        return wrapped[context.node_id](message, context)

    def names() -> list[str]:
        return [one["name"] for one in read_run(tmp_path / "run").about["clients"]]

    detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
    detector.start(without_partitions(each, [11, 22]), arrays(w=[5.0]), num_rounds=1)
    first = names()
    assert len(first) == 2
    assert json.loads((tmp_path / "a" / "name").read_text())["name"] in first
    # The node of vault a comes back under another id: the same client.
    with heard() as said:
        detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
        detector.start(without_partitions(each, [77, 22]), arrays(w=[5.0]), num_rounds=2)
    assert names() == first
    assert [(r["asked"], r["answered"]) for r in read_run(tmp_path / "run").rounds] == [([0, 1], [0, 1])] * 2
    assert not any("set aside" in text or "calls itself" in text for text in said)


def test_two_nodes_with_one_vault_are_refused_with_the_fix(tmp_path: Path) -> None:
    app = wrap(own_app({}), folder=tmp_path / "one")
    with heard() as said:
        detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
        result = detector.start(without_partitions(app, [11, 22]), arrays(w=[5.0]), num_rounds=1)
    refusal = f"{tmp_path / 'one'} is used by two nodes, "
    assert any(text.startswith("! round 1: client node-") and refusal in text for text in said)
    assert any("LINDT_PRIVATE" in text for text in said if refusal in text)
    assert result.arrays["w"].numpy().tolist() == [6.0]  # both trained, and both count


def test_five_nodes_with_one_name_are_told_apart_and_share_no_model(tmp_path: Path) -> None:
    seen: dict[int, list[bool]] = {}
    app = wrap(own_app(seen), folder=tmp_path / "vault", client_id=lambda context: "ward")
    with heard() as said:
        detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
        detector.start(FakeGrid(app, [1, 2, 3, 4, 5]), arrays(w=[5.0]), num_rounds=3)
    assert sum("calls itself 'ward', and so does node" in text for text in said) == 5
    assert sum("calls itself" in note for note in read_run(tmp_path / "run").about["notes"]) == 5
    assert detector.verdict is not None
    assert detector.verdict.clients == 0
    # Two calls of P_i in the first round, before the server knew; then the app's own calls alone.
    assert all(len(calls) <= 3 + 2 for calls in seen.values())


def test_models_of_a_partition_that_moved_are_set_aside_and_trained_anew(tmp_path: Path) -> None:
    app = wrap(own_app({}), folder=tmp_path / "vault", client_id=lambda context: f"site-{context.node_id}")

    def play_on(rounds: int, partitions: int, examples: int) -> list[str]:
        grid = FakeGrid(app, [11, 22], config={"examples": examples, "num-server-rounds": rounds})
        for context in grid.contexts.values():
            context.node_config["num-partitions"] = partitions
        with heard() as said:
            NFLDetector(FedAvg(), folder=tmp_path / "run").start(grid, arrays(w=[5.0]), num_rounds=rounds)
        return [text for text in said if "set aside" in text]

    (home,) = [tmp_path / "vault" / read_id / "client-site-11" for read_id in _experiments(tmp_path, play_on)]
    assert play_on(2, 2, 4) == []  # more rounds are no other data
    assert list((home / "private").iterdir())
    moved = play_on(3, 7, 4)
    assert any("client site-11: node_config changed; its models are set aside" in text for text in moved)
    assert any(text.startswith("! round 3: client site-11") for text in moved)  # on the server, too
    assert list((home / "aside" / "private").iterdir())
    assert play_on(5, 7, 4) == []
    assert any("number of examples changed; its models are set aside" in text for text in play_on(6, 7, 9))
    assert any("set aside" in note for note in read_run(tmp_path / "run").about["notes"])


def _experiments(folder: Path, play_on: Any) -> list[str]:
    assert play_on(1, 2, 4) == []
    return [read_run(folder / "run").about["run"]]


def test_a_vault_that_cannot_be_written_is_named_and_the_apps_reply_goes_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    app = wrap(own_app({}), folder=tmp_path / "file" / "vault")
    good = wrap(own_app({}), folder=tmp_path / "good")
    with heard() as said:
        grid = FakeGrid(good, [11, 22])
        grid.faults[22] = app
        result = NFLDetector(FedAvg()).start(grid, arrays(w=[5.0]), num_rounds=1)
    told = [text for text in said if f"the folder of its models, {tmp_path / 'file' / 'vault'}, cannot be used" in text]
    assert any(text.startswith("! client 1: no report") for text in told)  # on the client
    assert any(text.startswith("! round 1: client 1: no report") for text in told)  # on the server
    assert all("LINDT_PRIVATE" in text for text in told)
    assert result.arrays["w"].numpy().tolist() == [6.0]


def test_after_the_last_round_one_model_of_each_stays(tmp_path: Path) -> None:
    app = wrap(own_app({}), folder=tmp_path / "vault")
    detector = NFLDetector(FedAvg(), folder=tmp_path / "run")
    detector.start(FakeGrid(app, [11, 22]), arrays(w=[5.0]), num_rounds=2)
    assert len(list((tmp_path / "vault").glob("*/client-0/private/*"))) == 1
