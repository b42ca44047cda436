"""The test of the gains that clients report: whether federation helps or hurts, at a stated level.

A question compares two predictors by the differences d in [-1, 1] on the clients' validation parts V_i. There are four
questions: w against the finished P_i (the verdict), w against P_i of equal age (the early warning), and, while recovery
is on, the model that clients predict with against w (`recovery`) and against P_i (`recovered`). The answer is "hurts"
or "helps" when two tests agree; each covers what the other does not.

**A betting e-process** per direction (Waudby-Smith and Ramdas, arXiv 2010.09686). For "hurts", each report of a round
multiplies the wealth by 1 - lambda x, with lambda = min(max(-mu / (var + mu^2), 0), 0.9 / b) from earlier rounds, 0
until two rounds are known. "helps" is the same with the opposite sign. x is the report, less this client's last report,
plus the mean of all clients' last reports (a difference estimator: its mean over clients is the present mean gain, and
differences between clients that do not change over rounds add no variance); |x| <= b, with b at least 1. Null: in every
round since the start, the mean gain of all clients on their V_i is at least 0. If the clients that report are a uniform
draw, the wealth is a supermartingale: a draw without replacement is negatively associated, so the mean of a product of
bets is at most the product of their means (Joag-Dev and Proschan, 1983). By Ville's inequality the probability that it
ever reaches 1 / alpha is at most alpha. One bet on the mean of a round would need 68 rounds to reach 20 at a gain of -5
points, however clear the reports are.

**A paired test** that counts each validation sample once. The e-process does not cover new data, because the V_i are
the same in all rounds. The estimate is the mean over clients of each client's last report, not older than half of the
rounds so far. The standard error is that of the samples, plus that of the draw where some clients are missing. The test
is made at four looks: at each quarter of the way from the start to the last planned round (without a planned end, 10,
20, 40, ... rounds after the start). A look spends a twentieth of the alpha that is left, the last planned look 95% of
it. In total less than alpha is spent, so the level holds however w changes between the looks (Bonferroni).

A look is clear only if the gain, extrapolated with its change since the look before, is on the same side of 0 in the
last planned round. A federation that learns slowly is worse than the finished P_i for many rounds, and then improves:
it stays undecided. This can only prevent decisions, so the level still holds; at the last planned round it has no
effect.

A look is clear only if the middle half of the clients agrees, too: their mean is on the same side of 0, by half of its
standard error. So a few clients, honest or not, cannot decide alone. This, too, can only prevent decisions. It does not
make the test safe against clients that lie: `combine = "median"` is safe against a quarter of them.

**The division of alpha.** "hurts" needs both tests, so each has the whole alpha: in a run, the probability of a false
"hurts" on the V_i, and of a false "hurts" on new data, is at most alpha. The early warning needs both tests too, with
an alpha of its own; its looks are at rounds 8, 12, 16, 24, 32, ..., and each spends a quarter of the alpha that is
left. Verdict and warning use the same V_i, so their errors go together: under the nulls of
`lindt_experiments.detectors.nulls`, one or both were raised in 1% to 6% of the runs.
"helps" has the same levels: where the gain is not 0, only one of the two directions can be wrong. The two questions of
recovery have alpha each.

A decision can change. When the estimate, or that of the middle half of the clients, is no longer on the side of the
decision, the answer is "undecided" again. After a decision the opposite process restarts: its moments, and wealth above
1, are dropped. That never adds wealth, so the level still holds.

The results of other designs: `lindt_experiments.detectors.nulls`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Final, Literal, final

from lindt.errors import require
from lindt.gains import MOST_NOISE as MOST_NOISE
from lindt.protocols import ClientId, Decision, Detection, DetectionState, Evidence, GainReport, Paired, VerdictState
from lindt.registry import register

SIGN: Final[dict[VerdictState, int]] = {"hurts": -1, "helps": 1}
LARGEST_BET: Final = 0.9
FIRST: Final = 5  # the first round that a test counts: before it, w has hardly been trained
WITHOUT_END: Final = 20  # the first round that the test of the finished P_i counts where no end is planned
QUARTERS: Final = 4  # looks of the paired test where the end is known
FIRST_GAP: Final = 10  # rounds from the start to the first look where no end is planned
SPENT: Final = 0.05  # the share of the remaining alpha that a look spends
SPENT_LAST: Final = 0.95  # the share that the look at the last planned round spends
SPENT_WARNING: Final = 0.25  # the share that a look of the early warning spends
TYPICAL: Final = 0.5  # the standard errors by which the middle half of the clients has to be on the same side
TRIMMED: Final = 0.25  # the share of the clients that `median` leaves out at each end
RECENT: Final = 10  # the number of last rounds that the estimate of `sum` uses, about
NEEDED: Final = 10**9  # more validation samples than any federation has

Numbers = dict[str, float]


@register(Detection)
@final
@dataclass(frozen=True)
class Gain:
    """Clients hold out a validation part, and report in each round how w does on it against their private model.

    `combine` says how a round's reports are used:
      mean    one bet a report, and the paired test of the mean over clients.
      median  against clients that lie, up to a quarter of them: one bet a round on the median, and the paired test of
              the mean over the middle half of the clients. Both test the typical client, not the mean.
      sum     only the sum and the number of the reports, as under secure aggregation: one bet a round on their mean,
              and no paired test. The level then covers the present validation samples, not new data: with a true
              gain of 0 and few samples, a long run ends with "hurts" or "helps" far more often than alpha.

    Args:
        alpha: The level of the whole run.
        combine: How a round's reports are used: `mean`, `median` or `sum`.
        start: The first round that the test of the finished P_i counts; 0: chosen by the number of rounds.
        noise: The scale b of Laplace noise that a client adds to each number that it reports.
        panel: The share of the clients that train a P_i and report.

    Raises:
        PlanError: A value is out of its range.

    Examples:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from lindt.flower import Gain, NFLDetector
        >>> strategy = NFLDetector(FedAvg(), detection=Gain(noise=0.1, panel=0.5))
        >>> strategy.detection.noise
        0.1
    """

    alpha: float = 0.05  # the level of the whole run
    combine: Literal["mean", "median", "sum"] = "mean"  # of a round's reports
    start: int = 0  # the first round that the test of the finished P_i counts; 0: chosen by the number of rounds
    noise: float = 0.0  # the scale b of Laplace noise that a client adds to each number that it reports
    panel: float = 1.0  # the share of the clients that train a P_i and report

    reports = True

    def __post_init__(self) -> None:
        require(0 < self.alpha < 1, "alpha", self.alpha, "give a level between 0 and 1")
        require(self.start >= 0, "start", self.start, "give a round, or 0 to choose it by the number of rounds")
        require(0 <= self.noise <= MOST_NOISE, "noise", self.noise, f"give a scale from 0 to {MOST_NOISE:g}")
        require(0 < self.panel <= 1, "panel", self.panel, "give a share of the clients, above 0 and up to 1")

    @property
    def promise(self) -> str:
        """What the level covers, as text for a report."""
        if self.combine == "sum":
            return f"at level {self.alpha:g} on the clients' validation samples alone, not on new data"
        of = "the mean gain" if self.combine == "mean" else "the gain of the middle half of the clients"
        return f"at level {self.alpha:g}, for {of} on new data of these clients"

    def begin(self) -> DetectionState | None:
        return DetectionState()

    def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState | None:
        assert state is not None
        numbers, reports = dict(state.numbers), state.reports
        if self.combine != "sum":
            reports = reports | {i: (evidence.round, report) for i, report in evidence.reports.items()}
        after = replace(state, numbers=numbers, reports=reports)
        round, answers = evidence.round, evidence.reports.values()
        verdict = self._answer(
            "private", state.verdict, state, after, evidence, first_round(self.start, evidence.rounds)
        )
        warning = state.warning
        if warning is None and self._warns(state, after, evidence):
            warning = round
        recovery, recovered = state.recovery, state.recovered
        if any(report.adapted is not None for report in answers):
            recovery = self._answer("adapted", recovery or Decision(), state, after, evidence, round)
        if any(report.adapted_private is not None for report in answers):
            recovered = self._answer("adapted_private", recovered or Decision(), state, after, evidence, round)
        return DetectionState(verdict, warning, recovery, recovered, numbers, reports)

    def _answer(
        self,
        question: str,
        decision: Decision,
        before: DetectionState,
        after: DetectionState,
        evidence: Evidence,
        started: int,
    ) -> Decision:
        """The decision after a round, from the decision before it. Changes the numbers of `after`."""
        numbers, last = after.numbers, evidence.round == evidence.rounds
        bets = self._bets(question, before, evidence)
        if bets is None and not last:
            return decision
        self._remember(question, numbers, evidence)
        estimate = self._estimate(question, after, evidence)
        start = int(numbers.get(f"{question}.start", started))
        if bets is not None and evidence.round >= start:
            numbers[f"{question}.start"] = float(start)
            numbers[f"{question}.rounds"] = numbers.get(f"{question}.rounds", 0.0) + 1
            for side, sign in SIGN.items():
                _bet(numbers, f"{question}.{side}", sign, bets)
            if numbers[f"{question}.rounds"] == 1:
                _projected(numbers, question, estimate.gain, evidence)  # the first point of the line
        if numbers.get(f"{question}.rounds", 0.0) < 2:
            return self._described("too early" if estimate.clients or not last else "undecided", None, estimate)
        if _is_due(numbers, question, look_before(start, evidence.rounds, evidence.round)):
            projected = _projected(numbers, question, estimate.gain, evidence)
            for side, sign in SIGN.items():
                self._look(numbers, f"{question}.{side}", sign, estimate, SPENT_LAST if last else SPENT)
                if projected * sign <= 0 or not self._is_typical(question, sign, after, evidence):
                    numbers[f"{question}.{side}.passed"] = 0.0
        state, since = decision.state, decision.since
        if state in SIGN and (
            estimate.gain * SIGN[state] <= 0 or not self._is_typical(question, SIGN[state], after, evidence, 0.0)
        ):
            _restart(numbers, f"{question}.{state}")
            state, since = "undecided", None
        for side in SIGN:
            found = self._agree(numbers, f"{question}.{side}") and estimate.gain * SIGN[side] > 0
            if found and state != side:
                state, since = side, evidence.round
                _restart(numbers, f"{question}.{'helps' if side == 'hurts' else 'hurts'}")
        return self._described("undecided" if state == "too early" else state, since, estimate)

    def _warns(self, before: DetectionState, after: DetectionState, evidence: Evidence) -> bool:
        """Whether both tests find that w is worse than P_i of equal age."""
        numbers, bets = after.numbers, self._bets("equal_age", before, evidence)
        if bets is None or evidence.round < FIRST:
            return False
        _bet(numbers, "equal_age.hurts", -1, bets)
        if _is_due(numbers, "equal_age", warning_look_before(evidence.round)):
            estimate = self._estimate("equal_age", after, evidence)
            self._look(numbers, "equal_age.hurts", -1, estimate, SPENT_WARNING)
            if not self._is_typical("equal_age", -1, after, evidence):
                numbers["equal_age.hurts.passed"] = 0.0
        return self._agree(numbers, "equal_age.hurts")

    def _bets(self, question: str, before: DetectionState, evidence: Evidence) -> Bets | None:
        """The values that a round bets on; None where no client answers the question."""
        gains = {i: pair.mean for i, (_, pair) in _pairs(question, evidence.reports).items()}
        if not gains:
            return None
        if self.combine != "mean":
            return Bets([median(gains.values()) if self.combine == "median" else _mean(gains.values())], 1.0)
        known = {i: pair.mean for i, (_, pair) in _pairs(question, _reports(before)).items()}
        center = _mean(known.values()) if known else 0.0
        farthest = max((abs(gain - center) for gain in known.values()), default=0.0)
        return Bets([gain - known.get(i, center) + center for i, gain in gains.items()], 1 + farthest)

    def _agree(self, numbers: Numbers, name: str) -> bool:
        """Whether the e-process has reached its level and the last look of the paired test was clear."""
        sure = numbers.get(f"{name}.peak", 0.0) >= -math.log(self.alpha)
        return sure and (self.combine == "sum" or numbers.get(f"{name}.passed", 0.0) > 0)

    def _look(self, numbers: Numbers, name: str, sign: int, estimate: Estimate, spent: float) -> None:
        left = numbers.get(f"{name}.left", self.alpha)
        numbers[f"{name}.left"] = left * (1 - spent)
        numbers[f"{name}.passed"] = float(estimate.clear(sign, left * spent))

    def _estimate(self, question: str, after: DetectionState, evidence: Evidence) -> Estimate:
        """The gain now, from each client's last report that is not older than half of the rounds so far."""
        if self.combine == "sum":
            clients = len(_pairs(question, evidence.reports))
            return Estimate(after.numbers.get(f"{question}.recent", 0.0), clients=clients)
        pairs = list(_pairs(question, _reports(after, evidence.round / 2)).values())
        if not pairs:
            return Estimate(0.0)
        if self.combine == "median":
            return _trimmed(pairs)
        return _paired(pairs, 1 - len(pairs) / max(evidence.clients, len(pairs)), 2 * self.noise**2)

    def _is_typical(
        self, question: str, sign: int, after: DetectionState, evidence: Evidence, errors: float = TYPICAL
    ) -> bool:
        """Whether the middle half of the clients is on that side of 0, by at least `errors` standard errors."""
        if self.combine == "sum":
            return True
        pairs = list(_pairs(question, _reports(after, evidence.round / 2)).values())
        middle = _trimmed(pairs) if pairs else Estimate(0.0)
        return middle.gain * sign > errors * middle.error

    def _remember(self, question: str, numbers: Numbers, evidence: Evidence) -> None:
        """For `sum`: update the mean of the rounds' means over about the last ten rounds."""
        gains = [pair.mean for _, pair in _pairs(question, evidence.reports).values()]
        if self.combine == "sum" and gains:
            name = f"{question}.recent"
            seen = min(numbers.get(f"{name}.rounds", 0.0) + 1, RECENT)
            numbers[name] = numbers.get(name, 0.0) + (_mean(gains) - numbers.get(name, 0.0)) / seen
            numbers[f"{name}.rounds"] = seen

    def _described(self, state: VerdictState, since: int | None, estimate: Estimate) -> Decision:
        if not estimate.clients:
            return Decision(state, since)
        # The level of the last planned look, after those before it.
        level = self.alpha * (1 - SPENT) ** (QUARTERS - 1) * SPENT_LAST
        needed = estimate.needed(level) if state == "undecided" and self.combine == "mean" else None
        error = estimate.error if estimate.samples else None
        return Decision(state, since, estimate.gain, error, estimate.clients, estimate.samples, needed)


@final
@dataclass(frozen=True)
class Bets:
    """The values that a round bets on, and the bound b of their absolute value, known before the round."""

    values: Sequence[float]
    bound: float


@final
@dataclass(frozen=True)
class Estimate:
    """A gain with its variance, that of the samples and that of the draw of clients, and its degrees of freedom."""

    gain: float
    within: float = 0.0
    drawn: float = 0.0
    clients: int = 0
    samples: int = 0
    freedom: float = 1.0

    @property
    def error(self) -> float:
        return math.sqrt(self.within + self.drawn)

    def clear(self, sign: int, level: float) -> bool:
        """Whether the gain is above (sign 1) or below (sign -1) 0, by a t-test at this level."""
        # With fewer samples not even a sign test could reach the level.
        possible = self.samples > 0 and 0.5**self.samples <= level
        return possible and self.gain * sign > critical(level, self.freedom) * self.error

    def needed(self, level: float) -> int | None:
        """The number of validation samples that would make `gain` clear; None if they are enough, or no number does."""
        square = critical(level, self.freedom) ** 2
        room = self.gain**2 - square * self.drawn
        samples = square * self.within * self.samples / room if room > 0 else math.inf
        # With enough samples more rounds are needed: the wealth of the bets is still too low.
        return math.ceil(samples) if self.samples < samples <= NEEDED else None


def critical(level: float, freedom: float) -> float:
    """The upper quantile of Student's t, by the expansion of Cornish and Fisher around that of the normal."""
    z = -NormalDist().inv_cdf(level)
    return z + (z**3 + z) / 4 / freedom + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / freedom**2


def _paired(pairs: Sequence[tuple[int, Paired]], missing: float, noise: float) -> Estimate:
    """The mean over clients. `missing` is the share of clients that are not among them.

    Each client gets one more sample, whose square is the mean square over all samples and one more of 1: so the
    variance of a client whose few d are all equal is not 0. `noise` is the variance of the noise in a client's report.
    """
    m, samples = len(pairs), sum(n for n, _ in pairs)
    gain = _mean([pair.mean for _, pair in pairs])
    pooled = (math.fsum(n * pair.square for n, pair in pairs) + 1) / (samples + 1)
    parts = [(max(pair.square - pair.mean**2, 0.0) + pooled / n) / n + noise for n, pair in pairs]
    within = math.fsum(parts)
    freedom = within**2 / math.fsum(part**2 / n for part, (n, _) in zip(parts, pairs, strict=True))
    # The means lie in [-1, 1]: with one client, their variance is 1 at most.
    between = 1.0 if m == 1 else math.fsum((pair.mean - gain) ** 2 for _, pair in pairs) / (m - 1)
    return Estimate(gain, within / m**2, missing * between / m, m, samples, freedom)


def _trimmed(pairs: Sequence[tuple[int, Paired]]) -> Estimate:
    """The mean over the middle half of the clients, with its error by Tukey and McLaughlin, from the spread of clients.

    A client that lies about its squares, or about its number of samples, does not change it.
    """
    means = sorted(pair.mean for _, pair in pairs)
    m = len(means)
    cut = int(TRIMMED * m)
    middle = means[cut : m - cut]
    ends = [middle[0]] * cut + middle + [middle[-1]] * cut
    center = _mean(ends)
    # One more client at a distance of 1 is added, so that the variance of a few equal clients is not 0.
    variance = (math.fsum((x - center) ** 2 for x in ends) + 1 / m) / max(m - 1, 1)
    return Estimate(
        _mean(middle), variance * m / len(middle) ** 2, 0.0, m, sum(n for n, _ in pairs), max(len(middle) - 1, 1)
    )


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)


def _reports(state: DetectionState, after: float = 0) -> dict[ClientId, GainReport]:
    """The last report of each client, if it was made after round `after`."""
    return {i: report for i, (round, report) in state.reports.items() if round > after}


def _pairs(question: str, reports: Mapping[ClientId, GainReport]) -> dict[ClientId, tuple[int, Paired]]:
    """The number of validation samples and the answer to a question, for each client that answered it.

    Their order does not matter: every sum over clients is exact (`math.fsum`).
    """
    found = {i: (reports[i].samples, getattr(reports[i], question)) for i in reports}
    return {i: (samples, pair) for i, (samples, pair) in found.items() if pair is not None and samples > 0}


def _bet(numbers: Numbers, name: str, sign: int, bets: Bets) -> None:
    """One round of an e-process: bet by the moments of the earlier rounds, then update the moments."""
    of = {key: numbers.get(f"{name}.{key}", 0.0) for key in ("rounds", "sum", "squares", "wealth", "peak")}
    bet, largest = 0.0, LARGEST_BET / bets.bound
    if of["rounds"] >= 2 and of["sum"] * sign > 0:
        # mu / (var + mu^2) by the sums; the squares of tiny numbers may be 0
        bet = largest if of["sum"] * sign >= largest * of["squares"] else of["sum"] * sign / of["squares"]
    of["wealth"] += math.fsum(math.log1p(bet * sign * x) for x in bets.values)
    of["peak"] = max(of["peak"], of["wealth"])
    of["rounds"] += 1
    of["sum"] += math.fsum(bets.values)
    of["squares"] += math.fsum(x * x for x in bets.values)
    numbers.update({f"{name}.{key}": float(value) for key, value in of.items()})


def _restart(numbers: Numbers, name: str) -> None:
    """Drop the moments, the peak, wealth above 1, and a clear look."""
    numbers.update({f"{name}.{key}": 0.0 for key in ("rounds", "sum", "squares", "peak", "passed")})
    numbers[f"{name}.wealth"] = min(numbers[f"{name}.wealth"], 0.0)


def _is_due(numbers: Numbers, question: str, look: int) -> bool:
    """Whether that look is still to be made. Without reports in its round it is made in the next round with reports."""
    due = look > numbers.get(f"{question}.looked", 0.0)
    if due:
        numbers[f"{question}.looked"] = float(look)
    return due


def _projected(numbers: Numbers, question: str, gain: float, evidence: Evidence) -> float:
    """The gain in the last planned round, extrapolated with its change since the look before.

    Without a planned end it is extrapolated over as many rounds as have passed since that look.
    """
    before, at = numbers.get(f"{question}.gain", gain), numbers.get(f"{question}.at", float(evidence.round))
    numbers[f"{question}.gain"], numbers[f"{question}.at"] = gain, float(evidence.round)
    since = evidence.round - at
    ahead = since if evidence.rounds is None else max(evidence.rounds - evidence.round, 0)
    return gain + (gain - before) / since * ahead if since > 0 else gain


def first_round(start: int, rounds: int | None) -> int:
    """The first round that the test of the finished P_i counts. It needs two rounds with reports to answer."""
    return start or max(FIRST, WITHOUT_END if rounds is None else math.ceil(rounds / 4))


def too_short(start: int, rounds: int | None) -> str:
    """Why a run of so many rounds cannot have a verdict, as text; empty where it can."""
    first = first_round(start, rounds)
    if rounds is None or rounds > first:
        return ""
    return f"the test needs the reports of two rounds from round {first} on, but the run has {rounds}: plan more rounds"


def look_before(start: int, rounds: int | None, round: int) -> int:
    """The round of the last look of the paired test, up to this round; 0 before the first look."""
    if rounds is not None and round <= rounds:
        looks = [start + math.ceil((rounds - start) * k / QUARTERS) for k in range(1, QUARTERS + 1)]
        return max((look for look in looks if look <= round), default=0)
    gap, found = FIRST_GAP, 0
    while start + gap <= round:
        found, gap = start + gap, 2 * gap
    return found


def warning_look_before(round: int) -> int:
    """The round of the last look of the early warning, up to this round. Its looks are at 8, 12, 16, 24, 32, 48, ..."""
    power = 2 ** max(round.bit_length() - 1, 0)
    return 0 if round < 8 else power * 3 // 2 if round >= power * 3 // 2 else power
