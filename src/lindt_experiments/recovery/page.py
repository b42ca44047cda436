"""The page of the scoreboard of recovery: docs/recovery-scoreboard.md, written from the kept lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from lindt.runs.files import write_whole
from lindt_experiments.detectors.statistics import Share
from lindt_experiments.plans.scales import reduced
from lindt_experiments.recovery.cells import METHOD_NAMES, WORLDS, cells
from lindt_experiments.recovery.outcomes import RecoveryOutcome
from lindt_experiments.tables.sheets import Sheet, as_markdown

HEADING: Final = "Recovery: every method in the same federations"
OURS: Final = "guarded"  # the default recovery
DRAWS: Final = 2000
COLUMNS: Final = (
    "method", "central", "local", "beta", "beats guarded", "not worse off (IPR)", "clearly worse off", "worst tenth",
    "attack success", "train s", "predict s", "kB", "seeds",
)  # fmt: skip
MEANING: Final = (
    "local: accuracy of what the honest clients predict with; beta: less that of training alone, in points, with a 95% "
    "interval by a bootstrap over seeds and, within each, clients. beats guarded: the difference in local accuracy to "
    "guarded prediction on the same clients and seeds, in points, by the same bootstrap. IPR: the share of clients "
    "that are not worse off than alone, and clearly worse off (paired test at 95%) their number, of all clients and "
    "seeds; in brackets the exact 95% interval of Clopper and Pearson, as if clients were independent."
)
COSTS: Final = (
    "train s and predict s: seconds of one client to train in a round, and to be scored at the end; runs were played "
    "beside each other, so that small differences mean nothing. kB: the shared weights, to a client and back, as a "
    "deployment has to send them. '-' as central accuracy: there is no whole global model."
)
SETTINGS: Final = (
    "Settings were fixed before the runs: each method has those that it has by name, its authors' where they are "
    "known; the strength of guarded prediction was chosen on other tasks (docs/recovery.md). Nothing was searched for "
    "on these federations. Recovery is on from the first round. Guarded prediction holds out V_i and trains on less "
    "data; all others train on all of D_i."
)


def path_of(results: Path, scale: str, complete: bool) -> Path:
    """The docs, once every cell is played and where there are docs beside the results; else with the tables."""
    docs = results.resolve().parent / "docs"
    if scale == "cpu" and complete and docs.is_dir():
        return docs / "recovery-scoreboard.md"
    return results / "tables" / f"{scale}-recovery.md"


def write(kept: Sequence[RecoveryOutcome], scale: str, results: Path) -> Path:
    found, every = {one.cell for one in kept}, cells(scale)
    path = path_of(results, scale, len(found) == len(every))
    path.parent.mkdir(parents=True, exist_ok=True)
    dates = sorted({one.date for one in kept})
    origin = (
        f"Written by `lindt reproduce recovery --scale {scale}` from `results/recovery-{scale}.jsonl`: "
        f"{len(kept)} runs of {len(found)} of {len(every)} cells, {dates[0]} to {dates[-1]}, "
        f"commit {', '.join(sorted({one.commit for one in kept}))}.",
        f"CIFAR-10; smaller than the paper's (in brackets): {reduced('cifar', scale)}." if scale != "paper" else "",
        MEANING,
        COSTS,
        SETTINGS,
    )
    sheets = [sheet for world in WORLDS if (sheet := _sheet(kept, world)) is not None]
    write_whole(path, as_markdown(sheets, HEADING, [text for text in origin if text]).encode())
    return path


def conclusions(kept: Sequence[RecoveryOutcome]) -> list[str]:
    """One sentence a world: who has the highest local accuracy, who leaves nobody clearly worse off, who beats ours."""
    return [said for world in WORLDS if (said := _conclusion(world, _by_method(kept, world)))]


def _conclusion(world: str, runs: Mapping[str, Sequence[RecoveryOutcome]]) -> str:
    local = {}
    for name, mine in runs.items():
        known = [one.local for one in mine if one.local is not None]
        if known:
            local[name] = statistics.fmean(known)
    if not local:
        return ""
    best = max(local, key=lambda name: local[name])
    spared = [name for name, mine in runs.items() if not sum(one.clearly_harmed or 0 for one in mine)]
    text = f"{world} ({WORLDS[world]}): highest local accuracy {best}, {100 * local[best]:.1f}"
    text += f"; nobody clearly worse off with {', '.join(spared)}" if spared else "; each leaves some clearly worse off"
    if OURS in runs:
        beating = [name for name in runs if name != OURS and _beats(runs[name], runs[OURS])]
        text += f"; above {OURS} by the interval: {', '.join(beating) or 'none'}"
    return f"{text}."


def _sheet(kept: Sequence[RecoveryOutcome], world: str) -> Sheet | None:
    runs = _by_method(kept, world)
    if not runs:
        return None
    rows = tuple(_row(name, mine, runs.get(OURS, [])) for name, mine in runs.items())
    said = _conclusion(world, runs)
    return Sheet(WORLDS[world].capitalize(), COLUMNS, rows, (said,) if said else ())


def _by_method(kept: Sequence[RecoveryOutcome], world: str) -> dict[str, list[RecoveryOutcome]]:
    found: dict[str, list[RecoveryOutcome]] = {}
    for name in METHOD_NAMES:
        mine = sorted((one for one in kept if one.cell == (world, name)), key=lambda one: one.seed)
        if mine:
            found[name] = mine
    return found


def _row(name: str, mine: Sequence[RecoveryOutcome], ours: Sequence[RecoveryOutcome]) -> tuple[str, ...]:
    clients = sum(len(one.betas) for one in mine)
    not_worse = Share(clients - sum(one.harmed or 0 for one in mine), clients)
    clearly = Share(sum(one.clearly_harmed or 0 for one in mine), clients)
    low, high = clearly.interval
    beta = _percent([one.beta for one in mine], sign=True)
    if clients:
        beta += _range(bootstrap([one.betas for one in mine]))
    return (
        f"`{name}`",
        _percent([one.central for one in mine]),
        _percent([one.local for one in mine]),
        beta,
        "-" if name == OURS else _difference(mine, ours),
        f"{_share(not_worse)}",
        f"{clearly.hits} of {clearly.total} ({100 * low:.1f}-{100 * high:.1f}%)" if clients else "-",
        _percent([one.worst_tenth for one in mine], sign=True),
        _percent([one.attack_local for one in mine]),
        _mean([one.train_seconds for one in mine], "{:.2f}"),
        _mean([one.score_seconds for one in mine], "{:.2f}"),
        f"{mine[0].bytes / 1000:,.0f}",
        str(len(mine)),
    )


def _share(share: Share) -> str:
    if share.value is None:
        return "-"
    low, high = share.interval
    return f"{100 * share.value:.0f}% ({100 * low:.0f}-{100 * high:.0f})"


def differences(mine: Sequence[RecoveryOutcome], ours: Sequence[RecoveryOutcome]) -> list[tuple[float, ...]]:
    """Of each seed that both have: how much better each client's local score is."""
    theirs = {one.seed: one for one in ours}
    return [
        tuple(a - b for a, b in zip(one.locals, theirs[one.seed].locals, strict=True))
        for one in mine
        if one.seed in theirs and len(one.locals) == len(theirs[one.seed].locals) > 0
    ]


def _difference(mine: Sequence[RecoveryOutcome], ours: Sequence[RecoveryOutcome]) -> str:
    found = differences(mine, ours)
    if not found:
        return "-"
    mean = statistics.fmean(statistics.fmean(one) for one in found)
    return f"{100 * mean:+.1f}{_range(bootstrap(found))}"


def _beats(mine: Sequence[RecoveryOutcome], ours: Sequence[RecoveryOutcome]) -> bool:
    found = differences(mine, ours)
    return bool(found) and bootstrap(found)[0] > 0


def bootstrap(groups: Sequence[Sequence[float]], draws: int = DRAWS) -> tuple[float, float]:
    """A 95% percentile interval of the mean over groups of their means: groups are drawn, then members of each."""
    generator = np.random.default_rng(0)
    arrays = [np.asarray(group, dtype=np.float64) for group in groups if len(group)]
    chosen = generator.integers(len(arrays), size=(draws, len(arrays)))
    means = np.empty(chosen.shape)
    for group, values in enumerate(arrays):
        here = chosen == group
        rows = generator.integers(len(values), size=(int(here.sum()), len(values)))
        means[here] = values[rows].mean(1)
    low, high = np.quantile(means.mean(1), [0.025, 0.975])
    return float(low), float(high)


def _range(interval: tuple[float, float]) -> str:
    low, high = interval
    return f" ({100 * low:+.1f} to {100 * high:+.1f})"


def _percent(values: Sequence[float | None], sign: bool = False) -> str:
    return _mean([None if value is None else 100 * value for value in values], "{:+.1f}" if sign else "{:.1f}")


def _mean(values: Sequence[float | None], form: str) -> str:
    write_: Callable[[float], str] = form.format
    known = [value for value in values if value is not None]
    return write_(statistics.fmean(known)) if known else "-"
