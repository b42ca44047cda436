"""The federation: FedAvg (Alg. 1) and LINDT (Alg. 2). One round is one function, from top to bottom.

Legend: K clients answering, P parameters.
"""

from __future__ import annotations

import math
import sys
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lindt.environment.threats import Threat, omniscient
from lindt.errors import UserError, in_short, require_type
from lindt.plan.plan import Plan, attackers_of, counted_clients, reporting_clients, scored_clients, trained_before
from lindt.plan.problem import Problem, problem_for, require_no_import, settled
from lindt.protocols import (
    VALIDATION,
    Buffers,
    Engine,
    Evidence,
    Kind,
    Loss,
    Metric,
    Optimizer,
    Reply,
    Schedule,
    Task,
    private_names,
)
from lindt.seeds import seed_for, with_threads
from lindt.server.aggregation import ClippedUpdates, buffer_divergence, join_buffers
from lindt.server.checks import check, keeps_private
from lindt.server.detection.divergence import Distances, mean_cosine
from lindt.server.recovery import Always, Never, OnDetection
from lindt.server.scores import Scores, summarise
from lindt.server.state import BestRound, RoundResult, RunState
from lindt.server.updates import asked_reports, collect_scores, collect_updates
from lindt.weights import InitialWeights, initial_weights, last_of, places_of

if TYPE_CHECKING:
    from lindt.engines.inprocess import InProcess


def play_round(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> tuple[RunState, RoundResult]:
    """Play one round (Alg. 2, s3-s11). Returns the next state and the round's result; `state` is not changed."""
    with with_threads(plan.threads):
        return _play_round(state, plan, problem, engine)


def _play_round(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> tuple[RunState, RoundResult]:
    r, env, method = state.round + 1, plan.environment, plan.method
    N = len(problem.data)  # all clients; some of them may not be available
    available, attackers = engine.available(), attackers_of(plan, N)
    asked = env.participation.active(_seed(state, plan, "active", r), available, attackers, N)  # C_r
    replies = engine.dispatch([_task("train", state, i, r) for i in asked])
    first = initial_weights(problem, plan)
    wanted = env.participation.wanted(N)  # K
    updates_KP, sizes_K, theirs, answered, refused, reports = collect_updates(
        replies, set(asked), r, state.w, state.buffers, wanted, first.float_buffers
    )
    part = _shared_part(plan, first) if state.recovery.on else _SharedPart(None, first.parameters)
    updates_KP, before_P = part.of_rows(updates_KP), part.of(state.w)
    reports = asked_reports(reports, reporting_clients(plan, N), recovering=state.recovery.on)
    if attackers:
        _conspire(env.threat, r, updates_KP, answered, attackers)
    if answered:
        buffers = join_buffers(theirs, method.aggregator, sizes_K)
        buffer_div = buffer_divergence(theirs, buffers)
        clipped_KP = ClippedUpdates(updates_KP, env.privacy.scales(updates_KP))
        noise_P = env.privacy.noise(before_P, _noise_seed(state, plan, r))
        # Eq. 5, 7, from w^{r-1} as the origin: w_i - w is the update less the step.
        distances = Distances(len(answered))
        step_P = clipped_KP.step(method.aggregator, sizes_K, noise_P, distances)
        last_KL = clipped_KP.columns(last_of(part.parameters))
        seen = distances.divergence(clipped_KP.share(), mean_cosine(last_KL))
        w = part.replaced(state.w, before_P + step_P)  # Eq. 4
    else:
        w, buffers, seen, buffer_div = state.w, state.buffers, None, None
    evidence = Evidence(r, seen, frozenset(answered), N, plan.rounds, reports)
    detection = plan.detection.judge(state.detection, evidence)
    recovery = method.recovery.judge(state.recovery, replace(evidence, detection=detection))
    after = RunState(state.run, r, w, buffers, recovery, state.secret, detection, state.best)
    # A round with a detection is always scored, so that its line in rounds.jsonl has beta on test data too.
    suspected = after.recovery.detections > state.recovery.detections
    judged = replace(after, recovery=state.recovery) if suspected else after  # score with recovery still off
    scores = evaluate(judged, plan, problem, engine) if suspected or plan.scored(r) else None
    return _with_best(after, judged, scores, plan) if plan.early_stop.patience else after, RoundResult(
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


def _with_best(after: RunState, judged: RunState, scores: Scores | None, plan: Plan) -> RunState:
    """The state with the best round so far. Where the run ends here, the models are those of the best round."""
    best, score = after.best, None if scores is None else scores.notes.get(VALIDATION)
    if score is not None and (best is None or score > best.score):
        best = BestRound(judged.round, score, judged.w, judged.buffers, judged.recovery)
    elif score is not None and best is not None:
        best = replace(best, since=best.since + 1)
    if best is None or (best.since < plan.early_stop.patience and after.round < plan.rounds):
        return replace(after, best=best)
    best = replace(best, restored=True)
    return replace(after, w=best.w, buffers=best.buffers, recovery=best.recovery, best=best)


@final
@dataclass(frozen=True)
class _SharedPart:
    """The part of w that clients share in a round. In such a round P counts the shared parameters only."""

    places: Tensor | None  # the indices in w; None where all of w is shared
    parameters: Sequence[tuple[str, int]]  # the name and size of each

    def of(self, values: Tensor) -> Tensor:
        return values if self.places is None else values[self.places]

    def of_rows(self, values_KP: Tensor) -> Tensor:
        """This part of each of the K rows. It is written over the rows, since a copy would be as large as they are."""
        if self.places is None:
            return values_KP
        K, shared = len(values_KP), len(self.places)
        packed_KP = values_KP.view(-1)[: K * shared].view(K, shared)
        for row, values_P in enumerate(values_KP):
            packed_KP[row] = values_P[self.places]  # row k ends at or before the start of row k + 1 of values_KP
        return packed_KP

    def replaced(self, w: Tensor, shared: Tensor) -> Tensor:
        """w with these values in place of the shared part."""
        return shared if self.places is None else w.index_copy(0, self.places, shared)


def _shared_part(plan: Plan, first: InitialWeights) -> _SharedPart:
    private = private_names(plan.method.adaptation, [name for name, _ in first.parameters])
    if not private:
        return _SharedPart(None, first.parameters)
    shared = [(name, size) for name, size in first.parameters if name not in private]
    return _SharedPart(places_of(first.parameters, private), shared)


def _conspire(threat: Threat, r: int, updates_KP: Tensor, answered: Sequence[int], attackers: Set[int]) -> None:
    """Write the updates of attackers that know the honest updates. Only a simulation has such attackers."""
    plot = omniscient(threat, r)
    hostile = [row for row, i in enumerate(answered) if i in attackers]
    honest = [row for row, i in enumerate(answered) if i not in attackers]
    if plot is not None and hostile and honest:
        updates_KP[hostile] = plot.conspire(updates_KP[honest], updates_KP[hostile])


def federate(
    plan: Plan,
    *,
    clients: Sequence[Sequence[object]] | None = None,
    model: Callable[[], nn.Module] | None = None,
    loss: Loss | None = None,
    metric: Metric | Callable[[Tensor, Tensor], Tensor] | None = None,
    optimizer: Optimizer | None = None,
    schedule: Schedule | None = None,
    accumulate: int | None = None,
    weights: Sequence[float] = (),
    problem: Problem | None = None,
    engine: Engine | None = None,
    state: RunState | None = None,
    folder: Path | str | None = None,
    device: str = "cpu",
    preflight: bool = True,
) -> Iterator[tuple[RunState, RoundResult]]:
    """Run a plan and yield the state and the result after every round.

    With neither `clients` and `model` nor a `problem`, the plan's own data and model are used.

    To resume, pass the `state` of the last round, and the same `folder` or the same `engine` in both calls, so that the
    clients have their v_i. The resumed run equals the uninterrupted run.

    Before the first round the problem is checked for mistakes that give a plausible but false result, such as training
    on test data (server/preflight.py): an error raises a UserError, a warning is a `PreflightWarning`. The checks take
    a few seconds, and a resumed `state` is not checked again.

    Args:
        plan: The plan of the run, such as `lindt.resolve("own-task")`.
        clients: For each client a pair (train, test), or (train, validation, test): tensors, arrays, map-style datasets
            or DataLoaders. `LazyClients` are made when they are visited.
        model: A function that builds an untrained model.
        loss: A function of outputs and targets; by default cross entropy.
        metric: A Metric, or a function of outputs and targets that returns one number per sample. Default: the plan's.
        optimizer: A function that builds the optimizer of the clients' steps for a list of parameters.
        schedule: A function that builds an LRScheduler for an optimizer.
        accumulate: The number of batches whose gradients are added for one step.
        weights: alpha_i of Eq. 3, one for each client.
        problem: Clients, model and all of the above as one `Problem`.
        engine: Where clients train; by default in this process.
        device: "cpu" or "cuda". With an `engine`, give the device to the engine instead.
        state: The state to continue from.
        folder: Where the v_i are kept on disk, each run under its own id. Without it they are kept in memory and are
            lost with the generator.
        preflight: Whether to check the problem before the first round.

    Yields:
        The server's state and the round's result, after every round.

    Raises:
        UserError: An argument is wrong, or does not suit the plan or the model.

    Examples:
        Two camps of clients that contradict each other, on a model of one layer:

        >>> import lindt, torch
        >>> from torch import nn
        >>> xs = torch.randn(4, 40, 2, generator=torch.Generator().manual_seed(0))
        >>> ys = [(x @ torch.tensor([1.0, sign]) > 0).long() for x, sign in zip(xs, (1, -1, 1, -1))]
        >>> clients = [((x[:30], y[:30]), (x[30:], y[30:])) for x, y in zip(xs, ys)]
        >>> plan = lindt.resolve("own-task", ["method=fedavg", "alone.epochs=5"], rounds=2)
        >>> for state, result in lindt.federate(plan, clients=clients, model=lambda: nn.Linear(2, 2)):
        ...     print(result.round, result.scores.beta < 0)
        1 True
        2 True
    """
    if torch.is_inference_mode_enabled():
        raise UserError("torch.inference_mode is on, and no model can train in it; call federate outside of it")
    require_no_import()
    require_type("plan", plan, Plan, f"give a Plan: lindt.resolve({_name_of(plan)}) makes one of a preset or a file")
    own = {"loss": loss, "metric": metric, "optimizer": optimizer, "schedule": schedule, "accumulate": accumulate}
    given: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    given |= {} if isinstance(weights, Sized) and not len(weights) else {"weights": weights}
    if problem is None:
        problem = _problem(plan, clients, model, given)
    elif given or clients is not None or model is not None:
        names = [*(["clients"] if clients is not None else []), *(["model"] if model is not None else []), *given]
        raise UserError(f"problem: it was given with {', '.join(names)}, which a problem contains; leave one out")
    require_type("problem", problem, Problem, "give a lindt.Problem, or clients= and model=")
    plan = settled(plan, problem)
    check(plan, problem)
    if state is not None:
        require_type("state", state, RunState, "give the RunState, the first of the pair that federate yields")
    if engine is not None and not hasattr(engine, "dispatch"):
        raise UserError(
            f"engine: it is of type {type(engine).__name__}; give an engine, or leave it out to train in this process"
        )
    if engine is not None and device != "cpu":
        raise UserError("device: an engine was given too, which has a device; give the device to the engine")
    if device not in ("cpu", "cuda"):
        raise UserError(f"device: it is {device!r}; choose cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device: this machine or this build of torch has no cuda; use cpu")
    if engine is not None and folder is not None:
        raise UserError("folder: an engine was given too, which stores the v_i itself; leave out one of the two")
    first = begin(plan, problem, "" if folder is None else uuid.uuid4().hex)
    if state is not None and state.w.shape != first.w.shape:
        raise UserError(f"state: it has {state.w.numel()} weights, the model {first.w.numel()}; give the state's model")
    if state is not None and state.detection is None and first.detection is not None:
        raise UserError(
            "state: it is of a run whose clients reported no gains, and the plan's test needs their reports from "
            "round 1 on; continue with detection=delta, or start a new run"
        )
    if preflight and state is None:
        _warn(plan, problem)
    state = state or first
    if engine is None:
        # Imported here, as it builds clients: the rest of this file uses the Engine protocol only.
        from lindt.engines.inprocess import InProcess

        kept = None if folder is None else Path(folder)
        engine = InProcess(plan, problem, run=state.run, folder=kept, device=device)
        _check_private(engine, plan, problem, state, folder)
    engine.forget_after(state.round)  # delete the v_i of later rounds
    for _ in train_privately(plan, problem, engine, state):
        pass
    yield from play_rounds(state, plan, problem, engine)


def _name_of(plan: object) -> str:
    """The name to show in the error: the preset or file that was given instead of a Plan, else an example."""
    return in_short(plan if isinstance(plan, str) else "digits-nfl")


def _warn(plan: Plan, problem: Problem) -> None:
    # Imported here: playing a round does not need it.
    from lindt.server.preflight import PreflightWarning, preflight

    for said in preflight(plan, problem).warnings:
        warnings.warn(said, PreflightWarning, stacklevel=3)


def _check_private(engine: InProcess, plan: Plan, problem: Problem, state: RunState, folder: Path | str | None) -> None:
    """Refuse to resume a state without its clients' v_i: the clients would start with new models, without a warning."""
    recovery, N = state.recovery, len(problem.data)
    if state.round == 0 or isinstance(plan.method.recovery, Never) or not keeps_private(plan, problem):
        return
    if isinstance(plan.method.recovery, OnDetection) and not (recovery.on or recovery.detections):
        return
    if folder is None:
        raise UserError(
            f"state: the clients of this method have stored a v_i each by round {state.round}, and the state does not "
            "contain them; give both calls of federate the same folder=, or the same engine="
        )
    expected = _with_private(plan, state, N)
    stopped = recovery.detections > recovery.on  # recovery has run and stopped at least once
    if (expected or stopped) and not engine.versions.newest_rounds(up_to=sys.maxsize):
        raise UserError(f"folder {folder}: it holds no v_i of this run; give the folder that the run began with")
    for i in sorted(expected):
        rounds = engine.versions.rounds(i)
        if rounds and min(rounds) > state.round:
            raise UserError(
                f"state: it is of round {state.round}, and client {i} has deleted its v_i of that round; resume one of "
                "the last two states"
            )
        if not rounds:
            raise UserError(f"folder {folder}: the v_i of client {i} is missing; start a new run")


def _with_private(plan: Plan, state: RunState, N: int) -> frozenset[int]:
    """The clients that have trained a v_i, as far as the server knows. Attackers have no v_i."""
    attackers = attackers_of(plan, N)
    if not isinstance(plan.method.recovery, Always):
        return frozenset(i for i in state.recovery.treated if i not in attackers)
    active = plan.environment.participation.active
    seeds = [_seed(state, plan, "active", r) for r in range(1, state.round + 1)]
    met = {i for seed in seeds for i in active(seed, range(N), attackers, N)}
    return frozenset(i for i in met if i not in attackers)


def play_rounds(
    state: RunState, plan: Plan, problem: Problem, engine: Engine
) -> Iterator[tuple[RunState, RoundResult]]:
    """Play the remaining rounds. The private models have to be trained already (`train_privately`)."""
    while state.round < plan.rounds and not (state.best is not None and state.best.restored):
        state, result = play_round(state, plan, problem, engine)
        yield state, result
    if state.best is not None and state.best.restored:
        engine.forget_after(state.best.round)  # the final v_i are those of the best round, as is the final w


def begin(plan: Plan, problem: Problem, run: str = "") -> RunState:
    """The state before round 1 (Alg. 2, s1): w^0, count = 0, and the flag."""
    first = initial_weights(problem, plan)
    buffers = Buffers(first.buffers.floats_F.clone(), first.buffers.counts_I.clone())  # the caller may change its state
    return RunState(run, 0, first.w_P.clone(), buffers, plan.method.recovery.begin(), detection=plan.detection.begin())


def train_privately(plan: Plan, problem: Problem, engine: Engine, state: RunState) -> Iterator[Reply]:
    """Let clients that are scored or report train P_i alone, before round 1 (Sec. 3.2). Yields their replies."""
    if plan.alone.private:
        available = _members(engine.available())
        asked = [i for i in trained_before(plan, len(problem.data)) if i in available]
        for reply in engine.dispatch([_task("private", state, i, 0) for i in asked]):
            if reply.fault is None:
                yield reply


def evaluate(state: RunState, plan: Plan, problem: Problem, engine: Engine) -> Scores | None:
    """Score the available clients, or those of the panel. One pass gives the central and the local scores.

    None if no client answers.
    """
    N, available, metric = len(problem.data), _members(engine.available()), problem.metric_for(plan)
    members = scored_clients(plan, N)
    asked = [i for i in members if i in available]
    dispatched = engine.dispatch([_task("evaluate", state, i, state.round) for i in asked])
    replies = collect_scores(dispatched, set(asked), state.round, metric)
    alphas = {
        "equal": dict.fromkeys(replies, 1.0),
        "size": {i: float(reply.size) for i, reply in replies.items()},
        "given": dict(enumerate(plan.scoring.weights)),
    }[plan.scoring.weighting]
    tallies = {i: reply.tally for i, reply in replies.items() if reply.tally is not None}
    counted = counted_clients(plan, range(N))
    if not any(alphas[i] for i in tallies if i in counted):
        return None
    panel = None if len(members) == N else (sum(i in counted for i in members), len(counted))
    return summarise(
        tallies,
        metric,
        counted=counted,
        alphas=alphas,
        notes=[_notes(reply.notes, i in counted) for i, reply in replies.items() if reply.notes],
        panel=panel,
    )


def _members(available: Sequence[int]) -> Set[int] | range:
    """The clients that an engine lists, to ask for membership."""
    return available if isinstance(available, range) else frozenset(available)


def _notes(notes: dict[str, float], counted: bool) -> dict[str, float]:
    """The finite notes. The validation score is kept only for clients whose scores count."""
    return {name: v for name, v in notes.items() if math.isfinite(v) and (counted or name != VALIDATION)}


def _seed(state: RunState, plan: Plan, *names: str | int) -> int:
    """The server's own seeds: from the plan in a simulation, from the secret where clients know the plan."""
    return plan.seed_for(*names) if state.secret is None else seed_for(state.secret, *names)


def _noise_seed(state: RunState, plan: Plan, round: int) -> int | None:
    """The seed of a round's noise; None in a deployment: a repeated round needs new noise."""
    return plan.seed_for("noise", round) if state.secret is None else None


def _task(kind: Kind, state: RunState, client: int, round: int) -> Task:
    # Only the last two states can be resumed, state.round and the one before: clients keep the v_i of both.
    keep = max(0, state.round - 1) if state.best is None else min(max(0, state.round - 1), state.best.round)
    return Task(kind, state.run, client, round, state.w, state.buffers, state.recovery.on, keep)


def _problem(
    plan: Plan,
    clients: Sequence[Sequence[object]] | None,
    model: Callable[[], nn.Module] | None,
    given: Mapping[str, Any],
) -> Problem:
    """The user's problem, or the plan's. The user's loss, metric and optimizer also work with the plan's data."""
    if clients is None and model is None:
        own = problem_for(plan)
        return replace(own, **given) if given else own
    if clients is None or model is None:
        missing, other = ("model", "clients") if model is None else ("clients", "model")
        raise UserError(f"{missing}: it is missing beside {other}; give both, or neither to use the plan's own")
    return Problem(clients, model, **given)
