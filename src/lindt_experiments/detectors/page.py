"""The page of the scoreboard: docs/detectors.md with its plot, written from the stored lines.

The page has the tables that most readers need. The others are written to results/tables/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from matplotlib import rc_context
from matplotlib.figure import Figure

from lindt.runs.files import write_whole
from lindt_experiments.detectors import null_levels
from lindt_experiments.detectors.judgement import (
    BINS,
    DETECTORS,
    LIED,
    Goal,
    Judgement,
    Outcomes,
    goals,
    judge,
    part,
    reader_error,
    with_server_statistics,
    within,
)
from lindt_experiments.detectors.readings import MOMENTS
from lindt_experiments.detectors.statistics import Share
from lindt_experiments.figures.style import BLUE, FONT, GREEN, GREY, ORANGE, PINK, SKY, VERMILION, YELLOW, new_figure
from lindt_experiments.tables.sheets import Sheet, as_markdown

Nulls = dict[str, Any] | None
HEADING: Final = "Detectors, side by side"
COLOURS: Final = {
    "gain": BLUE,
    "gain-median": GREEN,
    "warning": ORANGE,
    "fl-guard": PINK,
    "delta": VERMILION,
    "delta-best": GREY,
    "cosine": YELLOW,
    "cosine-recent": SKY,
    "reader": "black",
}
SHORT: Final = {"gain-median": "gain, median", "cosine": "cosine", "cosine-recent": "cosine, recent"}  # in the plot
TASKS: Final = {
    "digits": "digits",
    "mnist": "MNIST, 14 x 14",
    "generated": "generated clusters",
    "cancer": "breast cancer",
    "camps": "two camps",
    "cifar": "CIFAR-10, `cpu`",
    "shake": "Shakespeare, `cpu`",
}
MEANING: Final = (
    "Each run is FedAvg, recorded once; every detector is replayed over the same reports. A run is negative if the "
    "mean beta of its last ten scored rounds, over the clients that do not attack, is below 0; the other runs are "
    "healthy. *Detected*: negative runs with an alarm in any round. *False alarms*: healthy runs with an alarm in any "
    "round, also if beta was negative in that round and rose later. *Alarms at negative beta*: of the alarms of all "
    "runs, the share that came in a round in which the true beta was negative. *Delay*: the median round of the alarm "
    "in detected negative runs, as a share of the rounds. In brackets: exact 95% intervals (Clopper and Pearson)."
)
REST: Final = (
    "the gain test by task, AUC over the rounds, detection by the size of the gain, federations outside of the grid, "
    "the design part, and the level and power of the test"
)
SHOWN: Final = 3  # the first of the sheets stand on the page in docs/, the others in results/tables/


def path_of(results: Path, scale: str) -> Path:
    """The path of the page: in docs/, where docs/ exists; that of the smoke scale is stored with the tables."""
    docs = results.resolve().parent / "docs"
    if scale == "cpu" and docs.is_dir():
        return docs / "detectors.md"
    return results / "tables" / f"{scale}-detectors.md"


def write(kept: Outcomes, scale: str, results: Path) -> Path:
    """Write the page and its plot, from all stored outcomes."""
    path, nulls = path_of(results, scale), null_levels.read(results, scale)
    tables = results / "tables" / f"{scale}-detectors.md"
    for folder in (path.parent, tables.parent):
        folder.mkdir(parents=True, exist_ok=True)
    plot = path.with_suffix(".svg")
    commits = ", ".join(sorted({one.commit for one in kept}))
    dates = sorted({one.date for one in kept})
    made = (
        f"Written by `lindt reproduce detectors --scale {scale}` from `results/detectors-{scale}.jsonl`; "
        f"{len(kept)} runs, {dates[0]} to {dates[-1]}, commit {commits}."
    )
    picture, every = f"![AUC over the rounds, and detection by the size of the gain]({plot.name})", sheets(kept, nulls)
    if path == tables:
        write_whole(path, as_markdown(every, HEADING, (MEANING, picture, *conclusions(kept, nulls), made)).encode())
    else:
        origin = (answer(kept), MEANING, picture, f"{made} [More tables](../results/tables/{tables.name}): {REST}.")
        write_whole(path, as_markdown(every[:SHOWN], HEADING, origin).encode())
        back = ("The other tables of [detectors](../../docs/detectors.md), where the terms are explained.", made)
        write_whole(tables, as_markdown(every[SHOWN:], f"{HEADING}: more tables", back).encode())
    full, _ = with_server_statistics(kept)
    with rc_context({"svg.hashsalt": "lindt", "svg.fonttype": "none"}):
        draw(full).savefig(plot, format="svg", metadata={"Date": None})
    return path


def answer(kept: Outcomes) -> str:
    """The results of the default and of the paper's rule on the judged part, in one sentence."""
    judged = part(with_server_statistics(kept)[0], "judged")
    ours, papers = judge(judged, "gain"), judge(judged, "delta")
    return (
        f"On {len(judged)} federations that it was not designed on, the default test of gains detects "
        f"{_percent(ours.detected)} of the negative ones, with false alarms in {_percent(ours.false)} of the healthy "
        f"ones. The paper's rule detects {_percent(papers.detected)}, with false alarms in {_percent(papers.false)}."
    )


def _percent(share: Share) -> str:
    return "-" if share.value is None else f"{100 * share.value:.{0 if share.value > 0.1 else 1}f}%"


def conclusions(kept: Outcomes, nulls: Nulls = None) -> tuple[str, ...]:
    """The goals that are reached and those that are not, as text."""
    full, _ = with_server_statistics(kept)
    asked = _asked(full, nulls)
    told = {
        "Reached": [goal for goal in asked if goal.reached],
        "**Not reached**": [goal for goal in asked if goal.reached is False],
        "Not measured": [goal for goal in asked if goal.reached is None],
    }
    return tuple(
        f"{words}: " + "; ".join(f"{goal.words} {goal.measured}, asked {goal.wanted}" for goal in found) + "."
        for words, found in told.items()
        if found
    )


def sheets(kept: Outcomes, nulls: Nulls = None) -> list[Sheet]:
    full, thresholds = with_server_statistics(kept)
    judged = part(full, "judged")
    found = [
        _goals(full, nulls),
        _comparison(judged, "The judged part: every detector", DETECTORS, _thresholds(thresholds)),
        _lies(judged),
        _by_task(judged),
        _areas(judged),
        _bins(judged),
        *_stress(full),
        _comparison(part(full, "design"), "The design part, for comparison", DETECTORS),
        _counts(full),
    ]
    return [*found, *null_levels.sheets(nulls)] if nulls else found


def _thresholds(chosen: dict[str, float]) -> tuple[str, ...]:
    epsilon = f"The best single epsilon is {chosen['delta-best']:.3g}."
    if "cosine" not in chosen:
        return epsilon, "The cosine has no row: no threshold can be chosen while the design part lacks its curve."
    return epsilon, (
        f"The cosine is the mean over pairs of clients of a round. Low is below {chosen['cosine']:.2f} in a round and "
        f"below {chosen['cosine-recent']:.2f} over a tenth of the rounds, the best thresholds of the design part."
    )


def _covered(outcomes: Outcomes, which: dict[str, str]) -> tuple[str, ...]:
    """A sentence for each detector that has fewer runs than the others."""
    some = [(words, [one for one in outcomes if name in one.readings]) for name, words in which.items()]
    return tuple(
        f"Only {len(mine)} of {len(outcomes)} runs have this row's values, {_counted(mine)[:-1]}: {words}."
        for words, mine in some
        if 0 < len(mine) < len(outcomes)
    )


def _goals(outcomes: Outcomes, nulls: Nulls) -> Sheet:
    reached = {True: "yes", False: "**no**", None: "not measured"}
    rows = tuple((goal.words, goal.wanted, goal.measured, reached[goal.reached]) for goal in _asked(outcomes, nulls))
    return Sheet("What the gain test must reach on the judged part", ("", "asked", "measured", "reached"), rows)


def _asked(outcomes: Outcomes, nulls: Nulls) -> list[Goal]:
    """The goals of the test, the level under the exact nulls last."""
    words = 'false "hurts" under the exact nulls, the worst case'
    if nulls is None:
        return [*goals(outcomes), Goal(words, "at most alpha", "-", None)]
    worst = null_levels.worst(nulls)
    reached = worst.value is not None and worst.value <= nulls["alpha"]
    return [*goals(outcomes), Goal(words, f"at most {nulls['alpha']:g}", str(worst), reached)]


def _counted(outcomes: Outcomes) -> str:
    negative = sum(one.negative for one in outcomes)
    return f"{negative} negative and {len(outcomes) - negative} healthy runs."


def _comparison(outcomes: Outcomes, title: str, which: dict[str, str], remarks: tuple[str, ...] = ()) -> Sheet:
    columns = (
        "detector",
        "detected",
        "false alarms",
        "at the end: detected",
        "false",
        "delay",
        "alarms at negative beta",
    )
    rows = tuple(_row(judge(outcomes, name), words) for name, words in which.items() if _known(outcomes, name))
    return Sheet(title, columns, rows, (_counted(outcomes), *_covered(outcomes, which), *remarks))


def _known(outcomes: Outcomes, detector: str) -> bool:
    return any(detector in one.readings for one in outcomes)


def _row(found: Judgement, words: str) -> tuple[str, ...]:
    delay = "-" if found.delay is None else f"{found.delay:.2f}"
    ends = (_short(found.ends_hurting), _short(found.ends_false))
    return (words, str(found.detected), str(found.false), *ends, delay, str(found.true_then))


def _short(found: Share) -> str:
    return "-" if found.value is None else f"{found.value:.3f}"


def _areas(outcomes: Outcomes) -> Sheet:
    rows = tuple(
        (words, *("-" if area is None else f"{area:.3f}" for area in judge(outcomes, name).areas))
        for name, words in DETECTORS.items()
        if _known(outcomes, name)
    )
    columns = ("detector", *(f"at {moment}" for moment in MOMENTS))
    return Sheet(
        "AUC of the evidence at a share of the rounds, judged part", columns, rows, _covered(outcomes, DETECTORS)
    )


def _bins(outcomes: Outcomes) -> Sheet:
    rows = []
    for name, words in DETECTORS.items():
        if not _known(outcomes, name):
            continue
        cells = [judge(within(outcomes, *edges), name) for edges in BINS]
        rows.append((f"{words}: detected", *(str(cell.detected) for cell in cells)))
        rows.append((f"{words}: false alarms", *(str(cell.false) for cell in cells)))
    remarks = tuple(
        f"{words} points: {_counted(within(outcomes, *edges))}" for words, edges in zip(_edges(), BINS, strict=True)
    )
    remarks = (*remarks, *_covered(outcomes, DETECTORS))
    return Sheet("By the size of the gain, |beta| in points", ("", *_edges()), tuple(rows), remarks)


def _edges() -> tuple[str, ...]:
    return tuple(f"{100 * low:g} to {100 * high:g}" if high < 1 else f"over {100 * low:g}" for low, high in BINS)


def _lies(outcomes: Outcomes) -> Sheet:
    remark = (
        "A quarter of all clients lie in every report: the attackers, and as many others as make up a quarter. Runs "
        "with more attackers than that are left out."
    )
    some = [one for one in outcomes if _known([one], "lie-1 gain")]
    plain = {name: DETECTORS[name] for name in ("gain", "gain-median", "warning")}
    return _comparison(some, "Clients that lie in their reports", plain | LIED, (remark,))


def _by_task(outcomes: Outcomes) -> Sheet:
    rows = []
    for task, words in TASKS.items():
        mine = [one for one in outcomes if one.task == task]
        if mine:
            gain, reader = judge(mine, "gain"), judge(mine, "reader")
            counts = (str(sum(one.negative for one in mine)), str(sum(not one.negative for one in mine)))
            samples = sorted(one.samples for one in mine)[len(mine) // 2]
            cells = (str(gain.detected), str(gain.false), _short(reader.detected), _short(reader.false))
            rows.append((words, *counts, str(samples), *cells, *_errors(mine)))
    columns = (
        "task",
        "negative",
        "healthy",
        "validation samples",
        "detected",
        "false alarms",
        "reader: detected",
        "false",
        "mean error",
        "RMS error",
    )
    bias, rms = _errors(outcomes)
    remark = (
        "Validation samples: the median of a run. Errors: the gain in the last reports less the true beta on "
        f"test data, in points; over all tasks {bias} on average, {rms} RMS."
    )
    return Sheet("The gain test by task, judged part", columns, tuple(rows), (remark,))


def _errors(outcomes: Outcomes) -> tuple[str, str]:
    """The mean and RMS error of the reports, in points."""
    found = reader_error(outcomes)
    return ("-", "-") if found is None else (f"{100 * found[0]:+.1f}", f"{100 * found[1]:.1f}")


def _stress(outcomes: Outcomes) -> list[Sheet]:
    found = []
    for kind, words in (("rate", "a learning rate of 0.6"), ("noise", "noise of 0.1"), ("model", "another model")):
        mine = [one for one in part(outcomes, "stress") if one.configuration.startswith(f"stress-{kind}-")]
        if mine:
            found.append(_comparison(mine, f"Outside of the grid: {words}", DETECTORS))
    return found


def _counts(outcomes: Outcomes) -> Sheet:
    rows = []
    for task, words in TASKS.items():
        mine = [one for one in outcomes if one.task == task]
        if mine:
            cells = [str(sum(one.part == name for one in mine)) for name in ("design", "judged", "stress")]
            seconds = sorted(one.seconds for one in mine)[len(mine) // 2]
            rows.append((words, *cells, f"{seconds:.1f}"))
    columns = ("task", "design", "judged", "stress", "seconds of rounds, median")
    return Sheet("Runs", columns, tuple(rows))


def draw(outcomes: Outcomes) -> Figure:
    """AUC over the rounds; detected and false alarms by |beta|."""
    judged = part(outcomes, "judged")
    figure = new_figure(3, 1)
    left, middle, right = (figure.add_subplot(1, 3, place) for place in (1, 2, 3))
    for name, words in DETECTORS.items():
        if not _known(judged, name):
            continue
        colour, label = COLOURS[name], SHORT.get(name, words.split(",")[0].split(":")[0])
        areas = judge(judged, name).areas
        left.plot(range(len(MOMENTS)), [_number(area) for area in areas], "o-", color=colour, label=label, markersize=3)
        cells = [judge(within(judged, *edges), name) for edges in BINS]
        middle.plot(range(len(BINS)), [_number(c.detected.value) for c in cells], "o-", color=colour, markersize=3)
        right.plot(range(len(BINS)), [_number(c.false.value) for c in cells], "o-", color=colour, markersize=3)
    right.axhline(0.05, color=GREY, linestyle=":", linewidth=1)
    for axes, title, ticks, below in (
        (left, "AUC", tuple(MOMENTS), "share of the rounds"),
        (middle, "negative runs detected", _edges(), "|beta|, points"),
        (right, "healthy runs with an alarm", _edges(), "|beta|, points"),
    ):
        axes.set_title(title, fontsize=FONT, loc="left")
        axes.set_xticks(range(len(ticks)), ticks, fontsize=FONT - 1)
        axes.set_xlabel(below, fontsize=FONT)
        axes.set_ylim(-0.03 if axes is not left else 0.4, 1.03)
        axes.tick_params(labelsize=FONT - 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
    figure.legend(loc="outside lower center", ncols=4, fontsize=FONT - 1, frameon=False)
    return figure


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
