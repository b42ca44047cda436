"""The paper's figures, drawn from results/: SVG and PDF, with a caption of commands and dates. Never imports torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from lindt.errors import UserError
from lindt.runs.files import write_whole
from lindt_experiments.claims.judging import Cell, Results
from lindt_experiments.figures.panels import PANELS, Found
from lindt_experiments.figures.style import FONT, new_figure
from lindt_experiments.figures.traces import caption_of_traces, draw_traces, traces_for
from lindt_experiments.results.outcomes import Outcome, load

# Figures with several panels; in rows, as the paper arranges them.
ROWS: dict[str, tuple[tuple[str, ...], ...]] = {
    "3": (("3a", "3b"),),
    "5": (("5a", "5b"),),
    "6": (("6a", "6b"),),
    "7": (("7a",), ("7b", "7c")),
}
TITLES = {
    "1": "traces of four clients' updates: normal FL and four negative effects",
    "3": "detection of NFL and recovery",
    "5": "local accuracy over the rounds",
    "6": "Δ on SHAKE",
    "7": "Δ in three processes",
    "8": "Δ where the attacks end",
    "9": "recovery where the attacks end",
}
METADATA = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}


def names() -> dict[str, str]:
    """The names of all figures and panels, with their titles."""
    found = dict(TITLES)
    for whole, rows in ROWS.items():
        found |= {panel: PANELS[panel].title.split(") ")[-1] for row in rows for panel in row if panel != whole}
    return dict(sorted(found.items()))


def _known(name: str) -> str:
    """The name without its prefix: `figure3a` and `3a` are the same."""
    plain = name.removeprefix("figure")
    if plain not in names():
        raise UserError(f"figure {name!r}: choose among {', '.join(names())}, all")
    return plain


def draw(name: str, outcomes: Iterable[Outcome], scale: str, partial: bool = False) -> Figure:
    """Draw one of figures 3 and 5 to 9, or one panel; with `partial` also where runs are missing."""
    rows = ROWS.get(name, ((name,),))
    found = _found(name, rows, outcomes, scale, partial)
    columns = max(len(row) for row in rows)
    figure = new_figure(columns if columns > 1 else 1.25, len(rows))
    grid = figure.add_gridspec(len(rows), 2 * columns)
    for y, row in enumerate(rows):
        for x, panel in enumerate(row):
            start = 2 * x + columns - len(row)  # a shorter row is centred
            PANELS[panel].draw(figure.add_subplot(grid[y, start : start + 2]), found)
    if name == "7":  # the same axes for all, to compare them
        bounds = [axes.get_ylim() for axes in figure.axes]
        for axes in figure.axes:
            axes.set_ylim(min(low for low, _ in bounds), max(high for _, high in bounds))
    figure.supxlabel(_footer(found, scale), fontsize=FONT - 2, color="#555555")
    return figure


def write(name: str, results: Path, scale: str, out: Path, png: bool = False, partial: bool = False) -> list[Path]:
    """Write the figure as SVG and PDF, and its caption as text: scale, commands, commits and dates."""
    plain = _known(name)
    if plain == "1":
        panels = traces_for(results, scale)
        figure, caption = draw_traces(panels), caption_of_traces(panels)
    else:
        outcomes = load(results, scale)
        figure, caption = draw(plain, outcomes, scale, partial), _caption(plain, outcomes, scale, partial)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context({"svg.hashsalt": "lindt"}):  # the same bytes for the same results
        for kind in ("svg", "pdf", *(["png"] if png else [])):
            path = out / f"figure{plain}-{scale}.{kind}"
            told = {"svg": {"Description": caption}, "pdf": {"Subject": caption}, "png": {"Description": caption}}
            figure.savefig(path, dpi=200, metadata=METADATA[kind] | told[kind] | {"Title": f"Figure {plain}, {scale}"})
            written.append(path)
    text = out / f"figure{plain}-{scale}.txt"
    write_whole(text, caption.encode())
    return [*written, text]


def _found(name: str, rows: Sequence[Sequence[str]], outcomes: Iterable[Outcome], scale: str, partial: bool) -> Found:
    results = Results(tuple(outcomes), scale)
    cells = dict.fromkeys(cell for row in rows for panel in row for cell in PANELS[panel].lines)
    found = {cell: [outcome for _, outcome in sorted(results.of(cell).items())] for cell in cells}
    missing = [" ".join(cell) for cell, kept in found.items() if not kept]
    drawable = all(any(found[cell] for cell in PANELS[panel].lines) for row in rows for panel in row)
    if missing and not (partial and drawable):
        whole = name.rstrip("abc")
        rest = ", or draw the stored part with --partial" if drawable else ""
        raise UserError(
            f"figure {name} at scale {scale}: these runs are missing: {', '.join(missing)}; "
            f"make it with `lindt reproduce figure{whole} --scale {scale}`{rest}"
        )
    found = {cell: kept for cell, kept in found.items() if kept}
    _check_alike(name, found, scale)
    return found


def _check_alike(name: str, found: Found, scale: str) -> None:
    """Refuse runs of different sizes: the scale may have been changed between them."""
    sizes: dict[str, set[tuple[object, ...]]] = {}
    for (task, _, _), kept in found.items():
        sizes.setdefault(task, set()).update((o.rounds, o.epsilon, o.patience, o.reduced) for o in kept)
    odd = [task for task, different in sizes.items() if len(different) > 1]
    if odd:
        raise UserError(
            f"figure {name} at scale {scale}: its runs of {', '.join(odd)} are of different sizes, as the scale was "
            f"changed in between; make it again with `lindt reproduce figure{name.rstrip('abc')} --scale {scale}`"
        )


def _footer(found: Found, scale: str) -> str:
    seeds: dict[str, set[int]] = {}
    for (task, _, _), kept in found.items():
        seeds.setdefault(task, set()).update(outcome.seed for outcome in kept)
    alike = len(set(map(frozenset, seeds.values()))) == 1
    told = dict.fromkeys(_counted(mine) + ("" if alike else f" ({task.upper()})") for task, mine in seeds.items())
    several = any(len(kept) > 1 for kept in found.values())
    band = "; lines are means over seeds, bands go from the lowest to the highest" if several else ""
    return f"scale: {scale}, {', '.join(told)}{band}"


def _counted(seeds: Collection[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, sorted(seeds)))}"


def _caption(name: str, outcomes: Iterable[Outcome], scale: str, partial: bool) -> str:
    rows = ROWS.get(name, ((name,),))
    found = _found(name, rows, outcomes, scale, partial)
    missing = dict.fromkeys(cell for row in rows for panel in row for cell in PANELS[panel].lines if cell not in found)
    kept = [outcome for outcomes in found.values() for outcome in outcomes]
    titles = [PANELS[panel].title for row in rows for panel in row]
    title = names()[name]
    lines = [
        f"Figure {name}: {title}.",
        *(f"{text}." for text in titles if len(titles) > 1),
        _footer(found, scale) + ".",
    ]
    lines += [f"Not run: {', '.join(' '.join(cell) for cell in missing)}."] if missing else []
    lines += [f"Reduced: {words}." for words in dict.fromkeys(outcome.reduced for outcome in kept if outcome.reduced)]
    lines += ["", "Runs:", *(_run_line(cell, runs) for cell, runs in found.items()), ""]
    lines.append(f"Drawn by: lindt figure {name} --scale {scale}{' --partial' if missing else ''}")
    return "\n".join(lines) + "\n"


def _run_line(cell: Cell, runs: Sequence[Outcome]) -> str:
    seeds = ", ".join(str(outcome.seed) for outcome in runs)
    told = "; ".join(dict.fromkeys(f"{o.command}, commit {o.commit}, {o.date}" for o in runs))
    return f"  {' '.join(cell)}, seed {seeds}: {told}"
