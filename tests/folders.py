"""Runs' folders written by hand, for tests of what reads them: no torch, any state, any damage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w


def scores(betas: Sequence[float], clear: Sequence[bool] | None = None, **changes: Any) -> dict[str, Any]:
    """A scored round of len(betas) clients, each 0.8 alone; `clear` by default where |beta| is 0.1 or more."""
    sure = clear if clear is not None else [abs(beta) >= 0.1 for beta in betas]
    clients = [
        {"client": i, "samples": 50, "local": 0.8 + beta, "private": 0.8, "beta": beta, "clear": is_clear}
        for i, (beta, is_clear) in enumerate(zip(betas, sure, strict=True))
    ]
    mean = sum(betas) / len(betas)
    return {
        "central": 0.7, "local": 0.8 + mean, "private": 0.8, "beta": mean,
        "harmed": sum(beta < 0 for beta in betas),
        "clearly_harmed": sum(beta < 0 and is_clear for beta, is_clear in zip(betas, sure, strict=True)),
        "ties": sum(beta == 0 for beta in betas), "worst_tenth": min(betas),
        "attack_central": None, "attack_local": None, "clients": clients, "notes": {},
    } | changes  # fmt: skip


def line(round: int, **changes: Any) -> dict[str, Any]:
    return {
        "round": round, "asked": [0, 1], "answered": [0, 1], "refused": [],
        "w_div": 0.5, "delta": 0.2, "clean": 0.3, "spread": 0.3, "clipped": 0.0, "noise_norm": 0.3,
        "recovering": False, "flag": False, "count": round, "quiet": 0, "detections": 0, "scores": None,
    } | changes  # fmt: skip


def plan(**changes: Any) -> dict[str, Any]:
    """LINDT on detection, epsilon 0.1 and r' = 2, of ten rounds."""
    return {
        "name": "by-hand",
        "seed": 0,
        "rounds": 10,
        "environment": {"privacy": {"kind": "no_privacy"}},
        "method": {
            "adaptation": {"kind": "dual"},
            "aggregator": {"kind": "mean"},
            "penalty": {"kind": "no_penalty"},
            "recovery": {"kind": "on_detection", "epsilon": 0.1, "patience": 2, "statistic": "delta"},
        },
        "scoring": {"metric": "accuracy", "last": 2},
    } | changes


def method(adaptation: str = "dual", recovery: str = "on_detection", **parts: Any) -> dict[str, Any]:
    found: dict[str, Any] = plan()["method"]
    rule = found["recovery"] if recovery == "on_detection" else {"kind": recovery}
    return found | {"adaptation": {"kind": adaptation}, "recovery": rule} | parts


def about(clients: int = 4, **changes: Any) -> dict[str, Any]:
    return {
        "format": 1, "run": "0" * 32, "name": "by-hand", "task": None, "class_names": ["cat", "dog"],
        "metric_in_percent": True, "float_buffers": False,
        "clients": [
            {"client": i, "train": 40, "test": 50, "attacker": i == clients - 1, "labels": {"0": 30, "1": 10}}
            for i in range(clients)
        ],
        "versions": {"lindt": "0.1.0"},
    } | changes  # fmt: skip


def summary(lines: Sequence[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    scored = [one["scores"] for one in lines if one["scores"]]
    last = scored[-1]
    return {
        "rounds": len(lines), "scored_rounds": 1, "central": last["central"], "local": last["local"],
        "private": last["private"], "beta": last["beta"], "worst_tenth": last["worst_tenth"],
        "attack_central": None, "attack_local": None, "harmed": last["harmed"],
        "clearly_harmed": last["clearly_harmed"], "ties": 0, "counted_clients": len(last["clients"]),
        "negative": False, "detected_at": [], "metric_in_percent": True,
        "privacy": {"words": "no guarantee: no noise is added (sigma = 0)", "epsilon": None, "delta": 0.1},
    } | changes  # fmt: skip


def write_run(
    folder: Path,
    lines: Sequence[dict[str, Any]],
    *,
    ended: bool = True,
    the_plan: dict[str, Any] | None = None,
    the_about: dict[str, Any] | None = None,
    the_summary: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(the_about or about()))
    (folder / "plan.toml").write_text(tomli_w.dumps(the_plan or plan()))
    (folder / "lock").touch()
    (folder / "rounds.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    timing = "".join(json.dumps({"round": one["round"], "seconds": 0.5}) + "\n" for one in lines)
    (folder / "timing.jsonl").write_text(timing)
    if ended:
        (folder / "summary.json").write_text(json.dumps(the_summary or summary(lines)))
    return folder


def mended() -> list[dict[str, Any]]:
    """Ten rounds: NFL in round 3 with two of three clients clearly worse off, recovery from 4 on, well at the end."""
    sick, well = scores([-0.3, -0.2, 0.05]), scores([0.02, 0.1, 0.2], notes={"score/fc1": 0.9, "gradient/fc1": 0.01})
    found = [line(1), line(2)]
    found.append(line(3, count=3, detections=1, flag=True, scores=sick))
    for r in range(4, 11):
        found.append(
            line(r, count=3, delta=0.05, detections=1, flag=True, recovering=True, scores=well if r > 8 else None)
        )
    return found
