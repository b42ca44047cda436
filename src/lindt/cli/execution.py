"""What the commands do: runs one after the other, drawn or as JSON lines, and what is printed at their end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from lindt.cli.comparison import ComparisonGrid
from lindt.client.private_models import centralized
from lindt.engines.flower.launch import FlowerOptions, run_on_flower
from lindt.errors import UserError
from lindt.plan.file import resolve
from lindt.plan.plan import METHODS, Plan
from lindt.plan.problem import load_task, problem_for
from lindt.registry import kind_of
from lindt.report import verdict
from lindt.report.reading import read_run
from lindt.report.tables import alarm_table, comparison, verdict_table
from lindt.resources import keep_memory
from lindt.runs.play import (
    Event,
    PrivateModelTrained,
    RoundFollowed,
    RoundPlayed,
    RunEnded,
    RunStarted,
    cache_folder,
    run_plan,
)
from lindt.runs.replay import first_alarms, papers_rule
from lindt.runs.summary import about_run

Job = tuple[str, Plan | None, Path]
MOST_ROWS = 200  # of clients in a table
DEMONSTRATED = """\
Clients learn to read digits together. Each one reports how the shared model w does on samples that it holds out,
against the model that it trains alone. From the reports the server tests whether federation helps or hurts them.
  FedAvg                  a client holds three or five of the ten digits, a quarter of the clients plant a backdoor
  detect and recover      the same; once the reports warn, each client trains a model of its own along with w
  healthy control         each client holds all ten digits, and none attacks
  healthy, learns slowly  as the control, with two clients a round instead of four, and without noise
"""


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
    brief: bool = False  # of a run that has ended, the verdict alone
    preflight: bool = True  # whether runs are checked before training

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
    context.console.print(f"[bold]{label}[/]: {verdict.verdict(read_run(folder)).sentence}", highlight=False)
    if not context.brief:
        context.console.print(f"  privacy: {summary['privacy']['words']}", highlight=False)
        context.say(f"  {folder}")
    return summary


@final
class ProgressDisplay:
    """One run as it goes on: a bar with the round, what the detector says, local accuracy, recovery.

    `label` names the run where several follow each other.
    """

    def __init__(self, console: Console, label: str) -> None:
        self.console, self.label = console, label
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
        )
        self.bar: TaskID | None = None
        self.rule: Any = None
        self.adapts = True
        self.percent = True
        self.local: float | None = None
        self.flag = False
        self.detections = 0
        self.level = ""
        self.before: dict[str, Any] | None = None
        self.costs: list[float | None] = []  # of the private models

    @contextmanager
    def watching(self) -> Iterator[ProgressDisplay]:
        with self.progress:
            yield self

    def see(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, PrivateModelTrained):
            self.costs.append(event.cost)
            self._bar("each client alone", event.clients, "private models, the yardstick of beta")
        elif isinstance(event, RoundPlayed | RoundFollowed):
            self._round(event.line)

    def _start(self, event: RunStarted) -> None:
        self.plan = event.plan
        self.percent = event.store.about["metric_in_percent"]
        recovery = event.plan.method.recovery
        self.rule = recovery if hasattr(recovery, "epsilon") else None
        self.adapts = type(event.plan.method.adaptation).__name__ != "GlobalOnly"
        self.flag = event.plan.method.recovery.begin().on
        test = event.plan.detection
        self.level = verdict.level_words(kind_of(test), getattr(test, "alpha", None))
        if event.round:
            last = event.store.rounds()[-1]
            self.flag, self.detections, self.before = last["flag"], last["detections"], last
            self.console.print(f"{self.label}: resumed after round {event.round}", highlight=False)
        self.resumed = event.round

    def _bar(self, title: str, total: int, state: str) -> None:
        if self.bar is None or self.progress.tasks[-1].description != title:
            if self.bar is not None:
                self.progress.update(self.bar, visible=False)
            started = self.resumed if title == self.label else 0
            self.bar = self.progress.add_task(title, total=total, completed=started, state=state)
        self.progress.update(self.bar, advance=1, state=state)

    def _round(self, line: dict[str, Any]) -> None:
        known = [cost for cost in self.costs if cost is not None]
        if known and verdict.detection_of(line) is not None:
            cost = f"a private model took a median of {median(known):.1f} times a client's work in the federation"
            self.console.print(f"{self.label}: {cost}", highlight=False)
        self.costs.clear()
        if line["scores"]:
            self.local = line["scores"]["local"]
        for text in self._news(line):
            self.console.print(f"{self.label}, {text}", highlight=False)
        self.flag, self.detections, self.before = line["flag"], line["detections"], line
        delta = "no answers" if "delta" not in line else f"Delta {line['delta']:.3f}"
        against = (
            f" / epsilon {self.rule.epsilon:g}, count {line['count']} / r' {self.rule.patience}" if self.rule else ""
        )
        detection = verdict.detection_of(line)
        if detection is not None:
            found = detection["verdict"]
            delta, against = f"gain {verdict.interval(found, self.percent)}, {found['state']}", ""
        local, recovery = verdict.points(self.local, self.percent), "on" if line["flag"] else "off"
        self._bar(self.label, self.plan.rounds, f"{delta}{against}  local {local}  recovery {recovery}")

    def _news(self, line: dict[str, Any]) -> list[str]:
        said = verdict.refused(line)
        if verdict.detection_of(line) is not None:
            return said + verdict.detection_news(self.before, line, self.level, self.percent)
        if self.rule and line["detections"] > self.detections:
            rule = self.rule
            said.append(verdict.suspected(line, rule.epsilon, rule.patience, rule.statistic, self.adapts))
            said.append(verdict.measured(line, self.percent))
        if self.flag and not line["flag"]:
            said.append(verdict.stopped(line))
        return said


def _print_warnings(context: CommandContext, event: Event) -> None:
    if isinstance(event, RunStarted):
        checks = event.store.about.get("checks") or {}
        for said in (*checks.get("warnings", ()), *event.store.said):
            context.warn(f"warning: {said}")


def _events(context: CommandContext, plan: Plan | None, folder: Path) -> Iterator[Event]:
    if context.engine == "flower":
        where, task, device = context.flower or FlowerOptions(), context.task, context.device
        cache, resume, checks = cache_folder(), context.resume, context.preflight
        return run_on_flower(
            plan, folder, where, task=task, resume=resume, device=device, cache=cache, preflight=checks
        )
    return run_plan(
        plan,
        folder,
        task=context.task,
        resume=context.resume,
        engine=context.engine,
        device=context.device,
        cache=cache_folder(),
        preflight=context.preflight,
    )


def compare_methods(context: CommandContext, base: Plan, grid: ComparisonGrid, folder: Path) -> None:
    jobs: list[Job] = [(label, plan, folder / label) for label, plan in grid.plans(base)]
    rows = play(context, jobs)
    problem = load_task(context.task) if context.task else problem_for(base)
    pooled = centralized(base, problem, context.device, cache_folder())
    alone = rows[0][1]["private"]
    N = len(problem.data)
    alarms = [(label, first_alarms(read_run(where).rounds, N, base.rounds)) for label, _, where in jobs]
    if context.as_json:
        _line({"event": "reference", "alone": alone, "centralized": pooled})
        _line({"event": "detectors", "alarms": dict(alarms)})
        return
    rows += [("alone", {"local": alone}), ("centralized", {"central": pooled})]
    _print_tables(context, rows, f"{base.name}, {base.rounds} rounds, seed {base.seed}")
    context.console.print(alarm_table(alarms, papers_rule(base.rounds).patience))
    context.say(f"runs in {folder}")


def _print_tables(context: CommandContext, rows: Sequence[tuple[str, dict[str, Any]]], title: str) -> None:
    context.console.print(comparison(rows, title))
    if (found := verdict_table(rows)) is not None:
        context.console.print(found)


def demonstrate(context: CommandContext, out: Path, seed: int | None, rounds: int | None) -> None:
    nfl, control, slow = (
        resolve(name, seed=seed, rounds=rounds) for name in ("digits-backdoor", "digits-control", "digits-slow")
    )
    fedavg = replace(nfl, method=METHODS["fedavg"])
    context.say(DEMONSTRATED)
    jobs: list[Job] = [
        ("FedAvg", fedavg, out / "fedavg"),
        ("detect and recover", nfl, out / "recovered"),
        ("healthy control", control, out / "control"),
        ("healthy, learns slowly", slow, out / "slow"),
    ]
    rows = play(replace(context, brief=True), jobs)
    if not context.as_json:
        title = f"digits, {nfl.rounds} rounds, seed {nfl.seed}: accuracy in percent"
        _print_tables(context, rows, title)
        context.say(_by_delta("healthy, learns slowly", out / "slow", slow.rounds))
        context.say(f"runs in {out}; as a page: lindt report {out} -o report.html")


def _by_delta(label: str, folder: Path, rounds: int) -> str:
    """What the paper's rule says of a run, replayed on the Delta that it recorded: 25 of 80 rounds, as many in part."""
    rule = papers_rule(rounds)
    flagged = rule.replay(line["delta"] for line in read_run(folder).rounds)
    would = "would not have flagged" if flagged is None else "would have flagged"
    at = "" if flagged is None else f" in round {flagged}"
    return f"The paper's rule (Delta above {rule.epsilon:g} in more than {rule.patience} rounds) {would} '{label}'{at}."


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
