"""What a run leaves for its readers: a line a round, and the summary at the end. Plain values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lindt.client.adaptations.guarded import Guarded, cost_in_words
from lindt.environment.budget import budget
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan, attackers_of
from lindt.plan.problem import Problem, fingerprint
from lindt.protocols import BoundedSensitivity, Examples, SharesPart
from lindt.runs.schema import DIVERGENCE, NOT_NAMED, NUMBER, REPORT, REPORTED, ROUND, SCORES, SOMETIMES, kind, record
from lindt.server.checks import first_private
from lindt.server.detection.divergence import is_negative
from lindt.server.federation import RoundResult
from lindt.server.recovery import OnDetection
from lindt.server.scores import client_weights, excluded_clients, without_clients
from lindt.weights import initial_weights


def round_line(result: RoundResult) -> dict[str, Any]:
    """One line of rounds.jsonl. Accuracies and gains are fractions."""
    seen, recovery = result.seen, result.recovery
    found = {**vars(recovery), "flag": recovery.on, **(vars(seen) if seen else {}), **vars(result)}
    absent = {*(() if seen else DIVERGENCE), *(REPORTED if result.reports is None else ())}
    absent |= {name for name in SOMETIMES if found[name] is None}
    line = {name: record(found[name], shape) for name, shape in ROUND.items() if name not in {*absent, "reports"}}
    if result.reports is not None:
        line["reports"] = [{"client": i, **record(report, REPORT)} for i, report in sorted(result.reports.items())]
    return line


def withheld_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """A round's line without who took part, and without what was measured of their updates before noise.

    The numbers of clients asked, answering and refused stay, and the scores of the federation as a whole.
    """
    kept = {name: value for name, value in line.items() if name not in {*DIVERGENCE, "buffer_div", "reports"}}
    kept |= {name: [NOT_NAMED] * len(line[name]) for name in ("asked", "answered")}
    kept["refused"] = [{**one, "client": NOT_NAMED} for one in line["refused"]]
    return kept | {"scores": line["scores"] and {**line["scores"], "clients": [], "notes": {}}}


def about_run(
    plan: Plan, problem: Problem, task: str | None, noise: str = "plan", withheld: bool = False
) -> dict[str, Any]:
    """run.json: who takes part. Label counts only where labels are classes. `noise` says where noise comes from.

    `withheld`: no label counts, and lines by `withheld_line`.
    """
    attackers = attackers_of(plan, len(problem.data))
    return {
        "name": plan.name,
        "task": task,
        "data": fingerprint(problem) if task else None,  # a plan's own data follow from the plan
        "class_names": list(problem.class_names),
        "metric_in_percent": problem.metric_for(plan).percent,
        # They travel without noise: whoever reads the run before it ended needs this to say its privacy budget.
        "float_buffers": bool(initial_weights(problem, plan).float_buffers),
        "clients": [
            {
                "client": i,
                **({"name": problem.client_names[i]} if problem.client_names else {}),
                "train": len(train),
                "test": len(test),
                "attacker": i in attackers,
                "labels": {} if withheld else _label_counts(train.labels),
                # Data of the user's own only: those that a plan names are known.
                **({"not_finite": True} if task and not (_is_finite(train) and _is_finite(test)) else {}),
            }
            for i, (train, test) in enumerate(problem.data)
        ],
        "versions": software_versions(),
        "noise": noise,
        **({"withheld": True} if withheld else {}),
    }


def software_versions() -> dict[str, str]:
    """What computed a run."""
    import platform

    import lindt

    return {"lindt": lindt.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _label_counts(labels: Any) -> dict[str, int]:
    if labels.is_floating_point() or labels.dim() != 1:
        return {}
    values, counts = labels.unique(return_counts=True)
    return {str(int(v)): int(c) for v, c in zip(values, counts, strict=True)}


def _is_finite(examples: Examples) -> bool:
    for start in range(0, len(examples), 1024):
        inputs, _ = examples.take(torch.arange(start, min(start + 1024, len(examples))))
        if inputs.is_floating_point() and not torch.isfinite(inputs).all():
            return False
    return True


def summarise_run(
    plan: Plan, lines: list[dict[str, Any]], problem: Problem, buffers: bool, about: Mapping[str, Any]
) -> dict[str, Any]:
    """summary.json: the mean over the last scored rounds, as the paper reports it, and the verdicts."""
    clients, metric = len(problem.data), problem.metric_for(plan)
    weights = client_weights(to_dict(plan), about["clients"])
    found = summarise_rounds(lines, plan.scoring.last, metric.percent, about["clients"], weights)
    if not isinstance(plan.method.recovery, OnDetection):
        found["detected_at"] = None
    checks = about.get("checks")
    told = {} if checks is None else {"checks": {name: checks[name] for name in ("made", "warnings")}}
    cost = prediction_cost(plan, problem)
    guarded = {} if cost is None else {"prediction": cost}
    return found | told | guarded | {"privacy": privacy_budget(plan, clients, lines, buffers, about)}


def prediction_cost(plan: Plan, problem: Problem) -> dict[str, Any] | None:
    """What a client holds to predict under guarded prediction: w, its v_i and P_i; None for other methods."""
    guarded = plan.method.adaptation
    if not isinstance(guarded, Guarded):
        return None
    private, P = first_private(plan, problem), len(initial_weights(problem, plan).w_P)
    has = {"adapted": True, "global": guarded.has_global, "private": plan.alone.private}
    weights = P + (P if "private" in guarded.members and has["private"] else 0)
    weights += 0 if private is None else sum(p.numel() for p in private.parameters() if p.requires_grad)
    models = sum(has[name] for name in guarded.members)
    return {"models": models, "weights": weights, "words": cost_in_words(models, weights)}


def summarise_rounds(
    lines: list[dict[str, Any]],
    last_scored: int,
    percent: bool,
    clients: Sequence[Mapping[str, Any]],
    weights: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """What the lines of rounds.jsonl tell by themselves; `clients` are those of run.json, `weights` their alpha_i."""
    excluded = excluded_clients(lines, clients).keys()
    kept = [without_clients(line["scores"], excluded, weights) for line in lines if line["scores"]]
    scored = [scores for scores in kept if scores]
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
        "detection": lines[-1].get("detection") if lines else None,
    }


REPLAYED = 2  # rounds that a restart may play again: as many as there are checkpoints (runs/store.py)


def privacy_budget(
    plan: Plan, clients: int, lines: list[dict[str, Any]], buffers: bool, about: Mapping[str, Any]
) -> dict[str, Any]:
    """What the noise really buys, in numbers and in words: by the fewest answers that any round had.

    Sampling amplifies at the rate of the clients asked among those that could be reached, over-selection included
    (`budget` gives the reason), and only where they are drawn by `Sampled`: another Participation is not known to draw
    uniformly. `about` is run.json. Where it does not say that noise came from a cryptographic generator there is no
    guarantee, and the words tell what there would be. On a deployment each restart counts as REPLAYED rounds more.
    """
    privacy, aggregator = plan.environment.privacy, plan.method.aggregator
    participation = plan.environment.participation
    played = [line for line in lines if line["answered"]]
    sigma, sensitivity = 0.0, None
    if isinstance(privacy, Gaussian):
        sigma = privacy.sigma
        if isinstance(aggregator, BoundedSensitivity) and played and not buffers:
            sensitivity = max(aggregator.sensitivity(privacy.S, K) for K in {len(line["answered"]) for line in played})
    reachable = [line.get("reachable") or clients for line in played]
    secure, restarts = about.get("noise") == "system", (about.get("attempts") or 1) - 1
    again = [min(reachable)] * (REPLAYED * restarts) if reachable and secure else []
    spent = budget(
        sigma=sigma,
        sensitivity=sensitivity,
        clients=clients,
        active=participation.wanted(clients),
        asked=participation.asked(clients) if isinstance(participation, Sampled) else None,
        reachable=[*reachable, *again],
        uniform=isinstance(participation, Sampled) and plan.environment.threat.share == 0,
    )
    words, epsilon = spent.in_words(), spent.epsilon_dp
    if again:
        words += f"; {REPLAYED} rounds more are counted for each of {restarts} restart{'s' if restarts > 1 else ''}"
    if buffers and sigma:
        words = "no guarantee: the model's buffers (BatchNorm's statistics) travel without noise"
    elif sigma and plan.detection.reports:
        words += f"; {_reports_outside(plan)}"
    adaptation = plan.method.adaptation
    if sigma and isinstance(adaptation, SharesPart) and adaptation.part_in_words:
        words += f"; while recovery is on clients send {adaptation.part_in_words}: noise and clipping cover these"
    if epsilon is not None and played and secure:
        words += f"; {SECURE}; {WITHHELD if about.get('withheld') else TOLD}"
    elif epsilon is not None and played:
        words, epsilon = f"{SIMULATED} {words}", None
    return {"words": words, "epsilon": epsilon, "delta": spent.delta_dp}


SECURE = "the noise comes from the operating system's cryptographic generator"
TOLD = (
    "this folder names the clients of each round, keeps the seed by which they were drawn, and holds measures of their "
    "updates without noise: the guarantee is lost to whoever reads it, unless the run was started with --withhold"
)
WITHHELD = (
    "this folder does not name the clients of a round; the scores, the answers of the test, recovery's flag and the "
    "clients' sizes are in it, and lie outside the guarantee"
)
SIMULATED = (
    "no guarantee: the noise comes from torch's generator, as in every simulation, and can be found by trying its 2^32 "
    "seeds; from a cryptographic one it would be"
)


def _reports_outside(plan: Plan) -> str:
    """What the guarantee does not cover: each visit reports how w does on a client's own validation data."""
    b = getattr(plan.detection, "noise", 0.0)
    if not b:
        return "the clients' gain reports lie outside it, they are sent without noise"
    return f"the clients' gain reports lie outside it: each number of a report is {2 / b:.3g}-DP by itself"


def _detections(lines: list[dict[str, Any]]) -> list[int]:
    return [b["round"] for a, b in _pairs(lines) if b["detections"] > a["detections"]]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pairs(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip([{"detections": 0, "flag": False}, *lines], lines, strict=False))
