"""A picture of the allocation (Appendix C1): how many samples of each class each client holds.

Legend: N clients, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from numpy.typing import NDArray

BENIGN, ATTACKER = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermillion: different to colour-blind readers too
FONT, SMALL = 8.0, 6.0  # points
POINTS = 72.0  # an inch
MOST_BARS = 1000


def draw_labels(
    counts_NC: NDArray[np.int64],
    path: Path | str,
    class_names: Sequence[str] | None = None,
    roles: Sequence[str] | None = None,
    attackers: frozenset[int] = frozenset(),
) -> None:
    """Write the picture as PNG, PDF or SVG, by the suffix of `path`."""
    label_figure(counts_NC, class_names, roles, attackers).savefig(path, dpi=150)


def label_figure(
    counts_NC: NDArray[np.int64],
    class_names: Sequence[str] | None = None,
    roles: Sequence[str] | None = None,
    attackers: frozenset[int] = frozenset(),
) -> Figure:
    """The label distribution of every client as a heat map, the client's size in a bar above it.

    `roles` are names for the clients instead of their numbers, such as Shakespeare's speaking roles. The colour
    scale is logarithmic, because the amounts are log-normal; white means no sample.
    """
    clients, classes = counts_NC.shape
    names_C = list(class_names) if class_names is not None else [str(c) for c in range(classes)]
    names_N = list(roles) if roles is not None else [str(i) for i in range(clients)]
    if (len(names_N), len(names_C)) != (clients, classes):
        given = f"{len(names_N)} roles and {len(names_C)} class names"
        raise ValueError(f"{given} for {clients} clients and {classes} classes; give one each")

    width, height = min(11.0, max(5.5, 0.12 * clients + 2.5)), min(9.0, max(2.0, 0.2 * classes))
    figure = Figure(figsize=(width, height + 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    bars, heat = figure.subplots(2, 1, sharex=True, height_ratios=(1.2, height))
    _draw_sizes(bars, counts_NC.sum(axis=1), attackers)
    _draw_heat(figure, heat, counts_NC)

    _name(heat, "y", names_C, 0.9 * height, width=1)
    # Numbers are horizontal and need room for their digits; names of roles are vertical and need one line each.
    digits = max(len(name) for name in names_N)
    _name(heat, "x", names_N, 0.75 * width, width=1 if roles is not None else digits)
    if roles is not None:
        heat.tick_params(axis="x", labelrotation=90)
    heat.set_xlabel("client" if roles is None else "client (role)")
    heat.set_ylabel("class")
    figure.suptitle(f"Label distribution of {clients} clients over {classes} classes", fontsize=FONT + 3)
    return figure


def _draw_sizes(axes: Axes, sizes_N: NDArray[np.int64], attackers: frozenset[int]) -> None:
    hostile_N = np.isin(np.arange(len(sizes_N)), list(attackers))
    if len(sizes_N) <= MOST_BARS:
        axes.bar(range(len(sizes_N)), sizes_N, width=0.8, color=np.where(hostile_N, ATTACKER, BENIGN).tolist())
    else:  # a bar is thinner than a pixel, and takes matplotlib a millisecond
        places = np.arange(len(sizes_N))
        for mine_N, colour in ((~hostile_N, BENIGN), (hostile_N, ATTACKER)):
            axes.vlines(places[mine_N], 0, sizes_N[mine_N], colors=colour, linewidth=0.5)
        axes.set_ylim(bottom=0)
    axes.set_ylabel("samples")
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_thousands))
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.tick_params(labelsize=FONT)
    axes.spines[["top", "right"]].set_visible(False)
    if attackers:
        # A triangle, too: a small client's bar is too low to show its colour, and print may be grey.
        where, below = sorted(attackers), axes.get_xaxis_transform()
        (mark,) = axes.plot(
            where, [-0.07] * len(where), "^", color=ATTACKER, markersize=4, transform=below, clip_on=False
        )
        mark.set_label("attacker")
        handles = [Patch(color=BENIGN, label="benign"), mark]
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=FONT)


def _draw_heat(figure: Figure, axes: Axes, counts_NC: NDArray[np.int64]) -> None:
    held_CN = np.ma.masked_equal(counts_NC.T, 0)
    most = max(2, int(counts_NC.max(initial=0)))  # a logarithmic scale needs two ends
    scale = LogNorm(vmin=1, vmax=most)
    image = axes.imshow(held_CN, aspect="auto", interpolation="nearest", cmap="viridis_r", norm=scale)
    axes.tick_params(labelsize=FONT)
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.05, aspect=7 * figure.get_figheight())
    bar.set_label("samples (white: none)", fontsize=FONT + 1)
    powers = [10**p for p in range(len(str(most)))]
    bar.ax.yaxis.set_major_locator(FixedLocator([1, *(p for p in powers[1:] if 2 * p <= most), most]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_thousands))
    bar.ax.tick_params(labelsize=FONT)


def _name(axes: Axes, side: Literal["x", "y"], names: list[str], inches: float, width: float) -> None:
    """Tick labels, `width` font sizes each: smaller where that keeps them apart, else only every step-th."""
    room = inches * POINTS / len(names) / (1.1 * width)
    step = next(step for power in count() for step in (10**power, 2 * 10**power, 5 * 10**power) if step * room >= SMALL)
    places = range(0, len(names), step)
    tick = axes.set_xticks if side == "x" else axes.set_yticks
    # Shakespeare's classes are characters: a line break and a dollar sign must be drawn as characters.
    tick(places, [names[p].replace("\n", "\\n") for p in places], parse_math=False)
    axes.tick_params(axis=side, labelsize=min(FONT, step * room))


def _thousands(value: float, _: object) -> str:
    return f"{value:,.0f}"
