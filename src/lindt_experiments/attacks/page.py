"""The page of the grid of attacks: docs/attacks.md, written from the stored lines.

The page has the advice and the default recovery. The other tables are written to results/tables/.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, final

from lindt.runs.files import write_whole
from lindt_experiments.attacks.grid import AGGREGATORS, ATTACKS, METHOD_NAMES, GridCell, cells
from lindt_experiments.attacks.outcomes import AttackOutcome
from lindt_experiments.tables.sheets import Sheet, as_markdown

HEADING: Final = "Attacks, aggregators and recovery"
ADVICE: Final = "The default recovery with each aggregator"
WORST_ATTACK: Final = "The worst attack on each aggregator"
THE_ATTACKS: Final = "The attacks"
WORST: Final = 20  # the number of cells that are listed
TITLES: Final = {
    "fedavg": "FedAvg: the clients predict with w",
    "on_evidence": "Recovery on evidence, the default: guarded dual models once the clients' reports warn",
    "lindt": "LINDT: recovery on from the first round",
}
DEFAULT: Final = "on_evidence"
MEANING: Final = (
    "Which aggregator withstands which attack, and how benign clients fare. Digits as in `digits-nfl`: 20 "
    "clients with three or five of the ten classes each, 5 attackers, updates clipped to S = 15, privacy noise; 12 "
    "answer in a round, 3 of them attackers, in 30 rounds. Aggregators with a `share` of attackers are given the true "
    "share. Attackers report their gains truthfully."
)
REFERENCE: Final = (
    "All clients hold out V_i to report. Training alone uses it for `on_evidence`, whose private models that predict "
    "use it too; for the other methods neither side does."
)
CELLS: Final = (
    "A cell is the mean over seeds: beta of the benign clients in points (accuracy of the model that they predict "
    "with, less that of training alone); the number of them that are clearly worse off than alone (paired test), of "
    "how many; in brackets how often their predictions are the attackers' label, where the attackers want a label. The "
    f"worst attack comes first. {REFERENCE}"
)
BETA: Final = (
    "beta: accuracy of the model that the benign clients predict with, less that of training alone, in points, mean "
    f"over seeds. Clearly worse off: by a paired test. {REFERENCE}"
)


@final
@dataclass(frozen=True)
class CellMean:
    """The mean of a cell over its seeds."""

    cell: GridCell
    seeds: int
    beta: float
    spread: float  # the standard deviation over seeds; 0 for one seed
    harmed: float
    counted: float
    success: float | None

    @property
    def sums(self) -> tuple[int, int]:
        """The clients clearly worse off, and all that are counted, over the seeds."""
        return round(self.harmed * self.seeds), round(self.counted * self.seeds)

    @property
    def words(self) -> str:
        wanted = "" if self.success is None else f" ({100 * self.success:.0f}%)"
        return f"{100 * self.beta:+.1f}, {_count(self.harmed)}/{self.counted:.0f}{wanted}"


def path_of(results: Path, scale: str, complete: bool) -> Path:
    """The path of the page: in docs/, once every cell is played and where docs/ exists; else with the tables."""
    docs = results.resolve().parent / "docs"
    if scale == "cpu" and complete and docs.is_dir():
        return docs / "attacks.md"
    return results / "tables" / f"{scale}-attacks.md"


def write(kept: Sequence[AttackOutcome], scale: str, results: Path) -> Path:
    found, every = means(kept), cells(scale)
    path, tables = path_of(results, scale, len(found) == len(every)), results / "tables" / f"{scale}-attacks.md"
    for folder in (path.parent, tables.parent):
        folder.mkdir(parents=True, exist_ok=True)
    dates = sorted({one.date for one in kept})
    made = (
        f"Written by `lindt reproduce attacks --scale {scale} --seeds 3` from `results/attacks-{scale}.jsonl`: "
        f"{len(kept)} runs, {dates[0]} to {dates[-1]}, commit {', '.join(sorted({one.commit for one in kept}))}."
    )
    setting = MEANING if scale == "cpu" else "A few tiny federations, which only test the command."
    origin, shown = (setting, CELLS, progress(found, len(every))), sheets(found, len(every))
    if path == tables:
        write_whole(path, as_markdown(shown, HEADING, (*origin, made)).encode())
        return path
    on_page = [sheet for sheet in shown if sheet.title in (ADVICE, WORST_ATTACK, THE_ATTACKS)]
    more = f"{made} [More tables](../results/tables/{tables.name}): every cell, the worst first."
    short = (setting, BETA, progress(found, len(every)), more)
    write_whole(path, as_markdown(on_page, HEADING, short).encode())
    others = [sheet for sheet in shown if sheet not in on_page]
    back = ("The other tables of [attacks](../../docs/attacks.md).", CELLS, made)
    write_whole(tables, as_markdown(others, f"{HEADING}: more tables", back).encode())
    return path


def means(kept: Sequence[AttackOutcome]) -> list[CellMean]:
    """The cells with a beta, the worst first."""
    known = sorted((one for one in kept if one.beta is not None), key=lambda one: one.cell)
    found = [_mean(GridCell(*cell), list(runs)) for cell, runs in groupby(known, key=lambda one: one.cell)]
    return sorted(found, key=lambda one: (one.beta, one.cell))


def _mean(cell: GridCell, runs: Sequence[AttackOutcome]) -> CellMean:
    betas = [one.beta for one in runs if one.beta is not None]
    wanted = [one.attack_local for one in runs if one.attack_local is not None]
    return CellMean(
        cell=cell,
        seeds=len(runs),
        beta=statistics.fmean(betas),
        spread=statistics.stdev(betas) if len(betas) > 1 else 0.0,
        harmed=statistics.fmean(one.clearly_harmed or 0 for one in runs),
        counted=statistics.fmean(one.counted_clients for one in runs),
        success=statistics.fmean(wanted) if wanted else None,
    )


def progress(found: Sequence[CellMean], every: int) -> str:
    fewest = min((one.seeds for one in found), default=0)
    if len(found) < every:
        return f"**{len(found)} of {every} cells are played.** The best defence is not known before the others are."
    return f"All {every} cells are played, each with {fewest} seed{'s' if fewest > 1 else ''} or more."


def sheets(found: Sequence[CellMean], every: int) -> list[Sheet]:
    by_method = [sheet for method in METHOD_NAMES if (sheet := _grid(found, method)) is not None]
    if len(found) == every:
        by_method.insert(0, _worst_of_each(found))
        return [_advice(found), _worst(found), *by_method, _attacks()]
    return [_worst(found), *by_method, _attacks()]


def _advice(found: Sequence[CellMean]) -> Sheet:
    """The aggregators with the default recovery, first the one with the fewest clients clearly worse off."""
    rows = []
    for name in AGGREGATORS:
        mine = [one for one in found if one.cell.method == DEFAULT and one.cell.aggregator == name]
        if not mine:  # a small grid has only some aggregators
            continue
        harm = max(mine, key=lambda one: (one.harmed, -one.beta))
        worst, plain = min(mine, key=lambda one: one.beta), next(o for o in mine if o.cell.attack == "no_threat")
        rows.append((harm.harmed, -worst.beta, name, harm, worst, plain, _shares(mine)))
    rows.sort(key=lambda row: row[:3])
    _, _, best, harm, worst, *_ = rows[0]
    everywhere = _shares([one for one in found if one.cell.method == DEFAULT])
    remark = (
        f"**Advice: `{best}` with the default recovery.** Under its worst attack "
        f"{_count(harm.harmed)} of {harm.counted:.0f} benign clients are clearly worse off than alone (mean over "
        f"seeds), and the lowest beta is {100 * worst.beta:+.1f} points. This is for a quarter of attackers on digits; "
        "trimmed mean, Krum and Multi-Krum are given the true share of attackers."
    )
    chance = (
        f"In all cells together {everywhere} are clearly worse off; a seed has the same clients in every cell. "
        "[By chance](recovery.md#what-a-scored-round-counts) it would be more: private models trained from other seeds."
    )
    table = tuple(
        (
            f"`{name}`",
            f"{100 * plain.beta:+.1f}",
            f"{100 * worst.beta:+.1f} (`{worst.cell.attack}`)",
            f"{_count(harm.harmed)} (`{harm.cell.attack}`)" if harm.harmed else "0",
            shares,
        )
        for _, _, name, harm, worst, plain, shares in rows
    )
    columns = ("aggregator", "beta without attack", "lowest beta", "most clients clearly worse off", "in all attacks")
    return Sheet(ADVICE, columns, table, (remark, chance))


def _shares(found: Sequence[CellMean]) -> str:
    """How many clients are clearly worse off, of how many, over cells and seeds."""
    harmed, counted = (sum(part) for part in zip(*(one.sums for one in found), strict=True))
    return f"{harmed} of {counted:,} ({100 * harmed / counted:.1f}%)"


def _count(mean: float) -> str:
    return f"{mean:.1f}".removesuffix(".0")


def _worst(found: Sequence[CellMean]) -> Sheet:
    rows = tuple(
        (
            f"`{one.cell.attack}`",
            f"`{one.cell.aggregator}`",
            f"`{one.cell.method}`",
            f"{100 * one.beta:+.1f}" + (f" ±{100 * one.spread:.1f}" if one.seeds > 1 else ""),
            f"{_count(one.harmed)} of {one.counted:.0f}",
            "-" if one.success is None else f"{100 * one.success:.0f}%",
            str(one.seeds),
        )
        for one in found[:WORST]
    )
    columns = ("attack", "aggregator", "method", "beta", "clearly worse off", "attackers' label", "seeds")
    return Sheet(f"The worst {len(rows)} cells", columns, rows)


def _worst_of_each(found: Sequence[CellMean]) -> Sheet:
    """The worst attack on each aggregator; the best defence has the highest beta of these."""
    there = [name for name in AGGREGATORS if any(one.cell.aggregator == name for one in found)]
    rows = []
    for method in METHOD_NAMES:
        worst = {}
        for one in reversed(found):
            if one.cell.method == method:
                worst[one.cell.aggregator] = f"{100 * one.beta:+.1f} (`{one.cell.attack}`)"
        rows.append((f"`{method}`", *(worst.get(name, "-") for name in there)))
    remark = "beta under the worst attack. The largest of a row is the best defence if attackers know the aggregator."
    return Sheet(WORST_ATTACK, ("", *(f"`{n}`" for n in there)), tuple(rows), (remark,))


def _grid(found: Sequence[CellMean], method: str) -> Sheet | None:
    mine = {one.cell: one for one in found if one.cell.method == method}
    if not mine:
        return None
    there = [name for name in AGGREGATORS if any(cell.aggregator == name for cell in mine)]
    rows = []
    for attack in dict.fromkeys(cell.attack for cell in mine):  # worst first, as they come
        row = [mine.get(GridCell(attack, aggregator, method)) for aggregator in there]
        rows.append((f"`{attack}`", *("-" if one is None else one.words for one in row)))
    return Sheet(TITLES[method], ("attack", *(f"`{name}`" for name in there)), tuple(rows))


def _attacks() -> Sheet:
    rows = tuple((f"`{name}`", attack.words) for name, attack in ATTACKS.items())
    remark = (
        "`threat.kind` of a plan, here with 25% of attackers; the number after a hyphen is epsilon or z. Attackers "
        "that know the honest updates exist in simulations only: they are the worst case. `next_character` is the "
        "paper's attack on text; `until` ends any of them after a round."
    )
    return Sheet(THE_ATTACKS, ("attack", "what an attacker does"), rows, (remark,))
