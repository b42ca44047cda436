"""Exact nulls: simulated federations whose true gain is known on unlimited data, judged by the real test.

N clients have n validation samples each, the same in all rounds; K of them, drawn at random, report in a round. Each
sample has a d of -1, 0 or 1, drawn from its client's distribution. The clients' true gains spread around the
federation's. In a drifting federation each d is drawn again in a round with probability `drift`, as when the prediction
of w for a sample changes: the true gain is the same in all rounds.

Designs of the test of gains that were compared before one was chosen, at alpha = 0.05, with N = 20, K = 4 and a drift
of 0.02, unless the row says otherwise. The numbers are shares of runs with a "hurts", from a vectorised copy of the
test that is not in the repository (1,500 runs; 300 for 500 rounds). On the six nulls of 60 rounds, `rates` agreed with
it within its intervals.

| | e-process of round means, alone | and paired | bets on reports | bets on changes | paired, one look |
|---|--:|--:|--:|--:|--:|
| gain 0, constant w, n 8, 60 rounds | .032 | .025 | .040 | .040 | .050 |
| gain 0, n 8, 60 rounds | .017 | .011 | .035 | .042 | .053 |
| gain 0, n 8, K = N, 60 rounds | .017 | .011 | .047 | .049 | .057 |
| gain 0, constant w, n 8, 500 rounds | .363 | .047 | .047 | .047 | .053 |
| gain 0, n 8, K = N, 500 rounds | .443 | .030 | .030 | .040 | .063 |
| gain -2 points, n 8, 60 rounds | .056 | .038 | .096 | .107 | .122 |
| gain -5 | .193 | .139 | .268 | .279 | .299 |
| gain -10 | .672 | .607 | .755 | .765 | .765 |
| gain -5, n 30, clients' gains spread by 0.25 | .099 | .097 | .464 | .623 | .648 |
| gain -10, likewise | .746 | .746 | .981 | .997 | .995 |

The last column is the limit: one look at the end with the whole alpha, and no answer before it. Bets on changes
(`Gain`) are within three points of it. With few samples the paired test limits the power, not the e-process. The mean
of a client's last reports in place of the last report did not help (600 runs, bets on reports, -5: .287 against .283,
and .182 against .277 at a drift of 0.2): the covariance of a client's reports is not known, so a mean cannot be assumed
to have a smaller error. Spending a tenth at each look and nine tenths at the end costs a point of power at -5, and
finds -10 one look earlier where K = N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from lindt.protocols import Detection, DetectionState, Evidence, GainReport, Paired
from lindt.seeds import seed_for

LEVEL: Final = 0.95  # the confidence level of an interval


@final
@dataclass(frozen=True)
class Null:
    """A federation to simulate, many times."""

    clients: int = 20  # N
    reporting: int = 4  # K, the clients that report in a round
    samples: int = 8  # n, the validation samples of each client
    rounds: int = 60
    drift: float = 0.0
    gain: float = 0.0  # the true gain; below 0 it is not a null, and the rates of "hurts" are the test's power
    spread: float = 0.1  # the standard deviation of the clients' true gains
    discordant: float = 0.3  # the share of samples on which exactly one of the two predictors is right


@final
@dataclass(frozen=True)
class Rate:
    """A share of runs with its exact interval (Clopper and Pearson)."""

    share: float
    low: float
    high: float


@final
@dataclass(frozen=True)
class Row:
    """The answers of the test in all runs of a case."""

    case: Null
    runs: int
    hurts_ever: Rate
    hurts_at_end: Rate
    helps_ever: Rate
    warned: Rate
    delay: float | None  # the median round of the first "hurts", over the runs with a "hurts"
    warning_delay: float | None


def rates(detection: Detection, cases: Sequence[Null], runs: int, seed: int = 0) -> list[Row]:
    """For each case, the shares of `runs` simulated federations with "hurts", "helps" or an early warning."""
    return [_row(detection, case, runs, seed) for case in cases]


def nulls(rounds: Sequence[int] = (60, 500)) -> list[Null]:
    """A true gain of 0: constant and drifting w, K < N and K = N."""
    return [
        Null(rounds=length, reporting=reporting, drift=drift)
        for length in rounds
        for reporting in (4, 20)
        for drift in (0.0, 0.02, 0.2)
    ]


def alternatives(rounds: int = 60) -> list[Null]:
    """Cases with a true gain below 0, to measure the test's power: with few samples per client, and with more."""
    gains = (-0.02, -0.05, -0.1)
    few = [Null(rounds=rounds, drift=0.02, gain=gain) for gain in gains]
    return few + [Null(rounds=rounds, drift=0.02, gain=gain, samples=30) for gain in gains]


def simulate(case: Null, seed: int) -> Iterator[dict[int, GainReport]]:
    """The reports of each round of one federation."""
    generator = np.random.default_rng(seed)
    spread_N = generator.normal(0.0, case.spread, case.clients)
    limit = case.discordant - abs(case.gain)
    gains_N1 = (case.gain + np.clip(spread_N - spread_N.mean(), -limit, limit))[:, None]
    gains_N1 += case.gain - gains_N1.mean()  # clipping changed the mean
    gains_N1 = np.clip(gains_N1, -case.discordant, case.discordant)
    shape = (case.clients, case.samples)

    def draw() -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        better = generator.random(shape) < (1 + gains_N1 / case.discordant) / 2
        return np.where(generator.random(shape) < case.discordant, np.where(better, 1.0, -1.0), 0.0)

    d_Nn = draw()
    for _ in range(case.rounds):
        if case.drift:
            d_Nn = np.where(generator.random(shape) < case.drift, draw(), d_Nn)
        means, squares = d_Nn.mean(1), (d_Nn**2).mean(1)
        chosen = generator.choice(case.clients, case.reporting, replace=False)
        pairs = {int(i): Paired(float(means[i]), float(squares[i])) for i in chosen}
        yield {i: GainReport(case.samples, private=pair, equal_age=pair) for i, pair in pairs.items()}


def _row(detection: Detection, case: Null, runs: int, seed: int) -> Row:
    hurts, warnings, at_end, helps = [], [], 0, 0
    for run in range(runs):
        first: int | None = None
        helped, state = False, detection.begin()
        for round, reports in enumerate(simulate(case, seed_for(seed, "null", run)), 1):
            state = _judged(
                detection, state, Evidence(round, None, frozenset(reports), case.clients, case.rounds, reports)
            )
            first = round if first is None and state.verdict.state == "hurts" else first
            helped = helped or state.verdict.state == "helps"
        assert state is not None
        hurts += [] if first is None else [first]
        warnings += [] if state.warning is None else [state.warning]
        at_end, helps = at_end + (state.verdict.state == "hurts"), helps + helped
    ever, end, helped_ever, warned = (rate(count, runs) for count in (len(hurts), at_end, helps, len(warnings)))
    delay, warning_delay = (float(np.median(found)) if found else None for found in (hurts, warnings))
    return Row(case, runs, ever, end, helped_ever, warned, delay, warning_delay)


def _judged(detection: Detection, state: DetectionState | None, evidence: Evidence) -> DetectionState:
    after = detection.judge(state, evidence)
    assert after is not None, "this detection has no test of reports"
    return after


def rate(count: int, runs: int) -> Rate:
    """The share, and the interval in which it lies with 95% confidence."""
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(count, runs).proportion_ci(LEVEL, method="exact")
    return Rate(count / runs, float(interval.low), float(interval.high))
