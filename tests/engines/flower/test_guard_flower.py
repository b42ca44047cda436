"""No process of ours outlives `lindt run --engine flower`, however the command ends.

With a SuperLink and Ray: test_simulation_flower.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lindt.engines.flower.superlink import environment, family, guarded

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
    end = time.monotonic() + 120
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
        assert {process.pid, orphan} <= set(running(mine))  # the one in between may have ended already
    wait_for_none(mine, 60)


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
    wait_for_none(mine, 60)
