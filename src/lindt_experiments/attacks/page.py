"""The page of the grid of attacks: docs/attacks.md, written from the kept lines."""

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
WORST: Final = 20  # cells that are listed
TITLES: Final = {
    "fedavg": "FedAvg: the clients predict with w",
    "on_evidence": "Recovery on evidence, the default: guarded dual models once the clients' reports warn",
    "lindt": "LINDT: recovery on from the first round",
}
DEFAULT: Final = "on_evidence"
MEANING: Final = (
    "Which aggregator withstands which attack, and what becomes of the benign clients. Digits as in `digits-nfl`: 20 "
    "clients with three or five of the ten classes each, 5 attackers, updates clipped to S = 15, privacy noise; 12 "
    "answer a round, 3 of them attackers, 30 rounds. Aggregators that ask for the share of attackers are told the true "
    "one. Attackers report their gains truthfully."
)
CELLS: Final = (
    "A cell is the mean over seeds: beta of the benign clients in points (accuracy with what they predict with, less "
    "that of training alone); how many of them are clearly worse off than alone (paired test), of how many; in "
    "brackets how often what they predict with says what the attackers want, where they want a label. The worst "
    "attack stands first."
)


@final
@dataclass(frozen=True)
class CellMean:
    """A cell over its seeds."""

    cell: GridCell
    seeds: int
    beta: float
    spread: float  # the standard deviation over seeds; 0 of one
    harmed: float
    counted: float
    success: float | None

    @property
    def words(self) -> str:
        wanted = "" if self.success is None else f" ({100 * self.success:.0f}%)"
        return f"{100 * self.beta:+.1f}, {_count(self.harmed)}/{self.counted:.0f}{wanted}"


def path_of(results: Path, scale: str, complete: bool) -> Path:
    """The docs, once every cell is played and where there are docs beside the results; else with the tables."""
    docs = results.resolve().parent / "docs"
    if scale == "cpu" and complete and docs.is_dir():
        return docs / "attacks.md"
    return results / "tables" / f"{scale}-attacks.md"


def write(kept: Sequence[AttackOutcome], scale: str, results: Path) -> Path:
    found, every = means(kept), cells(scale)
    path = path_of(results, scale, len(found) == len(every))
    path.parent.mkdir(parents=True, exist_ok=True)
    dates = sorted({one.date for one in kept})
    origin = (
        f"Written by `lindt reproduce attacks --scale {scale} --seeds 3` from `results/attacks-{scale}.jsonl`: "
        f"{len(kept)} runs, {dates[0]} to {dates[-1]}, commit {', '.join(sorted({one.commit for one in kept}))}.",
        MEANING if scale == "cpu" else "A few tiny federations, which only show that all works.",
        CELLS,
        progress(found, len(every)),
    )
    write_whole(path, as_markdown(sheets(found, len(every)), HEADING, origin).encode())
    return path


def means(kept: Sequence[AttackOutcome]) -> list[CellMean]:
    """The cells of which a run has a beta, the worst first."""
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
        return f"**{len(found)} of {every} cells are played.** Which defence is best waits for the others."
    return f"All {every} cells are played, each with {fewest} seed{'s' if fewest > 1 else ''} or more."


def sheets(found: Sequence[CellMean], every: int) -> list[Sheet]:
    by_method = [sheet for method in METHOD_NAMES if (sheet := _grid(found, method)) is not None]
    if len(found) == every:
        by_method.insert(0, _worst_of_each(found))
        return [_advice(found), _worst(found), *by_method, _attacks()]
    return [_worst(found), *by_method, _attacks()]


def _advice(found: Sequence[CellMean]) -> Sheet:
    """The aggregators with the default recovery, the one that leaves the fewest clients clearly worse off first."""
    rows = []
    for name in AGGREGATORS:
        mine = [one for one in found if one.cell.method == DEFAULT and one.cell.aggregator == name]
        if not mine:  # a small grid has some of them
            continue
        harm = max(mine, key=lambda one: (one.harmed, -one.beta))
        worst, plain = min(mine, key=lambda one: one.beta), next(o for o in mine if o.cell.attack == "no_threat")
        rows.append((harm.harmed, -worst.beta, name, harm, worst, plain))
    rows.sort(key=lambda row: row[:3])
    _, _, best, harm, worst, _ = rows[0]
    remark = (
        f"**Advice: `{best}` with the default recovery.** Under its worst attack "
        f"{_count(harm.harmed)} of {harm.counted:.0f} benign clients are clearly worse off than alone (mean over "
        f"seeds), and the lowest beta is {100 * worst.beta:+.1f} points. This is for a quarter of attackers on digits; "
        "trimmed mean, Krum and Multi-Krum are told the true share of attackers."
    )
    table = tuple(
        (
            f"`{name}`",
            f"{100 * plain.beta:+.1f}",
            f"{100 * worst.beta:+.1f} (`{worst.cell.attack}`)",
            f"{_count(harm.harmed)} (`{harm.cell.attack}`)" if harm.harmed else "0",
        )
        for _, _, name, harm, worst, plain in rows
    )
    columns = ("aggregator", "beta without attack", "lowest beta", "most clients clearly worse off")
    return Sheet("The default recovery with each aggregator", columns, table, (remark,))


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
    """What an attacker that knows the aggregator does to it; the best defence has the least bad of them."""
    there = [name for name in AGGREGATORS if any(one.cell.aggregator == name for one in found)]
    rows = []
    for method in METHOD_NAMES:
        worst = {}
        for one in reversed(found):
            if one.cell.method == method:
                worst[one.cell.aggregator] = f"{100 * one.beta:+.1f} (`{one.cell.attack}`)"
        rows.append((f"`{method}`", *(worst.get(name, "-") for name in there)))
    remark = "beta under the attack that hurts most. The largest of a row is the best defence against one who knows it."
    return Sheet("The worst attack on each aggregator", ("", *(f"`{n}`" for n in there)), tuple(rows), (remark,))


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
        "`threat.kind` of a plan, here with 25% of attackers; what follows a hyphen is epsilon or z. Attackers that "
        "know the honest updates exist in simulations only: they are the worst case. `next_character` is the paper's "
        "attack on text; `until` ends any of them after a round."
    )
    return Sheet("The attacks", ("attack", "what a hostile client does"), rows, (remark,))
