"""The paper's findings as checks over kept outcomes, claim by claim: holds, fails, undecided or not run.

How one is judged stands in claims/judging.py, what is claimed in claims/tables.py and claims/figures.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lindt.runs.files import write_whole
from lindt_experiments.claims import figures, tables
from lindt_experiments.claims.judging import VERDICTS, Claim, Results, Verdict
from lindt_experiments.results.outcomes import SCALES, Outcome

CLAIMS: tuple[Claim, ...] = (*tables.claims(), *figures.claims())
COLOURS: dict[Verdict, str] = {"holds": "green", "fails": "red", "undecided": "yellow", "not run": "dim"}
RULES = (
    "Differences are paired by seed, in points of accuracy unless said otherwise, with 95% t intervals over the seeds. "
    "A gap under 2 points needs 3 seeds to be called; undecided means that the interval contains zero."
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
    command: str  # what runs it


def report(outcomes: Iterable[Outcome], scale: str | None = None) -> list[Row]:
    """Every claim at the scale, or at each scale of which there are outcomes; scales are never mixed."""
    kept = tuple(outcomes)
    found = [name for name in SCALES if any(outcome.scale == name for outcome in kept)]
    return [_row(claim, Results(kept, name)) for name in ([scale] if scale else found or ["cpu"]) for claim in CLAIMS]


def _row(claim: Claim, results: Results) -> Row:
    answer = claim.answer(results)
    command = f"lindt reproduce {claim.made_by} --scale {results.scale}"
    seeds = tuple(sorted(answer.seeds))
    return Row(results.scale, claim.id, claim.where, claim.says, answer.verdict, answer.numbers, seeds, command)


def summary(rows: Sequence[Row]) -> str:
    """`12 hold, 3 fail ...` in the order of the verdicts."""
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)


def render(outcomes: Iterable[Outcome], scale: str | None = None) -> RenderableType:
    """For the terminal: a table a scale; what was not run is listed by the command that runs it."""
    rows = report(outcomes, scale)
    parts: list[RenderableType] = []
    for name in dict.fromkeys(row.scale for row in rows):
        here = [row for row in rows if row.scale == name]
        parts.append(Text(f"The paper's claims at scale {name}: {summary(here)}", style="bold"))
        table = Table(box=box.SIMPLE, expand=True)
        table.add_column("verdict", no_wrap=True)
        table.add_column("claim", ratio=2)
        table.add_column("numbers", ratio=3)
        table.add_column("seeds", no_wrap=True)
        for row in here:
            if row.verdict != "not run" or row.seeds:  # a part may have been run
                says = Text(f"{row.says} ", overflow="fold").append(f"({row.where})", style="dim")
                table.add_row(Text(row.verdict, style=COLOURS[row.verdict]), says, Text(row.numbers), _seeds(row))
        parts += [*([table] if table.rows else []), *_not_run(here)]
    return Group(*parts, Text(RULES, style="dim"))


def _seeds(row: Row) -> str:
    return ", ".join(map(str, row.seeds)) or "-"


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
    """A page for each scale of which there are outcomes."""
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
