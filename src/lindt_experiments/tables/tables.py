"""The paper's tables from stored outcomes: our number and the paper's in each cell."""

from __future__ import annotations

from collections.abc import Sequence

from lindt_experiments.plans.catalog import ALONE_IN, Cell, Exhibit
from lindt_experiments.plans.choices import CHOICES
from lindt_experiments.plans.scales import size_of
from lindt_experiments.results.outcomes import Outcome, find
from lindt_experiments.tables import paper
from lindt_experiments.tables.sheets import Sheet, ours, papers
from lindt_experiments.tables.titles import METHOD_TITLES, STARRED, TASK_TITLES, WORLD_TITLES

COLUMNS = ("", "seeds", "central", "paper", "local", "paper", "beta", "paper")
MEANING = (
    "Accuracy in percent, beta in points: means over the last scored rounds; ± is the standard deviation over seeds."
)


def table_sheets(exhibit: Exhibit, outcomes: Sequence[Outcome], scale: str, task: str | None) -> list[Sheet]:
    """Table 3 is four sheets, one for each task and environment; the others are one, a row for each method."""
    cells = [cell for cell in exhibit.cells if task in (None, cell.task)]
    if exhibit.number != 3:
        name = f"Table {exhibit.number}, {exhibit.title}"
        return [_sheet(name, cells, outcomes, scale, exhibit.number)] if cells else []
    found = []
    for whose, world in dict.fromkeys((cell.task, cell.world) for cell in cells):
        name = f"Table 3, {TASK_TITLES[whose]} / {'NFL' if world == 'nfl' else 'normal FL'}"
        group = [cell for cell in cells if (cell.task, cell.world) == (whose, world)]
        found.append(_sheet(name, group, outcomes, scale, 3))
    return found


def _sheet(title: str, cells: Sequence[Cell], outcomes: Sequence[Outcome], scale: str, number: int) -> Sheet:
    lines: list[tuple[str, ...]] = []
    remarks: list[str] = []
    for cell in cells:
        kept = find(outcomes, **cell._asdict(), scale=scale)
        printed = paper.one(*cell)
        place = "" if number == 3 else f"{WORLD_TITLES.get(cell.world) or STARRED[number]}, "
        lines.append(
            (
                place + METHOD_TITLES[cell.method],
                str(len(kept)),
                ours(one.central for one in kept),
                papers(printed and printed.central),
                ours(one.local for one in kept),
                papers(printed and printed.local),
                ours((one.beta for one in kept), sign=True),
                papers(printed and printed.beta, sign=True),
            )
        )
        if number == 3 and cell.method in ("fedavg", "lindt"):
            remarks += _stretched(cell, kept, outcomes, scale)
    return Sheet(title, COLUMNS, tuple(lines), tuple(remarks))


def _stretched(cell: Cell, kept: Sequence[Outcome], outcomes: Sequence[Outcome], scale: str) -> list[str]:
    """beta against private models of half and of twice the epochs, where these were trained."""
    halved, doubled = (betas(kept, outcomes, f"alone-x{factor}", scale) for factor in ("0.5", "2"))
    if not halved or not doubled:
        return []
    against = (
        f"{ours(halved, sign=True)} against private models of half the epochs, {ours(doubled, sign=True)} of twice"
    )
    return [f"beta of {METHOD_TITLES[cell.method]}: {against}."]


def betas(kept: Sequence[Outcome], outcomes: Sequence[Outcome], alone: str, scale: str) -> list[float]:
    """The gain of each seed's run over other private models of the same clients."""
    found = []
    for one in kept:
        others = find(outcomes, task=one.task, world=one.world, method=alone, scale=scale, seed=one.seed)
        found += [one.local - other.private for other in others if one.local is not None and other.private is not None]
    return found


def ablation_sheets(exhibit: Exhibit, outcomes: Sequence[Outcome], scale: str) -> list[Sheet]:
    """The scores of each variant, and the mean score and v's gradient norm at each point of its dual model."""
    model = size_of("cifar", scale).model.build(10)
    layers = [*(name for name, _ in model.named_modules()), "head"]
    reached, learned = [], []
    for cell in exhibit.cells:
        kept = find(outcomes, **cell._asdict(), scale=scale)
        title = METHOD_TITLES.get(cell.method) or cell.method.removeprefix("dual-").replace("-", ", ")
        scores = [ours(one.central for one in kept), ours(one.local for one in kept)]
        reached.append((title, str(len(kept)), *scores, ours((one.beta for one in kept), sign=True)))
        learned.append((title, _noted(kept, "score/", layers, ".2f"), _noted(kept, "gradient/", layers, ".1g")))
    remark = "A variant is named by attach position, scale of the score and first v; LINDT is after, paper, copy."
    columns = ("", "seeds", "central", "local", "beta")
    points = ("", "score at each point", "gradient of v, then its head")
    return [
        Sheet("Ablation on CIFAR / NFL", columns, tuple(reached), (remark,)),
        Sheet("What the dual does in it", points, tuple(learned)),
    ]


def _noted(kept: Sequence[Outcome], prefix: str, layers: Sequence[str], digits: str) -> str:
    """Means over the seeds, in the order of the layers."""
    names = [f"{prefix}{layer}" for layer in layers]
    found = [[one.notes[name] for one in kept if name in one.notes] for name in names]
    return " ".join(f"{sum(values) / len(values):{digits}}" for values in found if values) or "-"


def private_sheets(outcomes: Sequence[Outcome], scale: str, task: str | None) -> list[Sheet]:
    """The private models with three numbers of epochs and the paper's implied accuracy, and the gains over them."""
    alone, gains = [], []
    stretches = ("alone-x0.5", "alone-x1", "alone-x2")
    for whose, worlds in ALONE_IN.items():
        for world in worlds if task in (None, whose) else ():
            place = f"{TASK_TITLES[whose]}, {WORLD_TITLES.get(world) or STARRED['alone', whose]}"
            kept = [find(outcomes, task=whose, world=world, method=name, scale=scale) for name in stretches]
            printed = paper.one(whose, world, "fedavg")
            implied = papers(printed.private if printed else None)
            alone.append((place, str(len(kept[1])), *(ours(one.private for one in runs) for runs in kept), implied))
            for method in ("fedavg", "lindt"):
                runs = find(outcomes, task=whose, world=world, method=method, scale=scale)
                row = paper.one(whose, world, method)
                cells = [ours(betas(runs, outcomes, name, scale), sign=True) for name in stretches]
                printed_beta = papers(row.beta if row else None, sign=True)
                gains.append((f"{place}, {METHOD_TITLES[method]}", str(len(runs)), *cells, printed_beta))
    columns = ("", "seeds", "half", "the rule's", "twice", "paper")
    remark = "Each client's number of epochs is chosen on held-out training data, then halved or doubled."
    return [
        Sheet("Accuracy of the private models by epochs; the paper's is implied", columns, tuple(alone), (remark,)),
        Sheet("beta over them", columns, tuple(gains)),
    ]


def choices_sheet(outcomes: Sequence[Outcome], scale: str) -> Sheet:
    """FedAvg and the private models with one open choice changed, and the differences from the default."""
    base = {one.seed: one for one in find(outcomes, task="cifar", world="nfl", method="fedavg", scale=scale)}
    lines: list[tuple[str, ...]] = []
    for world, title in {"nfl": "the default", **{name: choice.title for name, choice in CHOICES.items()}}.items():
        kept = find(outcomes, task="cifar", world=world, method="fedavg", scale=scale)
        paired = [(one, base[one.seed]) for one in kept if one.seed in base and world != "nfl"]
        lines.append(
            (
                title,
                str(len(kept)),
                ours(one.local for one in kept),
                ours((_less(a.local, b.local) for a, b in paired), sign=True),
                ours(one.private for one in kept),
                ours((_less(a.private, b.private) for a, b in paired), sign=True),
                ours((one.beta for one in kept), sign=True),
            )
        )
    columns = ("", "seeds", "FedAvg's local", "moved by", "private", "moved by", "beta")
    return Sheet("One open choice made otherwise, CIFAR / NFL", columns, tuple(lines))


def _less(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
