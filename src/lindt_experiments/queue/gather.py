"""The outcome of a finished run, one line, from its folder."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from lindt.errors import UserError
from lindt.runs.store import Store, read_lines
from lindt.server.recovery import OnDetection
from lindt_experiments.plans.catalog import Cell
from lindt_experiments.plans.keys import content_key
from lindt_experiments.plans.scales import reduced, size_of
from lindt_experiments.results.outcomes import Outcome

MEANS = ("central", "local", "beta", "private", "worst_tenth", "attack_central", "attack_local")
COUNTS = ("harmed", "clearly_harmed", "counted_clients")


@final
@dataclass(frozen=True)
class Origin:
    """The command, commit and date of a result, stored with every line and table."""

    command: str
    commit: str
    date: str

    @classmethod
    def now(cls, command: str) -> Origin:
        return cls(command, commit(), datetime.now(UTC).strftime("%Y-%m-%d"))


def commit() -> str:
    """The commit of the running code, marked if files have changed since; "unknown" outside of version control."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except OSError:  # no git on this machine
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if head is None:
        return "unknown"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", "../lindt")
    return f"{head}+changes" if changed else head


def ended(folder: Path, key: str) -> bool:
    """Whether the folder holds a finished run of this plan."""
    if not (folder / "plan.toml").exists():
        return False
    store = Store.open(folder)
    if content_key(store.plan()) != key:
        raise UserError(f"{folder}: it holds a run of another plan than its name says; move it to another folder")
    return store.ended


def outcome_of(folder: Path, cell: Cell, scale: str, origin: Origin) -> Outcome:
    """The outcome of the finished run in a folder."""
    store = Store.open(folder)
    plan, summary, lines = store.plan(), store.summary(), store.rounds()
    size, recovery = size_of(cell.task, scale, cell.world), plan.method.recovery
    detection = recovery if isinstance(recovery, OnDetection) else size
    scored = [line for line in lines if line["scores"]]
    last = scored[-plan.scoring.last :]
    detected = summary["detected_at"]
    return Outcome(
        task=cell.task,
        world=cell.world,
        method=cell.method,
        scale=scale,
        seed=plan.seed,
        plan=content_key(plan),
        rounds=len(lines),
        epsilon=detection.epsilon,
        patience=detection.patience,
        **{name: summary[name] for name in (*MEANS, *COUNTS)},
        detected_at=None if detected is None else tuple(detected),
        stopped_at=tuple(summary["stopped_at"]),
        delta=_column(lines, "delta"),
        w_div=_column(lines, "w_div"),
        clean=_column(lines, "clean"),
        flag=tuple(line["recovering"] for line in lines),
        scored=tuple(line["round"] for line in scored),
        local_curve=tuple(line["scores"]["local"] for line in scored),
        central_curve=tuple(line["scores"]["central"] for line in scored),
        beta_curve=tuple(line["scores"]["beta"] for line in scored),
        notes=_notes(lines, last),
        command=origin.command,
        commit=origin.commit,
        date=origin.date,
        seconds=round(sum(line["seconds"] for line in read_lines(folder / "timing.jsonl")), 1),
        reduced=reduced(cell.task, scale, cell.world),
    )


def _column(lines: Sequence[dict[str, Any]], name: str) -> tuple[float | None, ...]:
    return tuple(line.get(name) for line in lines)


def _notes(lines: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The notes of the method, as means of the last scored rounds; the share of clipped updates over all rounds.

    Where clients report gains: the test's verdict after the last round, and the round of the early warning.
    """
    found: dict[str, list[float]] = {}
    for line in last:
        for name, value in line["scores"]["notes"].items():
            found.setdefault(name, []).append(value)
    clipped = [line["clipped"] for line in lines if "clipped" in line]
    if clipped:
        found["clipped"] = clipped
    return {name: sum(values) / len(values) for name, values in sorted((found | _test_of_gains(lines[-1])).items())}


def _test_of_gains(line: dict[str, Any]) -> dict[str, list[float]]:
    """The gain that the test has found, its error and the round since which it has been shown, as notes."""
    told = line.get("detection") or {}
    verdict = told.get("verdict") or {}
    values = {f"test/{name}": verdict.get(name) for name in ("gain", "error", "since")}
    values["test/warning"] = told.get("warning")
    return {name: [float(value)] for name, value in values.items() if value is not None}
