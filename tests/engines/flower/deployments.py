"""What tests of a real deployment on loopback share: the processes, the command `lindt run`, and waiting for them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from lindt.engines.flower.superlink import SuperLink, environment
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
EXAMPLE = ROOT / "examples/flower-deployment"
BIN = Path(sys.executable).parent


def write_plan(plan: Plan, path: Path) -> Path:
    path.write_text(tomli_w.dumps(to_dict(plan)))
    return path


def lines(out: Path) -> list[dict[str, Any]]:
    """The rounds that are written to the end of their line."""
    path = out / "rounds.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def wait_until(happened: Callable[[], Any], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.2)


ASK = 60.0  # seconds between two questions for a run's status: each starts a process of about 2 CPU seconds


def status_at_end(superlink: SuperLink, id: str, out: Path, seconds: float) -> str:
    """The status of a wrapped app's run after its end, which `summary.json` in its folder shows at once."""
    end, asked = time.monotonic() + seconds, time.monotonic()
    while time.monotonic() < end:
        if (out / "summary.json").exists() or time.monotonic() > asked + ASK:
            status, asked = superlink.status(id), time.monotonic()
            if status.startswith("finished"):
                return status
        time.sleep(0.2)
    raise AssertionError(f"the run did not end within {seconds} s; it is {superlink.status(id)}")


@contextmanager
def importable() -> Iterator[None]:
    """Processes that are started here import the example's modules and those of this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.syspath_prepend(HERE)
        yield


@contextmanager
def empty_deployment(folder: Path) -> Iterator[Any]:
    """Certificates and a SuperLink."""
    with importable():
        from hosts import Deployment

        folder.mkdir()
        found = Deployment(folder)
        try:
            found.start_superlink()
            yield found
        finally:
            found.stop()


@contextmanager
def started(deployment: Any, out: Path, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """`lindt run` on the deployment; killed at the end of the block if it is still running."""
    command = [
        *(BIN / "lindt", "run", "--engine", "flower", "--out", out, "--json", "--noise", "plan"),
        *("--superlink", deployment.address, "--root-certificates", deployment.keys / "ca.crt", *words),
    ]
    process = subprocess.Popen(
        [str(word) for word in command], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:  # closes its pipes and waits
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def finished(process: subprocess.Popen[str], deployment: Any, seconds: float = 300) -> tuple[int, str]:
    out, err = process.communicate(timeout=seconds)
    if process.returncode:
        show_logs(deployment)
    return process.returncode, out + err


def show_logs(deployment: Any) -> None:
    for log in deployment.folder.glob("*.log"):
        sys.stdout.write(f"--- {log.name}\n{log.read_text()[-3000:]}\n")
