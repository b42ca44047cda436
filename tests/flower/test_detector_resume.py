"""A killed server costs at most one round; and a Flower run reads like one of our own."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from fake_grid import FakeGrid
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import FedAvg, Strategy
from small_apps import arrays, heard, pushing

from lindt.errors import UserError
from lindt.flower import NFLDetector
from lindt.flower.protocol import ClientReport
from lindt.flower.recorder import load_newest
from lindt.protocols import ClientTally
from lindt.report.reading import method_words, read_run, repeat_command
from lindt.runs.schema import ABOUT, ROUND, SUMMARY, fits

ZERO = {"w": [0.0, 0.0]}
NODES = 6


def drifting(message: Message, context: Context) -> Message:
    """Each client and round has its own update; the first two clients report how they fare."""
    i, config = int(context.node_config["partition-id"]), message.content["config"]
    if message.metadata.message_type == "evaluate":
        reply = Message(RecordDict({"m": MetricRecord({"num-examples": 4, "acc": 0.5})}), reply_to=message)
        if i < 2:
            central, local, private = (torch.tensor([sum, 4.0], dtype=torch.float64) for sum in (2.0, 2.0 + i, 3.0))
            ClientReport(f"ward-{i}", ClientTally(4, central, local, private, wins=i, losses=1)).attach(reply.content)
        return reply
    rng = np.random.default_rng([i, int(config["server-round"])])
    w = message.content["arrays"]["w"].numpy() + rng.normal(0, 1, 2).astype(np.float32)
    metrics = MetricRecord({"num-examples": 4})
    return Message(RecordDict({"arrays": ArrayRecord({"w": Array(w)}), "metrics": metrics}), reply_to=message)


def detector(folder: Path, strategy: Strategy | None = None, **settings: Any) -> NFLDetector:
    chosen = strategy or FedAvg(fraction_train=0.5, fraction_evaluate=0.7)
    return NFLDetector(chosen, epsilon=0.5, patience=2, folder=folder, **settings)


class Killed(BaseException):
    """What no code of the app's can catch: the process is gone."""


def killing(at: int, kind: str) -> Callable[[Message, Context], Message]:
    def app(message: Message, context: Context) -> Message:
        if message.content["config"]["server-round"] == at and message.metadata.message_type == kind:
            raise Killed
        return drifting(message, context)

    return app


STATEFUL: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: FedAvg(fraction_train=0.5, fraction_evaluate=0.7),
    "FedAdam": lambda: flower.FedAdam(fraction_train=0.5),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.9),
}


@pytest.mark.parametrize("kind", ["train", "evaluate"])
@pytest.mark.parametrize("name", STATEFUL)
def test_killed_and_started_again_it_ends_as_if_nothing_had_been(name: str, kind: str, tmp_path: Path) -> None:
    random.seed(5)
    whole = detector(tmp_path / "whole", STATEFUL[name]())
    straight = whole.start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=6)

    random.seed(5)
    first = FakeGrid(killing(4, kind), NODES)
    with pytest.raises(Killed):
        detector(tmp_path / "cut", STATEFUL[name]()).start(first, arrays(**ZERO), num_rounds=6)
    random.seed(99)  # another process, another state
    again, second = detector(tmp_path / "cut", STATEFUL[name]()), FakeGrid(drifting, NODES)
    with heard() as said:
        result = again.start(second, arrays(**ZERO), num_rounds=6)
    rounds = [m.content["config"]["server-round"] for m in second.of("train")]
    lost = 3 if kind == "train" else 4  # the round that was trained is kept, though not evaluated
    assert min(rounds) == lost + 1
    count = lines(tmp_path / "whole")[lost - 1]["count"]
    assert f"continues after round {lost}, count {count}, recovery {'on' if count > 2 else 'off'}" in said
    if kind == "train":
        assert (again.state, again.seen) == (whole.state, whole.seen)
        assert result.arrays["w"].data == straight.arrays["w"].data
        assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
        assert result.train_metrics_clientapp[6] == straight.train_metrics_clientapp[6]
    else:
        found = lines(tmp_path / "cut")
        assert [line["round"] for line in found] == [1, 2, 3, 4, 5, 6]
        assert found[3] == lines(tmp_path / "whole")[3] | {"scores": None}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_kill_9(tmp_path: Path) -> None:
    """A process that is really gone, in the middle of round 4: its lock with it, its three rounds not."""
    code = """
import os, random, signal, sys
from pathlib import Path
import test_detector_resume as here

def app(message, context):
    if message.content["config"]["server-round"] == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return here.drifting(message, context)

random.seed(5)
here.detector(Path(sys.argv[1])).start(here.FakeGrid(app, here.NODES), here.arrays(**here.ZERO), num_rounds=6)
"""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])  # the same lindt as here
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", code, str(tmp_path / "cut")]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == -signal.SIGKILL, done.stderr
    detector(tmp_path / "cut").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=6)
    random.seed(5)
    detector(tmp_path / "whole").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=6)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


def test_clients_are_told_what_never_happened(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        detector(tmp_path).start(FakeGrid(killing(4, "train"), NODES), arrays(**ZERO), num_rounds=6)
    grid = FakeGrid(drifting, NODES)
    detector(tmp_path).start(grid, arrays(**ZERO), num_rounds=6)
    config = grid.sent[0].content["config"]
    run = json.loads((tmp_path / "run.json").read_text())["run"]
    assert (config["lindt-experiment"], config["lindt-since"], config["lindt-round"]) == (run, 3, 4)
    assert config["lindt-keep"] == 2


def test_round_numbers_are_true_after_a_restart(tmp_path: Path) -> None:
    seen: list[int] = []

    def central(round: int, w: ArrayRecord) -> MetricRecord:
        seen.append(round)
        return MetricRecord({"round": round})

    detector(tmp_path).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=2)
    result = detector(tmp_path).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4, evaluate_fn=central)
    assert seen == [2, 3, 4]  # the first is the w it goes on from
    assert list(result.train_metrics_clientapp) == [3, 4]
    assert result.evaluate_metrics_serverapp[4]["round"] == 4


def test_a_finished_run_is_not_played_again(tmp_path: Path) -> None:
    first = detector(tmp_path).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=2)
    grid = FakeGrid(drifting, NODES)
    with heard() as said:
        result = detector(tmp_path).start(grid, arrays(**ZERO), num_rounds=2)
    assert grid.sent == []
    assert result.arrays["w"].data == first.arrays["w"].data
    assert any("holds all 2 rounds already" in text for text in said)
    assert (tmp_path / "summary.json").exists()


def test_the_folder_reads_like_one_of_our_own_runs(tmp_path: Path) -> None:
    detector(tmp_path, FedAvg(), name="wards").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4)
    assert fits(json.loads((tmp_path / "run.json").read_text()), ABOUT)
    assert fits(json.loads((tmp_path / "summary.json").read_text()), SUMMARY)
    found = lines(tmp_path)
    assert all(fits(line, ROUND) for line in found)
    run = read_run(tmp_path)
    assert (run.state, run.name, run.planned, run.said) == ("ended", "wards", 4, ())
    assert run.summary is not None
    assert method_words(run.plan) == "LINDT on detection"
    assert repeat_command("plan.toml", run.about["task"]) == "start the Flower app with another folder"
    assert run.summary["detected_at"] == [3]  # Delta above 0.5 in more than 2 rounds
    # Two wards report: 2 of 4 right with w; they predict 2 and 3 right, alone 3 each.
    scores = found[0]["scores"]
    assert (scores["central"], scores["local"], scores["private"]) == (0.5, 0.625, 0.75)
    assert scores["beta"] == -0.125
    assert (scores["harmed"], scores["ties"]) == (1, 1)
    named = {one["client"]: one for one in run.about["clients"]}
    assert sorted(one["name"] for one in named.values() if "name" in one) == ["ward-0", "ward-1"]
    assert all(one["train"] == 4 for one in named.values())


def test_the_gain_is_in_flowers_own_metrics_and_the_log(tmp_path: Path) -> None:
    with heard() as said:
        result = NFLDetector(FedAvg(), 0.5, 2).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=1)
    metrics = result.evaluate_metrics_clientapp[1]
    assert (metrics["lindt-beta"], metrics["lindt-harmed"]) == (-0.125, 1)
    assert metrics["acc"] == pytest.approx(0.5)
    assert "! round 1: mean gain over training alone -0.125; worse off than alone: ward-0 (-0.250)" in said


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    app = pushing(*[[1, 1]] * 3)
    detector(tmp_path / "a", FedAvg()).start(FakeGrid(app), arrays(**ZERO), num_rounds=1)
    with pytest.raises(UserError, match=r"its run has the strategies \['FedAvg'\]"):
        detector(tmp_path / "a", flower.FedMedian())
    with pytest.raises(UserError, match="of another model"):
        detector(tmp_path / "a", FedAvg()).start(FakeGrid(app), arrays(w=[0.0]), num_rounds=2)
    assert read_run(tmp_path / "a").state == "ended"  # a refused start changes nothing
    assert read_run(tmp_path / "a").planned == 1
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "run.json").write_text(
        f'{{"format": 1, "run": "{"0" * 32}", "task": null, "clients": [], "metric_in_percent": true}}'
    )
    with pytest.raises(UserError, match="not of a Flower app"):
        detector(tmp_path / "b")
    state = next((tmp_path / "a" / "checkpoint").glob("round-*.safetensors"))
    state.write_text("{}")
    with pytest.raises(
        UserError, match=r"round-000001\.safetensors is damaged .* every older checkpoint is damaged too"
    ):
        detector(tmp_path / "a", FedAvg()).start(FakeGrid(app), arrays(**ZERO), num_rounds=2)


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    def second(message: Message, context: Context) -> Message:
        with pytest.raises(UserError, match="another process is working on this run"):
            detector(tmp_path).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=1)
        return drifting(message, context)

    detector(tmp_path).start(FakeGrid(second, NODES), arrays(**ZERO), num_rounds=1)


def test_only_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    detector(tmp_path).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4)
    found = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert found == ["round-000003.safetensors", "round-000004.safetensors"]


def w_after(folder: Path, round: int) -> bytes:
    saved, _ = load_newest(folder / "checkpoint", json.loads((folder / "run.json").read_text())["run"])
    assert saved is not None
    assert saved.round == round
    return saved.arrays["w"].data


@pytest.mark.parametrize("where", ["w", "words", "cut", "empty"])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(where: str, tmp_path: Path) -> None:
    random.seed(5)
    detector(tmp_path / "whole").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=6)
    random.seed(5)
    detector(tmp_path / "cut").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4)
    path = tmp_path / "cut" / "checkpoint" / "round-000004.safetensors"
    content = bytearray(path.read_bytes())
    if where == "w":
        content[-3] ^= 1  # the last bytes are those of w
    elif where == "words":
        content[content.index(b"lines")] ^= 1
    path.write_bytes({"cut": content[:-5], "empty": b""}.get(where, content))
    with heard() as said:
        detector(tmp_path / "cut").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=6)
    assert any(
        text.startswith("! ") and "it was renamed to .damaged, and the run continues from round 3" in text
        for text in said
    )
    assert path.with_suffix(".damaged").exists()
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert w_after(tmp_path / "cut", 6) == w_after(tmp_path / "whole", 6)


@pytest.mark.parametrize("spoilt", [False, True])
def test_a_checkpoint_of_an_earlier_version_is_read(spoilt: bool, tmp_path: Path) -> None:
    """unsealed_run/ was written by the version that kept two files a round without a checksum: 3 rounds of FedAvgM."""
    momentum = flower.FedAvgM(server_momentum=0.9)
    random.seed(5)
    detector(tmp_path / "whole", momentum).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=5)
    folder = tmp_path / "old"
    shutil.copytree(Path(__file__).parent / "unsealed_run", folder)
    if spoilt:
        (folder / "checkpoint" / "state-000003.json").write_text("{}")
    with heard() as said:
        again = detector(folder, flower.FedAvgM(server_momentum=0.9))
        again.start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=5)
    assert any(f"continues after round {2 if spoilt else 3}" in text for text in said)
    found, expected = lines(folder), lines(tmp_path / "whole")
    for line in (*found[:3], *expected[:3]):  # what the earlier version did not have
        line.pop("cosine", None)
        for name in ("median_gain", "clearly_better", "ipr"):
            (line["scores"] or {}).pop(name, None)
    # It summed distances in float32.
    rounded = ("delta", "w_div", "clean", "spread", "median")
    for line, other in zip(found[:3], expected[:3], strict=True):
        assert line == other | {name: pytest.approx(other[name], rel=1e-6) for name in rounded}
    assert found[3:] == expected[3:]
    assert w_after(folder, 5) == w_after(tmp_path / "whole", 5)
    left = {path.name for path in (folder / "checkpoint").iterdir() if path.suffix != ".damaged"}
    assert left - {"arrays-000003.safetensors"} == {"round-000004.safetensors", "round-000005.safetensors"}


def test_a_report_that_is_none_is_told_and_left_out(tmp_path: Path) -> None:
    def app(message: Message, context: Context) -> Message:
        reply = drifting(message, context)
        if message.metadata.message_type == "evaluate" and "lindt" in reply.content:
            reply.content["lindt"]["tally"] = "{}"
        return reply

    with heard() as said:
        result = NFLDetector(FedAvg(), 0.5, 2).start(FakeGrid(app, NODES), arrays(**ZERO), num_rounds=1)
    assert sum("sent a malformed report" in text for text in said) == 2
    assert list(result.evaluate_metrics_clientapp[1]) == ["acc"]
