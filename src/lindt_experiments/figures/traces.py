"""Figure 1: the traces of real rounds in the plane, drawn from results/traces-<scale>.jsonl. Never imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from lindt.errors import UserError
from lindt_experiments.figures.style import BLUE, FONT, ORANGE, VERMILION, new_figure
from lindt_experiments.results.traces import PANELS, Point, Traces, load

ATTACKER = VERMILION


def traces_for(results: Path, scale: str) -> list[Traces]:
    """The panels of the lowest stored seed: the figure shows one run in each panel."""
    kept = load(results, scale)
    first = min((traces.seed for traces in kept), default=None)
    found = {traces.panel: traces for traces in kept if traces.seed == first}
    missing = [panel for panel in PANELS if panel not in found]
    if missing:
        raise UserError(
            f"figure 1 at scale {scale}: these panels are missing: {', '.join(missing)}; "
            f"make it with `lindt reproduce figure1 --scale {scale}`"
        )
    return [found[panel] for panel in PANELS]


def draw_traces(panels: Sequence[Traces]) -> Figure:
    figure = new_figure(3, 2)
    cells = figure.subplots(2, 3).ravel()
    for letter, traces, axes in zip("abcde", panels, cells, strict=False):
        _draw_panel(axes, traces, letter)
    _explain(cells[-1], panels[0])
    return figure


def _draw_panel(axes: Axes, traces: Traces, letter: str) -> None:
    for update in traces.updates:
        _arrow(axes, update.start, update.end, ATTACKER if update.attacker else ORANGE, width=0.9)
    for start, end in pairwise(traces.central_trace):
        _arrow(axes, start, end, BLUE, width=1.3, dots=True)
    for start, end in pairwise(traces.global_trace):
        _arrow(axes, start, end, "black", width=1.5)
    points = [*traces.global_trace, *traces.central_trace, *(update.end for update in traces.updates)]
    axes.plot(*zip(*points, strict=True), linestyle="none", marker="none")  # arrows do not set the limits of the axes
    axes.plot(0, 0, "o", color="black", markersize=3)
    axes.set_aspect("equal", adjustable="datalim")
    axes.margins(0.08)
    told = f"w_div {fmean(traces.w_div):.2f}" + (f", turns by {fmean(traces.turns):.0f}°" if traces.turns else "")
    axes.set_title(f"({letter}) {traces.panel}: {traces.setting}\n{told}", fontsize=FONT, loc="left")
    axes.set_xlabel(f"axis 1 ({traces.shares[0]:.0%} of the variance)", fontsize=FONT - 1)
    axes.set_ylabel(f"axis 2 ({traces.shares[1]:.0%})", fontsize=FONT - 1)
    axes.tick_params(labelsize=FONT - 2)
    axes.spines[["top", "right"]].set_visible(False)


def _arrow(axes: Axes, start: Point, end: Point, colour: str, width: float, dots: bool = False) -> None:
    style = "-|>,head_length=2.6,head_width=1.3"
    patch = FancyArrowPatch(start, end, arrowstyle=style, color=colour, linewidth=width, shrinkA=0, shrinkB=0)
    if dots:
        patch.set_linestyle((0, (1, 1.5)))
    axes.add_patch(patch)


def _explain(axes: Axes, traces: Traces) -> None:
    handles = [
        Line2D([], [], color=ORANGE, label="local updates, w to w_i"),
        Line2D([], [], color=ATTACKER, label="an attacker's"),
        Line2D([], [], color="black", linewidth=1.8, label="global updates, w to the next w"),
        Line2D([], [], color=BLUE, linestyle=":", label="centralized training from the same w"),
    ]
    axes.set_axis_off()
    axes.legend(handles=handles, loc="upper left", frameon=False, fontsize=FONT)
    text = (
        f"{traces.rounds} rounds of 4 clients, w of {traces.parameters:,} weights\n"
        "on the two principal axes of all that is drawn.\n"
        "Axes in units of weight; the dot is where all begin.\n"
        "w_div and the angle between successive steps\nof w are means in all dimensions.\n"
        f"scale: {traces.scale}, seed {traces.seed}"
    )
    axes.text(0.02, 0.45, text, transform=axes.transAxes, va="top", fontsize=FONT - 1, color="#333333")


def caption_of_traces(panels: Sequence[Traces]) -> str:
    one = panels[0]
    lines = [
        f"Figure 1: {one.rounds} real rounds of 4 clients, {one.parameters:,} weights on two principal axes, "
        f"scale: {one.scale}, seed {one.seed}.",
        "Orange: local updates; black: the global trace; dotted blue: centralized training from the same weights.",
        "Axes are fitted on everything a panel shows and have the units of weights.",
        "",
        *(f"  ({letter}) {t.panel}: {t.setting}; {t.command}, commit {t.commit}, {t.date}"
          for letter, t in zip("abcde", panels, strict=False)),
        "",
        f"Drawn by: lindt figure 1 --scale {one.scale}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
