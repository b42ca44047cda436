"""Kills at random moments: whatever the process was doing, the run goes on to the bytes of an undisturbed one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crashing import crash_plan, figure, left, same, zygote

pytestmark = pytest.mark.torture


@pytest.mark.parametrize(("engine", "kills", "rounds"), [("inprocess", 100, 60), ("processes", 50, 60)])
def test_random_kills(engine: str, kills: int, rounds: int, tmp_path: Path) -> None:
    draw, plan = random.Random(engine), crash_plan(rounds)
    with zygote() as workshop:
        whole = workshop.play(plan, tmp_path / "straight" / "run", engine)
        assert whole["code"] == 0, whole["said"]
        straight = left(tmp_path / "straight" / "run")
        done, runs, ended, quickest = 0, 0, 0, whole["seconds"]
        while done < kills:
            runs += 1
            folder = tmp_path / f"killed-{runs}" / "run"
            before = done
            for _ in range(1000):  # starting takes a part of each life, so that a few are needed
                found = workshop.play(plan, folder, engine, after=draw.uniform(0.05, 0.6 * quickest))
                if found["code"] == 0:
                    break
                assert found["code"] == -9, found["said"]
                done += 1
            ended += found["code"] == 0
            if done == before:  # the machine is faster than it was: kill sooner
                quickest = min(quickest, found["seconds"])
            assert same(left(folder), straight)
    assert ended == runs
    figure(kills=done, engine=engine, runs=runs, same_bytes=ended)
