"""run.json and summary.json of a run with a plan: its clients and versions, its scores, verdicts and privacy budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, final

import torch

from lindt.client.adaptations.guarded import Guarded, cost_in_words
from lindt.client.optimizers import built_names, optimization_of
from lindt.data.clients import VisitedData
from lindt.data.examples import label_counts
from lindt.environment.budget import budget
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.errors import UserError
from lindt.plan.file import to_dict
from lindt.plan.plan import Plan, attackers_of, scored_clients
from lindt.plan.problem import Problem, fingerprint, steps_differ
from lindt.protocols import VALIDATION, BoundedSensitivity, Examples, SharesPart, tensors_of
from lindt.runs.schema import VISITED, fits
from lindt.runs.store import read_lines
from lindt.runs.summary import software_versions, summarise_rounds
from lindt.server.checks import first_private
from lindt.server.recovery import OnDetection
from lindt.server.scores import client_weights
from lindt.weights import first_model, initial_weights


def about_run(
    plan: Plan, problem: Problem, task: str | None, noise: str = "plan", withheld: bool = False
) -> dict[str, Any]:
    """run.json: the clients and the versions. It counts labels only where labels are classes.

    `noise` says where noise comes from. With `withheld` labels are not counted, and lines are those of `withheld_line`.
    """
    N = len(problem.data)
    attackers = attackers_of(plan, N)
    by = optimization_of(plan, problem) if steps_differ(plan, problem) else None
    return {
        "name": plan.name,
        "task": task,
        "data": fingerprint(problem) if task else None,  # a plan's own data follow from the plan
        "class_names": list(problem.class_names),
        "metric_in_percent": problem.metric_for(plan).percent,
        # Buffers are sent without noise: a reader needs this for the privacy budget of a run that has not ended.
        "float_buffers": bool(initial_weights(problem, plan).float_buffers),
        # Of lazy clients only those that are scored; clients.jsonl has those that were visited.
        "clients": [
            client_entry(problem, i, attackers, task, withheld)
            for i in (scored_clients(plan, N) if isinstance(problem.data, VisitedData) else range(N))
        ],
        **({"population": N} if isinstance(problem.data, VisitedData) else {}),
        "versions": software_versions(),
        "noise": noise,
        # The plan cannot name it: it is an object of the task.
        **({"optimizer": built_names(by, first_model(problem, plan))} if by is not None and by.own else {}),
        **({"withheld": True} if withheld else {}),
    }


def client_entry(
    problem: Problem, client: int, attackers: Set[int], task: str | None, withheld: bool = False
) -> dict[str, Any]:
    """What run.json says of a client. Of a lazy client it has a hash of its samples, too."""
    named: dict[str, Any] = {"name": problem.client_names[client]} if problem.client_names else {}
    if isinstance(problem.data, VisitedData):
        facts = problem.data.facts(client)
        train, test, labels, finite = facts.train, facts.test, facts.labels, facts.finite
        named |= {"data": facts.data}
    else:
        data = problem.data[client]
        (train, test), labels = (len(part) for part in data), label_counts(data[0].labels)
        if labels and not withheld:  # what a model that learned nothing reaches; `report.reading` compares with it
            usual = max(labels, key=lambda label: labels[label])
            named |= {"constant": float((data[1].labels == int(usual)).double().mean())}
        # Checked only for the user's own data: the data sets that a plan names are known to be finite.
        finite = not task or (_is_finite(data[0]) and _is_finite(data[1]))
    return {
        "client": client,
        **named,
        "train": train,
        "test": test,
        "attacker": client in attackers,
        "labels": {} if withheld else labels,
        **({} if finite else {"not_finite": True}),
    }


@final
class VisitedClients:
    """The entries of clients.jsonl: of each lazy client that was asked to train, from the round of its first visit."""

    def __init__(self, plan: Plan, problem: Problem, task: str | None, path: Path) -> None:
        self._problem, self._task = problem, task
        self._attackers = attackers_of(plan, len(problem.data))
        self._known: set[int] = set()
        if isinstance(problem.data, VisitedData):
            for line in read_lines(path):
                if not fits(line, VISITED):
                    raise UserError(f"{path}: a damaged line of round {line['round']}; start the run again elsewhere")
                self._known.add(line["client"])
                problem.data.expect(line["client"], line["data"])

    def new(self, asked: Sequence[int]) -> list[dict[str, Any]]:
        if not isinstance(self._problem.data, VisitedData):
            return []
        found = sorted(set(asked) - self._known)
        self._known.update(found)
        return [client_entry(self._problem, i, self._attackers, self._task) for i in found]


def _is_finite(examples: Examples) -> bool:
    for start in range(0, len(examples), 1024):
        inputs, _ = examples.take(torch.arange(start, min(start + 1024, len(examples))))
        if any(one.is_floating_point() and not torch.isfinite(one).all() for one in tensors_of(inputs)):
            return False
    return True


def summarise_run(
    plan: Plan, lines: list[dict[str, Any]], problem: Problem, buffers: bool, about: Mapping[str, Any]
) -> dict[str, Any]:
    """summary.json: means over the last scored rounds, as the paper reports them, and the verdicts."""
    clients, metric = len(problem.data), problem.metric_for(plan)
    weights = client_weights(to_dict(plan), about["clients"])
    stopped = early_stop(plan, lines)
    kept = None if stopped is None else stopped["best_round"]
    found = summarise_rounds(lines, plan.scoring.last, metric.percent, about["clients"], weights, kept)
    if not isinstance(plan.method.recovery, OnDetection):
        found["detected_at"] = None
    checks = about.get("checks")
    told = {} if checks is None else {"checks": {name: checks[name] for name in ("made", "warnings")}}
    cost = prediction_cost(plan, problem)
    guarded = {} if cost is None else {"prediction": cost}
    told |= {} if stopped is None else {"early_stop": stopped}
    return found | told | guarded | {"privacy": privacy_budget(plan, clients, lines, buffers, about)}


def early_stop(plan: Plan, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The round with the best validation score, and the round of the stop; None where the plan does not stop early."""
    best: tuple[int, float] | None = None
    since, stopped_at = 0, None
    for line in lines:
        score = ((line["scores"] or {}).get("notes") or {}).get(VALIDATION)
        if score is None:
            continue
        if best is None or score > best[1]:
            best, since = (line["round"], score), 0
        else:
            since += 1
        if since >= plan.early_stop.patience:
            stopped_at = line["round"]
    if not plan.early_stop.patience or best is None:
        return None
    was = f"the clients' mean validation score was highest in round {best[0]} ({best[1]:.4g})"
    words = f"all rounds were played; {was}"
    if stopped_at is not None:
        plural = "" if since == 1 else "s"
        words = f"stopped in round {stopped_at}: {was} and no higher in {since} scored round{plural} since"
    return {
        "best_round": best[0],
        "validation_score": best[1],
        "stopped_at": stopped_at,
        "words": f"{words}; the final models are those of round {best[0]}",
    }


def prediction_cost(plan: Plan, problem: Problem) -> dict[str, Any] | None:
    """The models that a client needs for guarded prediction (w, its v_i and P_i); None for other methods."""
    guarded = plan.method.adaptation
    if not isinstance(guarded, Guarded):
        return None
    private, P = first_private(plan, problem), len(initial_weights(problem, plan).w_P)
    has = {"adapted": True, "private": plan.alone.private} | dict.fromkeys(("global", "tuned"), guarded.has_global)
    weights = P + P * sum(name in guarded.members and has[name] for name in ("tuned", "private"))
    weights += 0 if private is None else sum(p.numel() for p in private.parameters() if p.requires_grad)
    models = sum(has[name] for name in guarded.members)
    words = cost_in_words(models, weights)
    if plan.detection.reports and not problem.validation and plan.alone.with_validation:
        words += (
            "; P_i, and a model that is tuned at prediction, train twice: without the validation data, which choose "
            "the weights, and with it, to predict"
        )
    elif not plan.detection.reports and not problem.validation:
        words += (
            "; no client holds out validation data: the weights of the models are equal, and a bad one is not left out"
        )
    return {"models": models, "weights": weights, "words": words}


REPLAYED = 2  # rounds that a restart may play again: as many as there are checkpoints (runs/store.py)


def privacy_budget(
    plan: Plan, clients: int, lines: list[dict[str, Any]], buffers: bool, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The privacy budget, in numbers and in words. It assumes the fewest answers that any round had.

    Amplification by sampling uses the share of reachable clients that are asked, over-selection included (`budget`
    gives the reason), and only where `Sampled` draws them: another Participation is not known to draw uniformly.
    `about` is run.json. Where it does not say that noise came from a cryptographic generator there is no guarantee, and
    the words say what the guarantee would be. On a deployment each restart counts as REPLAYED more rounds.
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
        words += f"; {REPLAYED} more rounds are counted for each of {restarts} restart{'s' if restarts > 1 else ''}"
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
    "updates without noise: the guarantee does not hold against its readers, unless the run was started with --withhold"
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
    """What the guarantee does not cover: each report is computed from a client's own validation data."""
    b = getattr(plan.detection, "noise", 0.0)
    if not b:
        return "the clients' gain reports lie outside it, they are sent without noise"
    return f"the clients' gain reports lie outside it: each number of a report is {2 / b:.3g}-DP by itself"
