"""Clients that are made when they are visited: the results of a list of them, and none of its N objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lindt.client.private_models import centralized
from lindt.data.clients import CHECKED, LazyClients
from lindt.data.partition import Iid
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.errors import PlanError, UserError
from lindt.plan.models import Mlp
from lindt.plan.plan import METHODS, Alone, Data, Plan, Scoring, reporting_clients, scored_clients, trained_before
from lindt.plan.problem import Problem, fingerprint, problem_for
from lindt.protocols import MANY, Detection
from lindt.server.detection.divergence import Delta
from lindt.server.detection.gain import Gain
from lindt.server.federation import federate

Part = tuple[Tensor, Tensor]


def pair(client: int, samples: int = 20) -> tuple[Part, Part]:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(client))
    y = (x[:, 0] * (-1) ** client > 0).long()
    half = samples // 2
    return (x[:half], y[:half]), (x[half:], y[half:])


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def plan(**changes: Any) -> Plan:
    made = Plan(
        rounds=3,
        environment=Environment(Sampled(active_clients=3)),
        method=METHODS["lindt-always"],
        alone=Alone(epochs=2, patience=1),
        scoring=Scoring(every=2, last=1),
    )
    return replace(made, **changes)


@pytest.mark.parametrize("detection", [Delta(), Gain()])
def test_lazy_clients_give_the_bytes_of_a_list(detection: Detection, tmp_path: Path) -> None:
    the_plan = plan(detection=detection)
    options = {"model": model, "preflight": False}
    eager = list(federate(the_plan, clients=[pair(i) for i in range(6)], **options))  # type: ignore[arg-type]
    lazy = list(federate(the_plan, clients=LazyClients(6, pair), folder=tmp_path, **options))  # type: ignore[arg-type]
    for (state, result), (lazy_state, lazy_result) in zip(eager, lazy, strict=True):
        assert torch.equal(state.w, lazy_state.w)
        assert result == lazy_result


def test_of_a_million_clients_only_some_are_made() -> None:
    made: list[int] = []

    def make(client: int) -> Sequence[object]:
        made.append(client)
        return pair(client)

    problem = Problem(LazyClients(1_000_000, make), model)
    assert (len(problem.data), made) == (1_000_000, [0])
    assert len(set(problem.checked)) == CHECKED
    assert max(problem.checked) > 500_000
    assert len(problem.data[999_999][0]) == 10
    with pytest.raises(IndexError, match="client 1000000 does not exist"):
        problem.data[1_000_000]
    with pytest.raises(TypeError, match="a loop over all lazy clients"):
        list(problem.data)
    fingerprint(problem)
    assert len(set(made)) == CHECKED + 1


def test_a_client_that_differs_between_visits_ends_the_run() -> None:
    visits = 0

    def make(client: int) -> Sequence[object]:
        nonlocal visits
        visits += client == 4
        return pair(client if client != 4 else 100 + visits)

    problem = Problem(LazyClients(6, make), model)
    problem.data[4]
    for other in range(6):
        problem.data[other]
    problem.data._recent.clear()  # type: ignore[attr-defined]  # as after RECENT other visits
    with pytest.raises(UserError, match=r"clients\[4\]: its data differ from those of an earlier visit"):
        problem.data[4]


def test_random_augmentation_is_the_same_client_and_leaves_the_generators_alone() -> None:
    @final
    class Augmented(Dataset[Part]):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, row: int) -> Part:
            x, y = pair(0)[0]
            return x[row] + torch.randn(3), y[row]

    data = Problem(LazyClients(6, lambda client: (Augmented(), pair(client)[1])), model).data
    before = torch.get_rng_state()
    first = data.facts(3)  # type: ignore[attr-defined]
    data._recent.clear()  # type: ignore[attr-defined]
    assert data[3]
    assert data.facts(3) == first  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), before)


def test_the_facts_of_a_visit_by_hand() -> None:
    x = torch.tensor([[1.0], [2.0], [float("nan")]])
    given = ((x, torch.tensor([0, 1, 1])), (x[:1], torch.tensor([0])))
    problem = Problem(LazyClients(2, lambda client: given), model)
    facts = problem.data.facts(1)  # type: ignore[attr-defined]
    assert (facts.train, facts.test, facts.labels, facts.finite) == (3, 1, {"0": 1, "1": 2}, False)
    again = Problem(LazyClients(2, lambda client: given), model).data
    assert again.facts(1) == facts  # type: ignore[attr-defined]
    again.expect(1, "0" * 16)  # type: ignore[attr-defined]  # what is known by now stays
    assert again[1]


def test_data_that_changed_since_the_run_was_stopped_are_refused() -> None:
    before, after = (Problem(LazyClients(6, make), model).data for make in (pair, lambda i: pair(i + (i == 5))))
    after.expect(5, before.facts(5).data)  # type: ignore[attr-defined]
    after.expect(4, before.facts(4).data)  # type: ignore[attr-defined]
    assert after[4]
    with pytest.raises(UserError, match=r"clients\[5\]: its data differ"):
        after[5]


def loaders(batch: int) -> Sequence[object]:
    return tuple(DataLoader(TensorDataset(*part), batch_size=batch) for part in pair(0))


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda i: pair(i) if i != 3 else (*pair(i), pair(i)[1]), r"clients\[3\]: it has a validation part, unlike"),
        (lambda i: pair(i) if i != 3 else pair(i, samples=2), r"clients\[3\]: it has 1 training and 1 test samples"),
        (lambda i: loaders(5 if i != 3 else 4), r"clients\[3\]: the batch_size of its DataLoader is 4, that of client"),
    ],
)
def test_a_client_unlike_the_first_is_named_when_it_is_visited(make: Any, complaint: str) -> None:
    problem = Problem(LazyClients(6, make), model)
    assert problem.data[2]
    with pytest.raises(UserError, match=complaint):
        problem.data[3]


@pytest.mark.parametrize(("count", "make"), [(1, pair), (2.0, pair), (True, pair), (5, [1, 2])])
def test_wrong_arguments_are_refused(count: Any, make: Any) -> None:
    with pytest.raises(UserError, match=r"^(clients|make): it is "):
        LazyClients(count, make)


def test_the_fingerprint_covers_the_checked_clients_and_their_number() -> None:
    def of(count: int, make: Any) -> str:
        return fingerprint(Problem(LazyClients(count, make), model))

    assert of(1000, pair) == of(1000, pair)
    assert of(1000, pair) != of(1001, pair)
    checked = Problem(LazyClients(1000, pair), model).checked[1]
    assert of(1000, pair) != of(1000, lambda i: pair(i + (i == checked)))
    assert of(6, pair) == fingerprint(Problem([pair(i) for i in range(6)], model))


def test_a_plan_names_a_source_that_makes_each_client() -> None:
    the_plan = plan(data=Data("two-camps-crowd", clients=1_000_000), model=Mlp(16, 4))
    problem = problem_for(the_plan)
    (x, y), (_, other_y) = (problem.data[client][0].take(torch.arange(10)) for client in (500_000, 500_001))
    assert (tuple(x.shape), y.dtype) == ((10, 16), torch.int64)
    assert len(y.unique()) > 1
    assert not torch.equal(y, other_y)
    with pytest.raises(PlanError, match=r"data.allocation.*makes each client's data itself"):
        problem_for(replace(the_plan, data=replace(the_plan.data, allocation=Iid())))


def test_a_model_of_all_data_is_refused_for_lazy_clients() -> None:
    problem = Problem(LazyClients(1000, pair), model)
    with pytest.raises(UserError, match="centralized: it trains on the data of all clients, and these 1,000 are lazy"):
        centralized(plan(), problem)


def test_of_many_clients_those_that_were_drawn_to_report_do() -> None:
    """Their P_i are trained when they are visited, and those of the scored clients before."""
    the_plan = plan(
        rounds=1,
        detection=Gain(panel=0.5),
        environment=Environment(Sampled(active_clients=8)),
        scoring=Scoring(every=9, last=1, panel=3),
    )
    ((_, result),) = federate(the_plan, clients=LazyClients(MANY + 1, pair), model=model, preflight=False)
    reporting = reporting_clients(the_plan, MANY + 1)
    assert len(reporting) == round(0.5 * (MANY + 1))
    assert result.reports is not None
    assert set(result.reports) == {i for i in result.answered if i in reporting}
    assert 0 < len(result.reports) < 8
    assert trained_before(the_plan, MANY + 1) == list(scored_clients(the_plan, MANY + 1))
    assert result.scores is not None
    assert result.scores.panel is not None
    assert (result.scores.panel.clients, result.scores.panel.of) == (3, MANY + 1)
