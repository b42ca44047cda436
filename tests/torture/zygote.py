"""Plays runs in children that are forked from one process: torch is imported once, so that hundreds can be killed.

    python zygote.py     one JSON job a line on standard input, one JSON answer a line on standard output

A job is {"plan": table, "folder": path, "engine": name, "break": text or null, "after": seconds or null}: with `after`
the child is killed at that moment of its life, wherever it is. The answer tells how it ended, what it said on
standard error, how long it lived, and every durable step it reached.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "inside"))

import sitecustomize as inside
import torch

from lindt.errors import UserError
from lindt.plan.file import from_dict
from lindt.plan.plan import Plan
from lindt.plan.problem import problem_for
from lindt.runs import files
from lindt.runs.play import run_plan


def play(job: dict[str, Any]) -> int:
    """In the child, as the command line does: mistakes are one line and 2."""
    if job.get("break"):
        os.environ["LINDT_BREAK"] = job["break"]  # for workers
        wanted, step, nth, fault, mark = job["break"].split("|")
        inside.break_at(wanted, step, int(nth), fault, Path(mark))
    elif job.get("steps"):
        steps = Path(job["steps"])
        files.watch = lambda step, path: _note(steps, f"{inside.family(path)}|{step}")
    folder = Path(job["folder"])
    try:
        plan = None if (folder / "plan.toml").exists() else from_dict(job["plan"])
        for _ in run_plan(plan, folder, resume=True, engine=job["engine"], cache=folder.with_name("cache")):
            pass
    except (UserError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return 0


def _note(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text + "\n")


def main() -> None:
    torch.set_num_threads(1)
    problem_for(Plan())  # whatever reading the digits imports, once
    for line in sys.stdin:
        job = json.loads(line)
        said = Path(job["folder"]).with_name("said.txt")
        begun = time.monotonic()
        child = os.fork()
        if not child:
            with said.open("w") as file:
                os.dup2(file.fileno(), 2)
            code = 70
            try:
                code = play(job)
            except BaseException:  # noqa: BLE001  # told on standard error, whatever it is
                import traceback

                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        if job.get("after") is not None:
            _kill_at(child, begun + job["after"])
        _, status = os.waitpid(child, 0)
        answer = {
            "code": os.waitstatus_to_exitcode(status),
            "seconds": time.monotonic() - begun,
            "said": said.read_text(),
        }
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _kill_at(child: int, moment: float) -> None:
    """Unless it ends before."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(min(left, 0.01))
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return
    os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
