"""Series of one number per seed, which claims compare. Accuracies are in percent, gains in points. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Literal, final

from lindt_experiments.claims.judging import Cell, Results, Series
from lindt_experiments.results.outcomes import Outcome
from lindt_experiments.tables.titles import METHOD_TITLES

NAMES = METHOD_TITLES | {
    "runtime": "persisting",
    "runtime-once": "everyone once",
    "runtime-quiet": "until quiet",
}
Metric = Literal["central", "local", "beta"]
SETTLED = 2.0  # points around the mean of the end


def _by_seed(results: Results, cell: Cell, of: Callable[[Outcome], float | None]) -> dict[int, float]:
    values = {seed: of(outcome) for seed, outcome in results.of(cell).items()}
    return {seed: value for seed, value in values.items() if value is not None}


@final
@dataclass(frozen=True)
class Score:
    """The mean over the last scored rounds, as in the paper's tables."""

    task: str
    world: str
    method: str
    metric: Metric = "local"
    title: str = ""  # needed where two series have the same method

    @property
    def name(self) -> str:
        if self.title:
            return self.title
        return f"beta of {NAMES[self.method]}" if self.metric == "beta" else NAMES[self.method]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return ((self.task, self.world, self.method),)

    def __call__(self, results: Results) -> dict[int, float]:
        def value(outcome: Outcome) -> float | None:
            found: float | None = getattr(outcome, self.metric)
            return None if found is None else 100 * found

        return _by_seed(results, self.cells[0], value)


@final
@dataclass(frozen=True)
class Minus:
    """One series less another, seed by seed."""

    one: Series
    other: Series
    name: str

    @property
    def cells(self) -> tuple[Cell, ...]:
        return (*self.one.cells, *self.other.cells)

    def __call__(self, results: Results) -> dict[int, float]:
        a, b = self.one(results), self.other(results)
        return {seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())}


@final
@dataclass(frozen=True)
class Range:
    """From the lowest to the highest of several series of one seed."""

    series: tuple[Series, ...]
    name: str

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for one in self.series for cell in one.cells)

    def __call__(self, results: Results) -> dict[int, float]:
        found = [one(results) for one in self.series]
        seeds = set.intersection(*(set(values) for values in found))
        return {seed: max(v[seed] for v in found) - min(v[seed] for v in found) for seed in sorted(seeds)}


@final
@dataclass(frozen=True)
class Allowed:
    """A fixed bound, the same for every seed of a series."""

    value: float
    bounded: Series

    @property
    def name(self) -> str:
        return "allowed"

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.bounded.cells

    def __call__(self, results: Results) -> dict[int, float]:
        return dict.fromkeys(self.bounded(results), self.value)


@final
@dataclass(frozen=True)
class Roughness:
    """The mean change of local accuracy from one scored round to the next, in the second half of the run.

    Only rounds in which every method is scored count: a detection adds a scored round that other methods do not have.
    """

    cell: Cell
    among: tuple[Cell, ...]

    @property
    def name(self) -> str:
        return NAMES[self.cell[2]]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.among

    def __call__(self, results: Results) -> dict[int, float]:
        found = [results.of(cell) for cell in self.among]
        rough = {}
        for seed, outcome in results.of(self.cell).items():
            if all(seed in outcomes for outcomes in found):
                common = set.intersection(*(set(outcomes[seed].scored) for outcomes in found))
                curve = curve_of(outcome)
                late = [curve[r] for r in sorted(common) if r > outcome.rounds / 2]
                if len(late) > 1:
                    rough[seed] = fmean(abs(b - a) for a, b in pairwise(late))
        return rough


@final
@dataclass(frozen=True)
class Settled:
    """When local accuracy has settled, in percent of the rounds: the first scored round after which it always is
    within 2 points of the mean of the end."""

    cell: Cell

    @property
    def name(self) -> str:
        return NAMES[self.cell[2]]

    @property
    def cells(self) -> tuple[Cell, ...]:
        return (self.cell,)

    def __call__(self, results: Results) -> dict[int, float]:
        return _by_seed(results, self.cell, settled)


def settled(outcome: Outcome) -> float | None:
    if outcome.local is None or not outcome.scored:
        return None
    end, curve = 100 * outcome.local, curve_of(outcome)
    away = [round for round, value in curve.items() if abs(value - end) > SETTLED]
    rest = [round for round in curve if round > max(away, default=0)]
    return 100 * (min(rest) if rest else outcome.rounds) / outcome.rounds


@final
@dataclass(frozen=True)
class Around:
    """A curve's value at the last scored round up to an event of the same seed: a detection, or a stop."""

    cell: Cell
    curve: Literal["local", "beta"]
    event: Literal["detected", "stopped"]
    of: Cell | None = None  # the run of the event, where it is another run

    @property
    def name(self) -> str:
        return f"{NAMES[self.cell[2]]} {'when detected' if self.event == 'detected' else 'at the stop'}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        return (self.cell, self.of) if self.of else (self.cell,)

    def __call__(self, results: Results) -> dict[int, float]:
        owners, found = results.of(self.of or self.cell), {}
        for seed, outcome in results.of(self.cell).items():
            when = first_event(owners[seed], self.event) if seed in owners else None
            curve = curve_of(outcome, self.curve)
            known = [round for round in curve if when is not None and round <= when]
            if known:
                found[seed] = curve[max(known)]
        return found


def first_event(outcome: Outcome, event: Literal["detected", "stopped"]) -> int | None:
    rounds = outcome.detected_at if event == "detected" else outcome.stopped_at
    return rounds[0] if rounds else None


def curve_of(outcome: Outcome, which: Literal["local", "beta"] = "local") -> Mapping[int, float]:
    """Percent or points by scored round."""
    values = outcome.local_curve if which == "local" else outcome.beta_curve
    return {r: 100 * value for r, value in zip(outcome.scored, values, strict=True) if value is not None}
