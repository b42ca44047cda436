"""The numbers of docs/reproduction.md: blocks between two markers of the page, each made from the kept results.

Text outside of the blocks has no measured number, so that none can be stale: a test reads the page for them.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final, final

from lindt.plan.models import parameters_of
from lindt.runs.files import write_whole
from lindt_experiments.claims.claims import Row, report
from lindt_experiments.claims.judging import VERDICTS
from lindt_experiments.plans.catalog import EXHIBITS, Cell
from lindt_experiments.plans.scales import CLASSES, SIZES
from lindt_experiments.plans.variants import FIRSTS, POSITIONS, SCORES
from lindt_experiments.results import traces
from lindt_experiments.results.outcomes import Outcome, find
from lindt_experiments.tables import paper
from lindt_experiments.tables.sheets import ours, papers, table_lines
from lindt_experiments.tables.tables import choices_sheet, private_sheets
from lindt_experiments.tables.titles import METHOD_TITLES, STARRED, TASK_TITLES, WORLD_TITLES

Outcomes = Sequence[Outcome]
NOT_RUN: Final = "Not run yet."
JUDGED: Final = ("cpu", "paper")  # the scales whose claims are counted
VARIED: Final = (4, 5, 6, 7, 10, 11, 12, 13)  # the tables that vary one condition
BLOCK: Final = re.compile(r"<!-- begin: (\w+) -->\n.*?<!-- end: \1 -->", flags=re.DOTALL)


@final
@dataclass(frozen=True)
class Evidence:
    """The stored results of present plans, and the points of figure 1."""

    outcomes: tuple[Outcome, ...]
    panels: tuple[traces.Traces, ...] = ()

    def claims(self, scale: str) -> list[Row]:
        return report(self.outcomes, scale)


def path_of(results: Path) -> Path:
    return results.resolve().parent / "docs" / "reproduction.md"


def write(outcomes: Outcomes, results: Path) -> Path | None:
    """Fill the page beside the results, if it exists."""
    path = path_of(results)
    if not path.is_file():
        return None
    evidence = Evidence(tuple(outcomes), tuple(traces.load(results, "cpu")))
    write_whole(path, filled(path.read_text(), evidence).encode())
    return path


def filled(page: str, evidence: Evidence) -> str:
    """The page with every block made anew."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- begin: {name} -->\n\n{BLOCKS[name](evidence)}\n\n<!-- end: {name} -->"

    return BLOCK.sub(block, page)


def claims_by_scale(evidence: Evidence) -> str:
    """How many of the paper's claims hold, fail, are undecided and were not run, by the scale of the runs."""
    counts = {scale: Counter(row.verdict for row in evidence.claims(scale)) for scale in JUDGED}
    total = sum(counts[JUDGED[0]].values())
    columns = (f"of {total} claims", *(f"scale `{scale}`" for scale in JUDGED))
    return table_lines(columns, [(verdict, *(str(counts[s][verdict]) for s in JUDGED)) for verdict in VERDICTS])


def failing(evidence: Evidence) -> str:
    """The claims that fail, with their numbers."""
    rows = [row for scale in JUDGED for row in evidence.claims(scale) if row.verdict == "fails"]
    return "\n".join(f"- `{row.scale}`: {row.says}. {_numbers(row)}." for row in rows) or "No claim fails."


def claims_of(exhibit: str, numbers: bool) -> Callable[[Evidence], str]:
    """The verdicts on the claims of a table or figure at `cpu`."""

    def block(evidence: Evidence) -> str:
        rows = [row for row in evidence.claims("cpu") if row.exhibit == exhibit]
        return "\n".join(_line(row, numbers) for row in rows)

    return block


def _line(row: Row, numbers: bool) -> str:
    needed = f" ({row.needed} seeds would decide)" if row.needed.isdigit() else ""
    text = f"- {row.says}: **{row.verdict}**{needed}"
    return f"{text}. {_numbers(row)}." if numbers else f"{text}."


def _numbers(row: Row) -> str:
    return "; ".join(row.numbers.splitlines())


def table_3(evidence: Evidence) -> str:
    """Ours beside the paper's: every cell at scale `cpu`, and those that were run at other scales."""
    return _beside([cell for cell in EXHIBITS["table3"].cells if paper.one(*cell)], evidence.outcomes, ("cpu",))


def beyond(evidence: Evidence) -> str:
    """The methods that the paper does not have, as far as they were run."""
    cells = [cell for name in ("table3", "beyond") for cell in EXHIBITS[name].cells if not paper.one(*cell)]
    return _beside(cells, evidence.outcomes, ())


def _beside(cells: Iterable[Cell], outcomes: Outcomes, always: Sequence[str]) -> str:
    lines = []
    for cell in cells:
        printed = paper.one(*cell)
        for scale in ("cpu", "tenth", "paper"):
            kept = find(outcomes, **cell._asdict(), scale=scale)
            if kept or scale in always:
                lines.append(
                    (
                        _place(cell),
                        f"`{scale}`, {len(kept)}",
                        ours(one.central for one in kept),
                        papers(printed and printed.central),
                        ours(one.local for one in kept),
                        papers(printed and printed.local),
                        *_beta(cell, kept),
                    )
                )
    columns = ("", "scale, seeds", "central", "paper", "local", "paper", "beta", "paper", "difference")
    return table_lines(columns, lines)


def gains(evidence: Evidence) -> str:
    """The test of gains over runs whose clients report them: its estimate beside beta of the test data."""
    lines = []
    for cell in EXHIBITS["beyond"].cells:
        for scale in ("cpu", "paper"):
            for one in find(evidence.outcomes, **cell._asdict(), scale=scale):
                if "test/gain" in one.notes:
                    warned, shown = (one.notes.get(f"test/{name}") for name in ("warning", "since"))
                    lines.append(
                        (
                            f"{_place(cell)}, `{scale}`, seed {one.seed}",
                            "-" if warned is None else f"{warned:.0f}",
                            "-" if shown is None else f"{shown:.0f}",
                            f"{100 * one.notes['test/gain']:+.1f} ±{100 * one.notes['test/error']:.1f}",
                            ours([one.beta], sign=True),
                        )
                    )
    return table_lines(("", "early warning", "shown since", "gain of w, held out", "beta"), lines) if lines else NOT_RUN


def _place(cell: Cell) -> str:
    world = "normal" if cell.world == "normal" else "NFL"
    return f"{TASK_TITLES[cell.task]}, {world}, {METHOD_TITLES[cell.method]}"


def behind(evidence: Evidence) -> str:
    """What stands behind table 3 in NFL: private models, clients worse off, the attack, and what was learned."""
    lines = []
    for cell in EXHIBITS["table3"].cells:
        printed = paper.one(*cell)
        for scale in (
            ("cpu", "paper") if cell.world == "nfl" and cell.method in ("fedavg", "apfl", "fb", "lindt") else ()
        ):
            kept = find(evidence.outcomes, **cell._asdict(), scale=scale)
            if kept:
                clients = sum(one.counted_clients for one in kept)
                harmed, clearly = (
                    sum(getattr(one, name) or 0 for one in kept) for name in ("harmed", "clearly_harmed")
                )
                lines.append(
                    (
                        f"{_place(cell)}, `{scale}`",
                        ours(one.private for one in kept),
                        papers(printed and printed.private),
                        f"{harmed} of {clients}",
                        str(clearly),
                        ours(one.attack_central for one in kept),
                        ours(one.attack_local for one in kept),
                        _learned(kept),
                    )
                )
    attack = ("attack, central", "attack, local")
    return table_lines(("", "private", "paper", "worse off than alone", "clearly", *attack, "at the end"), lines)


def _learned(kept: Outcomes) -> str:
    """APFL's alpha, or the dual's scores from the first layer to the last: means over the seeds."""

    def mean(name: str) -> float:
        return statistics.fmean(one.notes[name] for one in kept)

    if "alpha" in kept[0].notes:
        return f"alpha {mean('alpha'):.4f}"
    scores = [f"{mean(name):.2f}" for name in sorted(kept[0].notes) if name.startswith("score/")]
    return f"scores {' '.join(scores)}" if scores else "-"


def varied(number: int) -> Callable[[Evidence], str]:
    """The gain of FedAvg and of LINDT where one condition varies, at scale `cpu`."""

    def block(evidence: Evidence) -> str:
        lines: dict[str, list[str]] = {}
        for cell in EXHIBITS[f"table{number}"].cells:
            kept = find(evidence.outcomes, **cell._asdict(), scale="cpu")
            lines.setdefault(WORLD_TITLES.get(cell.world) or STARRED[number], []).extend(_beta(cell, kept))
        columns = ("beta", "FedAvg", "paper", "difference", "LINDT", "paper", "difference")
        return table_lines(columns, [(place, *line) for place, line in lines.items()])

    return block


def figure(number: int) -> Callable[[Evidence], str]:
    """The last values of the processes in a figure, at scale `cpu`. The paper prints no such numbers."""

    def block(evidence: Evidence) -> str:
        lines = []
        for cell in EXHIBITS[f"figure{number}"].cells:
            kept = find(evidence.outcomes, **cell._asdict(), scale="cpu")
            lines.append(
                (
                    METHOD_TITLES[cell.method] + (", normal FL" if cell.world.startswith("normal") else ""),
                    _rounds(one.detected_at for one in kept),
                    _rounds(one.stopped_at for one in kept),
                    ours(one.local for one in kept),
                    ours((one.beta for one in kept), sign=True),
                    ", ".join(f"{one.harmed} of {one.counted_clients}" for one in kept) or "-",
                )
            )
        return table_lines(("at the end", "detected", "stopped", "local", "beta", "worse off than alone"), lines)

    return block


def private(evidence: Evidence) -> str:
    """The accuracy of private models of half, the rule's and twice the epochs, and the gains over them."""
    accuracy, gains = private_sheets(evidence.outcomes, "cpu", None)
    rows = {row[0]: row[2:] for row in gains.rows}
    lines = []
    for place, seeds, *private_accuracy in accuracy.rows:
        if seeds != "0":  # not run yet
            betas = [" / ".join(rows[f"{place}, {METHOD_TITLES[method]}"][:3]) for method in ("fedavg", "lindt")]
            lines.append((place, *private_accuracy, *betas))
    return table_lines(("", "half", "the rule's", "twice", "paper", "beta of FedAvg", "beta of LINDT"), lines)


def choices(evidence: Evidence) -> str:
    """FedAvg and private models with one open choice changed, at scale `cpu`: the choices that were run."""
    sheet = choices_sheet(evidence.outcomes, "cpu")
    return table_lines(sheet.columns, [row for row in sheet.rows if row[1] != "0"])


def figure_1(evidence: Evidence) -> str:
    """The mean of w_div (Eq. 5) over the rounds of each panel."""
    panels = sorted(evidence.panels, key=lambda one: (one.seed, traces.PANELS.index(one.panel)))
    lines = [(f"{one.panel}: {one.setting}", f"{statistics.fmean(one.w_div):.2f}") for one in panels]
    return table_lines(("seed 0, CIFAR", "mean w_div"), lines)


Change = tuple[str, tuple[tuple[str, str], ...]]  # its title, and the methods that differ by it alone: from, to


def _changes() -> list[Change]:
    def dual(position: str, scale: str, first: str) -> str:
        name = f"dual-{position}-{scale}-{first}"
        return "lindt" if name == "dual-after-paper-copy" else name

    def scaled(scale: str) -> tuple[tuple[str, str], ...]:
        return tuple((dual(p, "paper", f), dual(p, scale, f)) for p, f in product(POSITIONS, FIRSTS))

    return [
        (
            "v begins at random, not as a copy of w",
            tuple((dual(p, s, "copy"), dual(p, s, "random")) for p, s in product(POSITIONS, SCORES)),
        ),
        (
            "attached before the activations",
            tuple((dual("after", s, f), dual("before", s, f)) for s, f in product(SCORES, FIRSTS)),
        ),
        ("score divided by the root of d", scaled("sqrt_d")),
        ("score as a cosine", scaled("cosine")),
        ("only v's head trains", (("lindt", "dual-head"),)),
        ("no attaching", (("lindt", "separate"),)),
    ]


def ablation(evidence: Evidence) -> str:
    """How far a change of the dual model moves local accuracy: the lowest and the highest of its pairs of runs."""
    local = {
        (one.method, one.seed): 100 * one.local
        for one in evidence.outcomes
        if (one.task, one.world, one.scale) == ("cifar", "nfl", "cpu") and one.local is not None
    }
    lines = []
    for title, pairs in _changes():
        moved = [
            local[other, seed] - value
            for one, other in pairs
            for (method, seed), value in local.items()
            if method == one and (other, seed) in local
        ]
        ends = (f"{min(moved):+.1f}", f"{max(moved):+.1f}") if moved else ("-", "-")
        lines.append((title, str(len(moved)), *ends))
    return table_lines(("change", "pairs of runs", "local moves by", "to"), lines)


def scales(_evidence: Evidence) -> str:
    """The sizes of the scales."""
    shown = [(scale, task) for task in TASK_TITLES for scale in ("paper", "tenth", "cpu") if (scale, task) in SIZES]
    sizes = [SIZES[key] for key in shown]

    def line(title: str, values: Iterable[object]) -> tuple[str, ...]:
        return (title, *(str(value) for value in values))

    lines = [
        line("clients", (size.clients for size in sizes)),
        line("rounds", (size.rounds for size in sizes)),
        line(
            "rounds of figures 3 and 7 to 9",
            (
                size.rounds * size.longer if task == "cifar" else "-"
                for size, (_, task) in zip(sizes, shown, strict=True)
            ),
        ),
        line(
            "weights",
            (
                f"{parameters_of(size.model.build(CLASSES[task])):,}"
                for size, (_, task) in zip(sizes, shown, strict=True)
            ),
        ),
        line("side of a picture, or window", (getattr(size.model, "side", size.text.window) for size in sizes)),
        line("share of the data", (_share(size.source, size.text.stride) for size in sizes)),
        line("epsilon", (f"{size.epsilon:g}" for size in sizes)),
        line("r'", (size.detection.patience for size in sizes)),
        line("most epochs of a private model", (size.alone.epochs for size in sizes)),
    ]
    return table_lines(("", *(f"{TASK_TITLES[task]}, `{scale}`" for scale, task in shown)), lines)


def _share(source: str, stride: int) -> str:
    return "half" if source.endswith("-half") else f"1 window in {stride}" if stride > 1 else "all"


def _beta(cell: Cell, kept: Outcomes) -> tuple[str, str, str]:
    """Our gain, the paper's, and the difference of our mean from the paper's, in points."""
    printed = paper.one(*cell)
    theirs = printed.beta if printed else None
    known = [100 * one.beta for one in kept if one.beta is not None]
    difference = f"{statistics.fmean(known) - theirs:+.1f}" if known and theirs is not None else "-"
    return ours((one.beta for one in kept), sign=True), papers(theirs, sign=True), difference


def _rounds(found: Iterable[tuple[int, ...] | None]) -> str:
    """The first round of an event, by seed."""
    return ", ".join(str(rounds[0]) if rounds else "-" for rounds in found) or "-"


BLOCKS: Final[dict[str, Callable[[Evidence], str]]] = {
    "claims": claims_by_scale,
    "failing": failing,
    "table3": table_3,
    "behind": behind,
    "beyond": beyond,
    "gains": gains,
    **{f"table{number}": varied(number) for number in VARIED},
    **{f"table{number}_claims": claims_of(f"table{number}", numbers=False) for number in VARIED},
    "figure1": figure_1,
    "figure3": figure(3),
    "figure9": figure(9),
    **{f"figure{number}_claims": claims_of(f"figure{number}", numbers=True) for number in (3, 5, 6, 7, 8, 9)},
    "ablation": ablation,
    "private": private,
    "choices": choices,
    "scales": scales,
}
