"""An exhibit from what was kept: its sheets, what is missing, what the scale reduces; and the page that is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from lindt.errors import UserError
from lindt.runs.files import write_whole
from lindt_experiments.plans.catalog import Exhibit
from lindt_experiments.plans.keys import content_key
from lindt_experiments.plans.scales import plan_for, reduced
from lindt_experiments.plans.worlds import TASKS
from lindt_experiments.queue.gather import Origin
from lindt_experiments.results.outcomes import Outcome
from lindt_experiments.tables.client_sizes import sizes_sheet
from lindt_experiments.tables.sheets import Sheet, as_markdown
from lindt_experiments.tables.tables import MEANING, ablation_sheets, private_sheets, table_sheets
from lindt_experiments.tables.titles import TASK_TITLES


@final
@dataclass(frozen=True)
class Page:
    sheets: tuple[Sheet, ...]
    remarks: tuple[str, ...]
    made: tuple[str, ...] = ()  # what played the runs it shows


def page_of(
    exhibit: Exhibit, outcomes: Sequence[Outcome], scale: str, seeds: int | None = None, task: str | None = None
) -> Page:
    """What there is to show of an exhibit, of one task or of both; only what the scale's plans of today have made.

    What is missing is counted over `seeds`; without, over as many as the task has kept anything of.
    """
    good = [outcome for outcome in outcomes if outcome.scale == scale and is_current(outcome)]
    tasks = [t for t in TASKS if task in (None, t) and (not exhibit.cells or t in {c.task for c in exhibit.cells})]
    if exhibit.kind == "sizes":
        if scale == "smoke":  # which needs no download
            return Page((sizes_sheet("cifar", seeds=3),), ("SHAKE's plays are looked at in the other scales.",))
        return Page(tuple(sizes_sheet(t) for t in tasks), ())
    if exhibit.kind == "ablation":
        sheets = ablation_sheets(exhibit, good, scale)
    elif exhibit.kind == "private":
        sheets = private_sheets(good, scale, task)
    else:
        sheets = table_sheets(exhibit, good, scale, task)
    reductions = [f"{TASK_TITLES[t]} at scale {scale}: {reduced(t, scale)}." for t in tasks]
    shown = [outcome for outcome in good if outcome.cell[:3] in exhibit.cells and outcome.task in tasks]
    missing = _missing(exhibit, outcomes, shown, seeds, tasks)
    return Page(tuple(sheets), (MEANING, *missing, *reductions), _made(shown))


def _made(shown: Sequence[Outcome]) -> tuple[str, ...]:
    """Runs may have come from several commands, over time."""
    commands = Counter((o.command, o.commit, o.date) for o in shown)
    return tuple(
        f"{count} run{'s' if count > 1 else ''} made by `{command}` at commit {commit}, {date}."
        for (command, commit, date), count in sorted(commands.items(), key=lambda item: (item[0][2], item[0]))
    )


def _missing(
    exhibit: Exhibit, outcomes: Sequence[Outcome], good: Sequence[Outcome], seeds: int | None, tasks: Sequence[str]
) -> list[str]:
    wanted = {t: seeds or max((o.seed + 1 for o in good if o.task == t), default=1) for t in tasks}
    cells = {(*cell, seed) for cell in exhibit.cells if cell.task in tasks for seed in range(wanted[cell.task])}
    missing = cells - {outcome.cell for outcome in good}
    stale = {outcome.cell for outcome in outcomes} & missing
    said = []
    if missing:
        said.append(f"{len(missing)} of {len(cells)} runs are missing.")
    if stale:
        said.append(f"{len(stale)} that were kept are of other plans than today's, and left out.")
    return said


def is_current(outcome: Outcome) -> bool:
    """Whether today's plan of the cell is the one that made it; a scale may have been changed since."""
    try:
        plan = plan_for(outcome.task, outcome.world, outcome.method, outcome.scale, outcome.seed)
    except UserError:  # a world or method that is no more
        return False
    return content_key(plan) == outcome.plan


def write_page(page: Page, exhibit: Exhibit, scale: str, results: Path, origin: Origin) -> Path:
    path = results / "tables" / f"{scale}-{exhibit.name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = page.made or (f"Made by `{origin.command}` at commit {origin.commit}, {origin.date}.",)
    heading = f"{exhibit.name}: {exhibit.title} (scale {scale})"
    write_whole(path, as_markdown(page.sheets, heading, [*made, *page.remarks]).encode())
    return path
