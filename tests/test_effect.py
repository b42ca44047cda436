"""The effect itself, not scripted: NFL is called negative and mended, healthy federations are not called negative.

The test of the gains decides it in the presets. The paper's rule is named where it is wanted: BY_DELTA.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lindt.plan.file import resolve
from lindt.plan.plan import METHODS, Plan
from lindt.runs.play import RoundPlayed, RunEnded, run_plan
from lindt.server.detection.divergence import Rule
from lindt.server.federation import federate

SEEDS = range(5)
BY_DELTA = ["detection=delta", "method=runtime", "method.recovery.patience=25"]


def flagged_at(plan: Plan) -> int | None:
    rounds = federate(plan, preflight=False)
    return next((result.round for _, result in rounds if result.recovery.detections), None)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed else ()) for seed in SEEDS])
def test_by_delta_nfl_is_flagged_and_so_is_the_slow_federation_but_not_the_control(seed: int) -> None:
    """The presets at reduced length, without scores: 40 of 80 rounds with the same epsilon and r'."""
    short = [*BY_DELTA, "rounds=40", "alone.private=false", "scoring.every=40", "scoring.last=1"]
    flagged = flagged_at(resolve("digits-nfl", short, seed=seed))
    assert flagged is not None
    assert 26 <= flagged <= 30  # count > r' = 25 cannot hold earlier
    assert flagged_at(resolve("digits-control", short, seed=seed)) is None
    assert flagged_at(resolve("digits-slow", short, seed=seed)) is not None


def test_the_control_differs_in_nothing_that_moves_delta() -> None:
    nfl, control = resolve("digits-nfl"), resolve("digits-control")
    same = ("model", "training", "method", "rounds", "threads", "alone", "scoring", "detection")
    assert all(getattr(nfl, name) == getattr(control, name) for name in same)
    assert nfl.environment.privacy == control.environment.privacy
    assert nfl.environment.participation == control.environment.participation


def played(plan: Plan, folder: Path, cache: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The lines of the rounds, and the summary."""
    *events, ended = run_plan(plan, folder, cache=cache)
    assert isinstance(ended, RunEnded)
    return [event.line for event in events if isinstance(event, RoundPlayed)], ended.summary


@pytest.mark.slow
def test_fedavg_is_called_negative_recovery_mends_it_and_the_healthy_are_not_called_so(tmp_path: Path) -> None:
    """The presets at full length: what `make run` shows."""
    nfl, control, slow = (resolve(f"digits-{name}") for name in ("backdoor", "control", "slow"))
    fedavg = replace(nfl, method=METHODS["fedavg"])
    (_, left), (_, mended), (rounds, healthy), (slow_rounds, learned) = (
        played(plan, tmp_path / name, tmp_path / "cache")
        for name, plan in (("fedavg", fedavg), ("mended", nfl), ("control", control), ("slow", slow))
    )
    assert left["negative"]
    assert left["detection"]["verdict"]["state"] == "hurts"
    assert left["detection"]["recovered"] is None
    assert not mended["negative"]
    assert mended["detection"]["recovery"]["state"] == "helps"
    assert mended["detection"]["recovered"]["state"] == "helps"
    assert mended["local"] > left["local"]
    assert mended["clearly_harmed"] < left["clearly_harmed"]
    assert mended["attack_local"] < left["attack_local"]
    assert not healthy["negative"]
    assert healthy["detection"]["verdict"]["state"] == "helps"
    # For long w is behind the finished P_i, and catches up.
    assert all(line["detection"]["verdict"]["state"] != "hurts" for line in rounds)
    assert not learned["negative"]
    assert all(line["detection"]["verdict"]["state"] != "hurts" for line in slow_rounds)
    assert Rule(epsilon=0.1, patience=25).replay(line["delta"] for line in slow_rounds) is not None


@pytest.mark.slow
def test_with_another_seed_too_fedavg_is_called_negative_and_recovery_better_than_w(tmp_path: Path) -> None:
    """Against training alone a gain of 5 points may stay undecided; it is not called worse."""
    nfl = resolve("digits-backdoor", seed=1)
    _, left = played(replace(nfl, method=METHODS["fedavg"]), tmp_path / "fedavg", tmp_path / "cache")
    _, mended = played(nfl, tmp_path / "mended", tmp_path / "cache")
    assert left["negative"]
    assert left["detection"]["verdict"]["state"] == "hurts"
    assert not mended["negative"]
    assert mended["detection"]["recovery"]["state"] == "helps"
    assert mended["detection"]["recovered"]["state"] in ("helps", "undecided")
    assert mended["local"] > left["local"]
