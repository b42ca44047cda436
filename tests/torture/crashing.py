"""Runs that are killed and go on, for the tests beside this file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from worlds import tiny

from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.plan.file import to_dict
from lindt.plan.plan import Alone, Plan, Scoring
from lindt.runs.store import Store

HERE = Path(__file__).parent


def crash_plan(rounds: int = 4) -> Plan:
    """All kinds of files: private models, v_i from the first round, noise, scores in every second round."""
    environment = Environment(Sampled(rate=0.5), privacy=Gaussian(S=15.0, sigma=0.001))
    plan = tiny("apfl", rounds=rounds, environment=environment, alone=Alone(epochs=1, patience=1))
    return replace(plan, scoring=Scoring(every=2, last=1))


@dataclass
class Zygote:
    process: subprocess.Popen[str]

    def play(self, plan: Plan, folder: Path, engine: str = "inprocess", **how: Any) -> dict[str, Any]:
        folder.parent.mkdir(parents=True, exist_ok=True)
        job = {"plan": to_dict(plan), "folder": str(folder), "engine": engine, **how}
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@contextmanager
def zygote() -> Iterator[Zygote]:
    command = [sys.executable, str(HERE / "zygote.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Zygote(process)
        finally:
            process.kill()


def left(folder: Path) -> dict[str, Any]:
    """What of a run must not depend on what happened to it on the way."""
    store = Store.open(folder)
    kept = {
        str(path.relative_to(store.private / store.run)): path.read_bytes()
        for path in sorted((store.private / store.run).rglob("*.safetensors"))
    }
    return {
        "rounds": (folder / "rounds.jsonl").read_bytes(),
        "summary": (folder / "summary.json").read_bytes(),
        "plan": (folder / "plan.toml").read_bytes(),
        "w": store.state().w,
        "v": kept,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    plain = all(one[name] == other[name] for name in ("rounds", "summary", "plan", "v"))
    return plain and torch.equal(one["w"], other["w"])


def litter(folder: Path) -> list[str]:
    """Files that a crash left half-written; a run that goes on may leave them, and nothing reads them."""
    return sorted(path.name for path in folder.rglob(".*"))


def figure(**values: object) -> None:
    """One line for `make torture` to print at its end."""
    sys.__stdout__.write("FIGURE " + " ".join(f"{name}={value}" for name, value in values.items()) + "\n")  # type: ignore[union-attr]
