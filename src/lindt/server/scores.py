"""How well it goes, and for whom: central and local scores, the gain beta_i and beta (Eq. 2, 3), clients harmed.

Clients report tallies: sums over samples that add up over clients. So the central score (all test data pooled) comes
from the same pass as the local ones, and no client reveals a prediction.

The last functions read a run's lines: a client that was refused more often than taken, or has NaN in its data, takes no
part in the federation, so that its gain says nothing about it. The files keep its numbers; the summary and every reader
leave it out, and the verdict names it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, final

from lindt.errors import UserError, one_line

if TYPE_CHECKING:  # readers of a run compute its gains anew where clients are left out, and need no torch for it
    from lindt.protocols import ClientTally, Metric

EXACT = 10_000  # samples; there the normal limit is within 0.0001 of the exact test


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
class Scores:
    """One scored round. Rates and gains are fractions, not percent.

    `private`, `beta` and what follows from beta_i are over the clients with a private score, None where there
    are none; `without_private` names the others.
    """

    central: float | None  # None where the method has no whole global model
    local: float
    private: float | None
    beta: float | None
    harmed: int | None  # clients with beta_i < 0
    clearly_harmed: int | None  # ... by the paired test at 95%
    clearly_better: int | None  # clients with beta_i > 0, by the same test
    ties: int | None
    worst_tenth: float | None  # the mean beta_i of the tenth of the clients that gain least
    median_gain: float | None  # the median beta_i: one client with a large gain does not move it
    ipr: float | None  # the share of the clients with beta_i >= 0: the incentivized participation rate
    attack_central: float | None  # the backdoor's success rate on the global model
    attack_local: float | None
    clients: tuple[ClientScore, ...]
    notes: dict[str, float]  # what the method logs, averaged over the clients that log it

    @property
    def without_private(self) -> tuple[int, ...]:
        """The clients that answered without a private score: no gain is known of them."""
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
    """By the names that they have in `Scores`."""

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


def paired_p_value(wins: int, losses: int) -> float:
    """McNemar's exact test, two-sided: are as many samples won as lost against training alone?

    Beyond EXACT samples its normal limit: a client that claims a billion of them would hold up the server.
    """
    n, k = wins + losses, min(wins, losses)
    if n == 0:
        return 1.0
    if n > EXACT:
        return math.erfc(max(0.0, abs(wins - losses) - 1) / math.sqrt(2 * n))  # with the correction for whole numbers
    term = total = 1  # C(n, 0), then each from the one before: thousands of samples take milliseconds
    for i in range(k):
        term = term * (n - i) // (i + 1)
        total += term
    return min(1.0, float(2 * total / 2**n))


def summarise(
    tallies: dict[int, ClientTally],
    metric: Metric,
    *,
    counted: frozenset[int],
    alphas: dict[int, float],
    notes: Sequence[dict[str, float]] = (),
) -> Scores:
    """A round's scores: central over everyone's test data, the rest over the clients that are `counted`."""
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
    """Significant, and in the direction of beta: a metric other than accuracy may point the other way."""
    agrees = (tally.wins - tally.losses) * beta > 0
    return agrees and paired_p_value(tally.wins, tally.losses) < 0.05


def _central(tallies: list[ClientTally], metric: Metric) -> float | None:
    """Over everyone's test data; None where a client has no whole global model."""
    import torch

    sums = [one.central for one in tallies if one.central is not None]
    return metric.value(torch.stack(sums).sum(0)) if len(sums) == len(tallies) else None


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
    """Client and reason, by number. `clients` are those of run.json; attackers are never counted in the first place."""
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
    """A scored round over the other clients, `weights` being their alpha_i; None where there are none.

    Central accuracy and the attack's success stay as they were measured: over everyone's test data.
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
    return {**scores, **vars(summarise_gains(gains)), "clients": kept}


def client_weights(plan: Mapping[str, Any], clients: Sequence[Mapping[str, Any]]) -> dict[int, float] | None:
    """alpha_i by the plan's tables; None where all are equal."""
    scoring = plan.get("scoring")
    weighting = scoring.get("weighting") if isinstance(scoring, Mapping) else None
    if weighting == "size":
        return {one["client"]: float(one["train"]) for one in clients}
    if weighting == "given" and isinstance(given := scoring.get("weights"), list):  # type: ignore[union-attr]
        usable = all(type(weight) in (int, float) and 0 <= weight < 1e300 for weight in given)
        return {client: float(weight) for client, weight in enumerate(given)} if usable else None
    return None


def require_updates(lines: Sequence[Mapping[str, Any]]) -> None:
    """Raise a UserError for a run whose w no client ever changed: its numbers are those of the first weights."""
    if lines and not any(line["answered"] for line in lines):
        raise UserError(no_update(lines))


def no_update(lines: Sequence[Mapping[str, Any]]) -> str:
    reasons = Counter(one_line(one["reason"]) for line in lines for one in line["refused"])
    why = f" ({reasons.most_common(1)[0][0]})" if reasons else ""
    refused = f"{sum(reasons.values())} were refused{why}" if reasons else "no client answered"
    rounds = f"any of {len(lines)} rounds" if len(lines) > 1 else "the only round"
    return f"no valid update came back in {rounds}, {refused}; the shared model never changed"
