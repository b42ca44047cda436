"""The page of the scoreboard of recovery: docs/recovery-scoreboard.md, written from the stored lines."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from lindt.runs.files import write_whole
from lindt_experiments.claims.judging import Interval, interval
from lindt_experiments.detectors.statistics import Share
from lindt_experiments.plans.scales import reduced
from lindt_experiments.recovery.cells import SEARCHED, WORLDS, cells, method_names, plan_for
from lindt_experiments.recovery.outcomes import RecoveryOutcome
from lindt_experiments.tables.sheets import Sheet, as_markdown

HEADING: Final = "Recovery: every method in the same federations"
OURS: Final = "guarded"  # the default recovery
BEST: Final = "guarded-all"  # the most accurate one of ours, at a higher cost
PAPERS: Final = "lindt"
COLUMNS: Final = (
    "method", "central", "local", "beta", "less guarded", "median gain", "not worse off (IPR)", "clearly worse off",
    "clearly better off", "worst tenth", "attack success", "train s", "predict s", "kB", "seeds",
)  # fmt: skip
MEANING: Final = (
    "local: accuracy of the models that honest clients predict with; beta: less that of training alone, in points; "
    "less guarded: local accuracy less that of guarded prediction with the same seeds. Intervals are 95% t intervals "
    "over seeds; one seed has no interval. IPR: the share of clients that are not worse off than alone; clearly worse "
    "and better off (paired test at 95%): their number, of all clients and seeds; in brackets the exact 95% interval "
    "of Clopper and Pearson, as if clients were independent. The paired test knows the chance of the test samples, not "
    "that of training: docs/recovery.md has the rate for equally good models."
)
COSTS: Final = (
    "train s and predict s: seconds of one client to train in a round, and to be scored at the end; runs were played "
    "in parallel, so that small differences mean nothing. kB: the shared weights that a client receives and sends in a "
    "round of a deployment. '-' as central accuracy: there is no whole global model."
)
SETTINGS: Final = (
    "Settings were fixed before the runs: each method has those of its name, its authors' where they are "
    "known; the strength of guarded prediction was chosen on other tasks (docs/recovery.md). No setting was tuned "
    "on these federations. Recovery is on from the first round. Guarded prediction holds out V_i while w and v_i "
    "train; P_i and tuned models that predict are trained on V_i too. Every gain is over the same private models, "
    "which train on all of D_i."
)
FOUND: Final = (
    "A row NAME-searched has the settings that a search with other seeds on validation data found, where the authors' "
    "fail (`lindt reproduce settings`)."
)
RULE: Final = (
    "The rule, of 18 November 2026, when only FedAvg, FB and LINDT in NFL with seed 0 were played: of the methods with "
    "the fewest clients clearly worse off over all environments, the one with the highest local accuracy in NFL "
    "becomes the default recovery, if its local accuracy less LINDT's has an interval over seeds above 0. Every method "
    "counts with the seeds that all methods have."
)
NAMES: Final = {"nfl": "NFL", "normal": "normal FL", "dirichlet": "Dirichlet(0.1)",
                "dirichlet-attacked": "Dirichlet(0.1) with attackers"}  # fmt: skip
# The goals of recovery at the paper's size, in percent, and at every size the share of clients worse off.
LEAST_LOCAL: Final = 86.0
MOST_WORSE: Final = 2 / 80
MOST_ATTACKED: Final = 3.0


def path_of(results: Path, scale: str, complete: bool) -> Path:
    """The path of the page: in docs/, once every cell is played and where docs/ exists; else with the tables."""
    docs = results.resolve().parent / "docs"
    if scale == "cpu" and complete and docs.is_dir():
        return docs / "recovery-scoreboard.md"
    return results / "tables" / f"{scale}-recovery.md"


def write(kept: Sequence[RecoveryOutcome], scale: str, results: Path) -> Path:
    found, every = {one.cell for one in kept}, cells(scale)
    path = path_of(results, scale, len(found) == len(every))
    path.parent.mkdir(parents=True, exist_ok=True)
    dates = " to ".join(sorted({min(one.date for one in kept), max(one.date for one in kept)}))
    origin = (
        f"Written by `lindt reproduce recovery --scale {scale}` from `results/recovery-{scale}.jsonl`: "
        f"{len(kept)} runs of {len(found)} of {len(every)} cells, {dates}, "
        f"commit {', '.join(sorted({one.commit for one in kept}))}.",
        f"CIFAR-10; smaller than the paper's (in brackets): {_smaller(scale)}." if scale != "paper" else "",
        MEANING,
        COSTS,
        SETTINGS,
        FOUND if any(one.method in SEARCHED for one in kept) else "",
    )
    sheets = [sheet for world in WORLDS if (sheet := _sheet(kept, world)) is not None]
    columns = ("goal", *(word for name in (OURS, BEST) for word in (f"`{name}`", "met")))
    chosen = Sheet("The goals of recovery, and its default", columns, _goals(kept, scale), (RULE, default(kept, scale)))
    write_whole(path, as_markdown([chosen, *sheets], HEADING, [text for text in origin if text]).encode())
    return path


def _smaller(scale: str) -> str:
    """The differences to the paper's size. The scoreboard scores the last rounds only, as some methods tune for it."""
    last = plan_for(cells(scale)[0], scale, 0).scoring.last
    return f"{reduced('cifar', scale).partition('; scored in')[0]}; only the last {last} rounds are scored"


def conclusions(kept: Sequence[RecoveryOutcome]) -> list[str]:
    """One sentence per environment: the method with the highest local accuracy, those without clients clearly worse
    off, and those better than ours."""
    return [said for world in WORLDS if (said := _conclusion(world, _by_method(kept, world)))]


def _conclusion(world: str, runs: Mapping[str, Sequence[RecoveryOutcome]]) -> str:
    local = {name: mean for name, mine in runs.items() if (mean := _local(mine)) is not None}
    if not local:
        return ""
    best = max(local, key=lambda name: local[name])
    spared = [name for name, mine in runs.items() if not sum(one.clearly_harmed or 0 for one in mine)]
    text = f"{world} ({WORLDS[world]}): highest local accuracy {best}, {local[best]:.1f}"
    text += (
        f"; no client clearly worse off with {', '.join(spared)}" if spared else "; some clearly worse off with each"
    )
    if OURS in runs:
        text += _beating(runs)
    return f"{text}."


def _beating(runs: Mapping[str, Sequence[RecoveryOutcome]]) -> str:
    """The methods above ours, with the interval of the difference; those with one seed apart, as they have none."""
    found = {name: less(mine, runs[OURS]) for name, mine in runs.items() if name != OURS}
    above = [f"{name} {one}" for name, one in found.items() if one is not None and one.seeds > 1 and one.low > 0]
    text = f"; above {OURS} by the interval: {', '.join(above) or 'none'}"
    single = [f"{name} {one}" for name, one in found.items() if one is not None and one.seeds == 1 and one.mean > 0]
    return text + (f"; above it on one seed, without an interval: {', '.join(single)}" if single else "")


def default(kept: Sequence[RecoveryOutcome], scale: str) -> str:
    """The answer of RULE, or what is missing for an answer."""
    every = cells(scale)
    seeds = [{one.seed for one in kept if one.cell == cell} for cell in every]
    common = frozenset[int]().union(*seeds).intersection(*seeds) if seeds else frozenset()
    if not common:
        played = sum(map(bool, seeds))
        return f"Not decided yet: {played} of {len(every)} cells are played, and no seed has all of them."
    runs = [one for one in kept if one.seed in common]
    worse = dict.fromkeys(dict.fromkeys(method for _, method in every), 0)
    for one in runs:
        worse[one.method] += one.clearly_harmed or 0
    fewest = min(worse.values())
    nfl = _by_method(runs, "nfl")
    local = {name: mean for name in worse if worse[name] == fewest and (mean := _local(nfl[name])) is not None}
    if not local:
        return "Not decided: no method with the fewest clients clearly worse off has a local accuracy."
    best = max(local, key=lambda name: local[name])
    text = (
        f"By these runs ({len(common)} seed{'s' if len(common) > 1 else ''} of every method): {fewest} clients clearly "
        f"worse off with {', '.join(local)}; the highest local accuracy in NFL of these has {best}, {local[best]:.1f}"
    )
    if best == PAPERS:
        return f"{text}; that is LINDT itself, and the default stays {OURS}."
    ahead = less(nfl[best], nfl[PAPERS])
    if ahead is None or ahead.seeds < 2 or ahead.low <= 0:
        return f"{text}; its difference to LINDT, {ahead or '-'}, is not above 0 by an interval: {OURS} stays."
    return f"{text}; its difference to LINDT is {ahead}: the default is {best}."


def _goals(kept: Sequence[RecoveryOutcome], scale: str) -> tuple[tuple[str, ...], ...]:
    """Each goal with what was found for the default recovery and for BEST, and whether it is met ('-': not played)."""
    found = [_found(kept, scale, name) for name in (OURS, BEST)]
    return tuple(
        (goal, *(text for one in found for text in (one[goal][0] or "-", _met(*one[goal])))) for goal in found[0]
    )


def _met(found: str | None, met: bool | None) -> str:
    return "-" if found is None else "one seed" if met is None else "yes" if met else "no"


def _found(kept: Sequence[RecoveryOutcome], scale: str, name: str) -> dict[str, tuple[str | None, bool | None]]:
    """By goal: what was found for a method (None: not played), and whether the goal is met (None: one seed)."""
    nfl, normal = ({other: _by_method(kept, world).get(other, []) for other in (name, PAPERS, "fedavg")}
                   for world in ("nfl", "normal"))  # fmt: skip
    ours, clients = nfl[name], sum(len(one.betas) for one in nfl[name])
    worse = sum(one.harmed or 0 for one in ours)
    ahead, in_normal = less(ours, nfl[PAPERS]), less(normal[name], normal["fedavg"])
    local, attacked, papers = _local(ours), _attacked(ours), _attacked(nfl[PAPERS])
    bound = MOST_ATTACKED if scale == "paper" else papers
    goals: dict[str, tuple[str | None, bool | None]] = {}
    for world in dict.fromkeys(cell.world for cell in cells(scale)):
        goals[f"{NAMES[world]}: no client clearly worse off"] = _clearly(_by_method(kept, world).get(name, []))
    goals[f"NFL: at most {100 * MOST_WORSE:.1f}% of the clients worse off"] = (
        f"{worse} of {clients}" if clients else None, worse <= MOST_WORSE * clients)  # fmt: skip
    if scale == "paper":
        goals[f"NFL: local accuracy of at least {LEAST_LOCAL:g}"] = (
            None if local is None else f"{local:.1f}", (local or 0) >= LEAST_LOCAL)  # fmt: skip
    goals["NFL: local accuracy above LINDT's by the interval"] = (
        None if ahead is None else str(ahead),
        ahead.low > 0 if ahead is not None and ahead.seeds > 1 else None,
    )
    goals["normal FL: the interval of local accuracy less FedAvg's is not below 0"] = (
        None if in_normal is None else str(in_normal),
        in_normal.high >= 0 if in_normal is not None and in_normal.seeds > 1 else None,
    )
    limit = f"on at most {MOST_ATTACKED:g}%" if scale == "paper" else "at most as often as with LINDT"
    goals[f"NFL: the attack succeeds {limit}"] = (
        None if attacked is None or bound is None else f"{attacked:.1f}%, LINDT {_text(papers)}%",
        attacked is not None and bound is not None and attacked <= bound,
    )
    return goals


def _clearly(mine: Sequence[RecoveryOutcome]) -> tuple[str | None, bool | None]:
    """The clients clearly worse off, of all clients and seeds, and whether there is none."""
    clients, clearly = sum(len(one.betas) for one in mine), sum(one.clearly_harmed or 0 for one in mine)
    return (f"{clearly} of {clients}" if clients else None), clearly == 0


def _local(mine: Sequence[RecoveryOutcome]) -> float | None:
    known = [100 * one.local for one in mine if one.local is not None]
    return statistics.fmean(known) if known else None


def _attacked(mine: Sequence[RecoveryOutcome]) -> float | None:
    known = [100 * one.attack_local for one in mine if one.attack_local is not None]
    return statistics.fmean(known) if known else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _sheet(kept: Sequence[RecoveryOutcome], world: str) -> Sheet | None:
    runs = _by_method(kept, world)
    if not runs:
        return None
    rows = tuple(_row(name, mine, runs.get(OURS, [])) for name, mine in runs.items())
    said = _conclusion(world, runs)
    return Sheet(title(world), COLUMNS, rows, (said,) if said else ())


def title(world: str) -> str:
    return WORLDS[world][0].upper() + WORLDS[world][1:]


def _by_method(kept: Sequence[RecoveryOutcome], world: str) -> dict[str, list[RecoveryOutcome]]:
    found: dict[str, list[RecoveryOutcome]] = {}
    for name in method_names():
        mine = sorted((one for one in kept if one.cell == (world, name)), key=lambda one: one.seed)
        if mine:
            found[name] = mine
    return found


def _row(name: str, mine: Sequence[RecoveryOutcome], ours: Sequence[RecoveryOutcome]) -> tuple[str, ...]:
    clients = sum(len(one.betas) for one in mine)
    not_worse = Share(clients - sum(one.harmed or 0 for one in mine), clients)
    clearly = Share(sum(one.clearly_harmed or 0 for one in mine), clients)
    low, high = clearly.interval
    return (
        f"`{name}`",
        _percent([one.central for one in mine]),
        _over_seeds([one.local for one in mine]),
        _over_seeds([one.beta for one in mine], sign=True),
        "-" if name == OURS else str(less(mine, ours) or "-"),
        _percent([one.median_gain for one in mine], sign=True),
        f"{_share(not_worse)}",
        f"{clearly.hits} of {clearly.total} ({100 * low:.1f}-{100 * high:.1f}%)" if clients else "-",
        str(sum(one.clearly_better or 0 for one in mine)) if clients else "-",
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


def less(mine: Sequence[RecoveryOutcome], theirs: Sequence[RecoveryOutcome]) -> Interval | None:
    """Local accuracy less that of another method, in points, paired by seed; None without a common seed."""
    other = {one.seed: one.local for one in theirs if one.local is not None}
    found = [100 * (one.local - other[one.seed]) for one in mine if one.local is not None and one.seed in other]
    return interval(found) if found else None


def _over_seeds(values: Sequence[float | None], sign: bool = False) -> str:
    """The mean of fractions in percent, from two seeds on with its interval."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return "-"
    seen = interval(known)
    form = "{:+.1f}" if sign else "{:.1f}"
    text = form.format(seen.mean)
    return text if math.isinf(seen.low) else f"{text} [{form.format(seen.low)}, {form.format(seen.high)}]"


def _percent(values: Sequence[float | None], sign: bool = False) -> str:
    return _mean([None if value is None else 100 * value for value in values], "{:+.1f}" if sign else "{:.1f}")


def _mean(values: Sequence[float | None], form: str) -> str:
    write_: Callable[[float], str] = form.format
    known = [value for value in values if value is not None]
    return write_(statistics.fmean(known)) if known else "-"
