"""Ten thousand rounds into one folder: memory stays flat, and a late round takes no longer than an early one.

LINDT_SOAK_SVG=docs/reliability-soak.svg python -m pytest -m torture tests/torture/test_soak.py
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from statistics import fmean

import pytest
import torch
from crashing import figure
from torch import nn

from lindt.client.adaptations.dual import Dual
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.plan.plan import Alone, Method, Plan, Scoring, Training
from lindt.plan.problem import Problem
from lindt.runs.play import RoundPlayed, run_plan
from lindt.server.recovery import OnDetection, QuietRounds

pytestmark = pytest.mark.torture
ROUNDS = int(os.environ.get("LINDT_SOAK_ROUNDS", "10000"))
WARM_UP, EVERY = ROUNDS // 10, ROUNDS // 100
FLAT = 5.0  # MB


def world() -> Problem:
    """Four clients with points in the plane, each with a line of its own between two classes; one layer and a head."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 12, 2, generator=draw)
    turned = torch.tensor([[1.0, 0.2], [1.0, -0.2], [0.2, 1.0], [-0.2, 1.0]])
    y = (torch.einsum("nsd,nd->ns", x, turned) > 0).long()
    halves = [((x[i, :8], y[i, :8]), (x[i, 8:], y[i, 8:])) for i in range(4)]
    return Problem(halves, lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


def soak() -> Plan:
    """Detection, recovery that stops and starts anew, v_i on disk, noise, scores now and then: all that a run keeps."""
    recovery = OnDetection(epsilon=0.012, patience=5, stop=QuietRounds(3))
    return Plan(
        name="soak",
        rounds=ROUNDS,
        training=Training(decay=1.0),
        environment=Environment(Sampled(rate=0.5), privacy=Gaussian(S=15.0, sigma=0.01)),
        method=Method(adaptation=Dual(), recovery=recovery),
        alone=Alone(epochs=2),
        scoring=Scoring(every=50, last=10),
    )


def resident() -> float:
    """MB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_ten_thousand_rounds_hold_memory_flat(tmp_path: Path) -> None:
    folder, held, spent = tmp_path / "run", dict[int, float](), dict[int, float]()
    for event in run_plan(soak(), folder, task="test_soak:world", engine="inprocess"):
        if isinstance(event, RoundPlayed) and event.result.round > WARM_UP and event.result.round % EVERY == 0:
            held[event.result.round], spent[event.result.round] = resident(), time.process_time()
    seconds = [json.loads(line)["seconds"] for line in (folder / "timing.jsonl").read_text().splitlines()]
    assert len(seconds) == ROUNDS
    values, third = list(held.values()), len(held) // 3
    early, late = fmean(values[:third]), fmean(values[-third:])
    # Of the processor, not of the clock: a machine that gets busier meanwhile would look like rounds that get slower.
    clock = list(spent.values())
    first, last = (part[-1] - part[0] for part in (clock[: third + 1], clock[-third - 1 :]))
    first, last = first / (third * EVERY), last / (third * EVERY)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    treated = sum(line["recovering"] for line in lines)
    figure(
        soak_rounds=ROUNDS, rounds_per_second=round(ROUNDS / sum(seconds), 1), rounds_of_recovery=treated,
        detections=lines[-1]["detections"], early_MB=round(early, 1), late_MB=round(late, 1),
        grown_MB=round(late - early, 2), early_cpu_ms=round(1000 * first, 2), late_cpu_ms=round(1000 * last, 2),
    )  # fmt: skip
    if picture := os.environ.get("LINDT_SOAK_SVG"):
        draw(held, Path(picture))
    assert 0 < treated < ROUNDS  # v_i were written, and the flag went on and off
    assert late < early + FLAT
    # Neighbours on the machine were seen to add a quarter; reading all lines again in each round would add far more.
    assert last < 2 * first
    assert sum(1 for _ in (folder / "checkpoint").iterdir()) == 2
    versions = list((folder / "private").rglob("*.safetensors"))
    assert len(versions) <= 4 * 3  # of each client those that a checkpoint may ask for, and one newer


def draw(held: dict[int, float], path: Path) -> None:
    from matplotlib import rc_context

    from lindt_experiments.figures.style import BLUE, Line, draw_curves, new_figure, prepare

    with rc_context({"svg.hashsalt": "lindt"}):
        picture = new_figure(1.6, 1)
        axes = picture.add_subplot()
        prepare(axes, f"{ROUNDS:,} rounds of a tiny federation", "memory in use, MB", (0, ROUNDS))
        draw_curves(axes, [held], Line("resident memory", BLUE))
        axes.set_ylim(0, 1.3 * max(held.values()))  # from zero: a slope that matters would show
        picture.savefig(path, format="svg", metadata={"Date": None})
