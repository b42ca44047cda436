"""Runs a command, and ends it and its descendants when the process that started the guard ends, in whatever way.

    python -m lindt.engines.flower.guard DESCRIPTOR COMMAND...

DESCRIPTOR is the read end of a pipe, whose write end the other process holds. A byte in it asks for an orderly end. The
operating system closes the pipe when that process ends, also by kill -9: then everything is killed at once, and the run
can be resumed. Flower starts some processes in sessions of their own, so no process group has all of them. On Linux,
processes whose parent has ended become children of this process; elsewhere the remaining descendants are searched.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from typing import Final

from lindt.engines.flower.superlink import end, family, kill

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
CHECK: Final = 0.2  # seconds between two checks whether the command has ended by itself


def main(descriptor: int, command: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the other process handles them, and then closes the pipe
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(command, preexec_fn=_become_child)
    asked = True
    while process.poll() is None:
        if select.select([descriptor], [], [], CHECK)[0]:
            asked = os.read(descriptor, 1) != b""
            break
    if asked:
        end(process)
    _kill_descendants()
    return process.returncode or 0


def _become_child() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_descendants() -> None:
    """Kill until no descendant is left: a process may have started another one before it was killed."""
    while True:
        kill(family(os.getpid())[1:])
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.05)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
