"""The panels of figures 3 and 5 to 9: the runs of each, and how it is drawn. Never imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, final

from matplotlib.axes import Axes

from lindt_experiments.claims.delta import LIFTED as LIFTED_AT
from lindt_experiments.claims.delta import TWO_WORLDS, deltas
from lindt_experiments.claims.judging import Cell
from lindt_experiments.claims.series import curve_of
from lindt_experiments.figures.style import (
    BLUE,
    DETECTED,
    GREEN,
    LIFTED,
    ORANGE,
    PINK,
    STOPPED,
    Line,
    draw_curves,
    draw_event,
    draw_level,
    events,
    explain,
    prepare,
)
from lindt_experiments.results.outcomes import Outcome

Found = Mapping[Cell, Sequence[Outcome]]
UNITS = {"delta": "Δ (Euclidean distance of weights)", "local": "local accuracy (%)"}


@final
@dataclass(frozen=True)
class Panel:
    """One panel, with a curve for each cell. `events` are the runs whose detection and stop are marked."""

    title: str
    curve: Literal["delta", "local"]
    lines: Mapping[Cell, Line]
    events: tuple[Cell, ...] = ()
    after: float = 0.0  # only rounds after this share of all rounds are drawn
    lifted: bool = False  # the attacks end

    def draw(self, axes: Axes, found: Found) -> None:
        lines = {cell: line for cell, line in self.lines.items() if cell in found}
        rounds = max(outcome.rounds for cell in lines for outcome in found[cell])
        first = round(self.after * rounds)
        prepare(axes, self.title, UNITS[self.curve], (first, rounds))
        for cell, line in lines.items():
            draw_curves(axes, [_curve(self.curve, outcome, self.after) for outcome in found[cell]], line)
        everyone = [outcome for cell in lines for outcome in found[cell]]
        if self.curve == "delta":
            draw_level(axes, everyone[0].epsilon, f"ε = {everyone[0].epsilon:g}", colour="black")
            lowest = min(min(_curve("delta", outcome, self.after).values(), default=0.0) for outcome in everyone)
            axes.set_ylim(bottom=min(0.0, lowest))
        elif alone := [100 * outcome.private for outcome in everyone if outcome.private is not None]:
            draw_level(axes, fmean(alone), "private models, mean", dashes="-")
        self._mark(axes, found, rounds)
        explain(axes)

    def _mark(self, axes: Axes, found: Found, rounds: int) -> None:
        """Mark the detection, once, since all runs are FedAvg until then; the stops; the end of the attacks."""
        runs = [outcome for cell in self.events for outcome in found.get(cell, ())]
        draw_event(axes, events(runs, lambda outcome: outcome.detected_at), DETECTED)
        if self.lifted:
            draw_event(axes, [round(LIFTED_AT * rounds)], LIFTED)
        draw_event(axes, events(runs, lambda outcome: outcome.stopped_at), STOPPED)


def _curve(which: Literal["delta", "local"], outcome: Outcome, after: float) -> Mapping[int, float]:
    return deltas(outcome, after) if which == "delta" else curve_of(outcome)


def _cell(task: str, world: str, method: str) -> Cell:
    return task, world, method


FEDAVG = Line("FedAvg", PINK)
ALL_TIME = Line("LINDT, all the time", BLUE, "-.")
PERSISTS = Line("LINDT, persisting", ORANGE)
ONCE = Line("LINDT, everyone once", GREEN, "--")
QUIET = Line("LINDT, until quiet", GREEN, "--")
NFL, NORMAL = Line("NFL", PINK), Line("normal FL", BLUE, "--")


def _two_worlds(title: str, task: str, after: float = 0.0) -> Panel:
    nfl, normal = (_cell(task, world, "fedavg") for world in TWO_WORLDS[task])
    return Panel(title, "delta", {nfl: NFL, normal: NORMAL}, after=after)


def _over_rounds(title: str, task: str) -> Panel:
    lines = {"fedavg": FEDAVG, "apfl": Line("APFL", GREEN, "--"), "lindt": Line("LINDT", BLUE, "-.")}
    return Panel(title, "local", {_cell(task, "nfl", method): line for method, line in lines.items()})


def _process(title: str, method: str) -> Panel:
    cell = _cell("cifar", "nfl-long", method)
    return Panel(title, "delta", {cell: Line("Δ", PINK)}, () if method == "fedavg" else (cell,))


_PERSISTS, _ONCE = _cell("cifar", "nfl-long", "runtime"), _cell("cifar", "nfl-long", "runtime-once")
_LIFTED = {m: _cell("cifar", "lifted", m) for m in ("fedavg", "lindt", "runtime", "runtime-quiet")}
PANELS: dict[str, Panel] = {
    "3a": _two_worlds("(a) CIFAR: Δ", "cifar"),
    "3b": Panel(
        "(b) CIFAR: recovery at run time",
        "local",
        {_cell("cifar", "nfl-long", "lindt"): ALL_TIME, _PERSISTS: PERSISTS, _ONCE: ONCE},
        (_PERSISTS, _ONCE),
    ),
    "5a": _over_rounds("(a) CIFAR", "cifar"),
    "5b": _over_rounds("(b) SHAKE", "shake"),
    "6a": _two_worlds("(a) SHAKE: Δ over all rounds", "shake"),
    "6b": _two_worlds("(b) SHAKE: Δ over the last 40% of the rounds", "shake", after=0.6),
    "7a": _process("(a) CIFAR: FedAvg", "fedavg"),
    "7b": _process("(b) CIFAR: recovery activated", "runtime"),
    "7c": _process("(c) CIFAR: activated and later stopped", "runtime-once"),
    "8": Panel(
        "CIFAR, non-IID(10): Δ where the attacks end",
        "delta",
        {_LIFTED["runtime-quiet"]: Line("Δ", PINK)},
        (_LIFTED["runtime-quiet"],),
        lifted=True,
    ),
    "9": Panel(
        "CIFAR, non-IID(10): recovery where the attacks end",
        "local",
        {
            _LIFTED["fedavg"]: FEDAVG,
            _LIFTED["lindt"]: ALL_TIME,
            _LIFTED["runtime"]: PERSISTS,
            _LIFTED["runtime-quiet"]: QUIET,
        },
        (_LIFTED["runtime"], _LIFTED["runtime-quiet"]),
        lifted=True,
    ),
}
