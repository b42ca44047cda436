"""What the commands do: runs one after the other, drawn or as JSON lines, and what is printed at their end."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lindt import presets
from lindt.errors import UserError
from lindt.methods import METHODS
from lindt.plan import Plan
from lindt.problem import problem_for
from lindt.records import about_run, round_line
from lindt.references import centralized
from lindt.report import words
from lindt.report.console import Narrator
from lindt.report.tables import comparison
from lindt.running import Ended, Played, cache_folder, load_task, run_plan

Job = tuple[str, Plan | None, Path]


def play(
    jobs: Sequence[Job], console: Console, as_json: bool, resume: bool, device: str, task: str | None
) -> list[tuple[str, dict[str, Any]]]:
    """Run jobs one after the other; returns each one's summary. Ctrl-C says how to go on."""
    found: list[tuple[str, dict[str, Any]]] = []
    for label, plan, folder in jobs:
        try:
            found.append((label, _play_one(label, plan, folder, console, as_json, resume, device, task)))
        except KeyboardInterrupt:
            console.print(f"stopped; what was played is kept in {folder}: the same command with --resume goes on",
                          highlight=False, soft_wrap=True)  # fmt: skip
            sys.exit(130)
    return found


def _play_one(
    label: str, plan: Plan | None, folder: Path, console: Console, as_json: bool, resume: bool, device: str,
    task: str | None,
) -> dict[str, Any]:  # fmt: skip
    narrator = Narrator(console, label)
    events = run_plan(plan, folder, task=task, resume=resume, device=device, cache=cache_folder())
    summary: dict[str, Any] = {}
    if as_json:
        for event in events:
            if isinstance(event, Played):
                _line({"event": "round", "run": label, **round_line(event.result)})
            elif isinstance(event, Ended):
                summary = event.summary
                _line({"event": "end", "run": label, "folder": str(folder), **summary})
        return summary
    with narrator.watching():
        for event in events:
            narrator.see(event, round_line(event.result) if isinstance(event, Played) else None)
            if isinstance(event, Ended):
                summary = event.summary
    console.print(f"[bold]{label}[/]: {words.ended(summary, summary['counted_clients'])}", highlight=False)
    console.print(f"  privacy: {summary['privacy']['words']}", highlight=False)
    console.print(f"  {folder}", highlight=False, soft_wrap=True)
    return summary


def compare_methods(
    base: Plan, names: Sequence[str], folder: Path, console: Console, as_json: bool, resume: bool, device: str,
    task: str | None,
) -> None:  # fmt: skip
    for name in names:
        if name not in METHODS:
            raise UserError(f"--methods {name}: choose among {', '.join(METHODS)}")
    if not names:
        raise UserError(f"--methods names none; choose among {', '.join(METHODS)}")
    plans = {name: replace(base, method=METHODS[name]) for name in names}
    jobs: list[Job] = [(name, plan, folder / name) for name, plan in plans.items()]
    rows = play(jobs, console, as_json, resume, device, task)
    pooled = centralized(base, load_task(task) if task else problem_for(base), device, cache_folder())
    rows.append(("alone", {"local": rows[0][1]["private"]}))
    rows.append(("centralized", {"central": pooled}))
    if as_json:
        _line({"event": "reference", "alone": rows[0][1]["private"], "centralized": pooled})
        return
    console.print(comparison(rows, f"{base.name}, {base.rounds} rounds, seed {base.seed}"))
    console.print(f"runs in {folder}", highlight=False, soft_wrap=True)


def demonstrate(out: Path, seed: int | None, rounds: int | None, console: Console, as_json: bool, resume: bool) -> None:
    nfl = presets.resolve("digits-nfl", seed=seed, rounds=rounds)
    control = presets.resolve("digits-control", seed=seed, rounds=rounds)
    fedavg = replace(nfl, method=replace(nfl.method, adaptation=METHODS["fedavg"].adaptation))
    if not as_json:
        console.print(
            "Twenty clients learn to read digits. Each holds two or three of the ten digits, a quarter attack, noise "
            "protects\nprivacy, and four answer a round. Is the shared model worth it to each of them?",
            highlight=False, soft_wrap=True)  # fmt: skip
    jobs: list[Job] = [
        ("FedAvg", fedavg, out / "fedavg"),
        ("detect and recover", nfl, out / "recovered"),
        ("healthy control", control, out / "control"),
    ]
    rows = play(jobs, console, as_json, resume, "cpu", None)
    if not as_json:
        console.print(comparison(rows, f"digits, {nfl.rounds} rounds, seed {nfl.seed}: accuracy in percent"))
        console.print(f"runs in {out}", highlight=False, soft_wrap=True)


def describe_data(plan: Plan, picture: Path, console: Console, as_json: bool, task: str | None) -> None:
    import numpy as np

    from lindt.report.labels import draw_labels

    problem = load_task(task) if task else problem_for(plan)
    about = about_run(plan, problem, task)
    clients = about["clients"]
    classes = max(len(about["class_names"]), 1 + max(int(label) for one in clients for label in one["labels"]))
    counts = np.zeros((len(clients), classes), dtype=np.int64)
    for one in clients:
        for label, count in one["labels"].items():
            counts[one["client"], int(label)] = count
    attackers = frozenset(one["client"] for one in clients if one["attacker"])
    draw_labels(counts, picture, about["class_names"] or None, attackers=attackers)
    if as_json:
        _line({"picture": str(picture), "clients": clients})
        return
    sizes = np.array([one["train"] + one["test"] for one in clients])
    table = Table(title=f"{plan.name}, seed {plan.seed}: {len(clients)} clients, {sizes.mean():.0f} samples each "
                  f"(std {sizes.std():.0f})", title_justify="left")  # fmt: skip
    for name in ("client", "train", "test", "labels", ""):
        table.add_column(name, justify="right" if name in ("client", "train", "test") else "left")
    for one in clients:
        labels = " ".join(f"{_name(about, label)}:{count}" for label, count in one["labels"].items())
        row = (str(one["client"]), str(one["train"]), str(one["test"]), labels, "attacker" if one["attacker"] else "")
        table.add_row(*row)
    console.print(table)
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)


def _name(about: dict[str, Any], label: str) -> str:
    return about["class_names"][int(label)] if about["class_names"] else label


def _line(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
