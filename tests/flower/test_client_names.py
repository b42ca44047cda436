"""In an app of the user's own a node counts by Flower's id; the name that it reports is a label, and belongs to one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import torch
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from small_apps import arrays, heard

from lindt.flower import NFLDetector
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


def play(folder: Path, app: Any, rounds: int) -> tuple[dict[str, str], dict[int, float], list[str]]:
    """The name of each node, beta_i by client number in the last round, and the log."""
    with heard() as said:
        NFLDetector(FedAvg(), 0.5, 2, folder=folder).start(FakeGrid(app, NODES), arrays(w=[0.0]), num_rounds=rounds)
    run = read_run(folder)
    names = {str(one["node"]): str(one.get("name", "")) for one in run.about["clients"]}
    return names, {one["client"]: one["beta"] for one in run.rounds[-1]["scores"]["clients"]}, list(said)


def test_a_node_that_takes_anothers_name_changes_neither_its_row_nor_its_numbers(tmp_path: Path) -> None:
    app = app_of({11: "ward-a", 22: "ward-b", 33: "ward-a"}, since=2)
    names, betas, said = play(tmp_path, app, 3)
    assert names == {"11": "ward-a", "22": "ward-b", "33": "ward-a (node 33)"}
    assert betas == {0: -0.25, 1: -0.25, 2: 0.5}
    warnings = [text for text in said if "node 33 calls itself 'ward-a'" in text]
    assert len(warnings) == 1  # once, not in every round


def test_of_two_that_report_one_name_at_the_same_time_neither_has_it(tmp_path: Path) -> None:
    names, _, _ = play(tmp_path, app_of({11: "ward-a", 22: "ward-b", 33: "ward-a"}), 1)
    assert names == {"11": "ward-a (node 11)", "22": "ward-b", "33": "ward-a (node 33)"}


def test_names_are_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    play(tmp_path, app_of({11: "ward-a", 22: "ward-b", 33: None}, since=9), 1)
    names, _, _ = play(tmp_path, app_of({11: "ward-a", 22: "ward-b", 33: "ward-b"}), 2)
    assert names == {"11": "ward-a", "22": "ward-b", "33": "ward-b (node 33)"}
