"""Records and outcomes made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from lindt.protocols import Divergence, GainReport, Paired
from lindt_experiments.detectors.outcomes import DetectorOutcome
from lindt_experiments.detectors.readings import Reading
from lindt_experiments.detectors.records import Record, RecordedRound


def report(mean: float, samples: int = 10, first: float | None = None) -> GainReport:
    return GainReport(samples, Paired(mean, abs(mean)), Paired(mean / 2, abs(mean) / 2), first_batch=first)


def seen(delta: float, cosine: float | None = None) -> Divergence:
    return Divergence(
        w_div=delta + 1,
        delta=delta,
        clean=delta,
        spread=delta,
        clipped=0.0,
        noise_norm=1.0,
        median=delta,
        cosine=cosine,
    )


def record(
    gain: Callable[[int, int], float],
    *,
    rounds: int = 16,
    clients: int = 4,
    attackers: tuple[int, ...] = (),
    delta: float = 0.2,
) -> Record:
    """Everyone reports in every round what `gain(client, round)` says; beta is the honest clients' mean."""
    honest = [i for i in range(clients) if i not in attackers]
    return Record(
        plan="made",
        clients=clients,
        attackers=frozenset(attackers),
        rounds=tuple(
            RecordedRound(
                r, frozenset(range(clients)), seen(delta), {i: report(gain(i, r), first=0.0) for i in range(clients)}
            )
            for r in range(1, rounds + 1)
        ),
        betas=tuple((r, sum(gain(i, r) for i in honest) / len(honest)) for r in range(2, rounds + 1, 2)),
        seconds=1.0,
    )


def reading(alarm: int | None, *evidence: float | None, state: str = "") -> dict[str, Any]:
    known = evidence or (0.0,) * 4
    return asdict(Reading(alarm, state or ("hurts" if alarm else "undecided"), tuple(known)))


def outcome(name: str, beta: float, alarm: int | None = None, **fields: Any) -> DetectorOutcome:
    """A run of 40 rounds whose beta never changes; every detector said the same."""
    said = reading(alarm, *(-beta,) * 4)
    names = ("gain", "gain-median", "warning", "fl-guard", "reader", "lie-1 gain", "lie+1 gain")
    known: dict[str, Any] = {
        "part": "judged", "task": "digits", "scale": "smoke", "index": 0, "plan": name, "rounds": 40, "clients": 10,
        "attackers": 0, "samples": 100, "negative": beta < 0, "beta": beta, "scored": (10, 20, 30, 40),
        "beta_curve": (beta,) * 4, "delta": (0.2 if beta < 0 else 0.05,) * 40, "readings": dict.fromkeys(names, said),
        "command": "lindt reproduce detectors", "commit": "0123456789ab", "date": "2026-11-17", "seconds": 1.0,
    }  # fmt: skip
    return DetectorOutcome(configuration=name, **(known | fields))
