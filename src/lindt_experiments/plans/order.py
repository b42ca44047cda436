"""The order in which `lindt reproduce --scale S --hours H` plays the cells of a scale, each with its seed.

At `cpu`, five seeds of each cell: first the runs of undecided claims, of which the claim comes first that the least
time would decide; last the cells where half of the clients or more are active, which take longest. At `paper` and
`tenth` the steps of STEPS, then all other cells. At `smoke` the catalogue's order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple, final

from lindt_experiments.plans.catalog import EXHIBITS, Cell, cells_of
from lindt_experiments.plans.scales import SIZES
from lindt_experiments.plans.worlds import LONG

SEEDS: Final = 5  # 0, 1, ... at `cpu`
LAST: Final = ("active-0.9", "active-0.7", "active-0.5")
# Tables 3 to 7 and 10 to 13 and figures 3, 5, 6, 8 and 9. The other exhibits need one seed.
SEVERAL: Final = (*(f"table{n}" for n in (3, 4, 5, 6, 7, 10, 11, 12, 13)), *(f"figure{n}" for n in (3, 5, 6, 8, 9)))
Run = tuple[Cell, int]  # with its seed


@final
@dataclass(frozen=True)
class OpenClaim:
    """An undecided claim: the cells of its undecided parts, and how many seeds would decide it."""

    cells: tuple[Cell, ...]
    seeds: int | None  # None: unknown

    @property
    def decidable(self) -> bool:
        """Whether SEEDS seeds would decide it."""
        return self.seeds is not None and self.seeds <= SEEDS

    def runs(self) -> list[Run]:
        return [(cell, seed) for seed in range(min(self.seeds or SEEDS, SEEDS)) for cell in self.cells]


class Cost(NamedTuple):
    """The time of a run, and of its private models, which other runs may share."""

    seconds: float
    models: Hashable = None
    private: float = 0.0


def equal(_run: Run) -> Cost:
    return Cost(1.0)


def _cells(worlds: Iterable[str], methods: Iterable[str], task: str = "cifar") -> list[Cell]:
    return [Cell(task, *names) for names in product(worlds, methods)]


Steps = tuple[tuple[Sequence[Cell], Sequence[int]], ...]  # each step: its cells and its seeds
PAPER: Final[Steps] = (
    (_cells(["nfl"], ["fedavg", "lindt", "fb", "apfl", "trimmed-mean", "fedprox", "lindt-tm"]), [0]),
    (_cells(["normal"], ["fedavg", "fedprox", "trimmed-mean", "fb", "apfl", "lindt"]), [0]),
    (_cells(["nfl", "normal"], ["guarded-all", "fl-guard"]), [0]),
    (EXHIBITS["figure3"].cells, [0]),
    (_cells(["nfl", "normal"], ["fedavg-gain"]), [0]),
    (_cells(["nfl"], ["fedavg", "lindt", "guarded-all"]), [1, 2]),
    (_cells(["classes-2", "iid", "attack-0", "sigma-0.01"], ["fedavg", "lindt"]), [0]),
    (_cells(["nfl", "normal"], ["guarded"]), [0]),
)
TENTH: Final[Steps] = ((_cells(["nfl", "normal"], ["fedavg", "lindt"], "shake"), [0]),)
STEPS: Final[dict[str, Steps]] = {"paper": PAPER, "tenth": TENTH}


def ordered(scale: str, undecided: Sequence[OpenClaim] = (), cost: Callable[[Run], Cost] = equal) -> list[Run]:
    """All runs of a scale in this order. `cost` of a run that is stored already is 0."""
    return list(dict.fromkeys(_ordered(scale, undecided, cost)))


def _ordered(scale: str, undecided: Sequence[OpenClaim], cost: Callable[[Run], Cost]) -> Iterator[Run]:
    every = [cell for cell in cells_of(EXHIBITS.values()) if (scale, cell.task) in SIZES]
    if scale in STEPS:
        yield from ((cell, seed) for cells, seeds in STEPS[scale] for seed in seeds for cell in cells)
    elif scale == "cpu":
        yield from _deciding(undecided, cost)
        several = cells_of(EXHIBITS[name] for name in SEVERAL)
        yield from sorted(product(several, range(SEEDS)), key=_rank)
    yield from ((cell, 0) for cell in every)


def _deciding(undecided: Sequence[OpenClaim], cost: Callable[[Run], Cost]) -> Iterator[Run]:
    """The runs of undecided claims: those that SEEDS seeds would decide first, each time the claim of least time."""
    left = [claim for claim in undecided if not any(cell.world in LAST for cell in claim.cells)]
    costs = {run: cost(run) for claim in left for run in claim.runs()}
    trained: set[Hashable] = set()

    def price(claim: OpenClaim) -> tuple[bool, float]:
        found = [costs[run] for run in claim.runs()]
        private = {one.models: one.private for one in found if one.models not in trained}
        return not claim.decidable, sum(one.seconds for one in found) + sum(private.values())

    while left:
        claim = min(left, key=price)
        left.remove(claim)
        yield from claim.runs()
        trained |= {costs[run].models for run in claim.runs()}
        costs |= {run: Cost(0.0) for run in claim.runs()}


def _rank(run: Run) -> tuple[bool, int, bool]:
    """Seed by seed, short runs before long ones; many active clients last."""
    cell, seed = run
    return cell.world in LAST, seed, cell.world in LONG
