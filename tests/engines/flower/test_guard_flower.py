"""No process of ours outlives `lindt run --engine flower`, however the command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from worlds import tiny_runtime

from lindt.engines.flower.superlink import environment, family, guarded
from lindt.plan.file import to_dict
from lindt.plan.plan import Alone
from lindt.report.reading import is_locked

# A command like Flower's: its child starts a process in a session of its own, and ends.
ORPHANS = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
start = f"import subprocess; print(subprocess.Popen({sleep!r}, start_new_session=True).pid, flush=True)"
subprocess.run([sys.executable, "-c", start])
time.sleep(600)
"""


def running(pids: list[int]) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,stat="], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid, state in map(str.split, listed.splitlines()) if int(pid) in pids and state[0] != "Z"]


def wait_for_none(pids: list[int], seconds: float) -> None:
    end = time.monotonic() + seconds
    while left := running(pids):
        assert time.monotonic() < end, subprocess.run(
            ["ps", "-o", "pid,ppid,args", "-p", ",".join(map(str, left))], capture_output=True, text=True
        ).stdout
        time.sleep(0.1)


def first_number(log: Path) -> int:
    end = time.monotonic() + 20
    while not log.read_text().strip():
        assert time.monotonic() < end
        time.sleep(0.02)
    return int(log.read_text())


def test_a_guarded_command_ends_with_all_that_it_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with guarded([sys.executable, "-c", ORPHANS], environment(), log) as process:
        orphan = first_number(log)
        mine = family(process.pid)
        assert orphan in mine  # it has no parent of its own any more
        assert running(mine) == sorted(mine)
    wait_for_none(mine, 5)


HOLDER = """
import os, sys
from pathlib import Path
from lindt.engines.flower.superlink import environment, guarded
log = Path(sys.argv[1])
with guarded([sys.executable, "-c", sys.argv[2]], environment(), log) as process:
    Path(sys.argv[3]).write_text(str(process.pid))
    process.wait()
"""


def test_a_process_killed_by_kill_9_leaves_nothing_behind(tmp_path: Path) -> None:
    log, pid = tmp_path / "log", tmp_path / "pid"
    log.touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, log, ORPHANS, pid], env=environment())
    orphan = first_number(log)
    mine = family(holder.pid)
    assert {orphan, int(pid.read_text())} < set(mine)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    wait_for_none(mine, 5)


@pytest.mark.slow
def test_kill_9_of_the_command_takes_superlink_and_superexec_with_it(tmp_path: Path) -> None:
    plan = replace(tiny_runtime(rounds=500), alone=Alone(private=False))
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(to_dict(plan)))
    command = [Path(sys.executable).parent / "lindt", "run", tmp_path / "plan.toml", "--engine", "flower"]
    words = [*map(str, command), "--out", str(tmp_path / "run")]
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(words, env=environment(), stdout=said, stderr=said)
    try:
        end, started = time.monotonic() + 150, ""
        while not all(name in started for name in ("flower-superlink", "flower-superexec", "gcs_server")):
            assert process.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < end, (tmp_path / "run/flower.log").read_text()[-2000:]
            time.sleep(0.2)
            mine = family(process.pid)
            started = subprocess.run(
                ["ps", "-ww", "-o", "args=", "-p", ",".join(map(str, mine))], capture_output=True, text=True
            ).stdout
    finally:
        process.kill()
        process.wait()
    wait_for_none(mine, 10)
    assert not is_locked(tmp_path / "run")  # --resume is not refused
