"""Play runs for the commands, one after the other, show progress bars or JSON lines, and print the results."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from lindt.cli.comparison import ComparisonGrid
from lindt.cli.tasks import remember_task
from lindt.client.private_models import centralized
from lindt.engines.flower.launch import FlowerOptions, run_on_flower
from lindt.errors import UserError, is_interrupt, plain
from lindt.plan.file import resolve
from lindt.plan.plan import METHODS, Plan, trained_before
from lindt.plan.problem import load_task, problem_for
from lindt.registry import kind_of
from lindt.report import verdict
from lindt.report.reading import read_run
from lindt.report.tables import alarm_table, comparison, verdict_table
from lindt.resources import keep_memory
from lindt.runs.about import about_run
from lindt.runs.branch import Branch
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

Job = tuple[str, Plan | None, Path]
MOST_ROWS = 200  # of clients in a table
ALONE, BASELINE = "each client alone", "private models, for comparison"
WIDE = 120  # columns of a terminal; in fewer the bar and its words are shorter
LINE_EVERY = 30.0  # seconds, where there is no terminal to draw a bar on
DEMO: Final = ("digits-backdoor", "digits-control", "digits-slow")  # presets
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
    """How a command was called: its console and its flags."""

    console: Console
    as_json: bool = False
    resume: bool = False
    engine: str = "auto"
    device: str = "cpu"
    task: str | None = None
    flower: FlowerOptions | None = None  # with engine "flower": its SuperLink and its waiting times
    track: tuple[str, ...] = ()  # names of trackers
    brief: bool = False  # print only the verdict of a run that has ended
    preflight: bool = True  # whether runs are checked before training
    keep: tuple[int, ...] = ()  # the rounds whose checkpoints are kept
    branch: Branch | None = None  # the run to begin with

    def say(self, text: str) -> None:
        if not self.as_json:
            self.console.print(plain(text, "\n"), highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        sys.stderr.write(f"{plain(text)}\n")


def play(context: CommandContext, jobs: Sequence[Job]) -> list[tuple[str, dict[str, Any]]]:
    """Run jobs one after the other; returns the summary of each. On Ctrl-C it prints how to continue."""
    if context.track:
        from lindt.trackers.base import check_trackers

        check_trackers(context.track)
    keep_memory()
    found: list[tuple[str, dict[str, Any]]] = []
    for label, plan, folder in jobs:
        try:
            found.append((label, _play_one(context, label, plan, folder)))
        except BaseException as error:
            if not is_interrupt(error):
                raise
            out = folder if len(jobs) == 1 else folder.parent
            hint = f"stopped; finished rounds are kept: the same command with --out {out} --resume continues"
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
            _remember(context, event)
            if isinstance(event, RoundPlayed | RoundFollowed):
                _line({"event": "round", "run": label, **event.line})
            elif isinstance(event, RunEnded):
                summary = event.summary
                _line({"event": "end", "run": label, "folder": str(folder), **summary})
        return summary
    with ProgressDisplay(context.console, label).watching() as progress:
        for event in events:
            _print_warnings(context, event)
            _remember(context, event)
            progress.see(event)
            if isinstance(event, RunEnded):
                summary = event.summary
    unwrapped = not context.console.is_terminal  # one line in a file or a pipe
    run = read_run(folder)
    sentence = verdict.verdict(run).sentence
    told = Text.assemble((plain(label), "bold"), f": {plain(sentence)}")
    if not context.brief:
        told.append(f"\n  privacy: {plain(summary['privacy']['words'])}")
    for note in run.said:
        told.append(f"\n  note: {plain(note)}", "yellow")
    context.console.print(told, highlight=False, soft_wrap=unwrapped)
    if not context.brief:
        context.say(f"  {folder}")
    return summary


@final
class ProgressDisplay:
    """The progress of one run: a bar with the round, the detector's state, local accuracy and recovery.

    `label` is the run's name, for commands that play several. The bar is one line, 80 columns wide or more. Where the
    output is not a terminal, a line is printed every LINE_EVERY seconds instead.
    """

    def __init__(self, console: Console, label: str) -> None:
        self.console, self.label = console, label
        self.narrow = console.width < WIDE
        self.lines = False  # whether lines stand for the bar
        self.told = time.monotonic()  # when the last line was printed
        bar = 6 if self.narrow else 24
        room = max(20, console.width - bar - len("1000/1000") - len("0:00:00") - 4)  # 4 spaces
        title = min(max(len(label), len(ALONE)), room // 2)
        self.progress = Progress(
            TextColumn("{task.description}", style="bold", markup=False, table_column=_column(title)),
            BarColumn(bar_width=bar),
            TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[state]}", table_column=_column(room - title)),
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
        self.lines = not self.console.is_terminal
        with nullcontext() if self.lines else self.progress:
            yield self

    def _print(self, text: str) -> None:
        """One message. A terminal wraps it between words; in a file or a pipe it is one line."""
        self.console.print(plain(text), highlight=False, markup=False, soft_wrap=not self.console.is_terminal)

    def see(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, PrivateModelTrained):
            self.costs.append(event.cost)
            self._bar(ALONE, event.clients, BASELINE)
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
            taken = event.store.about.get("branched") or {}
            begun = f"branched from {taken['name']}" if taken.get("round") == event.round else "resumed"
            self._print(f"{self.label}: {begun} after round {event.round}")
        self.resumed = event.round
        if private := len(trained_before(event.plan, event.clients)):
            self._bar(ALONE, private, BASELINE, advance=0)  # the first of them may take long

    @property
    def line(self) -> str:
        """The bar as text; empty before the bar is drawn."""
        if self.bar is None:
            return ""
        task = self.progress.tasks[-1]
        return f"{task.description}: {task.completed:.0f}/{task.total or 0:.0f}  {task.fields['state']}"

    def _bar(self, title: str, total: int, state: str, advance: int = 1) -> None:
        if self.bar is None or self.progress.tasks[-1].description != title:
            if self.bar is not None:
                self.progress.update(self.bar, visible=False)
            started = self.resumed if title == self.label else 0
            self.bar = self.progress.add_task(title, total=total, completed=started, state=state)
        self.progress.update(self.bar, advance=advance, state=state)
        if self.lines and time.monotonic() - self.told >= LINE_EVERY:
            task, self.told = self.progress.tasks[-1], time.monotonic()
            text = f"{self.label}: {title if title != self.label else 'round'} {task.completed:.0f}/{total}, {state}"
            self._print(text)

    def _round(self, line: dict[str, Any]) -> None:
        known = [cost for cost in self.costs if cost is not None]
        if known and verdict.detection_of(line) is not None:
            times = f"{median(known):.1f}" if median(known) >= 0.05 else "less than 0.1"
            cost = f"training a private model cost {times} times a client's work in the federation (median)"
            self._print(f"{self.label}: {cost}")
        self.costs.clear()
        if line["scores"]:
            self.local = line["scores"]["local"]
        for text in self._news(line):
            self._print(f"{self.label}, {text}")
        self.flag, self.detections, self.before = line["flag"], line["detections"], line
        self._bar(self.label, self.plan.rounds, self._state(line))

    def _state(self, line: dict[str, Any]) -> str:
        """Detection, local score and recovery after a round; a narrow terminal may cut off the end."""
        local, recovery = verdict.points(self.local, self.percent), "on" if line["flag"] else "off"
        detection = verdict.detection_of(line)
        if detection is not None:
            found = detection["verdict"]
            gain = verdict.interval(found, self.percent)
            said = f"gain {gain.removesuffix(' points') if self.narrow else gain}, {found['state']}"
        elif "delta" not in line:
            said = "no answers"
        elif self.rule and self.narrow:
            said = f"Delta {line['delta']:.3f}/{self.rule.epsilon:g}, count {line['count']}/{self.rule.patience}"
        else:
            rule, count = self.rule, line["count"]
            against = f" / epsilon {rule.epsilon:g}, count {count} / r' {rule.patience}" if rule else ""
            said = f"Delta {line['delta']:.3f}{against}"
        return (", " if self.narrow else "  ").join((said, f"local {local}", f"recovery {recovery}"))

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


def _column(width: int) -> Column:
    """A column of one line, cut off where the terminal is too narrow."""
    return Column(no_wrap=True, overflow="ellipsis", max_width=width)


def _print_warnings(context: CommandContext, event: Event) -> None:
    if isinstance(event, RunStarted):
        checks = event.store.about.get("checks") or {}
        for said in (*checks.get("warnings", ()), *event.store.said):
            context.warn(f"warning: {said}")


def _remember(context: CommandContext, event: Event) -> None:
    if isinstance(event, RunStarted) and context.task:
        remember_task(event.store.run, context.task)


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
        keep=context.keep,
        branch=context.branch,
    )


def compare_methods(context: CommandContext, base: Plan, grid: ComparisonGrid, folder: Path) -> None:
    jobs: list[Job] = [(label, plan, folder / label) for label, plan in grid.plans(base)]
    rows = play(context, jobs)
    problem = load_task(context.task) if context.task else problem_for(base)
    alone, N = rows[0][1]["private"], len(problem.data)
    listed = (
        len(problem.checked) == N
    )  # centralized training reads the data of all clients, which lazy ones do not bear
    pooled = centralized(base, problem, context.device, cache_folder()) if listed else None
    alarms = [(label, first_alarms(read_run(where).rounds, N, base.rounds)) for label, _, where in jobs]
    if context.as_json:
        _line({"event": "reference", "alone": alone, "centralized": pooled})
        _line({"event": "detectors", "alarms": dict(alarms)})
        return
    rows.append(("alone", {"local": alone}))
    if listed:
        rows.append(("centralized", {"central": pooled}))
    else:
        context.say(f"centralized training is left out: it would read the data of all {N:,} lazy clients")
    _print_tables(context, rows, f"{base.name}, {base.rounds} rounds, seed {base.seed}")
    context.console.print(alarm_table(alarms, papers_rule(base.rounds).patience))
    context.say(f"runs in {folder}")


def _print_tables(context: CommandContext, rows: Sequence[tuple[str, dict[str, Any]]], title: str) -> None:
    context.console.print(comparison(rows, title))
    if (found := verdict_table(rows)) is not None:
        context.console.print(found)


def demonstrate(context: CommandContext, out: Path, seed: int | None, rounds: int | None) -> None:
    nfl, control, slow = (resolve(name, seed=seed, rounds=rounds) for name in DEMO)
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
    """The result of the paper's rule on the recorded Delta of a run; its patience is 25 of 80 rounds, in proportion."""
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
        raise UserError("the task's targets are not classes, so there is no label distribution to draw")
    classes = max(len(about["class_names"]), 1 + max(labels))
    counts = np.zeros((len(clients), classes), dtype=np.int64)
    for row, one in enumerate(clients):
        for label, count in one["labels"].items():
            counts[row, int(label)] = count
    attackers = frozenset(row for row, one in enumerate(clients) if one["attacker"])
    if picture.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"-o {picture}: name a .png, .svg or .pdf file")
    names = [one["name"] for one in clients if "name" in one]
    draw_labels(counts, picture, about["class_names"] or None, names or None, attackers)
    if context.as_json:
        _line({"picture": str(picture), "clients": clients})
        return
    sizes = np.array([one["train"] + one["test"] for one in clients])
    some = f" of {about['population']:,}" if "population" in about else ""
    amount = f"{len(clients)}{some} clients, {sizes.mean():.0f} samples each (std {sizes.std():.0f})"
    table = Table(title=f"{plan.name}, seed {plan.seed}: {amount}", title_justify="left")
    for name in ("client", "train", "test", "labels", ""):
        table.add_column(name, justify="right" if name in ("client", "train", "test") else "left")
    for one in clients[:MOST_ROWS]:
        who, attacker = f"{one['client']} {one.get('name', '')}".strip(), "attacker" if one["attacker"] else ""
        table.add_row(who, str(one["train"]), str(one["test"]), _held(about, one["labels"]), attacker)
    context.console.print(table)
    if len(clients) > MOST_ROWS:
        context.say(f"and {len(clients) - MOST_ROWS:,} more clients; --json lists all")
    context.say(f"picture: {picture}")


def _held(about: dict[str, Any], labels: dict[str, int]) -> str:
    """The number of samples of each label; where there are many labels (characters), only the most frequent."""
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
