"""NFLDetector in a loop of the user's own, which calls the strategy's methods itself and may never evaluate."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fake_grid import FakeGrid
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvg
from small_apps import arrays
from test_detector_resume import NODES, ZERO, detector, drifting, lines

from lindt.errors import UserError
from lindt.flower import NFLDetector
from lindt.report.reading import read_run


def train(one: NFLDetector, grid: FakeGrid, r: int, w: ArrayRecord) -> ArrayRecord:
    replies = grid.send_and_receive(one.configure_train(r, w, ConfigRecord(), grid))
    return one.aggregate_train(r, replies)[0] or w


def evaluate(one: NFLDetector, grid: FakeGrid, r: int, w: ArrayRecord) -> None:
    one.aggregate_evaluate(r, grid.send_and_receive(one.configure_evaluate(r, w, ConfigRecord(), grid)))


def loop(one: NFLDetector, rounds: int, until: int | None = None, evaluated: Any = ()) -> ArrayRecord:
    grid = FakeGrid(drifting, NODES)
    done, w = one.begin(arrays(**ZERO), rounds)
    for r in range(done + 1, (until or rounds) + 1):
        w = train(one, grid, r, w)
        if r in evaluated:
            evaluate(one, grid, r, w)
    return w


@pytest.mark.parametrize("evaluated", [(), (2,), (3,), (1, 2, 3)])
def test_each_round_is_written_whether_it_is_evaluated_or_not(evaluated: tuple[int, ...], tmp_path: Path) -> None:
    one = detector(tmp_path, FedAvg())  # it asks everyone, so that the two clients that report are among them
    loop(one, 3, evaluated=evaluated)
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]
    assert [line["round"] for line in lines(tmp_path) if line["scores"]] == list(evaluated)
    run = read_run(tmp_path)  # while the detector is still there
    assert (run.state, len(run.rounds), run.said) == ("ended", 3, ())
    assert run.summary is not None
    assert (run.summary["rounds"], run.summary["scored_rounds"]) == (3, len(evaluated))
    assert [one["train"] for one in run.about["clients"]]


def test_an_evaluated_loop_writes_the_bytes_that_start_writes(tmp_path: Path) -> None:
    random.seed(5)
    loop(detector(tmp_path / "loop"), 4, evaluated=(1, 2, 3, 4))
    random.seed(5)
    detector(tmp_path / "start").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4)
    for name in ("rounds.jsonl", "summary.json", "plan.toml"):
        assert (tmp_path / "loop" / name).read_bytes() == (tmp_path / "start" / name).read_bytes()


def test_a_loop_that_stops_early_has_its_last_round_too(tmp_path: Path) -> None:
    one = detector(tmp_path)
    loop(one, 6, until=3)
    assert [line["round"] for line in lines(tmp_path)] == [1, 2]  # an evaluation of round 3 may still come
    del one
    gc.collect()
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]
    assert len((tmp_path / "timing.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_process_just_ends_and_another_goes_on(end: str, tmp_path: Path) -> None:
    code = f"""
import os, random, signal, sys
from pathlib import Path
import test_own_loop as here

random.seed(5)
one = here.detector(Path(sys.argv[1]))
here.loop(one, 6, until=4)
{end}
"""
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    call = [sys.executable, "-c", code, str(tmp_path / "cut")]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=600)
    killed = "SIGKILL" in end
    assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
    assert [line["round"] for line in lines(tmp_path / "cut")] == [1, 2, 3] + [4] * (not killed)
    again = loop(detector(tmp_path / "cut"), 6)
    random.seed(5)
    whole = loop(detector(tmp_path / "whole"), 6)
    assert (tmp_path / "cut" / "rounds.jsonl").read_bytes() == (tmp_path / "whole" / "rounds.jsonl").read_bytes()
    assert again["w"].data == whole["w"].data


def test_rounds_keep_their_numbers_after_a_restart(tmp_path: Path) -> None:
    loop(detector(tmp_path), 2)
    one, grid = detector(tmp_path), FakeGrid(drifting, NODES)
    done, w = one.begin(arrays(**ZERO), 3)
    assert done == 2
    with pytest.raises(UserError, match="round 1 was played already; continue with round 3"):
        one.configure_train(1, w, ConfigRecord(), grid)
    train(one, grid, done + 1, w)
    assert {message.content["config"]["lindt-round"] for message in grid.sent} == {3}
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_round_has_one_line_however_often_it_is_evaluated(tmp_path: Path) -> None:
    one, grid = detector(tmp_path), FakeGrid(drifting, NODES)
    _, w = one.begin(arrays(**ZERO), 3)
    w = train(one, grid, 1, w)
    evaluate(one, grid, 1, w)
    evaluate(one, grid, 1, w)
    train(one, grid, 2, w)
    train(one, grid, 3, w)
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]
    with pytest.raises(UserError, match="round 3 was played already"):
        one.aggregate_train(3, [])


def test_a_second_detector_in_the_process_takes_the_folder_over(tmp_path: Path) -> None:
    """As in a notebook whose cell is run again after a failure, while the first detector is still referred to."""
    first, grid = detector(tmp_path), FakeGrid(drifting, NODES)
    _, w = first.begin(arrays(**ZERO), 3)
    w = train(first, grid, 1, w)
    loop(detector(tmp_path), 3)
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]
    with pytest.raises(UserError, match="another detector has resumed it"):
        train(first, grid, 2, w)
    assert [line["round"] for line in lines(tmp_path)] == [1, 2, 3]


def test_another_process_is_kept_out_while_a_loop_runs(tmp_path: Path) -> None:
    one = detector(tmp_path)
    one.begin(arrays(**ZERO), 3)
    assert read_run(tmp_path).state == "running"
    code = "import pathlib, sys, test_own_loop as here; here.loop(here.detector(pathlib.Path(sys.argv[1])), 3)"
    env = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    call = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=600)
    assert "another process is working on this run" in done.stderr


def test_a_finished_loop_stays_finished(tmp_path: Path) -> None:
    loop(detector(tmp_path), 2)
    loop(detector(tmp_path), 2)
    assert read_run(tmp_path).state == "ended"


@pytest.mark.parametrize("lost", ["first", "middle", "all"])
def test_a_log_that_lost_lines_is_refused(lost: str, tmp_path: Path) -> None:
    detector(tmp_path).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4)
    path = tmp_path / "rounds.jsonl"
    found = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join({"first": found[1:], "middle": found[:1] + found[2:], "all": []}[lost]))
    with pytest.raises(UserError, match=r"rounds\.jsonl has \d of the 4 rounds of its checkpoint"):
        detector(tmp_path).start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=6)


def test_a_torn_last_line_is_written_again(tmp_path: Path) -> None:
    detector(tmp_path / "cut").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4)
    path = tmp_path / "cut" / "rounds.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    detector(tmp_path / "cut").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=4)
    assert path.read_bytes() == whole


def test_what_was_seen_is_not_carried_into_a_second_run() -> None:
    one = NFLDetector(FedAvg(), 0.5, 2)
    one.start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=1)
    assert one.seen is not None
    assert one.scores is not None
    one.begin(arrays(**ZERO), 1)
    assert (one.seen, one.scores, json.dumps(one.negative)) == (None, None, "false")
