"""The federation: FedAvg (Alg. 1) and LINDT (Alg. 2), one round as a straight line.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

import math
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from lindt.environment.threats import Threat, omniscient
from lindt.errors import PlanError, UserError, require_type
from lindt.plan.plan import Plan, attackers_of, counted_clients, private_clients, reporting_clients
from lindt.plan.problem import Problem, problem_for
from lindt.protocols import (
    Buffers,
    DetectionState,
    Divergence,
    Engine,
    Evidence,
    GainReport,
    Kind,
    Loss,
    Metric,
    RecoveryState,
    Reply,
    Task,
    private_names,
)
from lindt.seeds import seed_for, with_threads
from lindt.server.aggregation import buffer_divergence, join_buffers
from lindt.server.checks import check, keeps_private
from lindt.server.detection.divergence import measure
from lindt.server.recovery import Always, Never, OnDetection
from lindt.server.scores import Scores, summarise
from lindt.server.updates import Refusal, asked_reports, collect_scores, collect_updates
from lindt.weights import InitialWeights, initial_weights, last_of, places_of

if TYPE_CHECKING:
    from lindt.engines.inprocess import InProcess


@final
@dataclass(frozen=True)
class RunState:
    """The server's state after a round. With the clients' v_i it is all that a resumed run needs.

    A state can be resumed while it is one of the last two of its run: clients forget the v_i of older ones.
    """

    run: str
    round: int
    w: Tensor
    buffers: Buffers
    recovery: RecoveryState
    # On a deployment, where clients know the plan: a seed that only the server knows, of who is asked. It is never
    # printed. Noise then comes from no seed at all.
    secret: int | None = field(default=None, repr=False)
    detection: DetectionState | None = None  # of the plan's test; None where clients report nothing

    def seed_for(self, plan: Plan, *names: str | int) -> int:
        """The server's own seeds: from the plan in a simulation, from the secret where clients know the plan."""
        return plan.seed_for(*names) if self.secret is None else seed_for(self.secret, *names)

    def noise_seed(self, plan: Plan, round: int) -> int | None:
        """None on a deployment: a round that is played again there, on other answers, must have other noise."""
        return plan.seed_for("noise", round) if self.secret is None else None


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
    reports: Mapping[int, GainReport] | None = None  # None where the plan's detection asks for none
    detection: DetectionState | None = None  # as judged after it
    buffer_div: float | None = None  # how far the clients' float buffers lie from the joined ones, where there are any
    reachable: int | None = None  # how many clients could have been asked; None where all N could


def play_round(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> tuple[RunState, RoundResult]:
    """Alg. 2, s3-s11: state in, state out."""
    with with_threads(plan.threads):
        return _play_round(state, plan, problem, engine)


def _play_round(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> tuple[RunState, RoundResult]:
    r, env, method = state.round + 1, plan.environment, plan.method
    N = len(problem.data)  # of whom not all need be available
    available, attackers = engine.available(), attackers_of(plan, N)
    asked = env.participation.active(state.seed_for(plan, "active", r), available, attackers, N)  # C_r
    replies = engine.dispatch([_task("train", state, i, r) for i in asked])
    first = initial_weights(problem, plan)
    wanted = env.participation.wanted(N)  # K
    updates_KP, sizes_K, theirs, answered, refused, reports = collect_updates(
        replies, set(asked), r, state.w, state.buffers, wanted, first.float_buffers
    )
    part = _shared_part(plan, first) if state.recovery.on else _SharedPart(None, first.parameters)
    updates_KP, before_P = part.of(updates_KP), part.of(state.w)
    reports = asked_reports(reports, reporting_clients(plan, N), recovering=state.recovery.on)
    if attackers:
        _conspire(env.threat, r, updates_KP, answered, attackers)
    if answered:
        buffers = join_buffers(theirs, method.aggregator, sizes_K)
        buffer_div = buffer_divergence(theirs, buffers)
        clipped_KP = env.privacy.clip(updates_KP)
        noise_P = env.privacy.noise(before_P, state.noise_seed(plan, r))
        step_P = method.aggregator(clipped_KP, sizes_K) + noise_P
        w = part.replaced(state.w, before_P + step_P)  # Eq. 4
        # Eq. 5, 7, from w^{r-1} as the origin: w_i - w is the update less the step.
        clipped, last_KL = env.privacy.clipped(updates_KP), clipped_KP[:, last_of(part.parameters)]
        seen = measure(updates_KP, step_P, noise_P, clipped_KP, clipped, last_KL)
    else:
        w, buffers, seen, buffer_div = state.w, state.buffers, None, None
    evidence = Evidence(r, seen, frozenset(answered), N, plan.rounds, reports)
    detection = plan.detection.judge(state.detection, evidence)
    recovery = method.recovery.judge(state.recovery, replace(evidence, detection=detection))
    after = RunState(state.run, r, w, buffers, recovery, state.secret, detection)
    # A detection is scored at once, so that its line has beta on test data beside it.
    suspected = after.recovery.detections > state.recovery.detections
    judged = replace(after, recovery=state.recovery) if suspected else after  # the illness, not yet the cure
    scores = evaluate(judged, plan, problem, engine) if suspected or plan.scored(r) else None
    return after, RoundResult(
        r,
        tuple(asked),
        tuple(answered),
        refused,
        seen,
        state.recovery.on,
        after.recovery,
        scores,
        reports if plan.detection.reports else None,
        detection,
        buffer_div,
        len(available) if len(available) < N else None,
    )


@final
@dataclass(frozen=True)
class _SharedPart:
    """What of w clients share in a round. Legend of the round: P are the shared parameters alone."""

    places: Tensor | None  # in w; None for all of it
    parameters: Sequence[tuple[str, int]]  # the name and size of each

    def of(self, values: Tensor) -> Tensor:
        return values if self.places is None else values[..., self.places]

    def replaced(self, w: Tensor, shared: Tensor) -> Tensor:
        """w with these values in place of the shared part."""
        return shared if self.places is None else w.index_copy(0, self.places, shared)


def _shared_part(plan: Plan, first: InitialWeights) -> _SharedPart:
    private = private_names(plan.method.adaptation, [name for name, _ in first.parameters])
    if not private:
        return _SharedPart(None, first.parameters)
    shared = [(name, size) for name, size in first.parameters if name not in private]
    return _SharedPart(places_of(first.parameters, private), shared)


def _conspire(threat: Threat, r: int, updates_KP: Tensor, answered: Sequence[int], attackers: frozenset[int]) -> None:
    """Write the updates of attackers that know the honest ones: only a simulation has them (`check_engine`)."""
    plot = omniscient(threat, r)
    hostile = [row for row, i in enumerate(answered) if i in attackers]
    honest = [row for row, i in enumerate(answered) if i not in attackers]
    if plot is not None and hostile and honest:
        updates_KP[hostile] = plot.conspire(updates_KP[honest], updates_KP[hostile])


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
    folder: Path | str | None = None,
    preflight: bool = True,
) -> Iterator[tuple[RunState, RoundResult]]:
    """Run a plan and yield after every round: events, not callbacks.

    >>> for state, result in federate(plan, clients=[(train, test), ...], model=MyNet):
    ...     print(result.round, result.seen.delta, result.recovering)

    With neither `clients` and `model` nor a `problem`, the plan's own data and model are used.

    To resume, pass the `state` of the last round, and the clients' v_i: the same `folder` in both calls, or the
    same `engine`. The resumed run equals the uninterrupted one. `folder` is where the v_i are kept on disk, each
    run under its own id; without it they are kept in memory and are lost with the generator.

    >>> for state, result in federate(plan, folder="private"): ...
    >>> for state, result in federate(plan, folder="private", state=state): ...

    Before the first round the problem is checked for mistakes that give a believable false result, such as test data
    that are trained on (server/preflight.py): an error raises a UserError, a warning is a `PreflightWarning`. It takes
    seconds at most; `preflight=False` leaves it out, and a resumed `state` is not checked again.
    """
    if torch.is_inference_mode_enabled():
        raise UserError("torch.inference_mode is on, in which nothing can train; call federate outside of it")
    require_type("plan", plan, Plan, "give a Plan, such as lindt.resolve('digits-nfl')")
    if problem is None:
        problem = _problem(plan, clients, model, loss, metric)
    elif any(given is not None for given in (clients, model, loss, metric)):
        raise UserError(
            "problem: it was given with clients, model, loss or metric, which it holds; give one of the two"
        )
    require_type("problem", problem, Problem, "give a lindt.Problem, or clients= and model=")
    check(plan, problem)
    if state is not None:
        require_type("state", state, RunState, "give the RunState, the first of the pair that federate yields")
    if engine is not None and not hasattr(engine, "dispatch"):
        raise UserError(
            f"engine: it is of type {type(engine).__name__}; give an engine, or none to stay in this process"
        )
    if engine is not None and folder is not None:
        raise UserError("folder: an engine was given too, and keeps the v_i itself; give one of the two")
    first = begin(plan, problem, "" if folder is None else uuid.uuid4().hex)
    if state is not None and state.w.shape != first.w.shape:
        raise UserError(f"state: it has {state.w.numel()} weights, the model {first.w.numel()}; give the state's model")
    if state is not None and state.detection is None and first.detection is not None:
        raise UserError(
            "state: it is of a run whose clients reported no gains, and the plan's test needs their reports since "
            "round 1; go on with detection=delta, or start anew"
        )
    if preflight and state is None:
        _warn(plan, problem)
    state = state or first
    if engine is None:
        # Only here: it builds clients, of which this file knows no more than the Engine protocol.
        from lindt.engines.inprocess import InProcess

        engine = InProcess(plan, problem, run=state.run, folder=None if folder is None else Path(folder))
        _check_private(engine, plan, problem, state, folder)
    engine.forget_after(state.round)  # v_i of rounds that the state does not know
    for _ in train_privately(plan, problem, engine, state):
        pass
    yield from play_rounds(state, plan, problem, engine)


def _warn(plan: Plan, problem: Problem) -> None:
    # Only here: a round does not need it, and a reader of rounds does not open it.
    from lindt.server.preflight import PreflightWarning, preflight

    for said in preflight(plan, problem).warnings:
        warnings.warn(said, PreflightWarning, stacklevel=3)


def _check_private(engine: InProcess, plan: Plan, problem: Problem, state: RunState, folder: Path | str | None) -> None:
    """Refuse to resume a state without the v_i that its clients had: they would silently begin anew."""
    recovery, N = state.recovery, len(problem.data)
    if state.round == 0 or isinstance(plan.method.recovery, Never) or not keeps_private(plan, problem):
        return
    if isinstance(plan.method.recovery, OnDetection) and not (recovery.on or recovery.detections):
        return
    if folder is None:
        raise UserError(
            f"state: in round {state.round} the clients of this method keep a v_i each, which the state does not "
            "hold; give both calls of federate the same folder=, or the same engine="
        )
    kept = {i: engine.versions.rounds(i) for i in range(N)}
    expected = _with_private(plan, state, N)
    stopped = recovery.detections > recovery.on  # recovery has run and stopped at least once
    if (expected or stopped) and not any(kept.values()):
        raise UserError(f"folder {folder}: it holds no v_i of this run; give the folder that the run began with")
    for i in sorted(expected):
        if kept[i] and min(kept[i]) > state.round:
            raise UserError(
                f"state: it is of round {state.round}, and client {i} has forgotten its v_i of that time; a state "
                "can be resumed while it is one of the last two"
            )
        if not kept[i]:
            raise UserError(f"folder {folder}: client {i}'s v_i is gone; start the run anew")


def _with_private(plan: Plan, state: RunState, N: int) -> frozenset[int]:
    """The clients that have trained a v_i, as far as the server knows. Attackers train w only."""
    attackers = attackers_of(plan, N)
    if not isinstance(plan.method.recovery, Always):
        return state.recovery.treated - attackers
    active = plan.environment.participation.active
    seeds = [state.seed_for(plan, "active", r) for r in range(1, state.round + 1)]
    return frozenset(i for seed in seeds for i in active(seed, range(N), attackers, N)) - attackers


def play_rounds(
    state: RunState, plan: Plan, problem: Problem, engine: Engine
) -> Iterator[tuple[RunState, RoundResult]]:
    """The rounds that are left, for who has trained the private models already."""
    while state.round < plan.rounds:
        state, result = play_round(state, plan, problem, engine)
        yield state, result


def begin(plan: Plan, problem: Problem, run: str = "") -> RunState:
    """s1: w^0, count = 0, and the flag."""
    first = initial_weights(problem, plan)
    buffers = Buffers(first.buffers.floats_F.clone(), first.buffers.counts_I.clone())  # the state is its holder's own
    return RunState(run, 0, first.w_P.clone(), buffers, plan.method.recovery.begin(), detection=plan.detection.begin())


def train_privately(plan: Plan, problem: Problem, engine: Engine, state: RunState) -> Iterator[Reply]:
    """Every client whose gain counts or that reports trains P_i alone, beforehand (Sec. 3.2). Yields their answers."""
    if plan.alone.private:
        asked = private_clients(plan, len(problem.data)) & set(engine.available())
        for reply in engine.dispatch([_task("private", state, i, 0) for i in sorted(asked)]):
            if reply.fault is None:
                yield reply


def evaluate(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> Scores | None:
    """Ask every client how it fares: one pass gives the central and the local scores; None if nobody answers."""
    asked, metric = engine.available(), problem.metric_for(plan)
    dispatched = engine.dispatch([_task("evaluate", state, i, state.round) for i in asked])
    replies = collect_scores(dispatched, set(asked), state.round, metric)
    alphas = {
        "equal": dict.fromkeys(replies, 1.0),
        "size": {i: float(reply.size) for i, reply in replies.items()},
        "given": dict(enumerate(plan.scoring.weights)),
    }[plan.scoring.weighting]
    tallies = {i: reply.tally for i, reply in replies.items() if reply.tally is not None}
    counted = counted_clients(plan, range(len(problem.data)))
    if not any(alphas[i] for i in counted & tallies.keys()):
        return None
    return summarise(
        tallies,
        metric,
        counted=counted,
        alphas=alphas,
        notes=[_finite(reply.notes) for reply in replies.values() if reply.notes],
    )


def _finite(notes: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in notes.items() if math.isfinite(value)}


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
