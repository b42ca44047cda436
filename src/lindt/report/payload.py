"""A run as the page takes it (page/src/types.ts): plain values, no more digits than an eye can tell apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from lindt.report.reading import (
    Run,
    adapts,
    detection_rule,
    group_of,
    method_words,
    number_at,
    repeat_command,
    whole_at,
    word_at,
)
from lindt.report.verdict import verdict

MEASURED = ("delta", "clean", "spread", "median")


SUMMED = ("central", "local", "private", "beta", "attack_central", "attack_local")


RATES = ("central", "local", "private", "beta", "worst_tenth", "attack_central", "attack_local")


def whole_run(run: Run, id: str, spent: PrivacySpent) -> dict[str, Any]:
    """All of a run. `id` is how the page and its addresses call it."""
    rule = detection_rule(run.plan)
    return {
        **progress(run, id, spent, 0),
        "name": run.name,
        "method": method_words(run.plan),
        "seed": whole_at(run.plan, "seed"),
        "group": group_of(run.plan, run.about.get("task")),
        "planned": run.planned,
        "percent": run.percent,
        "metric": _metric(run),
        "rule": asdict(rule) if rule else None,
        "adapts": adapts(run.plan),
        "clients": [_client(one) for one in run.about["clients"]],
        "class_names": run.about["class_names"],
        "versions": run.about.get("versions") or {},
        "plan": run.plan_text,
        "command": repeat_command("plan.toml", run.about.get("task")),
    }


def progress(run: Run, id: str, spent: PrivacySpent, have: int) -> dict[str, Any]:
    """What changes while a run goes on; of the rounds those after the first `have`."""
    return {
        "id": id,
        "state": run.state,
        "verdict": asdict(verdict(run)),
        "said": list(run.said),
        "summary": _summary(run.summary),
        "privacy": asdict(spent)
        | {
            "sigma": number_at(run.plan, "environment", "privacy", "sigma"),
            "S": number_at(run.plan, "environment", "privacy", "S"),
        },
        "rounds": [_round(line, run.seconds) for line in run.rounds[have:]],
    }


def _round(line: Mapping[str, Any], seconds: Mapping[int, float]) -> dict[str, Any]:
    return {
        "round": line["round"],
        "asked": line["asked"],
        "answered": line["answered"],
        "refused": [{"client": one["client"], "reason": one["reason"]} for one in line["refused"]],
        **{name: brief_number(line.get(name)) for name in MEASURED},
        "recovering": line["recovering"],
        "flag": line["flag"],
        "count": line["count"],
        "detections": line["detections"],
        "seconds": brief_number(seconds.get(line["round"])),
        "scores": _scores(line["scores"]) if line.get("scores") else None,
    }


def _scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    clients: Sequence[Mapping[str, Any]] = scores["clients"]
    return {
        **{name: brief_number(scores.get(name)) for name in RATES},
        "harmed": scores.get("harmed"),
        "clearly_harmed": scores.get("clearly_harmed"),
        "clients": [one["client"] for one in clients],
        "locals": [brief_number(one["local"]) for one in clients],
        "betas": [brief_number(one.get("beta")) for one in clients],
        "clear": "".join("1" if one["clear"] else "0" for one in clients),
        "notes": {name: brief_number(value) for name, value in scores["notes"].items()},
    }


def _summary(summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if summary is None:
        return None
    kept = {name: brief_number(summary.get(name)) for name in SUMMED}
    whole = {name: summary.get(name) for name in ("scored_rounds", "clearly_harmed", "counted_clients")}
    return kept | whole


def _client(one: Mapping[str, Any]) -> dict[str, Any]:
    name = one.get("name") or one.get("role")
    return {
        **{field: one[field] for field in ("client", "train", "test", "attacker", "labels")},
        "name": name if isinstance(name, str) else "",
    }


def _metric(run: Run) -> str:
    """What is measured, as an axis says it. A task's own metric has no name that a plan would know."""
    if not run.percent:
        return "score"
    return word_at(run.plan, "scoring", "metric").replace("_", " ") or "accuracy"


def brief_number(value: float | None) -> float | int | None:
    """Four digits after the first: a difference too small to see takes no room."""
    if value is None:
        return None
    short = float(f"{value:.4g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


@final
@dataclass(frozen=True)
class PrivacySpent:
    words: str
    epsilon: float | None = None
    delta: float | None = None


def privacy_spent(run: Run) -> PrivacySpent:
    """What the files say, at once: the summary's budget, or why there is none."""
    if run.summary and run.summary.get("privacy"):
        found = run.summary["privacy"]
        return PrivacySpent(found["words"], found.get("epsilon"), found.get("delta"))
    if word_at(run.plan, "environment", "privacy", "kind") != "gaussian" or not _sigma(run):
        return PrivacySpent("no guarantee: no noise is added")
    return PrivacySpent("not computed yet: the run has not ended")


def budget_is_open(run: Run) -> bool:
    """Whether `spent_so_far` would know more than `spent`."""
    noisy = word_at(run.plan, "environment", "privacy", "kind") == "gaussian" and bool(_sigma(run))
    return noisy and not (run.summary and run.summary.get("privacy"))


def _sigma(run: Run) -> float | None:
    return number_at(run.plan, "environment", "privacy", "sigma")
