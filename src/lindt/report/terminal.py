"""Runs in the terminal: `lindt runs` lists them, `lindt show` prints one's verdict and charts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, final

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lindt.errors import UserError, plain
from lindt.report.reading import (
    Run,
    adapts,
    detection_rule,
    find_runs,
    gain_test,
    method_words,
    read_run,
    repeat_command,
    whole_at,
)
from lindt.report.verdict import (
    VALUES,
    Verdict,
    detection_of,
    detections,
    gain_summary,
    interval,
    points,
    scored_data,
    verdict,
)
from lindt.runs.schema import CHECKS, DETECTION

COLOURS = {"helps": "green", "mended": "green", "hurts": "red", "suspected": "yellow"}


def run_row(run: Run, shown: str) -> dict[str, Any]:
    """A run in a row of a list: plain values, fractions."""
    now, last = gain_summary(run), run.rounds[-1] if run.rounds else None
    rule, test = detection_rule(run.plan), gain_test(run.plan)
    detection = detection_of(last) if last else None
    return {
        "run": shown,
        "name": run.name,
        "state": run.state,
        "changed": last_change(run.folder),
        "method": method_words(run.plan),
        "seed": whole_at(run.plan, "seed"),
        "round": last["round"] if last else 0,
        "rounds": run.planned,
        "delta": last.get("delta") if last else None,
        "beta": now.beta if now else None,
        "median_gain": now.median if now else None,
        "ipr": now.ipr if now else None,
        "worst_tenth": now.worst_tenth if now else None,
        "clearly_better": now.clearly_better if now and now.beta is not None else None,
        "clearly_harmed": now.clearly_harmed if now and now.beta is not None else None,
        "counted_clients": now.clients if now else None,
        "flagged": [line["round"] for line in detections(run.rounds)] if rule else None,
        "metric_in_percent": run.percent,
        "alpha": test.alpha if test else None,
        "detection": None if detection is None else {name: detection.get(name) for name in DETECTION},
        "left_out_clients": sorted(run.excluded),
        "checks": _checks(run),
        "verdict": verdict(run).sentence,
    }


def _checks(run: Run) -> dict[str, Any] | None:
    found = run.about.get("checks")
    return None if found is None else {name: found.get(name) for name in CHECKS}


def run_rows(root: Path) -> list[dict[str, Any]]:
    """A row for every run below a folder: running ones first, then the latest. Unreadable runs have a row, too."""
    rows: list[dict[str, Any]] = []
    for folder in find_runs(root, whole=True):
        shown = str(folder.relative_to(root)) if folder != root else folder.resolve().name
        try:
            rows.append(run_row(read_run(folder), shown))
        except UserError as error:
            rows.append({"run": shown, "state": "unreadable", "changed": last_change(folder), "verdict": str(error)})
    return sorted(rows, key=by_time)


def by_time(row: Mapping[str, Any]) -> tuple[bool, float, str]:
    """The order of runs in a list: running ones first, by name, since all have just changed; then the latest."""
    running = row["state"] == "running"
    return not running, 0.0 if running else -row["changed"], row["run"]


def last_change(folder: Path) -> float:
    """When a run's results were last written, in seconds since 1970; 0 where no file can be found."""
    times = [0.0]
    for name in ("rounds.jsonl", "summary.json", "plan.toml"):
        with suppress(OSError):
            times.append((folder / name).lstat().st_mtime)
    return max(times)


COLUMNS = ("run", "state", "changed", "method", "round", "beta", "worse", "verdict")
LEFT_OUT = ("method", "changed", "beta", "worse", "round")  # where a terminal is narrow, the first of them first
CAPTIONS = {
    "beta": "the mean gain over training alone on test data, in points, in the last scored round",
    "worse": "clients clearly worse off than alone, by the paired test at 95%",
    "verdict": "of the test of the clients' reports, since a round; by Delta the rounds in which it suspected NFL",
}


def runs_table(rows: Sequence[dict[str, Any]], width: int = 120) -> Table:
    """A table of as many columns as `width` has room for; its caption names those that are left out."""
    cells = [dict(zip(COLUMNS, map(plain, _cells(row)), strict=True)) for row in rows]
    needed = {name: max(len(name), *(len(row[name]) for row in cells)) for name in COLUMNS}
    needed |= {"run": 14, "method": min(needed["method"], 12)}  # both may be wrapped
    shown = list(COLUMNS)
    for name in LEFT_OUT:
        if 2 + sum(needed[one] + 2 for one in shown) <= width:  # with the spaces between columns and at both ends
            break
        shown.remove(name)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for name in shown:
        if name in ("run", "method"):
            table.add_column(name, overflow="fold", min_width=needed[name])
        else:
            table.add_column(name, justify="left" if name in ("state", "changed") else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(row[name]) for name in shown))
    captions = [f"{name}: {words}" for name, words in CAPTIONS.items() if name in shown]
    captions += [plain(row["verdict"]) for row in rows if row["state"] == "unreadable"]
    if len(shown) < len(COLUMNS):
        captions.append(f"not shown in a narrow terminal: {', '.join(name for name in COLUMNS if name not in shown)}")
    table.caption = Text("\n".join(captions))
    table.caption_justify = "left"
    return table


def _cells(row: dict[str, Any]) -> list[str]:
    if row["state"] == "unreadable":
        return [row["run"], "unreadable", *[""] * 6]
    of = f"/{row['rounds']}" if row["rounds"] else ""
    worse = "-" if row["clearly_harmed"] is None else f"{row['clearly_harmed']}/{row['counted_clients']}"
    return [
        row["run"],
        row["state"],
        _when(row["changed"]),
        row["method"],
        f"{row['round']}{of}",
        points(row["beta"], row["metric_in_percent"], sign=True),
        worse,
        _verdict_cell(row),
    ]


def _when(changed: float) -> str:
    """The date; for today the time."""
    then = datetime.fromtimestamp(changed)
    return f"{then:%H:%M}" if then.date() == datetime.now().date() else f"{then:%Y-%m-%d}"


def _verdict_cell(row: dict[str, Any]) -> str:
    """`hurts 20` for the test of reports, `flagged 26` for the rule on Delta."""
    if row["detection"] is not None:
        found = row["detection"]["verdict"]
        since = "" if found.get("since") is None else f" {found['since']}"
        return f"{found['state']}{since}"
    if row["flagged"] is None:
        return "-"
    return f"flagged {', '.join(map(str, row['flagged']))}" if row["flagged"] else "not flagged"


def show(console: Console, run: Run) -> None:
    """Print the verdict, the gain and Delta over the rounds, what could not be read, and how to repeat the run."""
    found = verdict(run)
    unwrapped = not console.is_terminal  # a terminal wraps between words
    console.print(_headline(run, found), soft_wrap=unwrapped)
    marks = Marks() if console.encoding.lower().startswith("utf") else ASCII
    width = max(20, min(64, console.width - 12))
    for text in charts(run, marks, width):
        console.print(Text(text), soft_wrap=unwrapped)
    if run.summary and run.summary.get("early_stop"):
        console.print(Text(plain(run.summary["early_stop"]["words"])), soft_wrap=unwrapped)
    if run.summary and run.summary.get("prediction"):
        console.print(
            Text(f"to predict, a client has {plain(run.summary['prediction']['words'])}"), soft_wrap=unwrapped
        )
    if run.summary and run.summary.get("privacy"):
        console.print(Text(f"privacy: {plain(run.summary['privacy']['words'])}"), soft_wrap=unwrapped)
    notes = run.about.get("notes")  # of a run on a Flower app
    for said in notes if isinstance(notes, list) else ():
        if str(said).startswith("score: "):
            console.print(Text(plain(str(said))), soft_wrap=unwrapped)
    for said in run.warnings:
        console.print(Text(f"warning: {plain(said)}", style="yellow"), soft_wrap=unwrapped)
    for said in run.said:
        console.print(Text(f"note: {plain(said)}", style="yellow"), soft_wrap=unwrapped)
    task = run.about.get("task")
    console.print(Text(f"repeat:  {plain(repeat_command(str(run.folder / 'plan.toml'), task))}"), soft_wrap=True)


def _headline(run: Run, found: Verdict) -> Text:
    text = Text(f"{plain(found.sentence)}\n", style=COLOURS.get(found.tone, ""))
    seed = whole_at(run.plan, "seed")
    seeded = [] if seed is None else [f"seed {seed}"]  # a Flower app has none
    text.append(plain(", ".join([run.name, method_words(run.plan), *seeded, run.state])) + "\n", style="dim")
    return text


def charts(run: Run, marks: Marks, width: int) -> list[str]:
    rule, text = detection_rule(run.plan), list[str]()
    span = (run.rounds[0]["round"], run.rounds[-1]["round"]) if run.rounds else (0, 0)
    events = {line["round"]: letter for letter, line in _events(run)}
    tested = [(line["round"], found["verdict"]) for line in run.rounds if (found := detection_of(line))]
    scale = 100 if run.percent else 1
    if tested:
        unit = " in points" if run.percent else ""
        now = f", now {interval(tested[-1][1], run.percent)}" if tested[-1][1].get("gain") is not None else ""
        reported = [(r, scale * found["gain"]) for r, found in tested if found.get("gain") is not None]
        title = f"gain on validation data{unit}{now}"
        text += chart(title, reported, against=0.0, span=span, events=events, width=width, marks=marks, decimals=1)
        text.append("")
    name = rule.statistic if rule else "delta"
    deltas = [(line["round"], line[name]) for line in run.rounds if line.get(name) is not None]
    if rule:
        title = f"{'Delta' if name == 'delta' else name} against epsilon = {rule.epsilon:g}"
        text += chart(title, deltas, against=rule.epsilon, span=span, events=events, width=width, marks=marks)
    else:
        text += chart("Delta", deltas, against=0.0, span=span, width=width, marks=marks)
    betas = [(line["round"], line["scores"].get("beta")) for line in run.scored]
    gains = [(round, scale * beta) for round, beta in betas if beta is not None]
    if gains:
        unit = ", in points" if run.percent else ""
        title = f"mean gain over training alone, on {scored_data(run)}{unit}"
        text += ["", *chart(title, gains, against=0.0, span=span, events=events, width=width, marks=marks, decimals=1)]
    if events:
        on = "recovery on from the next round" if adapts(run.plan) else "this method has no recovery"
        words = LETTERS | {"D": f"D: NFL suspected by Delta, {on}"}
        text += ["", "; ".join(words[letter] for letter in words if letter in events.values())]
    return text


LETTERS = {
    "T": "T: the test begins",
    "W": "W: early warning",
    "+": "+: verdict helps",
    "!": "!: verdict hurts",
    "?": "?: undecided again",
    "D": "D: NFL suspected by Delta",
    "R": "R: recovery on",
    "S": "S: recovery stopped",
}


def _events(run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
    """Letter and line of each event; of two events in one round the chart draws the later one."""
    nothing: dict[str, Any] = {"flag": False, "detections": 0}
    for before, line in zip([nothing, *run.rounds], run.rounds, strict=False):
        now, then = detection_of(line), detection_of(before)
        if now is None and line["detections"] > before["detections"]:
            yield "D", line
        if now is not None:
            old, new = then["verdict"]["state"] if then else "too early", now["verdict"]["state"]
            if old == "too early" != new:
                yield "T", line
            if line["flag"] and not before["flag"]:
                yield "R", line
            if now.get("warning") == line["round"]:
                yield "W", line
            if VALUES[new] != VALUES[old]:
                yield {-1: "!", 0: "?", 1: "+"}[VALUES[new]], line
        if before["flag"] and not line["flag"]:
            yield "S", line


@final
@dataclass(frozen=True)
class Marks:
    """The characters that a chart is drawn with."""

    point: str = "•"
    rule: str = "┄"
    side: str = "│"
    floor: str = "─"
    corner: str = "└"


ASCII = Marks("*", "-", "|", "-", "+")


def chart(
    title: str,
    values: Sequence[tuple[int, float]],
    *,
    against: float,
    span: tuple[int, int],
    events: Mapping[int, str] | None = None,
    width: int = 64,
    height: int = 8,
    marks: Marks = Marks(),  # frozen
    decimals: int = 2,
) -> list[str]:
    """A chart as lines of text. `values` are (round, value) within `span`; `against` is a horizontal line.

    `events` are drawn below the chart, each as one letter.

    Each column is the mean of the rounds that fall into it.
    """
    if not values:
        return [f"{title}: nothing yet"]
    first, last = span
    columns = max(1, min(width, last - first + 1))

    def column(round: int) -> int:
        return (round - first) * columns // (last - first + 1)

    cells: dict[int, list[float]] = {}
    for round, value in values:
        cells.setdefault(column(round), []).append(value)
    means = {x: sum(found) / len(found) for x, found in cells.items()}
    low, high = min(against, *means.values(), 0.0), max(against, *means.values())
    high = high if high > low else low + 1

    def row(value: float) -> int:
        return round_half((high - value) / (high - low) * (height - 1))

    picture = [[" "] * columns for _ in range(height)]
    picture[row(against)] = [marks.rule] * columns
    for x, value in means.items():
        picture[row(value)][x] = marks.point
    numbers = {0: high, row(against): against, height - 1: low}
    labels = [f"{numbers[y]:.{decimals}f}" if y in numbers else "" for y in range(height)]
    room = max(len(label) for label in labels)
    text = [
        title,
        *(f"{label:>{room}} {marks.side}{''.join(cells)}" for label, cells in zip(labels, picture, strict=True)),
    ]
    text.append(" " * room + f" {marks.corner}" + marks.floor * columns)
    ends = (
        f"{first}{str(last).rjust(max(len(str(last)) + 1, columns - len(str(first))))}" if last > first else f"{first}"
    )
    text.append(" " * (room + 2) + ends + "  round")
    noted = [" "] * columns
    for round, letter in (events or {}).items():
        if first <= round <= last:
            noted[column(round)] = letter
    if "".join(noted).strip():
        text.insert(-1, " " * (room + 2) + "".join(noted).rstrip())
    return text


def round_half(value: float) -> int:
    """Round to the nearest row. Python's `round` rounds halves to even numbers, which bends straight lines."""
    return int(value + 0.5)
