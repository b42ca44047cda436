"""What the commands do: runs one after the other, drawn or as JSON lines, and what is printed at their end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from rich.console import Console
from rich.table import Table

from lindt.cli.comparison import ComparisonGrid
from lindt.client.private_models import centralized
from lindt.engines.flower.launch import FlowerOptions, run_on_flower
from lindt.errors import UserError
from lindt.plan import presets
from lindt.plan.methods import METHODS
from lindt.plan.plan import Plan
from lindt.plan.problem import load_task, problem_for
from lindt.report.progress import ProgressDisplay
from lindt.report.reading import read_run
from lindt.report.tables import comparison
from lindt.report.verdict import verdict
from lindt.resources import keep_memory
from lindt.runs.play import Event, RoundFollowed, RoundPlayed, RunEnded, RunStarted, cache_folder, run_plan
from lindt.runs.summary import about_run

Job = tuple[str, Plan | None, Path]
MOST_ROWS = 200  # of clients in a table


@final
@dataclass(frozen=True)
class CommandContext:
    """How a command was called: where it speaks, and what its flags say."""

    console: Console
    as_json: bool = False
    resume: bool = False
    engine: str = "auto"
    device: str = "cpu"
    task: str | None = None
    flower: FlowerOptions | None = None  # with engine "flower": where, and how patient
    track: tuple[str, ...] = ()  # trackers to tell

    def say(self, text: str) -> None:
        if not self.as_json:
            self.console.print(text, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")


def play(context: CommandContext, jobs: Sequence[Job]) -> list[tuple[str, dict[str, Any]]]:
    """Run jobs one after the other; returns each one's summary. Ctrl-C says how to go on."""
    if context.track:
        from lindt.trackers.base import check_trackers

        check_trackers(context.track)
    keep_memory()
    found: list[tuple[str, dict[str, Any]]] = []
    for label, plan, folder in jobs:
        try:
            found.append((label, _play_one(context, label, plan, folder)))
        except KeyboardInterrupt:
            out = folder if len(jobs) == 1 else folder.parent
            hint = f"stopped; what was played is kept: the same command with --out {out} --resume goes on"
            print(hint, file=sys.stderr if context.as_json else sys.stdout)
            sys.exit(130)
    return found


def _play_one(context: CommandContext, label: str, plan: Plan | None, folder: Path) -> dict[str, Any]:
    events = _events(context, plan, folder)
    if context.track:
        from lindt.trackers.base import track_events

        events = track_events(events, context.track, context.warn)
    summary: dict[str, Any] = {}
    if context.as_json:
        for event in events:
            _print_warnings(context, event)
            if isinstance(event, RoundPlayed | RoundFollowed):
                _line({"event": "round", "run": label, **event.line})
            elif isinstance(event, RunEnded):
                summary = event.summary
                _line({"event": "end", "run": label, "folder": str(folder), **summary})
        return summary
    with ProgressDisplay(context.console, label).watching() as progress:
        for event in events:
            _print_warnings(context, event)
            progress.see(event)
            if isinstance(event, RunEnded):
                summary = event.summary
    context.console.print(f"[bold]{label}[/]: {verdict(read_run(folder)).sentence}", highlight=False)
    context.console.print(f"  privacy: {summary['privacy']['words']}", highlight=False)
    context.say(f"  {folder}")
    return summary


def _print_warnings(context: CommandContext, event: Event) -> None:
    for said in event.store.said if isinstance(event, RunStarted) else ():
        context.warn(f"warning: {said}")


def _events(context: CommandContext, plan: Plan | None, folder: Path) -> Iterator[Event]:
    if context.engine == "flower":
        where, task, device = context.flower or FlowerOptions(), context.task, context.device
        cache = cache_folder()
        return run_on_flower(plan, folder, where, task=task, resume=context.resume, device=device, cache=cache)
    return run_plan(
        plan,
        folder,
        task=context.task,
        resume=context.resume,
        engine=context.engine,
        device=context.device,
        cache=cache_folder(),
    )


def compare_methods(context: CommandContext, base: Plan, grid: ComparisonGrid, folder: Path) -> None:
    jobs: list[Job] = [(label, plan, folder / label) for label, plan in grid.plans(base)]
    rows = play(context, jobs)
    problem = load_task(context.task) if context.task else problem_for(base)
    pooled = centralized(base, problem, context.device, cache_folder())
    alone = rows[0][1]["private"]
    if context.as_json:
        _line({"event": "reference", "alone": alone, "centralized": pooled})
        return
    rows += [("alone", {"local": alone}), ("centralized", {"central": pooled})]
    context.console.print(comparison(rows, f"{base.name}, {base.rounds} rounds, seed {base.seed}"))
    context.say(f"runs in {folder}")


def demonstrate(context: CommandContext, out: Path, seed: int | None, rounds: int | None) -> None:
    nfl = presets.resolve("digits-nfl", seed=seed, rounds=rounds)
    control = presets.resolve("digits-control", seed=seed, rounds=rounds)
    fedavg = replace(nfl, method=replace(nfl.method, adaptation=METHODS["fedavg"].adaptation))
    context.say(
        "Twenty clients learn to read digits. Each holds three or five of the ten digits, a quarter attack, noise "
        "protects\nprivacy, and four answer a round. Is the shared model worth it to each of them?"
    )
    jobs: list[Job] = [
        ("FedAvg", fedavg, out / "fedavg"),
        ("detect and recover", nfl, out / "recovered"),
        ("healthy control", control, out / "control"),
    ]
    rows = play(context, jobs)
    if not context.as_json:
        title = f"digits, {nfl.rounds} rounds, seed {nfl.seed}: accuracy in percent"
        context.console.print(comparison(rows, title))
        context.say(f"runs in {out}; as a page: lindt report {out} -o report.html")


def describe_data(context: CommandContext, plan: Plan, picture: Path) -> None:
    import numpy as np

    from lindt.report.labels import draw_labels

    problem = load_task(context.task) if context.task else problem_for(plan)
    about = about_run(plan, problem, context.task)
    clients = about["clients"]
    labels = [int(label) for one in clients for label in one["labels"]]
    if not labels:
        raise UserError("the task's targets are no classes, so there is no label distribution to draw")
    classes = max(len(about["class_names"]), 1 + max(labels))
    counts = np.zeros((len(clients), classes), dtype=np.int64)
    for one in clients:
        for label, count in one["labels"].items():
            counts[one["client"], int(label)] = count
    attackers = frozenset(one["client"] for one in clients if one["attacker"])
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"-o {picture}: name a .png, .svg or .pdf file")
    names = [one["name"] for one in clients if "name" in one]
    draw_labels(counts, picture, about["class_names"] or None, names or None, attackers)
    if context.as_json:
        _line({"picture": str(picture), "clients": clients})
        return
    sizes = np.array([one["train"] + one["test"] for one in clients])
    amount = f"{len(clients)} clients, {sizes.mean():.0f} samples each (std {sizes.std():.0f})"
    table = Table(title=f"{plan.name}, seed {plan.seed}: {amount}", title_justify="left")
    for name in ("client", "train", "test", "labels", ""):
        table.add_column(name, justify="right" if name in ("client", "train", "test") else "left")
    for one in clients[:MOST_ROWS]:
        who, attacker = f"{one['client']} {one.get('name', '')}".strip(), "attacker" if one["attacker"] else ""
        table.add_row(who, str(one["train"]), str(one["test"]), _held(about, one["labels"]), attacker)
    context.console.print(table)
    if len(clients) > MOST_ROWS:
        context.say(f"and {len(clients) - MOST_ROWS:,} clients more; --json lists all")
    context.say(f"picture: {picture}")


def _held(about: dict[str, Any], labels: dict[str, int]) -> str:
    """How much of which label; where labels are many (characters), only the most frequent."""
    shown = list(labels.items())
    if len(shown) > 20:
        shown = sorted(shown, key=lambda held: -held[1])[:5]
    more = f" and {len(labels) - len(shown)} more" if len(labels) > len(shown) else ""
    return " ".join(f"{_name(about, label)}:{count}" for label, count in shown) + more


def _name(about: dict[str, Any], label: str) -> str:
    return about["class_names"][int(label)] if about["class_names"] else label


def _line(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()
