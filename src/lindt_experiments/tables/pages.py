"""The page of an exhibit, from stored outcomes: its sheets, the missing runs, and the reduced settings."""

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
from lindt_experiments.plans.scales import only_task, plan_for, reduced
from lindt_experiments.plans.worlds import TASKS
from lindt_experiments.queue.gather import Origin
from lindt_experiments.results.outcomes import Outcome
from lindt_experiments.tables.client_sizes import sizes_sheet
from lindt_experiments.tables.sheets import Sheet, as_markdown
from lindt_experiments.tables.tables import MEANING, ablation_sheets, choices_sheet, private_sheets, table_sheets
from lindt_experiments.tables.titles import TASK_TITLES


@final
@dataclass(frozen=True)
class Page:
    sheets: tuple[Sheet, ...]
    remarks: tuple[str, ...]
    made: tuple[str, ...] = ()  # the commands that played its runs


def page_of(
    exhibit: Exhibit, outcomes: Sequence[Outcome], scale: str, seeds: int | None = None, task: str | None = None
) -> Page:
    """The page of an exhibit, of one task or of both; only outcomes of the present plans of the scale are used.

    Missing runs are counted over `seeds`; by default over the seeds that have any outcome of the task.
    """
    task = task or only_task(scale)
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
    elif exhibit.kind == "choices":
        sheets = [choices_sheet(good, scale)]
    else:
        sheets = table_sheets(exhibit, good, scale, task)
    reductions = [f"{TASK_TITLES[t]} at scale {scale}: {reduced(t, scale)}." for t in tasks]
    shown = [outcome for outcome in good if outcome.cell[:3] in exhibit.cells and outcome.task in tasks]
    missing = _missing(exhibit, outcomes, shown, seeds, tasks)
    return Page(tuple(sheets), (MEANING, *missing, *reductions), _made(shown))


def _made(shown: Sequence[Outcome]) -> tuple[str, ...]:
    """The commands, commits and dates of the runs, which may be several."""
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
    """Whether an outcome is of the present plan of its cell; the scale may have changed since."""
    try:
        plan = plan_for(outcome.task, outcome.world, outcome.method, outcome.scale, outcome.seed)
    except UserError:  # an environment or method that does not exist any more
        return False
    return content_key(plan) == outcome.plan


def path_of(exhibit: Exhibit, scale: str, results: Path) -> Path:
    return results / "tables" / f"{scale}-{exhibit.name}.md"


def write_page(page: Page, exhibit: Exhibit, scale: str, results: Path, origin: Origin | None = None) -> Path:
    """Write the page; `origin` is that of a page without runs."""
    path = path_of(exhibit, scale, results)
    path.parent.mkdir(parents=True, exist_ok=True)
    made = page.made or ((f"Made by `{origin.command}` at commit {origin.commit}, {origin.date}.",) if origin else ())
    heading = f"{exhibit.name}: {exhibit.title} (scale {scale})"
    write_whole(path, as_markdown(page.sheets, heading, [*made, *page.remarks]).encode())
    return path
