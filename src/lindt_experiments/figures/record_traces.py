"""Figure 1: traces of real rounds. Four clients play a few rounds; w and w_i are projected on two axes and stored.

The rounds are those of `play_round`, with an engine that records what clients send. The centralized reference is a
federation too: in each round one client answers, and it has the data of all clients.

Legend: M weight vectors of P parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from lindt.data.examples import pool
from lindt.data.partition import Classes, Iid
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.environment.threats import Backdoor
from lindt.errors import UserError
from lindt.plan.models import Cnn, Model, SmallCnn
from lindt.plan.plan import METHODS, Alone, Data, Plan, Scoring, Training, attackers_of
from lindt.plan.problem import Problem, problem_for
from lindt.protocols import Engine, Reply, Task
from lindt.server.federation import begin, play_round
from lindt_experiments.plans.keys import content_key
from lindt_experiments.queue.gather import Origin
from lindt_experiments.results.traces import PANELS, LocalUpdate, Point, Traces, keep, load, path_of

CLIENTS, ROUNDS = 4, 4
SIGMA = {"smoke": 0.01, "cpu": 0.01, "paper": 0.003}  # so that the norm of the noise is about that of a step


def plan_for(panel: str, scale: str, seed: int) -> tuple[Plan, str]:
    """The plan of a panel, and its setting as text. Each panel has one effect; inactivity is shown on skewed data."""
    base, sigma = _base(scale, seed), SIGMA[scale]
    backdoor = Backdoor(share=1 / CLIENTS, per_batch=3 * base.training.batch // 10)  # 3 of 10, as in the paper
    everyone = Environment(participation=Sampled(rate=1.0))
    environment, skewed, words = {
        "normal": (everyone, False, "IID data, all four answer"),
        "non-IID": (everyone, True, "three classes a client, all four answer"),
        "inactive": (Environment(participation=Sampled(active_clients=2)), True, "three classes a client, two answer"),
        "attacked": (replace(everyone, threat=backdoor), False, "IID data, one of four attacks"),
        "noised": (replace(everyone, privacy=Gaussian(sigma=sigma)), False, f"IID data, noise of σ = {sigma}"),
    }[panel]
    allocation = Classes(per_client=3, spread=0.5) if skewed else Iid()
    data = replace(base.data, clients=CLIENTS, allocation=allocation)
    return replace(base, data=data, environment=environment), words


def _base(scale: str, seed: int) -> Plan:
    small = Cnn(dropout=0.0, side=16, kernel=3, channels=(16, 32), units=(64, 32))
    parts: dict[str, tuple[Data, Model, Training]] = {
        "smoke": (Data("digits"), SmallCnn(), Training(batch=10)),
        "cpu": (Data("cifar10-half"), small, Training(batch=50)),
        "paper": (Data("cifar10"), Cnn(), Training(batch=10)),
    }
    if scale not in parts:
        raise UserError(f"scale {scale!r}: choose among {', '.join(parts)}")
    data, model, training = parts[scale]
    never = Scoring(every=ROUNDS, last=1)  # only w is needed
    return Plan(
        "figure1", seed, ROUNDS, data=data, model=model, training=training, method=METHODS["fedavg"],
        alone=Alone(private=False), scoring=never,
    )  # fmt: skip


@final
@dataclass(frozen=True)
class Played:
    """The weights of one federation: w^0 to w^R, and the w_i of each client and round."""

    w: list[Tensor]
    sent: list[tuple[int, int, Tensor]]  # round, client, w_i
    w_div: list[float]


@final
class Listening:
    """An engine around another engine that records the weights that clients send, and changes nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.heard: list[tuple[int, int, Tensor]] = []

    def available(self) -> Sequence[int]:
        return self.engine.available()

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        for reply in self.engine.dispatch(tasks):
            if reply.w is not None:
                self.heard.append((reply.round, reply.client, reply.w))
            yield reply

    def forget_after(self, round: int) -> None:
        self.engine.forget_after(round)


def played(plan: Plan, problem: Problem) -> Played:
    engine, state = Listening(InProcess(plan, problem)), begin(plan, problem)
    w, w_div = [state.w], []
    while state.round < plan.rounds:
        state, result = play_round(state, plan, problem, engine)
        w.append(state.w)
        w_div.append(result.seen.w_div if result.seen else 0.0)
    return Played(w, engine.heard, w_div)


def centralized(plan: Plan, problem: Problem) -> Played:
    """The reference from the same w^0: the steps of one client in a round, on as many samples as all clients use.

    A federation has at least two clients. Here both have the data of all clients, and one of them answers.
    """
    everyone = (pool([train for train, _ in problem.data]), pool([test for _, test in problem.data]))
    training = replace(plan.training, batch=plan.training.batch * len(problem.data))
    alone = replace(plan, training=training, environment=Environment(participation=Sampled(active_clients=1)))
    return played(alone, Problem([everyone, everyone], problem.model, problem.loss, problem.metric))


def axes_of(w_MP: Tensor) -> tuple[Tensor, Point]:
    """The two principal axes, 2 x P, and the share of the variance on each."""
    centred_MP = w_MP - w_MP.mean(0)
    _, sizes_M, axes_MP = torch.linalg.svd(centred_MP, full_matrices=False)
    variance_M = sizes_M**2 / (sizes_M**2).sum()
    axes_2P = axes_MP[:2]
    # The sign of an axis is free: it is chosen so that on average the vectors are right of the first, and above it.
    signs_2 = torch.where(axes_2P @ (w_MP.mean(0) - w_MP[0]) < 0, -1.0, 1.0).to(axes_2P)
    return axes_2P * signs_2[:, None], (float(variance_M[0]), float(variance_M[1]))


def turns(w: Sequence[Tensor]) -> list[float]:
    """The angle in degrees between each step of w and the next."""
    steps = [(after - before).double() for before, after in pairwise(w)]
    cosines = [torch.nn.functional.cosine_similarity(a, b, dim=0) for a, b in pairwise(steps)]
    return [float(torch.rad2deg(torch.arccos(cosine.clamp(-1, 1)))) for cosine in cosines]


def traced(panel: str, scale: str, seed: int, origin: Origin) -> Traces:
    """Play a panel's federation and the centralized reference; project their weights on the plane."""
    clock = time.perf_counter()
    plan, words = plan_for(panel, scale, seed)
    problem = problem_for(plan)
    federation, reference = played(plan, problem), centralized(plan, problem)
    first_P = federation.w[0].double()
    # Axes are fitted on all vectors that are drawn. On axes of the global and centralized traces only, the differences
    # between clients, which the figure is about, would be almost invisible.
    drawn_MP = torch.stack([*federation.w, *reference.w, *(w_i for _, _, w_i in federation.sent)]).double()
    axes_2P, shares = axes_of(drawn_MP)

    def point(w_P: Tensor) -> Point:
        x, y = (axes_2P @ (w_P.double() - first_P)).tolist()
        return round(x, 5), round(y, 5)

    attackers = attackers_of(plan, CLIENTS)
    return Traces(
        panel=panel,
        setting=words,
        scale=scale,
        seed=seed,
        plan=content_key(plan),
        rounds=plan.rounds,
        parameters=len(first_P),
        shares=(round(shares[0], 5), round(shares[1], 5)),
        global_trace=tuple(point(w) for w in federation.w),
        central_trace=tuple(point(w) for w in reference.w),
        updates=tuple(
            LocalUpdate(r, client, client in attackers, point(federation.w[r - 1]), point(w_i))
            for r, client, w_i in federation.sent
        ),
        w_div=tuple(round(value, 5) for value in federation.w_div),
        turns=tuple(round(value, 2) for value in turns(federation.w)),
        command=origin.command,
        commit=origin.commit,
        date=origin.date,
        seconds=round(time.perf_counter() - clock, 1),
    )


def reproduce(scale: str, seed: int, folder: Path, say: Callable[[str], None] = lambda text: None) -> Path:
    """`lindt reproduce figure1`: play the missing panels, and store each in results/traces-<scale>.jsonl."""
    origin = Origin.now(f"lindt reproduce figure1 --scale {scale} --seeds {seed + 1}")
    kept = {(traces.panel, traces.plan) for traces in load(folder, scale)}
    for panel in PANELS:
        if (panel, content_key(plan_for(panel, scale, seed)[0])) not in kept:
            say(f"figure1, seed {seed}: {panel}")
            keep(folder, scale, [traced(panel, scale, seed, origin)])
    return path_of(folder, scale)
