"""Contestants in alternation: all are started, then in each pass each of them plays one round, one after the other.

While one computes, the others wait for a line. So other work on the machine affects all contestants of a pass alike,
and ratios are taken within a pass. The first round of a process (compilation, caches, start of workers) is reported
separately.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from environments import python_of

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Contestant:
    key: str
    script: str
    options: tuple[str, ...] = ()
    peer: str = ""  # the environment; empty: this one
    every: int = 1  # takes part in each `every`-th pass


@dataclass
class Found:
    name: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    loss: float | None = None
    start: float = 0.0  # from the command to the end of the first round
    first: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)  # by pass
    cpu: dict[int, float] = field(default_factory=dict)  # processor seconds of all its processes, by pass
    others: dict[int, float] = field(
        default_factory=dict
    )  # the share of the cores that other work used during the round


class Running:
    def __init__(self, contestant: Contestant) -> None:
        python = python_of(contestant.peer) if contestant.peer else Path(sys.executable)
        self.contestant, self.found, self.started = contestant, Found(), time.perf_counter()
        self.process = subprocess.Popen(
            [python, HERE / "contestants" / contestant.script, *contestant.options],
            env=os.environ | {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if contestant.peer else None,
            text=True,
        )
        if self.process.stderr:
            _drain(self.process.stderr)
        self.found.first = self.play()
        self.found.start = time.perf_counter() - self.started

    def play(self) -> float:
        assert self.process.stdin
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._hear()["seconds"])

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        said = self._hear()
        self.process.wait(timeout=60)
        for key in ("name", "versions", "parameters", "loss"):
            setattr(self.found, key, said[key])

    def _hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.contestant.key} ended with {self.process.wait()} before it answered")
        return json.loads(line)


def _drain(stream: Any) -> None:
    """Read and drop the output of a peer; to see it, run its script by hand."""
    threading.Thread(target=lambda: [None for _ in stream], daemon=True).start()


@contextmanager
def _running(contestant: Contestant) -> Iterator[Running]:
    running = Running(contestant)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.terminate()


class Meter:
    """Measures the share of all cores that other processes used since the meter was made."""

    def __init__(self) -> None:
        self.total, self.busy, self.own = _ticks()

    def others(self) -> float:
        total, busy, own = _ticks()
        return max(0.0, (busy - self.busy) - max(0, own - self.own)) / max(total - self.total, 1)

    def own_seconds(self) -> float:
        """The processor time of this process and its descendants: of the contestant that plays, as the others wait."""
        return (_ticks()[2] - self.own) / os.sysconf("SC_CLK_TCK")


def _ticks() -> tuple[int, int, int]:
    """The time of all cores: in total, busy, and busy for this process and its descendants."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    parents, used = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                words = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(words[1])
                used[int(folder.name)] = sum(int(word) for word in words[11:15])  # with its ended children
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(numbers), sum(numbers) - numbers[3] - numbers[4], sum(used.get(pid, 0) for pid in ours)


def others_now(seconds: float) -> float:
    meter = Meter()
    time.sleep(seconds)
    return meter.others()


QUIET = 0.1  # of all cores


class Patience:
    """Waits for a quiet machine before a round, for so many seconds in total; after that it does not wait."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait(self) -> None:
        while self.left > 0 and others_now(0.3) > QUIET:
            time.sleep(1)
            self.left -= 1.3


def play(contestants: Sequence[Contestant], passes: int, patience: Patience) -> dict[str, Found]:
    with ExitStack() as stack:
        running = []
        for contestant in contestants:
            sys.stderr.write(f"  starting {contestant.key}\n")
            running.append(stack.enter_context(_running(contestant)))
        for number in range(passes):
            turn = number % len(running)  # so that no contestant always follows the same one
            for one in running[turn:] + running[:turn]:
                if number % one.contestant.every == 0:
                    patience.wait()
                    meter = Meter()
                    one.found.seconds[number] = one.play()
                    one.found.others[number] = meter.others()
                    one.found.cpu[number] = meter.own_seconds()
            share = max(one.found.others.get(number, 0.0) for one in running)
            sys.stderr.write(f"  pass {number + 1} of {passes}; other work took up to {share:.0%} of the cores\n")
        for one in running:
            one.end()
    return {one.contestant.key: one.found for one in running}
