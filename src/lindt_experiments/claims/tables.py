"""The paper's claims about its tables: methods in NFL, the best method, each effect. Each claim is one declaration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from lindt_experiments.claims.judging import SMALL, Claim, Gap
from lindt_experiments.claims.series import NAMES, Allowed, Metric, Minus, Range, Score
from lindt_experiments.tables.paper import TABLES
from lindt_experiments.tables.titles import STARRED, TASK_TITLES, WORLD_TITLES

SUFFER, MEND = ("fedavg", "fedprox", "trimmed-mean"), ("fb", "apfl", "lindt")
METRICS: tuple[Metric, ...] = ("central", "local")
EARLIER = ("fedprox", "trimmed-mean", "fb", "apfl")
# The tables of Sec. 5.2 and of the appendix, by the setting that each varies.
SWEEPS = {
    "cifar": {"allocation": 4, "active ratio": 5, "share of attackers": 6, "sigma": 7},
    "shake": {"allocation": 10, "active ratio": 11, "share of attackers": 12, "sigma": 13},
}


def worlds_of(table: int) -> tuple[str, ...]:
    """The environments of a table, in the paper's order."""
    return tuple(world for number, _, world in TABLES if number == table)


def _title(table: int, world: str) -> str:
    return STARRED[table] if world == "nfl" else WORLD_TITLES[world]


def claims() -> Iterator[Claim]:
    for task in TASK_TITLES:
        yield from _negative(task)
        yield from _positive(task)
        yield from _leading(task)
        yield from _central(task)
        yield from _normal(task)
        yield from _gains(task)
        yield _stable(task)
    yield _central_most()
    yield from _falling()


def _negative(task: str) -> Iterator[Claim]:
    for method in SUFFER:
        says = f"{TASK_TITLES[task]}, default NFL: {NAMES[method]} ends with beta < 0"
        beta = Gap(Score(task, "nfl", method, "beta"), below=True)
        yield Claim(f"{task}-nfl-{method}", "Table 3, left; 'end up in NFL'", says, {"": beta}, "table3")


def _positive(task: str) -> Iterator[Claim]:
    for method in MEND:
        says = f"{TASK_TITLES[task]}, default NFL: {NAMES[method]} ends with beta > 0"
        beta = Gap(Score(task, "nfl", method, "beta"))
        yield Claim(
            f"{task}-mended-{method}", "Table 3, left; 'handle the negative issues'", says, {"": beta}, "table3"
        )


def _leading(task: str) -> Iterator[Claim]:
    for method in ("apfl", "fb"):
        says = f"{TASK_TITLES[task]}, default NFL: LINDT leads {NAMES[method]} in local accuracy"
        gap = Gap(Score(task, "nfl", "lindt"), Score(task, "nfl", method))
        yield Claim(f"{task}-lindt-leads-{method}", "Table 3, left; 'LINDT leading'", says, {"": gap}, "table3")
    says = f"{TASK_TITLES[task]}, default NFL: a trimmed mean improves LINDT in central and local accuracy"
    parts: dict[str, Gap] = {
        metric: Gap(Score(task, "nfl", "lindt-tm", metric), Score(task, "nfl", "lindt", metric)) for metric in METRICS
    }
    yield Claim(f"{task}-lindt-tm-leads", "Table 3, last row", says, parts, "table3")


def _central(task: str) -> Iterator[Claim]:
    says = f"{TASK_TITLES[task]}, default NFL: LINDT is at least FedAvg in central accuracy"
    gap = Gap(Score(task, "nfl", "lindt", "central"), Score(task, "nfl", "fedavg", "central"), at_least=True)
    yield Claim(f"{task}-central", "Table 3, left; 'lead in central accuracy as well'", says, {"": gap}, "table3")


def _central_most() -> Claim:
    gains = {
        task: Minus(Score(task, "nfl", "lindt", "central"), Score(task, "nfl", "fedavg", "central"), title)
        for task, title in TASK_TITLES.items()
    }
    says = "LINDT's gain over FedAvg in central accuracy is larger on SHAKE than on CIFAR"
    gap = Gap(gains["shake"], gains["cifar"])
    return Claim("central-most-on-shake", "Table 3, left; 'much higher in SHAKE'", says, {"": gap}, "table3")


def _normal(task: str) -> Iterator[Claim]:
    where = "Table 3, right"
    says = f"{TASK_TITLES[task]}, normal FL: LINDT is at least FedAvg in central and local accuracy"
    parts: dict[str, Gap] = {
        metric: Gap(Score(task, "normal", "lindt", metric), Score(task, "normal", "fedavg", metric), at_least=True)
        for metric in METRICS
    }
    yield Claim(f"{task}-normal-lindt", where, says, parts, "table3")
    for method in EARLIER:
        says = f"{TASK_TITLES[task]}, normal FL: {NAMES[method]} is at most FedAvg in local accuracy"
        gap = Gap(Score(task, "normal", "fedavg"), Score(task, "normal", method), at_least=True)
        yield Claim(f"{task}-normal-{method}", f"{where}; 'most perform no better'", says, {"": gap}, "table3")


def _gains(task: str) -> Iterator[Claim]:
    for what, table in SWEEPS[task].items():
        says = f"{TASK_TITLES[task]}: LINDT's beta > 0 for every {what}"
        parts = {_title(table, world): Gap(Score(task, world, "lindt", "beta", "beta")) for world in worlds_of(table)}
        id = f"{task}-gain-{what.replace(' ', '-')}"
        yield Claim(id, f"Table {table}; 'always ensure a positive gain'", says, parts, f"table{table}")


def _stable(task: str) -> Claim:
    table = SWEEPS[task]["active ratio"]
    gains = tuple(Score(task, world, "lindt", "beta") for world in worlds_of(table))
    spread = Range(gains, "beta's range")
    says = f"{TASK_TITLES[task]}: LINDT's gain is stable over K/N (its range is under {SMALL:.0f} points)"
    gap = Gap(Allowed(SMALL, spread), spread)
    return Claim(f"{task}-stable-active-ratio", f"Table {table}; 'very stable'", says, {"": gap}, f"table{table}")


def _falling() -> Iterator[Claim]:
    """CIFAR only: on SHAKE the paper finds these changes neither large nor monotonic."""
    for what, table in (("skew", 4), ("attackers", 6), ("sigma", 7)):
        worlds = [
            world for world in worlds_of(table) if table != 4 or world != "nfl"
        ]  # Mixed is not a step of the skew
        titles = {world: _title(table, world) for world in worlds}
        where, command = f"Table {table}; 'reduction'", f"table{table}"

        def fall(one: str, other: str, metric: Metric, titles: dict[str, str] = titles) -> Gap:
            before, after = (Score("cifar", world, "fedavg", metric, titles[world]) for world in (one, other))
            return Gap(before, after)

        says = f"CIFAR: FedAvg's central and local accuracy fall with {what}, from first to last"
        ends: dict[str, Gap] = {metric: fall(worlds[0], worlds[-1], metric) for metric in METRICS}
        yield Claim(f"cifar-falls-{what}", where, says, ends, command)
        says = f"CIFAR: FedAvg's local accuracy falls with every step of {what}"
        steps = {f"step {n}": fall(a, b, "local") for n, (a, b) in enumerate(pairwise(worlds), 1)}
        yield Claim(f"cifar-falls-{what}-stepwise", where, says, steps, command)
