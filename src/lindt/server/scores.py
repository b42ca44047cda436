"""The scores of a round: central and local scores, the gains beta_i and beta (Eq. 2, 3), and the clients harmed.

Clients report tallies: sums over samples that can be added over clients. So the central score (all test data pooled)
comes from the same pass as the local scores, and no client reveals a prediction.

The last functions read the lines of a stored run. A client whose updates were refused more often than used, or with NaN
in its data, has no part in the federation, and its gain says nothing about the federation. The files keep its numbers;
the summary and every reader leave it out, and the verdict names it.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, Final, final

from lindt.errors import UserError, one_line

if TYPE_CHECKING:  # readers of a run recompute its gains where clients are left out, and do not import torch
    from lindt.protocols import ClientTally, Metric

EXACT = 10_000  # samples; for this many the normal approximation is within 0.0001 of the exact test


@final
@dataclass(frozen=True)
class ClientScore:
    client: int
    samples: int
    local: float
    private: float | None
    beta: float | None
    clear: bool  # |beta_i| is more than chance explains, by the paired test


@final
@dataclass(frozen=True)
class Panel:
    """What a random panel of clients says about all of them: intervals at 95%, for scores of `scoring.panel`.

    They cover the draw of the panel, and not members that did not answer: `clients` is then below `expected`. The
    interval of beta is Student's, that of the IPR Wilson's, both with the correction for a finite population.
    """

    expected: int  # the members whose gain counts
    clients: int  # those of them with a known gain
    of: int  # the clients that the panel stands for: all whose gain counts
    beta_low: float | None
    beta_high: float | None
    ipr_low: float | None
    ipr_high: float | None


@final
@dataclass(frozen=True)
class Scores:
    """The scores of one round. Rates and gains are fractions, not percent.

    `private`, `beta` and the fields computed from beta_i are over the clients with a private score, and None where no
    client has one; `without_private` lists the other clients.
    """

    central: float | None  # None where the method has no whole global model
    local: float
    private: float | None
    beta: float | None
    harmed: int | None  # clients with beta_i < 0
    clearly_harmed: int | None  # clients with beta_i < 0, significant by the paired test at 95%
    clearly_better: int | None  # clients with beta_i > 0, by the same test
    ties: int | None
    worst_tenth: float | None  # the mean beta_i of the tenth of the clients that gain least
    median_gain: float | None  # the median beta_i, which a single client with a large gain does not change
    ipr: float | None  # the share of the clients with beta_i >= 0: the incentivized participation rate
    attack_central: float | None  # the backdoor's success rate on the global model
    attack_local: float | None
    clients: tuple[ClientScore, ...]
    notes: dict[str, float]  # what the method logs, averaged over the clients that log it
    panel: Panel | None = None  # None where all clients are scored

    @property
    def without_private(self) -> tuple[int, ...]:
        """The clients that answered without a private score, whose gain is not known."""
        return tuple(score.client for score in self.clients if score.private is None)


@final
@dataclass(frozen=True)
class ClientGain:
    """One client in a scored round; `private` and `beta` are None where it has no private model."""

    local: float
    private: float | None
    beta: float | None
    clear: bool
    weight: float  # alpha_i


@final
@dataclass(frozen=True)
class Gains:
    """The fields of `Scores` that are computed from the clients' gains."""

    local: float
    private: float | None
    beta: float | None
    harmed: int | None
    clearly_harmed: int | None
    clearly_better: int | None
    ties: int | None
    worst_tenth: float | None
    median_gain: float | None
    ipr: float | None


def weighted_gain(betas: Sequence[float], weights: Sequence[float]) -> float:
    """beta (Eq. 3): sum of alpha_i * beta_i, with the alphas normalised to sum to 1."""
    total = math.fsum(weights)
    return math.fsum(a * b for a, b in zip(weights, betas, strict=True)) / total


def worst_tenth(betas: Sequence[float]) -> float:
    worst = sorted(betas)[: math.ceil(len(betas) / 10)]
    return math.fsum(worst) / len(worst)


def summarise_gains(clients: Sequence[ClientGain]) -> Gains:
    alone = [(one.private, one.weight) for one in clients if one.private is not None]
    gains = [one.beta for one in clients if one.beta is not None]
    clear = [one.beta for one in clients if one.beta is not None and one.clear]
    known, shares = bool(gains), [weight for _, weight in alone]
    weighted = any(shares)
    return Gains(
        local=weighted_gain([one.local for one in clients], [one.weight for one in clients]),
        private=weighted_gain([private for private, _ in alone], shares) if weighted else None,
        beta=weighted_gain(gains, shares) if weighted else None,
        harmed=sum(beta < 0 for beta in gains) if known else None,
        clearly_harmed=sum(beta < 0 for beta in clear) if known else None,
        clearly_better=sum(beta > 0 for beta in clear) if known else None,
        ties=sum(beta == 0 for beta in gains) if known else None,
        worst_tenth=worst_tenth(gains) if known else None,
        median_gain=median(gains) if known else None,
        ipr=sum(beta >= 0 for beta in gains) / len(gains) if known else None,
    )


LEVEL: Final = 0.975  # of each end of a panel's intervals


def panel_of(clients: Sequence[ClientGain], expected: int, of: int) -> Panel:
    """The intervals of a panel that was drawn uniformly, from the gains of its members.

    beta is a mean weighted by alpha_i, a ratio of two means: its variance is that of the linear terms
    alpha_i (beta_i - beta) / mean(alpha) (Cochran 1977, Sec. 6.4).
    """
    known = [(one.beta, one.weight) for one in clients if one.beta is not None]
    m, N = len(known), max(of, len(known))
    if m < 2 or not any(weight for _, weight in known):
        return Panel(expected, m, of, None, None, None, None)
    beta = weighted_gain([b for b, _ in known], [weight for _, weight in known])
    mean_weight = math.fsum(weight for _, weight in known) / m
    variance = math.fsum((weight / mean_weight * (b - beta)) ** 2 for b, weight in known) / (m - 1)
    missing = 1 - m / N
    wide = _student(m - 1) * math.sqrt(variance * missing / m)
    share, low, high = sum(b >= 0 for b, _ in known) / m, 0.0, 1.0
    if missing:
        z, n = NormalDist().inv_cdf(LEVEL), m / missing  # as many draws with replacement have the same variance
        center = (share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        low, high = max(0.0, center - half), min(1.0, center + half)
    else:
        low = high = share
    return Panel(expected, m, of, beta - wide, beta + wide, low, high)


FEW_FREE: Final = (12.7062, 4.3027, 3.1824, 2.7764)  # quantiles at LEVEL of 1 to 4 degrees of freedom


def _student(freedom: int) -> float:
    """The quantile of Student's t at LEVEL; from 5 degrees of freedom on by the expansion of Cornish and Fisher."""
    if freedom <= len(FEW_FREE):
        return FEW_FREE[freedom - 1]
    z = NormalDist().inv_cdf(LEVEL)
    third = 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    return z + (z**3 + z) / 4 / freedom + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / freedom**2 + third / 384 / freedom**3


def paired_p_value(wins: int, losses: int) -> float:
    """McNemar's exact test, two-sided, of as many samples won as lost against training alone.

    Above EXACT samples it is the normal approximation: a client that claims a billion samples would block the server.
    """
    n, k = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0
    if n > EXACT:
        return math.erfc(max(0.0, abs(wins - losses) - 1) / math.sqrt(2 * n))  # with the continuity correction
    term = total = 1  # C(n, 0); each further C(n, i) from the one before: thousands of samples take milliseconds
    for i in range(k):
        term = term * (n - i) // (i + 1)
        total += term
    return min(1.0, float(2 * total / 2**n))


def summarise(
    tallies: dict[int, ClientTally],
    metric: Metric,
    *,
    counted: Set[int],
    alphas: dict[int, float],
    notes: Sequence[dict[str, float]] = (),
    panel: tuple[int, int] | None = None,
) -> Scores:
    """A round's scores: the central score over all clients' test data, the others over the clients in `counted`.

    With a `panel` the tallies are those of its members: it has the number of members that count, and of all clients
    that count.
    """
    mine = {i: tallies[i] for i in sorted(tallies) if i in counted}
    scores = tuple(_client_score(i, tally, metric) for i, tally in mine.items())
    clients = [ClientGain(one.local, one.private, one.beta, one.clear, alphas[one.client]) for one in scores]
    attack = _attack_rates(list(tallies.values()), list(mine.values()))
    return Scores(
        central=_central(list(tallies.values()), metric),
        **vars(summarise_gains(clients)),
        attack_central=attack[0],
        attack_local=attack[1],
        clients=scores,
        notes=_mean_notes(notes),
        panel=None if panel is None else panel_of(clients, *panel),
    )


def _client_score(client: int, tally: ClientTally, metric: Metric) -> ClientScore:
    local = metric.value(tally.local)
    private = None if tally.private is None else metric.value(tally.private)
    return ClientScore(
        client,
        tally.samples,
        local,
        private,
        None if private is None else local - private,  # Eq. 2
        private is not None and _clear(local - private, tally),
    )


def _clear(beta: float, tally: ClientTally) -> bool:
    """Whether the test is significant in the direction of beta. For a metric other than accuracy the two may differ."""
    agrees = (tally.wins - tally.losses) * beta > 0
    return agrees and paired_p_value(tally.wins, tally.losses) < 0.05


def _central(tallies: list[ClientTally], metric: Metric) -> float | None:
    """The score over all clients' test data; None where a client has no whole global model."""
    sums = [one.central for one in tallies if one.central is not None]
    return metric.value(reduce(operator.add, sums)) if len(sums) == len(tallies) else None


def _attack_rates(everyone: list[ClientTally], counted: list[ClientTally]) -> tuple[float | None, float | None]:
    chances, own = sum(t.attack_chances for t in everyone), sum(t.attack_chances for t in counted)
    whole = all(t.central is not None for t in everyone)
    central = sum(t.attack_central for t in everyone) / chances if chances and whole else None
    return central, sum(t.attack_local for t in counted) / own if own else None


def _mean_notes(notes: Sequence[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for note in notes for name in note})
    values = {name: [note[name] for note in notes if name in note] for name in names}
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


def excluded_clients(lines: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The clients to leave out, with the reason. `clients` are those of run.json; attackers never count anyway."""
    refused = Counter(one["client"] for line in lines for one in line["refused"])
    taken = Counter(client for line in lines for client in line["answered"])
    reasons = {one["client"]: one["reason"] for line in lines for one in line["refused"]}  # the last one
    attackers = {one["client"] for one in clients if one["attacker"]}
    found = {one["client"]: "NaN or infinity in its data" for one in clients if one.get("not_finite") is True}
    for client, times in refused.items():
        if times > taken[client]:
            of = times + taken[client]
            found[client] = f"{times} of its {of} update{'s' if of > 1 else ''} refused, {one_line(reasons[client])}"
    return {client: found[client] for client in sorted(found) if client not in attackers}


def without_clients(
    scores: Mapping[str, Any], excluded: Set[int], weights: Mapping[int, float] | None = None
) -> dict[str, Any] | None:
    """The scores of a round without the `excluded` clients; `weights` are alpha_i. None where no client is left.

    Central accuracy and the attack's success stay as they were measured: over all clients' test data.
    """
    kept = [one for one in scores["clients"] if one["client"] not in excluded]
    if len(kept) == len(scores["clients"]):
        return dict(scores)
    alphas = [weights.get(one["client"], 0.0) if weights else 1.0 for one in kept]
    if not any(alphas):
        return None
    gains = [
        ClientGain(one["local"], one.get("private"), one.get("beta"), one["clear"], alpha)
        for one, alpha in zip(kept, alphas, strict=True)
    ]
    found = {**scores, **vars(summarise_gains(gains)), "clients": kept}
    if panel := scores.get("panel"):
        left = sum(one["client"] in excluded for one in scores["clients"])
        found["panel"] = vars(panel_of(gains, panel["expected"] - left, panel["of"]))
    return found


def client_weights(plan: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> dict[int, float] | None:
    """alpha_i of each client by the plan's `scoring` table; None where all are equal."""
    scoring = plan.get("scoring")
    weighting = scoring.get("weighting") if isinstance(scoring, Mapping) else None
    if weighting == "size":
        return {one["client"]: float(one["train"]) for one in clients}
    if weighting == "given" and isinstance(given := scoring.get("weights"), list):  # type: ignore[union-attr]
        usable = all(type(weight) in (int, float) and 0 <= weight < 1e300 for weight in given)
        return {client: float(weight) for client, weight in enumerate(given)} if usable else None
    return None


def require_updates(lines: Sequence[Mapping[str, Any]]) -> None:
    """Raise a UserError for a run without a single valid update: its scores are those of the untrained model."""
    if lines and not any(line["answered"] for line in lines):
        raise UserError(no_update(lines))


def no_update(lines: Sequence[Mapping[str, Any]]) -> str:
    reasons = Counter(one_line(one["reason"]) for line in lines for one in line["refused"])
    why = f" ({reasons.most_common(1)[0][0]})" if reasons else ""
    refused = f"{sum(reasons.values())} were refused{why}" if reasons else "no client answered"
    rounds = f"any of {len(lines)} rounds" if len(lines) > 1 else "the only round"
    return f"no valid update came back in {rounds}, {refused}; the shared model never changed"
