"""What the boards share (`lindt reproduce detectors`, `attacks`, `recovery`): jobs, playing them, saying how it went.

A board has cells, each of which is played with several seeds; what a run showed is one line of results
(results/kept_lines.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from rich.console import Console

from lindt.errors import UserError
from lindt.plan.plan import Plan
from lindt_experiments.plans.keys import content_key, private_group
from lindt_experiments.queue.jobs import Job
from lindt_experiments.queue.progress import Audience, play_jobs, say_json
from lindt_experiments.queue.work import work_of

TOGETHER: Final = 12  # short runs that one process plays


class BoardRequest(Protocol):
    """What every board is asked for on the command line."""

    @property
    def jobs(self) -> int: ...
    @property
    def as_json(self) -> bool: ...
    @property
    def console(self) -> Console: ...
    @property
    def command(self) -> str: ...


def check_counts(seeds: int, jobs: int) -> None:
    for option, number in (("--seeds", seeds), ("--jobs", jobs)):
        if number < 1:
            raise UserError(f"{option} {number}: at least 1")


def check_names(option: str, chosen: Sequence[str], known: Sequence[str]) -> None:
    for name in chosen:
        if name not in known:
            raise UserError(f"{option} {name}: choose among {', '.join(known)}")


def say(request: BoardRequest, text: str) -> None:
    """To people; machines read lines of JSON."""
    if not request.as_json:
        request.console.print(text, highlight=False, markup=False, soft_wrap=True)


def job_for(plan: Plan, number: int, runs: Path, *, short: bool = True) -> Job:
    """A run as a job of the queue. `number` is its seed or index; one process plays several short runs."""
    key = content_key(plan)
    folder = runs / f"{plan.name}-{number}-{key[:8]}"
    return Job((), plan, key, private_group(plan), folder, work_of(plan), "short" if short else "")


def play(request: BoardRequest, jobs: Sequence[Job], keep: Callable[[Job], None]) -> int:
    """Play them and `keep` each as it ends; returns how many failed."""
    told = Audience(request.console, request.as_json, request.command)
    return play_jobs(jobs, request.jobs, TOGETHER, keep, told)


def show(request: BoardRequest, name: str, page: Path, runs: int, words: Iterable[str]) -> None:
    """Where the page is, and what it says in short."""
    if request.as_json:
        say_json({"event": "page", "name": name, "file": str(page), "runs": runs})
    for text in (*words, str(page)):
        say(request, text)


def end(request: BoardRequest, played: int, failed: int) -> int:
    """Say how it ended. Returns the exit code: 1 where a run failed."""
    if request.as_json:
        say_json({"event": "end", "played": played - failed, "failed": failed})
    if failed:
        say(request, f"{failed} of {played} runs failed; the same command tries them again")
    return 1 if failed else 0
