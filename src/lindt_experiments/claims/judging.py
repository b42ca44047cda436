"""The judgement of a claim: paired differences over seeds, their 95% interval, and the least evidence.

Seeds are never chosen, and runs of different scales are never mixed. A gap is a paired difference in the direction that
the paper claims. It holds if its interval lies above zero, fails if below, and is undecided otherwise. A gap under 2
points needs 3 seeds; a larger gap can be decided with one seed. (With two seeds the interval is wide, since t has one
degree of freedom.)
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
MOST_SEEDS = 30  # beyond which the number of seeds that would decide is not given


@final
@dataclass(frozen=True)
class Results:
    """The outcomes of one scale, by cell."""

    outcomes: tuple[Outcome, ...]
    scale: str

    def of(self, cell: Cell) -> dict[int, Outcome]:
        """The outcomes by seed. Shakespeare without attackers is its normal FL: one run under one of two names."""
        task, world, method = cell
        names = ("attack-0", "normal") if (task, world) in (("shake", "attack-0"), ("shake", "normal")) else (world,)
        found = [find(self.outcomes, task=task, world=name, method=method, scale=self.scale) for name in names]
        return {outcome.seed: outcome for outcomes in found for outcome in outcomes}


@final
@dataclass(frozen=True)
class Interval:
    """The mean of paired differences and its 95% t interval; a single difference has no interval."""

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
    """Judge a claimed gap above zero; with `at_least`, zero is enough."""
    if not differences:
        return "not run"
    seen = interval(differences)
    if seen.seeds < ENOUGH and abs(seen.mean) < small:
        return "undecided"
    low, high = (seen.mean, seen.mean) if seen.seeds == 1 else (seen.low, seen.high)
    if low > 0 or (at_least and low >= 0):
        return "holds"
    return "fails" if high < 0 or (high <= 0 and not at_least) else "undecided"


def seeds_to_decide(differences: Sequence[float], spread: float | None, small: float = SMALL) -> int | None:
    """The number of seeds that would decide a gap if its mean and its standard deviation stay as they are.

    With fewer than ENOUGH differences `spread` is used, the usual deviation of such gaps; None where it is not known.
    A number above MOST_SEEDS stands for all larger ones.
    """
    from scipy.stats import t  # slow to import

    mean, n = abs(fmean(differences)), len(differences)
    deviation = stdev(differences) if n >= ENOUGH else spread
    if deviation is None:
        return None
    counts = range(max(n, ENOUGH if mean < small else 2), MOST_SEEDS + 1)
    return next((k for k in counts if float(t.ppf(0.975, k - 1)) * deviation / math.sqrt(k) < mean), MOST_SEEDS + 1)


@final
@dataclass(frozen=True)
class OpenGap:
    """An undecided gap: its differences by seed."""

    differences: tuple[float, ...]
    small: float = SMALL
    unit: str = ""


@final
@dataclass(frozen=True)
class Answer:
    verdict: Verdict
    numbers: str
    seeds: frozenset[int] = frozenset()
    open: tuple[OpenGap, ...] = ()  # the undecided gaps of an undecided answer
    spread: tuple[float, ...] = ()  # the standard deviations of its gaps of ENOUGH seeds, in points
    cells: tuple[Cell, ...] = ()  # the cells of its undecided parts


class Series(Protocol):
    """One number per seed, in points unless `unit` says otherwise."""

    @property
    def name(self) -> str: ...
    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells that must have been run."""
        ...

    def __call__(self, results: Results) -> dict[int, float]: ...


class Part(Protocol):
    """A part of a claim."""

    @property
    def cells(self) -> tuple[Cell, ...]: ...
    def answer(self, results: Results) -> Answer: ...


@final
@dataclass(frozen=True)
class Gap:
    """`of` is above `over`, or above zero without `over`; `below` reverses it."""

    of: Series
    over: Series | None = None
    below: bool = False
    at_least: bool = False
    small: float = SMALL
    unit: str = ""

    @property
    def cells(self) -> tuple[Cell, ...]:
        return (*self.of.cells, *(self.over.cells if self.over else ()))

    def answer(self, results: Results) -> Answer:
        missing = missing_cells(results, self.cells)
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
        verdict = judge(claimed, self.small, self.at_least)
        undecided = (OpenGap(tuple(claimed), self.small, self.unit),) if verdict == "undecided" else ()
        spread = (stdev(gaps),) if len(gaps) >= ENOUGH and not self.unit else ()
        return Answer(verdict, text.rstrip(), frozenset(seeds), undecided, spread)


@final
@dataclass(frozen=True)
class Seen:
    """The result of one seed: yes, no, or None where runs cannot be compared."""

    holds: bool | None
    text: str


@final
@dataclass(frozen=True)
class Every:
    """A yes or no that must be the same for all seeds; `of` takes the outcomes of one seed, in the order of `cells`."""

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
    """A finding of the paper, in our words, and the conditions that our runs must meet."""

    id: str
    where: str  # in the paper
    says: str
    parts: Mapping[str, Part]  # by a short name, "" where there is only one
    made_by: str  # `lindt reproduce ...`

    def answer(self, results: Results) -> Answer:
        """A claim fails if one part fails; it holds only if all parts were run and hold."""
        answers = {name: part.answer(results) for name, part in self.parts.items()}
        verdicts = [answer.verdict for answer in answers.values()]
        worst: tuple[Verdict, ...] = ("fails", "not run", "undecided", "holds")
        verdict = next(v for v in worst if v in verdicts)
        several = len(answers) > 1
        texts = [f"{name}: {one.numbers} ({one.verdict})" if several else one.numbers for name, one in answers.items()]
        undecided = [name for name, one in answers.items() if one.verdict == "undecided"]
        return Answer(
            verdict,
            "\n".join(texts),
            frozenset().union(*(one.seeds for one in answers.values())),
            tuple(gap for name in undecided for gap in answers[name].open),
            tuple(value for one in answers.values() for value in one.spread),
            tuple(dict.fromkeys(cell for name in undecided for cell in self.parts[name].cells)),
        )
