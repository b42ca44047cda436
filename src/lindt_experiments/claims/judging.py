"""How a claim is judged: paired differences over seeds, their 95% interval, and what too little evidence is.

Seeds are never chosen and runs of different scales never mixed. A gap is a paired difference in the direction
that the paper claims. It holds if its interval lies above zero, fails if below, and is undecided in between.
A gap under 2 points needs 3 seeds; with one seed a larger one can be called. (With two seeds the interval is
wide: t has one degree of freedom. That is the price of claiming an interval at all.)
Never imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal, Protocol, final

from lindt_experiments.results.outcomes import Outcome, find

Verdict = Literal["holds", "fails", "undecided", "not run"]
VERDICTS: tuple[Verdict, ...] = ("holds", "fails", "undecided", "not run")
Cell = tuple[str, str, str]  # task, world, method
SMALL = 2.0  # points: a smaller gap needs ENOUGH seeds
ENOUGH = 3


@final
@dataclass(frozen=True)
class Results:
    """The outcomes of one scale, by cell."""

    outcomes: tuple[Outcome, ...]
    scale: str

    def of(self, cell: Cell) -> dict[int, Outcome]:
        """By seed. Shakespeare without attackers is its normal FL: one run, kept under one of two names."""
        task, world, method = cell
        names = ("attack-0", "normal") if (task, world) in (("shake", "attack-0"), ("shake", "normal")) else (world,)
        found = [find(self.outcomes, task=task, world=name, method=method, scale=self.scale) for name in names]
        return {outcome.seed: outcome for outcomes in found for outcome in outcomes}


@final
@dataclass(frozen=True)
class Interval:
    """The mean of paired differences and its 95% t interval; a single one has none."""

    mean: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        width = f" [{self.low:+.1f}, {self.high:+.1f}]" if self.seeds > 1 else ""
        return f"{self.mean:+.1f}{width}"


def interval(differences: Sequence[float]) -> Interval:
    from scipy.stats import t  # slow to import

    n, mean = len(differences), fmean(differences)
    if n == 1:
        return Interval(mean, -math.inf, math.inf, 1)
    half = float(t.ppf(0.975, n - 1)) * stdev(differences) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def judge(differences: Sequence[float], small: float = SMALL, at_least: bool = False) -> Verdict:
    """A claimed gap above zero; with `at_least` zero itself will do."""
    if not differences:
        return "not run"
    seen = interval(differences)
    if seen.seeds < ENOUGH and abs(seen.mean) < small:
        return "undecided"
    low, high = (seen.mean, seen.mean) if seen.seeds == 1 else (seen.low, seen.high)
    if low > 0 or (at_least and low >= 0):
        return "holds"
    return "fails" if high < 0 or (high <= 0 and not at_least) else "undecided"


@final
@dataclass(frozen=True)
class Answer:
    verdict: Verdict
    numbers: str
    seeds: frozenset[int] = frozenset()


class Series(Protocol):
    """A number a seed, in points unless it says otherwise."""

    @property
    def name(self) -> str: ...
    @property
    def cells(self) -> tuple[Cell, ...]:
        """What must have been run."""
        ...

    def __call__(self, results: Results) -> dict[int, float]: ...


class Part(Protocol):
    """What a claim consists of."""

    def answer(self, results: Results) -> Answer: ...


@final
@dataclass(frozen=True)
class Gap:
    """`of` is above `over`, or above zero where there is no `over`; `below` turns it round."""

    of: Series
    over: Series | None = None
    below: bool = False
    at_least: bool = False
    small: float = SMALL
    unit: str = ""

    def answer(self, results: Results) -> Answer:
        missing = missing_cells(results, [*self.of.cells, *(self.over.cells if self.over else ())])
        if missing:
            return Answer("not run", f"not run: {missing}")
        ours, theirs = self.of(results), self.over(results) if self.over else {}
        seeds = sorted(ours.keys() & theirs.keys()) if self.over else sorted(ours)
        if not seeds:
            return Answer("undecided", f"{self.of.name}: no seed has it")
        gaps = [ours[seed] - theirs.get(seed, 0.0) for seed in seeds]
        claimed = [-gap for gap in gaps] if self.below else gaps
        level = fmean(ours[seed] for seed in seeds)
        if self.over:
            other = fmean(theirs[seed] for seed in seeds)
            text = f"{self.of.name} {level:.1f}, {self.over.name} {other:.1f}: {interval(gaps)} {self.unit}"
        else:
            text = f"{self.of.name} {interval(gaps)} {self.unit}"
        return Answer(judge(claimed, self.small, self.at_least), text.rstrip(), frozenset(seeds))


@final
@dataclass(frozen=True)
class Seen:
    """What one seed shows: yes, no, or (None) that it cannot be compared."""

    holds: bool | None
    text: str


@final
@dataclass(frozen=True)
class Every:
    """A yes or no that all seeds must agree on; `of` is given the outcomes of one seed, in the order of `cells`."""

    cells: tuple[Cell, ...]
    of: Callable[..., Seen]

    def answer(self, results: Results) -> Answer:
        missing = missing_cells(results, self.cells)
        if missing:
            return Answer("not run", f"not run: {missing}")
        found = [results.of(cell) for cell in self.cells]
        seeds = sorted(set.intersection(*(set(outcomes) for outcomes in found)))
        if not seeds:
            return Answer("not run", f"not run with one seed: {', '.join(' '.join(cell) for cell in self.cells)}")
        seen = [self.of(*(outcomes[seed] for outcomes in found)) for seed in seeds]
        answers = {one.holds for one in seen}
        verdict: Verdict = "holds" if answers == {True} else "fails" if answers == {False} else "undecided"
        texts = [one.text if len(seeds) == 1 else f"seed {s}: {one.text}" for s, one in zip(seeds, seen, strict=True)]
        return Answer(verdict, "\n".join(texts), frozenset(seeds))


def missing_cells(results: Results, cells: Iterable[Cell]) -> str:
    missing = [" ".join(cell) for cell in dict.fromkeys(cells) if not results.of(cell)]
    return ", ".join(missing)


@final
@dataclass(frozen=True)
class Claim:
    """A finding of the paper, in our words, and what would have to be true of our runs."""

    id: str
    where: str  # in the paper
    says: str
    parts: Mapping[str, Part]  # by a short name, "" where there is only one
    made_by: str  # `lindt reproduce ...`

    def answer(self, results: Results) -> Answer:
        """One failing part refutes a claim; it holds only if all of it was run and holds."""
        answers = {name: part.answer(results) for name, part in self.parts.items()}
        verdicts = [answer.verdict for answer in answers.values()]
        worst: tuple[Verdict, ...] = ("fails", "not run", "undecided", "holds")
        verdict = next(v for v in worst if v in verdicts)
        several = len(answers) > 1
        texts = [f"{name}: {one.numbers} ({one.verdict})" if several else one.numbers for name, one in answers.items()]
        return Answer(verdict, "\n".join(texts), frozenset().union(*(one.seeds for one in answers.values())))
