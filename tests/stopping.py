"""Real runs of the command line that are told to stop, for tests in several folders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 5.0  # within which a run that is told to stop has stopped
# A shell shows 130 for both. Where the signal falls into an import, while Python executes a string (as dataclasses
# do), Python itself ends by the signal once everything has been put in order.
INTERRUPTED = (130, -signal.SIGINT)


def command(out: str, rounds: int, engine: str = "inprocess", *, resume: bool = False) -> list[str]:
    """A federation of digits that recovers from its second round on, so that v_i are written too."""
    sets = ["alone.epochs=1", "detection=delta", "method=runtime", "method.recovery.patience=0"]
    plan = ["--rounds", str(rounds), *(word for assignment in sets for word in ("--set", assignment))]
    again = ["--resume"] if resume else []  # starts anew where nothing was begun
    return [sys.executable, "-m", "lindt.cli", "run", "--out", out, "--engine", engine, *plan, *again]


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"LINDT_CACHE": str(folder / "cache"), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}


def start(words: list[str], folder: Path, *, group: bool = False) -> subprocess.Popen[str]:
    """With `group` as a terminal would: the server and its workers in a group of their own, all of which get Ctrl-C."""
    return subprocess.Popen(
        words,
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0 if group else None,
    )


def stopped(process: subprocess.Popen[str], number: int, *, group: bool = False) -> tuple[float, str]:
    """Sends the signal; how long it then took to end, and all that was said."""
    began = time.monotonic()
    if group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    try:
        said, _ = process.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return time.monotonic() - began, said


def finish(words: list[str], folder: Path) -> None:
    done = subprocess.run(
        words, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600
    )
    assert done.returncode == 0, done.stdout.decode()


def wait_for_rounds(lines: Path, rounds: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not (lines.exists() and lines.read_bytes().count(b"\n") >= rounds):
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(parent: int) -> list[int]:
    """The processes that a process has started and that still run."""
    return [pid for pid, (above, _) in _processes().items() if above == parent]


def orphans(folder: Path) -> list[str]:
    """What still runs of those that know of a folder, by its command line or its environment."""
    mark = str(folder)
    return [words for pid, (_, words) in _processes().items() if mark in words and pid != os.getpid()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _processes() -> dict[int, tuple[int, str]]:
    """By id: the parent, and the command line with the environment. Of others' processes neither can be read."""
    found: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes() + b"\0" + (folder / "environ").read_bytes()
        except (OSError, ValueError):  # gone, or another user's
            continue
        found[int(folder.name)] = above, words.replace(b"\0", b" ").decode(errors="replace")
    return found
