"""Runs' folders written by hand, for tests of what reads them: no torch, any state, any damage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
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
        "clearly_better": sum(beta > 0 and is_clear for beta, is_clear in zip(betas, sure, strict=True)),
        "ties": sum(beta == 0 for beta in betas), "worst_tenth": min(betas), "median_gain": median(betas),
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
        "clearly_harmed": last["clearly_harmed"], "clearly_better": last.get("clearly_better"),
        "median_gain": last.get("median_gain"), "ties": 0, "counted_clients": len(last["clients"]),
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


def decision(state: str, gain: float | None = None, since: int | None = None, **changes: Any) -> dict[str, Any]:
    """An answer of the test by 12 clients with 400 validation samples; the standard error is 0.01."""
    known = gain is not None
    return {
        "state": state, "since": since, "gain": gain, "error": 0.01 if known else None,
        "clients": 12 if known else 0, "samples": 400 if known else 0, "needed": None,
    } | changes  # fmt: skip


def detection(verdict: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"verdict": verdict, "warning": None, "recovery": None, "recovered": None} | changes


def gain_plan(**changes: Any) -> dict[str, Any]:
    """LINDT on evidence, tested at level 0.05, of ten rounds."""
    return plan(method=method(recovery="on_evidence"), detection={"kind": "gain", "alpha": 0.05}) | changes


def too_early() -> list[dict[str, Any]]:
    """Four rounds of a healthy federation: w is still behind the finished private models, and no test counts yet."""
    return [
        line(r, detection=detection(decision("too early", -0.3 + 0.05 * r)), scores=SICK if r == 4 else None)
        for r in range(1, 5)
    ]


def undecided(needed: int | None = 3200) -> list[dict[str, Any]]:
    """Ten rounds, tested from round 3 on: the gain is too small for the samples there are."""
    found = too_early()[:2]
    for r in range(3, 11):
        told = detection(decision("undecided", 0.004, needed=needed))
        found.append(line(r, detection=told, scores=scores([0.02, -0.01, 0.0]) if r == 10 else None))
    return found


def helps() -> list[dict[str, Any]]:
    """Ten rounds, tested from round 3 on: federation helps since round 5."""
    found = undecided()[:4]
    for r in range(5, 11):
        told = detection(decision("helps", 0.01 * r, since=5))
        found.append(line(r, detection=told, scores=WELL if r == 10 else None))
    return found


def hurts(recovering: bool = False, recovered: str = "helps", switched_off: int | None = None) -> list[dict[str, Any]]:
    """Ten rounds: a warning in round 2, federation hurts since round 4, and with `recovering` recovery from 3 on.

    Its effect against w is known from round 6 on, that against training alone (`recovered`) from round 8 on.
    """
    found = []
    for r in range(1, 11):
        state = "too early" if r < 3 else "undecided" if r < 4 else "hurts"
        told = detection(
            decision(state, -0.02 * min(r, 6), since=4 if state == "hurts" else None), warning=2 if r >= 2 else None
        )
        on = recovering and r > 2 and (switched_off is None or r <= switched_off)
        if on:
            effect = "hurts" if switched_off else "helps"
            sign = -1 if switched_off else 1
            told["recovery"] = decision(effect, 0.08 * sign, since=6) if r >= 6 else decision("undecided", 0.01 * sign)
            against = decision(recovered, {"helps": 0.03, "hurts": -0.03}.get(recovered, 0.005), since=8)
            undecided = decision("undecided", -0.02)
            told["recovered"] = (
                undecided if r < 8 else against if recovered != "undecided" else against | {"since": None}
            )
        flag = recovering and r >= 2 and (switched_off is None or r < switched_off)
        last = WELL if recovering and recovered == "helps" else SICK
        found.append(
            line(r, flag=flag, recovering=on, detection=told, detections=int(flag), scores=last if r == 10 else None)
        )
    return found


SICK, WELL = scores([-0.3, -0.2, 0.05]), scores([0.02, 0.1, 0.2])
