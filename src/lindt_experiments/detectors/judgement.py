"""The judgement of each detector over the stored runs: the numbers of the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Final, final

from lindt_experiments.detectors.outcomes import DetectorOutcome
from lindt_experiments.detectors.readings import MOMENTS, Reading, delta_reading, low_cosine, low_recent_cosine
from lindt_experiments.detectors.statistics import Share, area, share

# Every detector by the name of its reading, in the order of the page.
DETECTORS: Final = {
    "gain": "gain, the default",
    "gain-median": "gain, the median of a round",
    "warning": "gain against equal age: the early warning",
    "fl-guard": "FL-GUARD's rule",
    "delta": "Delta, the paper's rule (0.1, more than 25 of 80 rounds)",
    "delta-best": "Delta at the best single epsilon of the design part",
    "cosine": "cosine of updates, last layer: low in more than 25 of 80 rounds",
    "cosine-recent": "cosine of updates, last layer: low on average over a tenth of the rounds",
    "reader": "a perfect reader of the V_i, at the end",
}
LIED: Final = {
    "lie-1 gain": "gain, a quarter say -100",
    "lie+1 gain": "gain, a quarter say +100",
    "lie-1 gain-median": "median, a quarter say -100",
    "lie+1 gain-median": "median, a quarter say +100",
    "lie-1 warning": "early warning, a quarter say -100",
    "lie+1 warning": "early warning, a quarter say +100",
}
BINS: Final = ((0.0, 0.02), (0.02, 0.05), (0.05, 0.10), (0.10, 1.01))  # of |beta|
EPSILONS: Final = tuple(0.001 * 10 ** (step / 8) for step in range(33))  # 0.001 to 10
COSINES: Final = tuple(step / 50 for step in range(-50, 51))  # -1 to 1
CosineRule = Callable[[Sequence[float | None], float], Reading]
COSINE_RULES: Final[dict[str, CosineRule]] = {"cosine": low_cosine, "cosine-recent": low_recent_cosine}
Outcomes = Sequence[DetectorOutcome]


@final
@dataclass(frozen=True)
class Judgement:
    """One detector on some runs."""

    detector: str
    areas: tuple[float | None, ...]  # at MOMENTS
    detected: Share  # the share of negative runs with an alarm
    false: Share  # the share of healthy runs with an alarm
    ends_hurting: Share  # the share of negative runs that end with "hurts"
    ends_false: Share  # the share of healthy runs that end with "hurts"
    delay: float | None  # the median round of the alarm, as a share of the rounds, in negative runs that are detected
    true_then: Share  # the share of all alarms that were raised in a round with negative beta


def reader_error(outcomes: Outcomes) -> tuple[float, float] | None:
    """The mean and the root mean square of the error of the last reports: their mean gain less the true beta."""
    last = [(one.evidence("reader")[-1], one.beta) for one in outcomes if "reader" in one.readings]
    errors = [-found - beta for found, beta in last if found is not None]
    return (fmean(errors), math.sqrt(fmean(error**2 for error in errors))) if errors else None


def judge(outcomes: Outcomes, detector: str) -> Judgement:
    """The judgement of a detector, over the runs that have its reading."""
    runs = [one for one in outcomes if detector in one.readings]
    negative, healthy = [o for o in runs if o.negative], [o for o in runs if not o.negative]
    alarms = [(one, round) for one in runs if (round := one.alarm(detector)) is not None]
    delays = [round / one.rounds for one, round in alarms if one.negative]
    return Judgement(
        detector,
        tuple(
            area([o.evidence(detector)[at] for o in negative], [o.evidence(detector)[at] for o in healthy])
            for at in range(len(MOMENTS))
        ),
        share([one.alarm(detector) is not None for one in negative]),
        share([one.alarm(detector) is not None for one in healthy]),
        share([_last_word(one, detector) for one in negative]),
        share([_last_word(one, detector) for one in healthy]),
        median(delays) if delays else None,
        share([one.beta_at(round) < 0 for one, round in alarms]),
    )


def _last_word(outcome: DetectorOutcome, detector: str) -> bool:
    return bool(outcome.readings[detector]["state"] == "hurts")


def within(outcomes: Outcomes, low: float, high: float = 2.0) -> list[DetectorOutcome]:
    """Runs whose |beta| lies in [low, high)."""
    return [one for one in outcomes if low <= abs(one.beta) < high]


def part(outcomes: Outcomes, name: str) -> list[DetectorOutcome]:
    return [one for one in outcomes if one.part == name]


def with_server_statistics(outcomes: Outcomes) -> tuple[list[DetectorOutcome], dict[str, float]]:
    """The outcomes with readings of the server's own statistics, Delta and the cosine; and the threshold of each.

    Thresholds are chosen on the design part. Runs with a curve of the cosine get a reading of it, but only if the
    design part has negative and healthy runs with the curve.
    """
    design = part(outcomes, "design")
    thresholds = {"delta-best": best_epsilon(design)}
    if {one.negative for one in design if cosines_of(one)} == {True, False}:
        thresholds |= {name: best_cosine(design, rule) for name, rule in COSINE_RULES.items()}
    found = []
    for one in outcomes:
        said = {"delta": delta_reading(one.delta), "delta-best": delta_reading(one.delta, thresholds["delta-best"])}
        cosines = cosines_of(one)
        for name in COSINE_RULES.keys() & thresholds.keys() if cosines else ():
            said[name] = COSINE_RULES[name](cosines, thresholds[name])
        for name, reading in said.items():
            one = one.with_reading(name, asdict(reading))
        found.append(one)
    return found, thresholds


def cosines_of(outcome: DetectorOutcome) -> Sequence[float | None]:
    """The curve; empty where no round has a value: in old lines, and with one client per round, which has no pair."""
    curve = outcome.cosine or ()
    return curve if any(value is not None for value in curve) else ()


def best_cosine(design: Outcomes, rule: CosineRule) -> float:
    """As `best_epsilon`, over the runs that have the curve; the lowest among equally good thresholds."""
    curves = [(one.negative, cosines) for one in design if (cosines := cosines_of(one))]
    return max(COSINES, key=lambda at: _youden([(negative, rule(cosines, at)) for negative, cosines in curves]))


def best_epsilon(design: Outcomes) -> float:
    """The epsilon with the most detections less false alarms, both as shares; the smallest among equally good ones."""
    return max(EPSILONS, key=lambda at: _youden([(one.negative, delta_reading(one.delta, at)) for one in design]))


def _youden(said: Sequence[tuple[bool, Reading]]) -> float:
    """The share of negative runs with an alarm, less that of healthy ones."""
    raised = [(negative, reading.alarm is not None) for negative, reading in said]
    detected, false = (share([alarm for negative, alarm in raised if negative is kind]) for kind in (True, False))
    return (detected.value or 0.0) - (false.value or 0.0)


@final
@dataclass(frozen=True)
class Goal:
    """A goal of the gain test, and the number that was measured on the judged part."""

    words: str
    wanted: str
    measured: str
    reached: bool | None  # None: there are no runs to measure it on


def goals(outcomes: Outcomes) -> list[Goal]:
    """The goals of the default detector on the judged part."""
    judged = part(outcomes, "judged")
    far = judge(within(judged, 0.05), "gain")
    everything, early = judge(judged, "gain"), judge(judged, "warning")
    half = list(MOMENTS).index("1/2")
    return [
        _at_least("detected where beta is 5 points or more from 0", far.detected, 0.97),
        _at_most("false alarms where beta is 5 points or more from 0", far.false, 0.01),
        _at_least("detected, all", everything.detected, 0.85),
        _at_most("false alarms, all", everything.false, 0.05),
        _goal("AUC at half of the rounds", everything.areas[half], lambda value: value >= 0.96, "at least 0.96"),
        _goal(
            "median delay of the early warning", early.delay, lambda value: value <= 0.25, "at most 0.25 of the rounds"
        ),
        *(
            _at_most(f"false alarms, {LIED[name]}", judge(judged, name).false, 0.05)
            for name in ("lie-1 gain", "lie+1 gain", "lie-1 gain-median", "lie+1 gain-median")
        ),
    ]


def _at_least(words: str, found: Share, bound: float) -> Goal:
    reached = None if found.value is None else found.value >= bound
    return Goal(words, f"at least {bound:g}", str(found), reached)


def _at_most(words: str, found: Share, bound: float) -> Goal:
    reached = None if found.value is None else found.value <= bound
    return Goal(words, f"at most {bound:g}", str(found), reached)


def _goal(words: str, value: float | None, good: Callable[[float], bool], wanted: str) -> Goal:
    return Goal(words, wanted, "-" if value is None else f"{value:.3f}", None if value is None else good(value))
