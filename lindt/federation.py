"""The federation: FedAvg (Alg. 1) and LINDT (Alg. 2), one round as a straight line.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from lindt.adaptations.base import Choosy, Loss
from lindt.data.examples import Examples, pool
from lindt.detection import Divergence, measure
from lindt.engines.base import Engine, Kind, Reply, Task
from lindt.environment.participation import choose_attackers
from lindt.errors import PlanError
from lindt.metrics import Metric, Scores, summarise
from lindt.plan import Plan
from lindt.problem import Problem, first_model, problem_for
from lindt.recovery import Evidence, RecoveryState
from lindt.weights import Buffers, join_buffers, read_buffers, read_w


@final
@dataclass(frozen=True)
class RunState:
    """The server's state after a round: all that a resumed run needs. It can be resumed while it is one of the
    last two; clients forget the v_i that older ones would ask for."""

    run: str
    round: int
    w: Tensor
    buffers: Buffers
    recovery: RecoveryState


@final
@dataclass(frozen=True)
class Refusal:
    """An update that the server did not take."""

    client: int
    reason: str


@final
@dataclass(frozen=True)
class RoundResult:
    round: int
    asked: tuple[int, ...]
    answered: tuple[int, ...]
    refused: tuple[Refusal, ...]
    seen: Divergence | None  # None when no valid update came back: w stays as it was
    recovering: bool  # in this round, on the clients
    recovery: RecoveryState  # as judged after it
    scores: Scores | None


def play_round(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> tuple[RunState, RoundResult]:
    """Alg. 2, s3-s11: state in, state out."""
    r, env, method = state.round + 1, plan.environment, plan.method
    clients = engine.available()
    attackers = attackers_of(plan, len(clients))
    asked = env.participation.active(plan.seed_for("active", r), clients, attackers)  # C_r
    replies = engine.dispatch([_task("train", state, i, r) for i in asked])
    w_KP, sizes_K, buffers, answered, refused = stack(
        replies, set(asked), r, state, wanted=env.participation.wanted(len(clients))
    )
    if answered:
        updates_KP = env.privacy.clip(w_KP - state.w)
        noise_P = env.privacy.noise(state.w, plan.seed_for("noise", r))
        w = state.w + method.aggregator(updates_KP, sizes_K) + noise_P  # Eq. 4
        seen = measure(w_KP, w, noise_P, updates_KP, env.privacy.clipped(w_KP - state.w))  # Eq. 5, 7
    else:
        w, seen = state.w, None
    evidence = Evidence(r, seen, frozenset(answered), len(clients))
    after = RunState(state.run, r, w, buffers, method.recovery.judge(state.recovery, evidence))
    # A suspicion is measured at once: Delta suspects, beta confirms.
    suspected = after.recovery.detections > state.recovery.detections
    scores = evaluate(after, plan, problem, engine) if suspected or plan.scored(r) else None
    return after, RoundResult(
        r, tuple(asked), tuple(answered), refused, seen, state.recovery.on, after.recovery, scores
    )


def federate(
    plan: Plan,
    *,
    clients: Sequence[tuple[object, object]] | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
    problem: Problem | None = None,
    engine: Engine | None = None,
    state: RunState | None = None,
) -> Iterator[tuple[RunState, RoundResult]]:
    """Run a plan and yield after every round: events, not callbacks. Resuming is passing a saved state.

    >>> for state, result in federate(plan, clients=[(train, test), ...], model=MyNet):
    ...     print(result.round, result.seen.delta, result.recovering)

    With neither `clients` and `model` nor a `problem`, the plan's own data and model are used.
    """
    problem = problem or _problem(plan, clients, model, loss, metric)
    check(plan, problem)
    if engine is None:
        from lindt.engines.inprocess import (
            InProcess,
        )  # it builds clients, which the protocols here know nothing of

        engine = InProcess(plan, problem)
    state = state or begin(plan, problem)
    for _ in train_privately(plan, engine, state):
        pass
    while state.round < plan.rounds:
        state, result = play_round(state, plan, problem, engine)
        yield state, result


def begin(plan: Plan, problem: Problem, run: str = "") -> RunState:
    """s1: w^0, count = 0, and the flag."""
    model = first_model(problem, plan)
    return RunState(run, 0, read_w(model), read_buffers(model), plan.method.recovery.begin())


def train_privately(plan: Plan, engine: Engine, state: RunState) -> Iterator[int]:
    """Every client trains P_i alone, beforehand (Sec. 3.2). Yields each client that has one."""
    if plan.alone.private:
        for reply in engine.dispatch([_task("private", state, i, 0) for i in engine.available()]):
            yield reply.client


def evaluate(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> Scores | None:
    """Ask every client how it fares: one pass gives the central and the local scores; None if nobody answers."""
    clients = engine.available()
    replies = list(engine.dispatch([_task("evaluate", state, i, state.round) for i in clients]))
    alphas = {
        "equal": {reply.client: 1.0 for reply in replies},
        "size": {reply.client: float(reply.size) for reply in replies},
        "given": dict(enumerate(plan.scoring.weights)),
    }[plan.scoring.weighting]
    tallies = {reply.client: reply.tally for reply in replies if reply.tally is not None}
    counted = counted_clients(plan, clients)
    if not counted & tallies.keys():
        return None
    return summarise(
        tallies,
        problem.metric_for(plan),
        counted=counted,
        alphas=alphas,
        notes=[reply.notes for reply in replies if reply.notes],
    )


def stack(
    replies: Iterable[Reply], asked: set[int], round: int, state: RunState, wanted: int
) -> tuple[Tensor, Tensor, Buffers, list[int], tuple[Refusal, ...]]:
    """The first `wanted` valid updates, by client id and not by arrival; the others are refused by name."""
    taken: dict[int, Reply] = {}
    refused: list[Refusal] = []
    for reply in replies:
        reason = _fault(reply, asked - taken.keys(), round, state)
        if reason:
            refused.append(Refusal(reply.client, reason))
        else:
            taken[reply.client] = reply
            if len(taken) == wanted:
                break
    answered = sorted(taken)
    valid = [taken[i] for i in answered]
    w_KP = torch.stack([r.w for r in valid if r.w is not None]) if valid else state.w.new_empty(0, len(state.w))
    sizes_K = torch.tensor([r.size for r in valid])
    buffers = join_buffers([r.buffers for r in valid if r.buffers is not None]) if valid else state.buffers
    return w_KP, sizes_K, buffers, answered, tuple(sorted(refused, key=lambda refusal: refusal.client))


def _fault(reply: Reply, expected: set[int], round: int, state: RunState) -> str | None:
    """Why an update cannot be taken, in words; None for a good one."""
    if reply.client not in expected:
        return "was not asked, or answered twice"
    if reply.round != round:
        return f"answers round {reply.round}"
    if reply.w is None or reply.w.shape != state.w.shape:
        found = "no weights" if reply.w is None else f"{reply.w.numel()} weights"
        return f"{found} where the model has {state.w.numel()}"
    if not torch.isfinite(reply.w).all():
        return "NaN or infinity among the weights"
    if not torch.isfinite(torch.linalg.vector_norm(reply.w - state.w)):
        return "its update is too long to measure"
    mine, theirs = state.buffers, reply.buffers
    if theirs is None or theirs.floats_F.shape != mine.floats_F.shape or theirs.counts_I.shape != mine.counts_I.shape:
        return "its buffers do not fit the model"
    if not torch.isfinite(theirs.floats_F).all():
        return "NaN or infinity among the buffers"
    return None


def attackers_of(plan: Plan, clients: int) -> frozenset[int]:
    return choose_attackers(plan.environment.threat.share, clients, plan.seed_for("attackers"))


def backdoor_of(plan: Plan, problem: Problem) -> Examples | None:
    """What the attackers hold in common."""
    threat = plan.environment.threat
    return threat.pool(pool([train for train, _ in problem.data])) if threat.share else None


def counted_clients(plan: Plan, clients: Sequence[int]) -> frozenset[int]:
    """Whose local scores and gains count."""
    left_out = attackers_of(plan, len(clients)) if plan.scoring.attackers == "left out" else frozenset()
    return frozenset(clients) - left_out


def check(plan: Plan, problem: Problem) -> None:
    """What only the data can tell: K against N, weights against clients, labels against the threat."""
    N = len(problem.data)
    try:
        plan.environment.participation.wanted(N)
    except PlanError as error:
        raise error.within("environment.participation") from None
    adaptation = plan.method.adaptation
    if isinstance(adaptation, Choosy):
        try:
            adaptation.fits(first_model(problem, plan))
        except PlanError as error:
            raise error.within("method.adaptation") from None
    backdoor_of(plan, problem)
    weights, counted = plan.scoring.weights, counted_clients(plan, range(N))
    if weights and len(weights) != N:
        raise PlanError("scoring.weights", weights, f"give one weight for each of {N} clients")
    if weights and not any(weights[i] for i in counted):
        raise PlanError("scoring.weights", weights, f"give a weight above 0 to one of the clients {sorted(counted)}")
    if not counted:
        raise PlanError("environment.threat.share", plan.environment.threat.share, "leave a client that is benign")


def _task(kind: Kind, state: RunState, client: int, round: int) -> Task:
    # States are kept for the last two rounds, state.round and the one before: so far back v_i must reach.
    keep = max(0, state.round - 1)
    return Task(kind, state.run, client, round, state.w, state.buffers, state.recovery.on, keep)


def _problem(
    plan: Plan,
    clients: Sequence[tuple[object, object]] | None,
    model: Callable[[], nn.Module] | None,
    loss: Loss | None,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None,
) -> Problem:
    if clients is None and model is None and loss is None and metric is None:
        return problem_for(plan)
    if clients is None or model is None:
        raise PlanError("clients, model", None, "give both, or neither to use the plan's own")
    own = Problem(clients, model, metric=metric)
    return own if loss is None else Problem(clients, model, loss, metric)
