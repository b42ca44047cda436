"""Ctrl-C, SIGTERM and dying workers at random moments: the run ends within seconds, or goes on, to the same bytes.

One of each is in the quick suite: tests/cli/test_cli.py (SIGINT in-process), tests/cli/test_stopping.py (with workers)
and tests/engines/test_processes.py (a worker killed).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from crashing import figure
from stopping import INTERRUPTED, SECONDS, command, finish, orphans, start, stopped
from worlds import tiny_runtime

from lindt.engines.processes.engine import Processes
from lindt.plan.problem import problem_for
from lindt.server.federation import federate

pytestmark = pytest.mark.torture
DRAW = random.Random(os.environ.get("LINDT_TORTURE_SEED", "signals"))
ROUNDS = 80


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What an undisturbed run writes, whatever its engine."""
    folder = tmp_path_factory.mktemp("straight")
    finish(command("run", ROUNDS), folder)
    return (folder / "run" / "rounds.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("engine", "group"), [("inprocess", False), ("processes", False), ("processes", True)])
def test_stopped_three_times_at_random_it_ends_with_the_same_bytes(
    engine: str, number: signal.Signals, group: bool, straight: bytes, tmp_path: Path
) -> None:
    lines, slowest, stops = tmp_path / "run" / "rounds.jsonl", 0.0, 0
    for _ in range(3):
        process = start(command("run", ROUNDS, engine=engine, resume=True), tmp_path, group=group)
        # Anywhere from its first seconds, in which torch is imported, to well into the rounds.
        moment = time.monotonic() + DRAW.uniform(2.0, 7.0)
        while time.monotonic() < moment and process.poll() is None:
            time.sleep(0.005)
        if process.poll() is not None:  # it has played all its rounds
            said, _ = process.communicate()
            assert process.returncode == 0, said
            break
        seconds, said = stopped(process, number, group=group)
        if process.returncode == 0:  # the signal came too late: all rounds were played, and it was ending anyway
            assert seconds < SECONDS, "it went on after the signal"
            break
        slowest, stops = max(slowest, seconds), stops + 1
        assert process.returncode in INTERRUPTED, said
        assert "Traceback" not in said
        assert orphans(tmp_path) == []
    finish(command("run", ROUNDS, engine=engine, resume=True), tmp_path)
    assert lines.read_bytes() == straight
    assert stops >= 1
    figure(stopped_by=number.name, engine=engine, group=group, stops=stops, slowest_seconds=round(slowest, 2))
    assert slowest < SECONDS


def test_workers_killed_ten_times_at_random_are_replaced_and_the_bytes_are_the_same() -> None:
    plan = tiny_runtime(rounds=40)
    problem = problem_for(plan)
    straight = list(federate(plan, problem=problem))
    engine, killed, over = Processes(plan, problem, workers=2), [], threading.Event()

    def kill_at_random() -> None:
        # Every third while it starts, the others at work. Once all are ready again: a task on which three workers die
        # one after the other, or a machine that cannot start one, ends a run, and so it should.
        while len(killed) < 10 and not over.wait(DRAW.uniform(0.0, 1.0)):
            ready = [worker for worker in engine._workers if worker.ready]
            starting = [worker for worker in engine._workers if not worker.ready]
            victims = starting if starting and len(killed) % 3 == 1 else ready if len(ready) == 2 else []
            if victims:
                victim = DRAW.choice(victims)
                with suppress(ProcessLookupError):
                    os.kill(victim.process.pid, signal.SIGKILL)
                    killed.append(victim in ready)

    killer = threading.Thread(target=kill_at_random)
    played = 0
    try:
        killer.start()
        while len(killed) < 10:  # as many runs as it takes: one of these is over in seconds
            found = list(federate(plan, problem=problem, engine=engine))
            assert [result for _, result in found] == [result for _, result in straight]
            assert torch.equal(found[-1][0].w, straight[-1][0].w)
            played += 1
            engine.forget_after(0)
    finally:
        over.set()
        killer.join()
        engine.close()
    assert orphans(Path(engine._scratch.name)) == []
    figure(workers_killed=len(killed), while_starting=killed.count(False), runs=played)
