"""The paper's findings as checks of stored outcomes. Each claim holds, fails, is undecided or was not run.

The rules of judgement are in claims/judging.py, the claims in claims/tables.py and claims/figures.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import shorten
from typing import final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lindt.runs.files import write_whole
from lindt_experiments.claims import figures, tables
from lindt_experiments.claims.judging import (
    MOST_SEEDS,
    VERDICTS,
    Answer,
    Cell,
    Claim,
    Results,
    Verdict,
    seeds_to_decide,
)
from lindt_experiments.results.outcomes import SCALES, Outcome

CLAIMS: tuple[Claim, ...] = (*tables.claims(), *figures.claims())
COLOURS: dict[Verdict, str] = {"holds": "green", "fails": "red", "undecided": "yellow", "not run": "dim"}
RULES = (
    "Differences are paired by seed, in points of accuracy unless said otherwise, with 95% t intervals over the seeds. "
    "A gap under 2 points needs 3 seeds to be called; undecided means that the interval contains zero. How many seeds "
    "would decide is estimated for the mean and standard deviation so far; below 3 seeds the deviation is the median "
    "of those at this scale. It is unknown where each seed answers yes or no."
)


@final
@dataclass(frozen=True)
class Row:
    """One claim at one scale."""

    scale: str
    id: str
    where: str
    says: str
    verdict: Verdict
    numbers: str
    seeds: tuple[int, ...]
    exhibit: str  # the table or figure with its runs
    command: str  # the command that plays them
    needed: str = ""  # the number of seeds that would decide an undecided claim, as text


def report(outcomes: Iterable[Outcome], scale: str | None = None) -> list[Row]:
    """Every claim at the scale, or at each scale with outcomes; scales are never mixed."""
    kept = tuple(outcomes)
    found = [name for name in SCALES if any(outcome.scale == name for outcome in kept)]
    return [row for name in ([scale] if scale else found or ["cpu"]) for row in _rows(Results(kept, name))]


def open_claims(outcomes: Iterable[Outcome], scale: str) -> list[tuple[tuple[Cell, ...], int | None]]:
    """For each undecided claim the cells of its undecided parts, and how many seeds would decide it, where known."""
    answers = [(answer, usual) for _, answer, usual in _answers(Results(tuple(outcomes), scale))]
    open_ = [(answer, _counts(answer, usual)) for answer, usual in answers if answer.verdict == "undecided"]
    return [(answer.cells, max(counts) if counts else None) for answer, counts in open_]


def _answers(results: Results) -> list[tuple[Claim, Answer, float | None]]:
    """Each claim with its answer and the usual standard deviation of a gap at this scale."""
    answers = [(claim, claim.answer(results)) for claim in CLAIMS]
    spreads = [spread for _, answer in answers for spread in answer.spread]
    usual = median(spreads) if spreads else None
    return [(claim, answer, usual) for claim, answer in answers]


def _rows(results: Results) -> list[Row]:
    return [_row(claim, answer, results, usual) for claim, answer, usual in _answers(results)]


def _row(claim: Claim, answer: Answer, results: Results, usual: float | None) -> Row:
    command = f"lindt reproduce {claim.made_by} --scale {results.scale}"
    seeds = tuple(sorted(answer.seeds))
    needed = _needed(answer, usual) if answer.verdict == "undecided" else ""
    return Row(
        results.scale,
        claim.id,
        claim.where,
        claim.says,
        answer.verdict,
        answer.numbers,
        seeds,
        claim.made_by,
        command,
        needed,
    )


def _needed(answer: Answer, usual: float | None) -> str:
    """The number of seeds that would decide all undecided gaps of the answer."""
    counts = _counts(answer, usual)
    if counts is None:
        return "an unknown number"
    return str(max(counts)) if max(counts) <= MOST_SEEDS else f"more than {MOST_SEEDS}"


def _counts(answer: Answer, usual: float | None) -> list[int] | None:
    """For each undecided gap the number of seeds that would decide it; None where one of them is not known."""
    counts = [seeds_to_decide(gap.differences, None if gap.unit else usual, gap.small) for gap in answer.open]
    known = [count for count in counts if count is not None]
    return known if known and len(known) == len(counts) else None


def summary(rows: Sequence[Row]) -> str:
    """`12 hold, 3 fail ...` in the order of the verdicts."""
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)


def overview(rows: Sequence[Row]) -> list[str]:
    """At most ten lines: how many claims hold, fail, are undecided and were not run, by scale; and which fail."""
    scales = list(dict.fromkeys(row.scale for row in rows))
    lines = [f"The paper's {len(CLAIMS)} claims, by the scale of the runs:"]
    lines.append(f"{'scale':8}{''.join(f'{verdict:>11}' for verdict in VERDICTS)}")
    for scale in scales:
        counts = Counter(row.verdict for row in rows if row.scale == scale)
        lines.append(f"{scale:8}{''.join(f'{counts[verdict]:>11}' for verdict in VERDICTS)}")
    for scale in scales:
        fails = [row.id for row in rows if row.scale == scale and row.verdict == "fails"]
        lines.append(
            shorten(f"fails at {scale}: {', '.join(fails) or 'none'}", 79, placeholder=" ...", break_on_hyphens=False)
        )
    return lines


def render(outcomes: Iterable[Outcome], scale: str | None = None) -> RenderableType:
    """For the terminal: the overview, then a table for each scale, and the commands of claims that were not run."""
    rows = report(outcomes, scale)
    parts: list[RenderableType] = [Text("\n".join([*overview(rows), ""]), no_wrap=True)]
    for name in dict.fromkeys(row.scale for row in rows):
        here = [row for row in rows if row.scale == name]
        parts.append(Text(f"The paper's claims at scale {name}: {summary(here)}", style="bold"))
        table = Table(box=box.SIMPLE, expand=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("claim", ratio=2)
        table.add_column("numbers", ratio=3)
        table.add_column("seeds", no_wrap=True)
        for row in here:
            if row.verdict != "not run" or row.seeds:  # a part of it may have been run
                says = Text(f"{row.says} ", overflow="fold").append(f"({row.where})", style="dim")
                table.add_row(Text(row.verdict, style=COLOURS[row.verdict]), says, Text(row.numbers), _seeds(row))
        parts += [*([table] if table.rows else []), *_not_run(here)]
    return Group(*parts, Text(RULES, style="dim"))


def _seeds(row: Row) -> str:
    """The seeds that were played; for an undecided claim the number that would decide it."""
    played = ", ".join(map(str, row.seeds)) or "-"
    if row.verdict != "undecided":
        return played
    return f"{played}; {row.needed} would decide"


def _not_run(rows: Sequence[Row]) -> list[Text]:
    commands = dict.fromkeys(row.command for row in rows if row.verdict == "not run")
    return [
        Text(f"not run: {', '.join(r.id for r in rows if r.verdict == 'not run' and r.command == command)}\n")
        .append(f"    {command}", style="dim")
        for command in commands
    ]  # fmt: skip


def markdown(outcomes: Iterable[Outcome], scale: str) -> str:
    """results/claims-<scale>.md."""
    kept = [outcome for outcome in outcomes if outcome.scale == scale]
    rows = report(kept, scale)
    lines = [f"# The paper's claims at scale {scale}", "", f"{summary(rows)}.", "", RULES, ""]
    lines += [f"Reduced: {words}." for words in sorted({o.reduced for o in kept if o.reduced})]
    lines += ["", *_made_from(kept, scale), "", "| verdict | claim | in the paper | numbers | seeds |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        numbers = row.numbers if row.verdict != "not run" or row.seeds else f"`{row.command}`"
        cells = (f"**{row.verdict}**", f"{row.says} (`{row.id}`)", row.where, numbers, _seeds(row))
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write_pages(outcomes: Iterable[Outcome], folder: Path) -> list[Path]:
    """A page for each scale with outcomes."""
    kept = tuple(outcomes)
    paths = []
    for scale in [name for name in SCALES if any(outcome.scale == name for outcome in kept)]:
        path = folder / f"claims-{scale}.md"
        write_whole(path, markdown(kept, scale).encode())
        paths.append(path)
    return paths


def _made_from(outcomes: Sequence[Outcome], scale: str) -> list[str]:
    if not outcomes:
        return ["Nothing has been run yet."]
    commits = ", ".join(sorted({outcome.commit for outcome in outcomes}))
    first, last = min(o.date for o in outcomes), max(o.date for o in outcomes)
    runs = f"{len(outcomes)} runs of {first} to {last}, commits {commits}"
    return [f"Made by `lindt reproduce --claims --scale {scale}` from {runs}."]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")
