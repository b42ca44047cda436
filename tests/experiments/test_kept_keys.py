"""Results are kept by the hash of their plan: every line of results/ still belongs to the plan that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lindt_experiments.attacks import grid
from lindt_experiments.detectors import configurations
from lindt_experiments.figures import record_traces
from lindt_experiments.plans.keys import content_key
from lindt_experiments.plans.scales import plan_for
from lindt_experiments.recovery import cells

RESULTS = Path(__file__).parents[2] / "results"
LINES = [(path.name, json.loads(line)) for path in RESULTS.glob("*.jsonl") for line in path.read_text().splitlines()]


@pytest.mark.parametrize("file", sorted({name for name, _ in LINES}))
def test_every_kept_line_has_the_key_of_its_plan(file: str) -> None:
    for name, line in LINES:
        if name != file:
            continue
        if "panel" in line:
            plan, _ = record_traces.plan_for(line["panel"], line["scale"], line["seed"])
        elif "attack" in line:
            cell = grid.GridCell(line["attack"], line["aggregator"], line["method"])
            plan = grid.plan_for(cell, line["scale"], line["seed"])
        elif "configuration" in line:
            plan = configurations.named(line["scale"], line["configuration"]).plan(line["index"])
        elif file.startswith("recovery-"):
            plan = cells.plan_for(cells.RecoveryCell(line["world"], line["method"]), line["scale"], line["seed"])
        else:
            plan = plan_for(line["task"], line["world"], line["method"], line["scale"], line["seed"])
        assert content_key(plan) == line["plan"], {key: line.get(key) for key in ("scale", "seed", "configuration")}


def test_there_are_kept_lines() -> None:
    assert {"cpu.jsonl", "paper.jsonl", "traces-cpu.jsonl"} <= {name for name, _ in LINES}
