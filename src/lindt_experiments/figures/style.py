"""The style of the figures: colours for colour-blind readers, a band over seeds, marked events. Never imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lindt_experiments.results.outcomes import Outcome

# Okabe and Ito's palette. Where the paper names a colour, its nearest: pink NFL, green first rule, orange second.
PINK, GREEN, ORANGE, BLUE, GREY = "#CC79A7", "#009E73", "#E69F00", "#0072B2", "#7A7A7A"
VERMILION, SKY, YELLOW = "#D55E00", "#56B4E9", "#F0E442"
FONT = 8.0  # points
WIDTH, HEIGHT = 3.4, 2.9  # inches of a panel
Curve = Mapping[int, float]  # round to value


@final
@dataclass(frozen=True)
class Line:
    """The style of one method: colour and dashes, so that it can be printed in grey."""

    label: str
    colour: str
    dashes: str = "-"


def new_figure(columns: float, rows: int) -> Figure:
    figure = Figure(figsize=(WIDTH * columns, HEIGHT * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_curves(axes: Axes, curves: Sequence[Curve], line: Line) -> None:
    """The mean over seeds, with a band from the lowest to the highest. Only rounds that all seeds have."""
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    means = [fmean(curve[r] for curve in curves) for r in rounds]
    axes.plot(rounds, means, line.dashes, color=line.colour, linewidth=1.2, label=line.label)
    if len(curves) > 1:
        low, high = ([pick(curve[r] for curve in curves) for r in rounds] for pick in (min, max))
        axes.fill_between(rounds, low, high, color=line.colour, alpha=0.22, linewidth=0)


def draw_level(axes: Axes, value: float, label: str, colour: str = GREY, dashes: str = "--") -> None:
    axes.axhline(value, color=colour, linestyle=dashes, linewidth=1.0, label=label, zorder=1)


@final
@dataclass(frozen=True)
class Event:
    """An event in a round, drawn as a vertical line with a mark at its foot."""

    words: str
    colour: str
    dashes: Any
    mark: str


DETECTED = Event("NFL detected", "black", (0, (1, 1.5)), "^")
STOPPED = Event("recovery stops", GREEN, (0, (5, 2)), "s")
LIFTED = Event("attacks end", VERMILION, (0, (5, 2, 1, 2)), "X")


def draw_event(axes: Axes, rounds: Sequence[int], event: Event) -> None:
    """One line per seed; the legend shows the round, or the first and the last round."""
    if not rounds:
        return
    ordered = sorted(rounds)
    when = f"{ordered[0]}" if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"
    for r in dict.fromkeys(ordered):
        line = axes.axvline(r, color=event.colour, linestyle=event.dashes, linewidth=0.8, zorder=1.5)
        if r == ordered[len(ordered) // 2]:
            line.set(marker=event.mark, markevery=[0], markersize=4, clip_on=False)
            line.set_label(f"{event.words} ({when})")


def prepare(axes: Axes, title: str, y: str, rounds: tuple[int, int]) -> None:
    axes.set_title(title, fontsize=FONT, loc="left")
    axes.set_xlabel("round", fontsize=FONT)
    axes.set_ylabel(y, fontsize=FONT)
    axes.set_xlim(*rounds)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.tick_params(labelsize=FONT - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    axes.set_axisbelow(True)


def explain(axes: Axes) -> None:
    """Draw the legend under the axes, so that it covers no curve."""
    axes.legend(fontsize=FONT - 1.5, frameon=False, loc="upper center", bbox_to_anchor=(0.45, -0.21), ncols=2)


def events(outcomes: Sequence[Outcome], of: Callable[[Outcome], tuple[int, ...] | None]) -> list[int]:
    """The first such round of every seed that has the event."""
    found = [of(outcome) for outcome in outcomes]
    return [rounds[0] for rounds in found if rounds]
