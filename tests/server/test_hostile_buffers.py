"""BatchNorm's statistics travel beside w: a client that sends impossible ones is refused and spoils nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.plan.plan import METHODS, Alone, Method, Plan, Scoring
from lindt.plan.problem import Problem
from lindt.protocols import Aggregator, Buffers, Reply, Task
from lindt.runs.about import privacy_budget
from lindt.runs.schema import ROUND, fits
from lindt.runs.summary import round_line
from lindt.server.aggregation import (
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    NormBound,
    TrimmedMean,
    WeightedMean,
    join_buffers,
)
from lindt.server.federation import federate
from lindt.server.state import RoundResult, RunState
from lindt.server.updates import MOST_TIMES, buffer_faults

ROBUST: list[Aggregator] = [TrimmedMean(0.2), Median(), Krum(0.2), MultiKrum(0.2), GeometricMedian(), NormBound()]
CLIENTS, CLASSES = 7, 4
Spoil = Callable[[Tensor], Tensor]


def net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


def skewed(seed: int = 0, held: int = 2) -> Problem:
    """Four classes of points, of which each client holds `held`; the clients' units differ by up to 3 to 1."""
    draw = torch.Generator().manual_seed(seed)
    centres = 3 * torch.randn(CLASSES, 6, generator=draw)

    def points(client: int, n: int) -> tuple[Tensor, Tensor]:
        y = (client + torch.randint(held, (n,), generator=draw)) % CLASSES
        return (centres[y] + torch.randn(n, 6, generator=draw)) * (1 + client % 3), y

    return Problem([(points(i, 40), points(i, 40)) for i in range(CLIENTS)], net)


def plan_with(aggregator: Aggregator, method: str = "fedavg", **changes: Any) -> Plan:
    return replace(
        Plan(
            rounds=3,
            environment=Environment(Sampled(rate=1.0)),
            method=replace(METHODS[method], aggregator=aggregator),
            alone=Alone(private=False),
            scoring=Scoring(every=3, last=1),
        ),
        **changes,
    )


class Spoiling:
    """All clients train; client 0 then changes the statistics that it sends, and leaves its weights as they are."""

    def __init__(self, plan: Plan, problem: Problem, spoil: Spoil) -> None:
        self.inner, self.spoil = InProcess(plan, problem), spoil
        self.available, self.forget_after = self.inner.available, self.inner.forget_after

    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        for reply in self.inner.dispatch(tasks):
            mine = reply.buffers
            hostile = reply.client == 0 and mine is not None
            yield replace(reply, buffers=Buffers(self.spoil(mine.floats_F), mine.counts_I)) if hostile else reply  # type: ignore[union-attr]


def played(plan: Plan, problem: Problem, spoil: Spoil | None = None) -> list[tuple[RunState, RoundResult]]:
    engine = None if spoil is None else Spoiling(plan, problem, spoil)
    return list(federate(plan, problem=problem, engine=engine))


def variances(value: float) -> Spoil:
    """`value` as every variance of the first layer, which are the floats 6 to 11."""

    def spoil(floats_F: Tensor) -> Tensor:
        spoilt_F = floats_F.clone()
        spoilt_F[6:12] = value
        return spoilt_F

    return spoil


def central(rounds: list[tuple[RunState, RoundResult]]) -> float:
    scores = rounds[-1][1].scores
    assert scores is not None
    return scores.central


@pytest.mark.parametrize(
    ("aggregator", "method"),
    [*((one, "fedavg") for one in (Mean(), *ROBUST)), (Mean(), "lindt")],
    ids=lambda one: one if isinstance(one, str) else type(one).__name__,
)
@pytest.mark.parametrize("value", [1e6, -1000.0])
def test_one_client_cannot_spoil_the_model_through_its_variances(
    value: float, aggregator: Aggregator, method: str
) -> None:
    plan, problem = plan_with(aggregator, method), skewed(held=CLASSES)
    honest, attacked = played(plan, problem), played(plan, problem, variances(value))
    assert central(honest) > 0.6
    assert central(attacked) > central(honest) - 0.1
    scores = [rounds[-1][1].scores for rounds in (honest, attacked)]
    assert scores[1].local > scores[0].local - 0.1  # type: ignore[union-attr]
    for _, result in attacked:
        assert [refusal.client for refusal in result.refused] == [0]
        assert "0.running_var" in result.refused[0].reason
        assert result.answered == tuple(range(1, CLIENTS))


@pytest.mark.parametrize("aggregator", ROBUST, ids=lambda one: type(one).__name__)
def test_a_robust_aggregator_keeps_statistics_among_the_honest_ones(aggregator: Aggregator) -> None:
    """Too near to be refused: then each coordinate of the result still lies between those of honest clients."""
    honest_KF = 1 + torch.rand(6, 10, generator=torch.Generator().manual_seed(1))
    for sent in (0.0, 0.5 * MOST_TIMES):
        theirs = [Buffers(row_F, torch.tensor([3])) for row_F in [*honest_KF, torch.full((10,), sent)]]
        joined_F = join_buffers(theirs, aggregator, torch.ones(7)).floats_F
        assert (joined_F >= honest_KF.amin(0)).all()
        assert (joined_F <= honest_KF.amax(0)).all()


@pytest.mark.parametrize("aggregator", [Mean(), WeightedMean()], ids=lambda one: type(one).__name__)
def test_the_means_average_statistics_plainly(aggregator: Aggregator) -> None:
    floats_KF = torch.rand(5, 9, generator=torch.Generator().manual_seed(2))
    theirs = [Buffers(row_F, torch.tensor([k])) for k, row_F in enumerate(floats_KF)]
    joined = join_buffers(theirs, aggregator, torch.tensor([1, 2, 3, 4, 500]))
    assert torch.equal(joined.floats_F, floats_KF.mean(0))  # bit for bit, whatever sizes the clients claim
    assert joined.counts_I.tolist() == [4]


# As they were before any buffer was refused.
GOLDEN = {
    0: {"w": 4.36421012878418, "floats": 54.69638442993164},
    1: {"w": 4.27719259262085, "floats": 54.28166580200195},
    2: {"w": 4.220694541931152, "floats": 23.10232925415039},
}


@pytest.mark.parametrize("seed", GOLDEN)
def test_an_honest_federation_has_the_numbers_that_it_had(seed: int) -> None:
    rounds = played(plan_with(Mean(), seed=seed), skewed(seed))
    state = rounds[-1][0]
    found = {"w": float(state.w.norm()), "floats": float(state.buffers.floats_F.norm())}
    assert found == pytest.approx(GOLDEN[seed], rel=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_no_honest_client_of_a_skewed_federation_is_refused(seed: int) -> None:
    plan = plan_with(Mean(), seed=seed, rounds=6, scoring=Scoring(every=6, last=1))
    for _, result in played(plan, skewed(seed)):
        assert result.refused == ()
        assert len(result.answered) == CLIENTS


def named(**values_K: list[list[float]]) -> dict[str, np.ndarray]:
    return {name.replace("__", "."): np.array(rows, np.float32) for name, rows in values_K.items()}


def test_faults_by_hand() -> None:
    before = {"a.running_mean": np.zeros(2, np.float32), "a.running_var": np.ones(2, np.float32)}
    far, below = [[1.0, 2.0], [1.0, 5000.0], [0.5, 2.0]], [[1.0, 2.0], [0.0, 1.0], [1.0, -1e-9]]
    calm = [[0.0, 0.0]] * 3
    assert buffer_faults(named(a__running_mean=calm, a__running_var=far), before) == {
        1: "its buffer a.running_var holds 5e+03, more than 1000 times the median client's 2"
    }
    assert buffer_faults(named(a__running_mean=calm, a__running_var=below), before) == {
        2: "its buffer a.running_var holds -1e-09, but a variance is never below 0"
    }


def test_a_mean_is_held_against_the_deviation_where_the_others_have_none() -> None:
    """Centred data have means near 0: a client whose data are not centred is honest."""
    before = {"a.running_mean": np.zeros(1, np.float32), "a.running_var": np.ones(1, np.float32)}
    even = [[4.0]] * 4
    near, far = [[0.0], [0.0], [0.0], [2.0 * MOST_TIMES]], [[0.0], [0.0], [0.0], [2.1 * MOST_TIMES]]
    assert buffer_faults(named(a__running_mean=near, a__running_var=even), before) == {}
    assert list(buffer_faults(named(a__running_mean=far, a__running_var=even), before)) == [3]


def test_where_there_is_no_majority_or_no_scale_nothing_is_too_far() -> None:
    before = {"kept": np.zeros(1, np.float32)}
    assert buffer_faults(named(kept=[[1.0], [1e17]]), before) == {}  # of two clients either may be the hostile one
    assert buffer_faults(named(kept=[[0.0], [0.0], [5.0]]), before) == {}
    # What w^{r-1} came with is a scale too: many that send nothing do not make one that sends something hostile.
    assert buffer_faults(named(kept=[[1e-9], [1e-9], [5.0]]), {"kept": np.ones(1, np.float32)}) == {}


def test_the_round_says_how_far_the_statistics_lie_apart() -> None:
    plan, problem = plan_with(Mean()), skewed()
    (_, result), *_ = played(plan, problem)
    line = json.loads(json.dumps(round_line(result), allow_nan=False))
    assert fits(line, ROUND)
    assert line["buffer_div"] > 0
    plain = Problem(problem.clients, lambda: nn.Linear(6, CLASSES))
    (_, result), *_ = played(plan, plain)
    line = round_line(result)
    assert "buffer_div" not in line  # the model has none: lines are as they were
    assert fits(line, ROUND)


def test_statistics_that_are_as_far_as_may_be_are_measured_in_finite_numbers() -> None:
    plan, problem = plan_with(Mean(), rounds=1, scoring=Scoring(last=1)), skewed()
    largest = played(plan, problem, lambda floats_F: floats_F.clamp(min=0.9e18))
    assert [refusal.client for refusal in largest[0][1].refused] == [0]
    assert math.isfinite(round_line(largest[0][1])["buffer_div"])


def test_under_privacy_the_guarantee_says_that_statistics_are_not_covered() -> None:
    env = Environment(Sampled(rate=1.0), privacy=Gaussian(S=1.0, sigma=3.0))
    lines = [{"answered": [0, 1, 2]}] * 3
    found = privacy_budget(Plan(environment=env, method=Method()), 100, lines, buffers=True, about={"noise": "system"})
    assert found["epsilon"] is None
    assert "no guarantee: the model's buffers (BatchNorm's statistics) travel without noise" in found["words"]
