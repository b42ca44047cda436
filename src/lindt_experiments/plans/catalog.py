"""The exhibits of `lindt reproduce`: each table and figure of the paper with the runs that it needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

from lindt.errors import UserError
from lindt_experiments.plans.choices import CHOICES
from lindt_experiments.plans.variants import ABLATIONS, ALONE, LATER, OURS
from lindt_experiments.tables import paper

Kind = Literal["table", "figure", "traces", "sizes", "ablation", "private", "choices"]


class Cell(NamedTuple):
    """One run for each seed: a method in an environment (world) of a task."""

    task: str
    world: str
    method: str


@final
@dataclass(frozen=True)
class Exhibit:
    name: str
    title: str
    kind: Kind
    cells: tuple[Cell, ...] = ()
    number: int = 0  # the paper's


def _table(number: int, title: str) -> Exhibit:
    cells = tuple(Cell(row.task, row.world, row.method) for row in paper.printed(number))
    if number == 3:
        cells += tuple(Cell("cifar", world, method) for world in ("nfl", "normal") for method in OURS)
    return Exhibit(f"table{number}", title, "table", cells, number)


def _figure(number: int, title: str, task: str, runs: dict[str, tuple[str, ...]]) -> Exhibit:
    tasks = ("cifar", "shake") if task == "both" else (task,)
    cells = tuple(Cell(t, world, method) for t in tasks for world, methods in runs.items() for method in methods)
    return Exhibit(f"figure{number}", title, "figure", cells, number)


RECOVERIES = ("fedavg", "runtime", "runtime-once", "lindt")
# The environments in which the paper's tables imply an accuracy of the private models.
ALONE_IN = {"cifar": ("nfl", "classes-10", "classes-5", "classes-2", "iid", "normal"), "shake": ("nfl", "balanced")}
_ALL = (
    _table(3, "comparison with previous methods, in NFL and in normal FL"),
    _table(4, "CIFAR: varying the data allocation"),
    _table(5, "CIFAR: varying the ratio of active clients"),
    _table(6, "CIFAR: varying the share of attackers"),
    _table(7, "CIFAR: varying sigma"),
    Exhibit("table8", "statistics of the client data, over 20 seeds; nothing is trained", "sizes", number=8),
    _table(10, "SHAKE: varying the data allocation"),
    _table(11, "SHAKE: varying the ratio of active clients"),
    _table(12, "SHAKE: varying the share of attackers"),
    _table(13, "SHAKE: varying sigma"),
    Exhibit("figure1", "traces of four clients over a few real rounds; no run is kept", "traces", number=1),
    _figure(
        3, "Delta; recovery under two stopping rules", "cifar", {"nfl-long": RECOVERIES, "normal-long": ("fedavg",)}
    ),
    _figure(5, "local accuracy over the rounds", "both", {"nfl": ("fedavg", "apfl", "lindt")}),
    _figure(6, "Delta on SHAKE", "shake", {"nfl": ("fedavg",), "normal": ("fedavg",)}),
    _figure(7, "Delta in three processes", "cifar", {"nfl-long": ("fedavg", "runtime", "runtime-once")}),
    _figure(8, "Delta where the attacks end", "cifar", {"lifted": ("fedavg", "runtime", "runtime-quiet", "lindt")}),
    _figure(9, "recovery where the attacks end", "cifar", {"lifted": ("fedavg", "runtime", "runtime-quiet", "lindt")}),
    Exhibit(
        "ablation",
        "what the dual learns: attach position x score scale x first v",
        "ablation",
        tuple(Cell("cifar", "nfl", method) for method in ("fedavg", "lindt", *ABLATIONS)),
    ),
    Exhibit(
        "beyond",
        "methods that the paper does not have, in table 3's environments of CIFAR",
        "table",
        tuple(Cell("cifar", world, method) for world in ("nfl", "normal") for method in LATER),
        number=3,
    ),
    Exhibit(
        "private",
        "the private models under the rule's number of epochs, half and twice of it",
        "private",
        tuple(Cell(task, world, method) for task, worlds in ALONE_IN.items() for world in worlds for method in ALONE),
    ),
    Exhibit(
        "choices",
        "FedAvg and private models with one open choice changed",
        "choices",
        tuple(Cell("cifar", world, "fedavg") for world in ("nfl", *CHOICES)),
    ),
)
EXHIBITS: dict[str, Exhibit] = {exhibit.name: exhibit for exhibit in _ALL}


def named(name: str) -> tuple[Exhibit, ...]:
    """The exhibit of a name, or all."""
    if name == "all":
        return _ALL
    if name not in EXHIBITS:
        raise UserError(f"{name!r}: choose among {', '.join(EXHIBITS)}, all")
    return (EXHIBITS[name],)


def cells_of(
    exhibits: Iterable[Exhibit], task: str | None = None, only: Sequence[str] = (), worlds: Sequence[str] = ()
) -> tuple[Cell, ...]:
    """The runs of some exhibits, each once, in order; only those of a task, methods or environments where given."""
    every = dict.fromkeys(cell for exhibit in exhibits for cell in exhibit.cells)
    cells = [cell for cell in every if task in (None, cell.task)]
    if every and not cells:
        raise UserError(
            f"--task {task}: it has runs of {', '.join({cell.task: 0 for cell in every})} only; leave it out"
        )
    methods = _chosen("--only", only, [cell.method for cell in cells])
    environments = _chosen("--world", worlds, [cell.world for cell in cells])
    found = tuple(cell for cell in cells if cell.method in methods and cell.world in environments)
    if cells and not found:
        raise UserError(f"--only {','.join(only)} --world {','.join(worlds)}: no run has both; leave one out")
    return found


def _chosen(option: str, asked: Sequence[str], known: Iterable[str]) -> frozenset[str]:
    """The names that were given; all names where none were given."""
    there = dict.fromkeys(known)
    for name in asked:
        if name not in there:
            choice = f"choose among {', '.join(there)}" if there else "it has no runs to choose from; leave it out"
            raise UserError(f"{option} {name}: {choice}")
    return frozenset(asked or there)
