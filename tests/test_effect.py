"""The effect itself, not scripted: NFL is flagged and mended, the healthy control stays silent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lindt.client.adaptations.base import GlobalOnly
from lindt.plan.plan import Plan
from lindt.plan.presets import resolve
from lindt.runs.play import RunEnded, run_plan
from lindt.server.federation import federate

SEEDS = range(5)


def flagged_at(plan: Plan) -> int | None:
    return next((result.round for _, result in federate(plan) if result.recovery.detections), None)


@pytest.mark.parametrize("seed", SEEDS)
def test_nfl_is_flagged_and_the_control_is_not(seed: int) -> None:
    """The presets at reduced length, without scores: 40 of 80 rounds with the same epsilon and r'."""
    short = ["rounds=40", "alone.private=false", "scoring.every=40", "scoring.last=1"]
    flagged = flagged_at(resolve("digits-nfl", short, seed=seed))
    assert flagged is not None
    assert 26 <= flagged <= 30  # count > r' = 25 cannot hold earlier
    assert flagged_at(resolve("digits-control", short, seed=seed)) is None


def test_the_control_differs_in_nothing_that_moves_delta() -> None:
    nfl, control = resolve("digits-nfl"), resolve("digits-control")
    same = ("model", "training", "method", "rounds", "threads", "alone", "scoring")
    assert all(getattr(nfl, name) == getattr(control, name) for name in same)
    assert nfl.environment.privacy == control.environment.privacy
    assert nfl.environment.participation == control.environment.participation


def summary_of(plan: Plan, folder: Path, cache: Path) -> dict[str, Any]:
    *_, ended = run_plan(plan, folder, cache=cache)
    assert isinstance(ended, RunEnded)
    return ended.summary


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_fedavg_ends_in_nfl_recovery_mends_it_and_the_control_is_healthy(seed: int, tmp_path: Path) -> None:
    """The presets at full length: what `make run` shows, for five seeds."""
    nfl, control = resolve("digits-nfl", seed=seed), resolve("digits-control", seed=seed)
    fedavg = replace(nfl, method=replace(nfl.method, adaptation=GlobalOnly()))
    left, mended, healthy = (
        summary_of(plan, tmp_path / name, tmp_path / "cache")
        for name, plan in (("fedavg", fedavg), ("mended", nfl), ("control", control))
    )
    assert left["negative"]
    assert left["detected_at"]
    assert not mended["negative"]
    assert mended["local"] > left["local"]
    assert mended["clearly_harmed"] < left["clearly_harmed"]
    assert mended["attack_local"] < left["attack_local"]
    assert not healthy["negative"]
    assert healthy["detected_at"] == []
