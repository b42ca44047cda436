"""A run as it goes on, in the terminal: a bar with the round, what the detector says, local accuracy, recovery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lindt.registry import kind_of
from lindt.report import verdict
from lindt.report.verdict import points

if TYPE_CHECKING:  # the events' types; importing them would import torch
    from lindt.runs.play import Event


@final
class ProgressDisplay:
    """Draws one run's events. Give it a console; `label` names the run where several follow each other."""

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
        name = type(event).__name__
        if name == "RunStarted":
            self._start(event)
        elif name == "PrivateModelTrained":
            self.costs.append(event.cost)  # type: ignore[union-attr]
            self._bar("each client alone", event.clients, "private models, the yardstick of beta")  # type: ignore[union-attr]
        elif name in ("RoundPlayed", "RoundFollowed"):
            self._round(event.line)  # type: ignore[union-attr]

    def _start(self, event: Any) -> None:
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
        state = (
            f"{delta}{against}  local {points(self.local, self.percent)}  recovery {'on' if line['flag'] else 'off'}"
        )
        self._bar(self.label, self.plan.rounds, state)

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
