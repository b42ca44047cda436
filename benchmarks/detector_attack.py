"""How far one client of K can change the detector's statistic: benchmarks/results/detector-attack.md.

    python benchmarks/detector_attack.py rounds     # single rounds: the best that one client can do; 3 minutes
    python benchmarks/detector_attack.py runs       # whole runs with a client that shapes its update; 10 minutes

The client knows everything: the others' updates, the aggregator and S. It does not know the noise beforehand.

Legend: K clients answering, P parameters; the last row is the hostile client's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from lindt.engines.inprocess import InProcess
from lindt.environment.privacy import Gaussian
from lindt.plan.file import resolve
from lindt.plan.plan import Alone, Plan, Scoring, attackers_of
from lindt.plan.problem import problem_for
from lindt.protocols import Aggregator, Reply, Statistic, Task
from lindt.server.aggregation import ClippedUpdates, GeometricMedian, Krum, Mean, Median
from lindt.server.detection.divergence import Distances, Rule
from lindt.server.federation import federate
from lindt.server.state import RoundResult

STATISTICS: tuple[Statistic, ...] = ("delta", "clean", "spread", "median")
JOINS: dict[str, Aggregator] = {"mean": Mean(), "median": Median(), "krum": Krum(0.25)}
LONGEST = 10.0  # the largest norm of the hostile update, in median norms of the others
SEEDS, INF = range(5), float("inf")
WHO = {"digits-nfl": "the attacker", "digits-control": "one of the four"}
HONEST = "its own update"
Shape = Callable[[Tensor, int], Tensor]  # of all honest updates and the round


@dataclass(frozen=True)
class Round:
    """The honest updates of one round, the row to replace, and the noise that the server drew."""

    updates_KP: Tensor
    noise_P: Tensor

    @property
    def unit(self) -> float:
        return float(torch.linalg.vector_norm(self.updates_KP[:-1], dim=1).median())

    @property
    def longest(self) -> float:
        return float(torch.linalg.vector_norm(self.updates_KP[:-1], dim=1).max())

    def seen(self, x_P: Tensor, join: Aggregator, S: float) -> dict[str, float]:
        """The server's measurements when the last client sends x."""
        sent_KP = torch.cat([self.updates_KP[:-1], x_P[None]])
        clipped_KP, distances = ClippedUpdates(sent_KP, Gaussian(S=S).scales(sent_KP)), Distances(len(sent_KP))
        clipped_KP.step(join, torch.ones(len(sent_KP)), self.noise_P, distances)
        found = distances.divergence(clipped_KP.share(), None)
        return {name: found.watched(name) for name in STATISTICS}


def reached(one: Round, join: Aggregator, S: float) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """The honest, lowest and highest value of each statistic over the updates that one client can send."""
    honest = one.seen(one.updates_KP[-1], join, S)
    low, high = dict(honest), dict(honest)
    best: dict[tuple[str, str], Tensor] = {}

    def look(x_P: Tensor) -> None:
        x_P = x_P * min(1.0, LONGEST * one.unit / max(float(torch.linalg.vector_norm(x_P)), 1e-12))
        for name, value in one.seen(x_P, join, S).items():
            if value < low[name]:
                low[name], best[name, "low"] = value, x_P
            if value > high[name]:
                high[name], best[name, "high"] = value, x_P

    for x_P in _guesses(one, join):
        look(x_P)
    # From the best guesses: random steps in the directions that matter, each shorter than the one before.
    draw = torch.Generator().manual_seed(0)
    basis_KP = torch.cat([one.updates_KP, _direction(one, 2)[None] * one.unit])
    for key in list(best):
        for step in torch.logspace(0, -2, 60).tolist():
            mix_K = torch.randn(len(basis_KP), generator=draw) * step / len(basis_KP) ** 0.5
            look(best[key] + mix_K @ basis_KP)
    return honest, low, high


def _guesses(one: Round, join: Aggregator) -> Iterator[Tensor]:
    others_KP, own_P = one.updates_KP[:-1], one.updates_KP[-1]
    ones_K = torch.ones(len(others_KP))
    mean_P, middle_P = others_KP.mean(0), GeometricMedian()(others_KP, ones_K)
    yield from (torch.zeros_like(own_P), mean_P, middle_P, join(others_KP, ones_K), *others_KP)
    yield middle_P + len(others_KP) * (middle_P - mean_P)  # moves the mean to the centre of the others
    for way_P in (mean_P, own_P, _direction(one, 1), others_KP[0]):
        unit_P = way_P * one.unit / torch.linalg.vector_norm(way_P)
        for length in torch.logspace(-2, 1, 25).tolist():
            yield length * unit_P
            yield -length * unit_P
            yield mean_P + length * unit_P


def _direction(one: Round, seed: int) -> Tensor:
    found_P = torch.randn(one.updates_KP.shape[1], generator=torch.Generator().manual_seed(seed))
    return found_P / torch.linalg.vector_norm(found_P)


def drawn(K: int, P: int = 2000) -> Round:
    """Updates of norm 1 whose squared norm is half from a common part and half from a part of each client's own."""
    draw = torch.Generator().manual_seed(K)
    ways_KP = torch.nn.functional.normalize(torch.randn(K + 2, P, generator=draw), dim=1)
    return Round(0.5**0.5 * (ways_KP[:K] + ways_KP[K]), 0.5 * ways_KP[K + 1])


def watched(name: str, seed: int) -> Plan:
    """FedAvg in a preset's environment, four of twenty answering; the last ten rounds are scored."""
    by_delta = ["detection=delta", "method=watch", "method.recovery.epsilon=0.1", "method.recovery.patience=25"]
    plan = resolve(name, by_delta, seed=seed)
    return replace(plan, scoring=Scoring(every=1000, last=10))


class Shaping:
    """The real clients, except that one client per round sends the update made by `shape`: the attacker if there is
    one, or with `besides` another client, so that two are hostile."""

    def __init__(self, plan: Plan, shape: Shape | None, cache: Path | None = None, *, besides: bool = False) -> None:
        self.problem = problem_for(plan)
        self.inner, self.shape = InProcess(plan, self.problem, cache=cache), shape
        self.hostile, self.besides = attackers_of(plan, len(self.problem.data)), besides
        self.updates: dict[int, Tensor] = {}  # by round

    def available(self) -> Sequence[int]:
        return self.inner.available()

    def forget_after(self, round: int) -> None:
        self.inner.forget_after(round)

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        replies = list(self.inner.dispatch(tasks))
        if tasks[0].kind != "train":
            return replies
        replies.sort(
            key=lambda reply: (reply.client in self.hostile) != self.besides
        )  # the last client is the one that is replaced
        w, round = tasks[0].w, tasks[0].round
        self.updates[round] = torch.stack([reply.w - w for reply in replies if reply.w is not None])
        if self.shape is not None:
            replies[-1] = replace(replies[-1], w=w + self.shape(self.updates[round], round))
        return replies


def played(name: str) -> list[Round]:
    plan = replace(watched(name, 0), alone=Alone(private=False))
    engine = Shaping(plan, None)
    list(federate(plan, problem=engine.problem, engine=engine))
    privacy = plan.environment.privacy
    return [
        Round(updates_KP, privacy.noise(updates_KP[0], plan.seed_for("noise", r)))
        for r, updates_KP in engine.updates.items()
        if r in (10, 20, 30, 40, 50, 60, 70, 80)
    ]


def rounds() -> Iterator[str]:
    worlds = {name: played(name) for name in ("digits-nfl", "digits-control")}
    worlds |= {f"drawn, K = {K}": [drawn(K)] for K in (4, 10, 50)}
    yield "| updates | aggregator | clipping | " + " | ".join(f"`{name}`" for name in STATISTICS) + " |"
    yield "|---" * (3 + len(STATISTICS)) + "|"
    for world, some in worlds.items():
        for join in JOINS:
            for clipping in ("none", "S = the others' longest"):
                found = [reached(one, JOINS[join], INF if clipping == "none" else one.longest) for one in some]
                cells = []
                for name in STATISTICS:
                    honest, low, high = (fmean(values[name] for values in part) for part in zip(*found, strict=True))
                    cells.append(f"{honest:.3f} ({low:.3f} to {high:.3f})")
                yield f"| {world} | {join} | {clipping} | " + " | ".join(cells) + " |"


def _any_way(length: float) -> Shape:
    """A direction drawn in every round, with `length` times the norm of the others' median update."""

    def shape(updates_KP: Tensor, round: int) -> Tensor:
        one = Round(updates_KP, torch.zeros(0))
        return length * one.unit * _direction(one, round)

    return shape


SHAPES: dict[str, Shape | None] = {
    HONEST: None,
    "w unchanged": lambda updates_KP, _: torch.zeros_like(updates_KP[0]),
    "the others' mean": lambda updates_KP, _: updates_KP[:-1].mean(0),
    "a random direction, as long as the others'": _any_way(1.0),
    "a random direction, 3 times as long": _any_way(3.0),
    "a random direction, 10 times as long": _any_way(10.0),
}
HIDING, FAKING = list(SHAPES)[1:3], list(SHAPES)[3:]
CASES = [("digits-nfl", shape, besides) for besides in (False, True) for shape in (HONEST, *HIDING)[besides:]]
CASES += [("digits-control", shape, False) for shape in (HONEST, *FAKING)]
# The epsilon of the presets for Delta, and of docs/choosing-epsilon.md for the two statistics without noise.
EPSILONS: dict[Statistic, float] = {"delta": 0.1, "median": 0.1, "clean": 0.35, "spread": 0.35}


def runs() -> Iterator[str]:
    heads = [f"`{name}` > {epsilon:g}" for name, epsilon in EPSILONS.items()]
    yield "| federation | hostile client | sends | " + " | ".join(heads) + " | beta at the end |"
    yield "|---" * (4 + len(heads)) + "|"
    with TemporaryDirectory() as cache:
        for world, shape, besides in CASES:
            flagged: dict[str, list[str]] = {name: [] for name in EPSILONS}
            above: dict[str, list[int]] = {name: [] for name in EPSILONS}
            betas = []
            for seed in SEEDS:
                plan = watched(world, seed)
                engine = Shaping(plan, SHAPES[shape], Path(cache), besides=besides)
                results = [result for _, result in federate(plan, problem=engine.problem, engine=engine)]
                betas.append(fmean(one.scores.beta or 0.0 for one in results[-10:] if one.scores))
                for name, epsilon in EPSILONS.items():
                    counts = counted(Rule(epsilon, 25, name), results)
                    first = next((r for r, count in enumerate(counts, 1) if count > 25), None)
                    flagged[name].append("no" if first is None else str(first))
                    above[name].append(counts[-1])
            who = "no client" if SHAPES[shape] is None else "a client beside the attacker" if besides else WHO[world]
            cells = [f"{', '.join(flagged[name])} ({median(above[name])})" for name in EPSILONS]
            gains = ", ".join(f"{100 * beta:+.1f}" for beta in betas)
            yield f"| {world} | {who} | {shape} | " + " | ".join(cells) + f" | {gains} |"


def counted(rule: Rule, results: Sequence[RoundResult]) -> list[int]:
    """The count after each round."""
    found = [0]
    for one in results:
        found.append(found[-1] if one.seen is None else rule.count(found[-1], one.seen.watched(rule.statistic)))
    return found[1:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    tables = {"rounds": rounds, "runs": runs}
    if len(sys.argv) != 2 or sys.argv[1] not in tables:
        sys.exit(f"usage: python {sys.argv[0]} {'|'.join(tables)}")
    for line in tables[sys.argv[1]]():
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
