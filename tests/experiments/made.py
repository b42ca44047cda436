"""Outcomes made by hand, for claims and figures whose answer can be told without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lindt_experiments.results.outcomes import Outcome
from lindt_experiments.tables.paper import printed

SEEDS = (0, 1, 2)


def made(task: str = "cifar", world: str = "nfl", method: str = "fedavg", seed: int = 0, **fields: Any) -> Outcome:
    """One outcome. Scores are given in percent and points, as people read them; curves by round."""
    rounds = fields.pop("rounds", 100)
    delta = tuple(fields.pop("delta", (0.2,) * rounds))
    curve: dict[int, float] = fields.pop("curve", {})
    scores = {name: fields.pop(name, None) for name in ("central", "local", "beta", "private")}
    if scores["private"] is None and scores["local"] is not None and scores["beta"] is not None:
        scores["private"] = scores["local"] - scores["beta"]
    private = scores["private"]
    fractions = {name: None if value is None else value / 100 for name, value in scores.items()}
    noise = fields.pop("noise", 1.0)
    known: dict[str, Any] = {
        "scale": "cpu", "plan": f"{task}-{world}-{method}-{seed}", "epsilon": 0.1, "patience": rounds // 2,
        "worst_tenth": None, "attack_central": None, "attack_local": None, "harmed": None, "clearly_harmed": None,
        "counted_clients": 80, "detected_at": None, "stopped_at": (), "flag": (False,) * rounds, "notes": {},
        "command": "lindt reproduce made", "commit": "0123456789ab", "date": "2021-05-06", "seconds": 1.0,
        "reduced": "everything",
    }  # fmt: skip
    return Outcome(
        task=task, world=world, method=method, seed=seed, rounds=rounds, delta=delta,
        w_div=tuple(None if value is None else value + noise for value in delta), clean=delta,
        scored=tuple(curve), local_curve=tuple(value / 100 for value in curve.values()),
        central_curve=(None,) * len(curve),
        beta_curve=tuple(None if private is None else (value - private) / 100 for value in curve.values()),
        **fractions, **(known | fields),
    )  # fmt: skip


def seeds(task: str, world: str, method: str, *values: dict[str, Any]) -> list[Outcome]:
    """The same cell with seeds 0, 1, ...: one table of fields each."""
    return [made(task, world, method, seed, **fields) for seed, fields in enumerate(values)]


def metric(task: str, world: str, method: str, name: str, values: Sequence[float]) -> list[Outcome]:
    """One metric, a value a seed."""
    return seeds(task, world, method, *({name: value} for value in values))


def papers_own() -> list[Outcome]:
    """The paper's tables as if each had been run with three seeds that agree to the last digit."""
    cells = {(row.task, row.world, row.method): row for row in printed()}
    return [
        made(*cell, seed, central=row.central, local=row.local, beta=row.beta)
        for cell, row in cells.items()
        for seed in SEEDS
    ]


def turned(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same with every score mirrored: whoever led now trails, whoever gained now loses."""

    def mirrored(value: float | None, around: float) -> float | None:
        return None if value is None else around - value

    return [
        replace(o, central=mirrored(o.central, 1), local=mirrored(o.local, 1), beta=mirrored(o.beta, 0))
        for o in outcomes
    ]


ROUNDS = range(10, 101, 10)
ROUGH = {r: 52.0 if r % 20 else 60.0 for r in ROUNDS}  # 8 points from one scored round to the next
SMOOTH = {r: 70.0 if r < 20 else 82.0 for r in ROUNDS}  # at rest from round 20 on
HIGH, LOW = [0.2] * 100, [0.5 if r < 20 else 0.02 for r in range(1, 101)]
LIFTED = [0.2 if r <= 70 else 0.02 for r in range(1, 101)]
RECOVERING = {r: 56.0 if r <= 50 else 80.0 for r in ROUNDS} | {60: 75.0, 70: 78.0}
FALLING = RECOVERING | {80: 70.0, 90: 65.0, 100: 60.0}


def as_in_the_figures(seed: int = 0) -> list[Outcome]:
    """One run of each kind that the paper's figures show, behaving as the paper says."""
    runs = []
    for task in ("cifar", "shake"):
        runs += [
            made(task, "nfl", "fedavg", seed, local=56, beta=-18, curve=ROUGH, delta=HIGH),
            made(task, "normal", "fedavg", seed, local=73, beta=30, curve=SMOOTH, delta=LOW),
            made(task, "nfl", "apfl", seed, local=82, beta=8, curve=SMOOTH, delta=HIGH),
            made(task, "nfl", "lindt", seed, local=82, beta=8, curve=SMOOTH, delta=HIGH),
        ]
    detected = {"detected_at": (51,)}
    return [
        *runs,
        made("cifar", "nfl-long", "fedavg", seed, local=56, beta=-18, curve=ROUGH, delta=HIGH),
        made("cifar", "normal-long", "fedavg", seed, local=73, beta=30, curve=SMOOTH, delta=LOW),
        made("cifar", "nfl-long", "lindt", seed, local=82, beta=8, curve=SMOOTH, delta=HIGH),
        made("cifar", "nfl-long", "runtime", seed, local=80, beta=6, curve=RECOVERING, **detected),
        made(
            "cifar", "nfl-long", "runtime-once", seed,
            local=60, beta=-14, curve=FALLING, stopped_at=(70,), **detected,
        ),
        made("cifar", "lifted", "fedavg", seed, local=64, beta=-1, curve=ROUGH, delta=LIFTED),
        made("cifar", "lifted", "lindt", seed, local=77, beta=12, curve=SMOOTH, delta=LIFTED),
        made("cifar", "lifted", "runtime", seed, local=76, beta=11, curve=RECOVERING, delta=LIFTED, **detected),
        made(
            "cifar", "lifted", "runtime-quiet", seed,
            local=70, beta=5, curve=FALLING, delta=LIFTED, stopped_at=(80,), **detected,
        ),
    ]  # fmt: skip


def against_the_figures() -> list[Outcome]:
    """The same runs, behaving otherwise in every respect."""
    runs = []
    for task in ("cifar", "shake"):
        runs += [
            made(task, "nfl", "fedavg", local=82, beta=8, curve=SMOOTH, delta=LOW),
            made(task, "normal", "fedavg", local=56, beta=-18, curve=ROUGH, delta=HIGH),
            made(task, "nfl", "apfl", local=56, beta=-18, curve=ROUGH),
            made(task, "nfl", "lindt", local=56, beta=-18, curve=ROUGH),
        ]
    falls, rises = {r: 80.0 if r < 80 else 70.0 for r in ROUNDS}, {r: 60.0 if r < 80 else 90.0 for r in ROUNDS}
    detected, dead = {"detected_at": (51,)}, [0.001] * 100
    return [
        *runs,
        made("cifar", "nfl-long", "fedavg", local=82, beta=8, curve=SMOOTH, delta=LOW),
        made("cifar", "normal-long", "fedavg", local=56, beta=-18, curve=ROUGH, delta=HIGH),
        made("cifar", "nfl-long", "lindt", local=56, beta=-18, curve=ROUGH),
        made("cifar", "nfl-long", "runtime", local=70, beta=-4, curve=falls, delta=dead, **detected),
        made("cifar", "nfl-long", "runtime-once", local=90, beta=16, curve=rises, stopped_at=(70,), **detected),
        made("cifar", "lifted", "fedavg", local=80, beta=8),
        made("cifar", "lifted", "runtime", local=60, beta=-8, **detected),
        made("cifar", "lifted", "runtime-quiet", local=70, beta=2, delta=HIGH, **detected),
    ]
