"""`lindt reproduce again`: after a change that may move numbers, play three named cells again and compare.

Kept results stay as they are. A cell whose local accuracy or beta differs by more than table 3's spread over seeds
says which table must be played again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import TYPE_CHECKING, Final

from lindt.errors import UserError
from lindt_experiments.plans.catalog import EXHIBITS, Cell
from lindt_experiments.plans.scales import SIZES
from lindt_experiments.queue.gather import Origin, outcome_of
from lindt_experiments.queue.jobs import Job, fetch_data, jobs_for
from lindt_experiments.queue.progress import Played, say_json
from lindt_experiments.results.outcomes import Outcome, find, rounded
from lindt_experiments.tables.pages import is_current
from lindt_experiments.tables.sheets import Sheet, as_rich, ours

if TYPE_CHECKING:
    from lindt_experiments.reproduce import Request

NAME: Final = "again"
TITLE: Final = "three cells played again after a change, compared with the kept results"
CELLS: Final = (Cell("cifar", "nfl", "fedavg"), Cell("cifar", "nfl", "lindt"), Cell("shake", "nfl", "lindt"))
SCORES: Final = ("local", "beta")
COLUMNS: Final = ("cell", "score", "kept", "again", "difference", "table 3's spread", "")


def jobs(scale: str, runs: Path, commit: str) -> list[Job]:
    """The runs, in folders of the present commit: a run of another commit is no answer."""
    cells = [cell for cell in CELLS if (scale, cell.task) in SIZES]
    return jobs_for(cells, scale, 1, runs / NAME / commit)


def spread(outcomes: Sequence[Outcome], cell: Cell, scale: str, score: str) -> float | None:
    """The standard deviation over seeds of a cell in points; below three seeds the median of its task's table 3.

    Where that has no cell of three seeds, the median of both tasks; None without any.
    """
    own = _deviation(outcomes, cell, scale, score)
    if own is not None:
        return own
    cells = EXHIBITS["table3"].cells
    all_ = {other: _deviation(outcomes, other, scale, score) for other in cells}
    for group in ([c for c in cells if c.task == cell.task], cells):
        known = [value for other in group if (value := all_[other]) is not None]
        if known:
            return median(known)
    return None


def _deviation(outcomes: Sequence[Outcome], cell: Cell, scale: str, score: str) -> float | None:
    found = [getattr(one, score) for one in find(outcomes, **cell._asdict(), scale=scale)]
    known = [100 * value for value in found if value is not None]
    return stdev(known) if len(known) >= 3 else None


def differs(before: float, after: float, limit: float | None) -> bool:
    """Whether two scores, fractions, differ by more than the limit in points. Without a limit any difference counts."""
    return abs(after - before) * 100 > (0.0 if limit is None else limit)


def compared(kept: Sequence[Outcome], new: Sequence[Outcome], scale: str) -> tuple[Sheet, bool]:
    """The table, and whether a score differs."""
    rows, moved = [], False
    for one in new:
        cell = Cell(*one.cell[:3])
        (before,) = find(kept, **cell._asdict(), scale=scale, seed=one.seed)
        for score in SCORES:
            was, now = getattr(before, score), rounded(getattr(one, score))  # kept results are rounded
            limit = spread(kept, cell, scale, score)
            apart = differs(was, now, limit)
            moved |= apart
            sign = score == "beta"
            rows.append(
                (
                    " ".join(cell),
                    score,
                    ours([was], sign),
                    ours([now], sign),
                    ours([now - was], sign=True),
                    "unknown" if limit is None else f"{limit:.1f}",
                    "differs" if apart else "same",
                )
            )
    return Sheet(f"Played again at scale {scale}", COLUMNS, tuple(rows)), moved


def reproduce(request: Request, play: Callable[[Sequence[Job], Callable[[Job], None]], Played]) -> int:
    """Play the cells by `play` and print the comparison. Returns 1 where a run failed or a score differs."""
    origin = Origin.now(request.command)
    if origin.commit.endswith("+changes"):
        raise UserError(f"{NAME}: files have changed since the last commit; commit them, so that the runs have a name")
    kept = [outcome for outcome in request.kept() if is_current(outcome)]
    wanted = jobs(request.scale, request.runs, origin.commit)
    for job in wanted:
        if not find(kept, **job.cells[0]._asdict(), scale=request.scale, seed=job.plan.seed):
            raise UserError(f"{' '.join(job.cells[0])}: no kept result at scale {request.scale} to compare with")
    fetch_data(job.plan for job in wanted)
    new: list[Outcome] = []
    # Private models of earlier code must not hide a change of their training.
    os.environ["LINDT_CACHE"] = str(wanted[0].folder.parent.resolve() / "cache")
    played = play(wanted, lambda job: new.append(outcome_of(job.folder, job.cells[0], request.scale, origin)))
    sheet, moved = compared(kept, sorted(new, key=lambda one: one.cell), request.scale)
    if request.as_json:
        for row in sheet.rows:
            say_json({"event": "again", **dict(zip(("cell", "score", "kept", "again"), row, strict=False))})
        say_json({"event": "end", "played": played.ended, "failed": played.failed, "differs": moved})
    else:
        request.console.print(as_rich(sheet))
        for task in sorted({row[0].split()[0] for row in sheet.rows if row[6] == "differs"}):
            again = f"lindt reproduce table3 --scale {request.scale} --task {task} --results again"
            request.console.print(f"play table 3 again: {again}", highlight=False, markup=False, soft_wrap=True)
    return 1 if played.failed or moved else 0
