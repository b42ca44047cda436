"""What a run leaves for its readers: a line a round, and the summary at the end. Plain values only."""

from __future__ import annotations

from typing import Any

from lindt.environment.budget import budget
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, attackers_of, fingerprint, initial_weights
from lindt.protocols import BoundedSensitivity
from lindt.runs.schema import DIVERGENCE, NUMBER, ROUND, SCORES, kind, record
from lindt.server.detection.rules import is_negative
from lindt.server.federation import RoundResult
from lindt.server.recovery import OnDetection


def round_line(result: RoundResult) -> dict[str, Any]:
    """One line of rounds.jsonl. Accuracies and gains are fractions."""
    seen, recovery = result.seen, result.recovery
    found = {**vars(result), **vars(recovery), "flag": recovery.on, **(vars(seen) if seen else {})}
    return {name: record(found[name], shape) for name, shape in ROUND.items() if seen or name not in DIVERGENCE}


def about_run(plan: Plan, problem: Problem, task: str | None) -> dict[str, Any]:
    """run.json: who takes part. Label counts only where labels are classes."""

    attackers = attackers_of(plan, len(problem.data))
    return {
        "name": plan.name,
        "task": task,
        "data": fingerprint(problem) if task else None,  # a plan's own data follow from the plan
        "class_names": list(problem.class_names),
        "metric_in_percent": problem.metric_for(plan).percent,
        # They travel without noise: whoever reads the run before it ended needs this to say its privacy budget.
        "float_buffers": initial_weights(problem, plan).float_buffers,
        "clients": [
            {
                "client": i,
                **({"name": problem.client_names[i]} if problem.client_names else {}),
                "train": len(train),
                "test": len(test),
                "attacker": i in attackers,
                "labels": _label_counts(train.labels),
            }
            for i, (train, test) in enumerate(problem.data)
        ],
        "versions": software_versions(),
    }


def software_versions() -> dict[str, str]:
    """What computed a run."""
    import platform

    import torch

    import lindt

    return {"lindt": lindt.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _label_counts(labels: Any) -> dict[str, int]:
    if labels.is_floating_point() or labels.dim() != 1:
        return {}
    values, counts = labels.unique(return_counts=True)
    return {str(int(v)): int(c) for v, c in zip(values, counts, strict=True)}


def summarise_run(plan: Plan, lines: list[dict[str, Any]], problem: Problem, buffers: bool) -> dict[str, Any]:
    """summary.json: the mean over the last scored rounds, as the paper reports it, and the verdicts."""
    clients, metric = len(problem.data), problem.metric_for(plan)
    found = summarise_rounds(lines, plan.scoring.last, metric.percent)
    if not isinstance(plan.method.recovery, OnDetection):
        found["detected_at"] = None
    return found | {"privacy": privacy_budget(plan, clients, lines, buffers)}


def summarise_rounds(lines: list[dict[str, Any]], last_scored: int, percent: bool) -> dict[str, Any]:
    """What the lines of rounds.jsonl tell by themselves."""
    scored = [line["scores"] for line in lines if line["scores"]]
    last = scored[-last_scored:]
    end = last[-1] if last else {"clients": ()}  # nobody answered when asked how it fares
    betas = [scores["beta"] for scores in scored if scores["beta"] is not None]
    return {
        "rounds": len(lines),
        "scored_rounds": len(last),
        **{
            name: _mean([scores.get(name) for scores in last]) if kind(shape) is NUMBER else end.get(name)
            for name, shape in SCORES.items()
        },
        "counted_clients": len(end["clients"]),
        "negative": is_negative(betas) if betas else None,
        "detected_at": _detections(lines),
        "stopped_at": [b["round"] for a, b in _pairs(lines) if a["flag"] and not b["flag"]],
        "recovery_rounds": sum(line["recovering"] for line in lines),
        "refused_updates": sum(len(line["refused"]) for line in lines),
        "metric_in_percent": percent,
    }


def privacy_budget(plan: Plan, clients: int, lines: list[dict[str, Any]], buffers: bool) -> dict[str, Any]:
    """What the noise really buys, in numbers and in words: by the fewest answers that any round had.

    Sampling amplifies at the rate of the clients asked, over-selection included (`budget` gives the reason), and only
    where they are drawn by `Sampled`: another Participation is not known to draw uniformly.
    """
    privacy, aggregator = plan.environment.privacy, plan.method.aggregator
    participation = plan.environment.participation
    answers = [len(line["answered"]) for line in lines if line["answered"]]
    sigma, sensitivity = 0.0, None
    if isinstance(privacy, Gaussian):
        sigma = privacy.sigma
        if isinstance(aggregator, BoundedSensitivity) and answers and not buffers:
            sensitivity = max(aggregator.sensitivity(privacy.S, K) for K in set(answers))
    spent = budget(
        sigma=sigma,
        sensitivity=sensitivity,
        clients=clients,
        active=participation.wanted(clients),
        asked=participation.asked(clients) if isinstance(participation, Sampled) else None,
        rounds=len(answers),
        uniform=isinstance(participation, Sampled) and plan.environment.threat.share == 0,
    )
    words = spent.in_words()
    if buffers and sigma:
        words = "no guarantee: the model's buffers (BatchNorm's statistics) travel without noise"
    return {"words": words, "epsilon": spent.epsilon_dp, "delta": spent.delta_dp}


def _detections(lines: list[dict[str, Any]]) -> list[int]:
    return [b["round"] for a, b in _pairs(lines) if b["detections"] > a["detections"]]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pairs(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip([{"detections": 0, "flag": False}, *lines], lines, strict=False))
