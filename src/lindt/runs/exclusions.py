"""Clients that a run's gain does not count: refused more often than taken, or with NaN in their data.

Such a client takes no part in the federation, so that its gain says nothing about it. The files keep its numbers;
the summary and every reader leave it out, and the verdict names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from lindt.errors import UserError, one_line
from lindt.server.scores import ClientGain, summarise_gains


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
