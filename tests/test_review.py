"""What a reader found: each was wrong once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from worlds import tiny, tiny_runtime

from lindt.client.adaptations.fine_tune_head import FineTuneHead
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.errors import UserError
from lindt.plan.plan import METHODS, Alone, Method, Plan
from lindt.plan.problem import Accuracy, Problem
from lindt.protocols import ClientTally
from lindt.runs.about import privacy_budget
from lindt.runs.play import run_plan
from lindt.server.checks import check
from lindt.server.federation import federate
from lindt.server.recovery import OnDetection
from lindt.server.scores import summarise


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))


def little(**changes: Any) -> Problem:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20, 2, generator=generator)
    data = [((one, (one[:, 0] > 0).long()),) * 2 for one in x]
    return Problem(**({"clients": data, "model": two_layers} | changes))


DEPLOYED = {"noise": "system"}
EVERYONE = Plan(rounds=4, environment=Environment(Sampled(rate=1.0)), alone=Alone(private=False))


def test_one_bad_batch_does_not_lose_a_client_for_good() -> None:
    calls = 0

    def loss(output: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += output.requires_grad  # the first call is the trial step of the checks
        return cross_entropy(output, y) * (float("nan") if calls == 3 else 1.0)

    plan = replace(EVERYONE, method=METHODS["lindt"])
    refused = [[one.client for one in r.refused] for _, r in federate(plan, problem=little(loss=loss), preflight=False)]
    assert refused == [[0], [], [], []]


def test_the_budget_follows_the_fewest_answers_and_the_buffers() -> None:
    plan = replace(EVERYONE, environment=Environment(Sampled(rate=0.2), privacy=Gaussian(S=1.0, sigma=3.0)))
    full, few = [{"answered": list(range(20))}] * 80, [{"answered": [1, 2]}] * 80
    said = [privacy_budget(plan, 100, lines, False, DEPLOYED)["epsilon"] for lines in (full, full[1:] + few[:1], few)]
    assert said[0] < said[1] == said[2]
    assert "buffers" in privacy_budget(plan, 100, full, True, DEPLOYED)["words"]
    assert privacy_budget(plan, 100, full, True, DEPLOYED)["epsilon"] is None


def test_attackers_take_part_unevenly_so_nothing_is_amplified() -> None:
    quiet = Environment(Sampled(rate=0.1), privacy=Gaussian(S=1.0, sigma=3.0))
    attacked = replace(quiet, threat=tiny().environment.threat)
    lines = [{"answered": list(range(10))}] * 80
    said = [
        privacy_budget(replace(EVERYONE, environment=e), 100, lines, False, DEPLOYED)["epsilon"]
        for e in (quiet, attacked)
    ]
    assert said[0] < said[1]


def test_over_selection_is_part_of_the_sampling_rate() -> None:
    """With 10 of 100 wanted and 10 more asked, 20 may be in the sum: as much amplification as 20 of 100 have."""
    lines = [{"answered": list(range(10))}] * 80

    def said(participation: Sampled) -> dict[str, Any]:
        plan = replace(EVERYONE, environment=Environment(participation, privacy=Gaussian(S=1.0, sigma=0.6)))
        return privacy_budget(plan, 100, lines, False, DEPLOYED)

    over, twenty = said(Sampled(active_clients=10, over_select=10)), said(Sampled(active_clients=20))
    assert over["epsilon"] == twenty["epsilon"] > said(Sampled(active_clients=10))["epsilon"]
    assert "sampling rate 20/100" in over["words"]
    assert "sampling" not in said(Sampled(active_clients=10, over_select=90))["words"]  # everyone is asked
    assert said(Sampled(active_clients=10, over_select=500))["epsilon"] is not None


def test_a_suspicion_is_measured_on_the_illness_not_on_the_cure() -> None:
    def beta_at_detection(method: Method) -> float | None:
        plan = replace(tiny_runtime(patience=0), method=replace(method, recovery=OnDetection(1e-6, 0)), rounds=1)
        ((_, result),) = federate(plan)
        assert result.scores is not None
        return result.scores.beta

    tuned = Method(adaptation=FineTuneHead(rate=0.05, epochs=20))
    assert beta_at_detection(tuned) == beta_at_detection(METHODS["watch"])


def test_clearly_harmed_goes_the_way_of_the_test() -> None:
    tallies = [torch.tensor([float(hits), 100.0], dtype=torch.float64) for hits in (50, 51)]
    tally = ClientTally(100, tallies[0], tallies[0], tallies[1], wins=20, losses=2)  # more won, yet beta < 0
    scores = summarise({0: tally}, Accuracy(), counted=frozenset({0}), alphas={0: 1.0})
    assert (scores.harmed, scores.clearly_harmed) == (1, 0)


def test_a_run_that_lost_a_v_i_is_not_resumed_without_it(tmp_path: Path) -> None:
    events = run_plan(tiny_runtime(rounds=5), tmp_path / "run")
    for _ in islice(events, 1 + 6 + 4):
        pass
    events.close()
    shutil.rmtree(tmp_path / "run" / "private")
    with pytest.raises(UserError, match=r"v_i of round \d is missing"):
        list(run_plan(None, tmp_path / "run", resume=True))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": lambda: two_layers().double()}, "weights are sent as float32"),
        ({"model": lambda: nn.Linear(3, 2)}, "client 0: the model does not take inputs of shape"),
        ({"model": lambda: nn.Linear(2, 1)}, "client 0"),
        ({"loss": lambda output, y: output - 1}, "the loss is not one number"),
        ({"metric": lambda output, y: 0.5}, "the metric does not take outputs of shape"),
        ({"clients": [((torch.zeros(3, 2), torch.tensor([0, 1, -1])),) * 2] * 2}, "labels from -1 to 1"),
        ({"clients": [((torch.zeros(3, 2), torch.tensor([0, 1, 7])),) * 2] * 2}, "labels from 0 to 7"),
    ],
)
def test_a_task_that_cannot_train_is_refused_before_it_does(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        check(EVERYONE, little(**changes))


def test_clients_are_pairs() -> None:
    with pytest.raises(UserError, match=r"clients\[0\]: it is of type tuple with 4 parts; give a pair \(train, test\)"):
        little(clients=[(1, 2, 3, 4)] * 2)


def test_fedavg_does_not_claim_to_recover() -> None:
    assert [r.recovering for _, r in federate(tiny("fedavg"))] == [False] * 4
