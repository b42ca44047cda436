"""Guarded prediction in whole runs: with and without validation data, from the cache, exported, and under attack."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from worlds import tiny

from lindt.client.adaptations.base import GlobalOnly
from lindt.client.adaptations.guarded import Guarded
from lindt.client.private_models import PrivateModelCache
from lindt.engines.inprocess import InProcess
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import InnerProduct
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Alone, Method, Plan, Scoring
from lindt.plan.problem import problem_for
from lindt.protocols import Detection
from lindt.registry import component
from lindt.report.reading import read_run
from lindt.report.terminal import show
from lindt.runs.export import export_client
from lindt.runs.play import run_plan
from lindt.server.federation import federate

GUARDED = Method(adaptation=Guarded(GlobalOnly()))


def plan(detection: str = "gain", **changes: object) -> Plan:
    return replace(tiny(GUARDED), detection=component(Detection, detection), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("detection", ["gain", "delta"])
def test_private_models_are_read_from_the_cache_as_they_were_trained(detection: str, tmp_path: Path) -> None:
    """Also in a plan without validation data, of which the cache keeps no weights for other methods."""
    one = plan(detection)
    problem = problem_for(one)
    scores = []
    for cache in (None, tmp_path, tmp_path):
        engine = InProcess(one, problem, cache=cache)
        *_, (_, result) = federate(one, problem=problem, engine=engine)
        scores.append(result.scores)
    assert scores[0] == scores[1] == scores[2]
    assert scores[0] is not None
    known = scores[0].notes["weight/private"]
    assert (known == pytest.approx(0.5)) is (detection == "delta")


def test_a_cached_model_without_weights_is_not_taken_for_one_with_them(tmp_path: Path) -> None:
    plain, guarded = tiny(), tiny(GUARDED)
    problem = problem_for(plain)
    first, second = (InProcess(one, problem, cache=tmp_path).clients[0] for one in (plain, guarded))
    assert PrivateModelCache(tmp_path).learned(first._private_training).w_P is None
    module = second._private_module()
    assert module is not None
    outputs = module(problem.data[0][1].take(torch.arange(len(problem.data[0][1])))[0])
    assert torch.allclose(outputs, first._private_model().outputs, atol=1e-6)


def test_a_guarded_client_is_exported_as_one_module(tmp_path: Path) -> None:
    one = plan(rounds=2, scoring=Scoring(every=1, last=1), method=METHODS["guarded"], model=SmallCnn())
    list(run_plan(one, tmp_path / "run", engine="inprocess"))
    about = export_client(tmp_path / "run", 1, tmp_path / "out")
    assert about["recorded_score"] is not None  # export_client compares the two
    summary = read_run(tmp_path / "run").summary
    assert summary is not None
    # Three models; w, v_i and P_i are 13,706 weights each.
    assert (summary["prediction"]["models"], summary["prediction"]["weights"]) == (3, 3 * 13_706)
    console = Console(record=True, width=200, file=io.StringIO())
    show(console, read_run(tmp_path / "run"))
    assert "to predict, a client has 3 models (41,118 weights, 0.2 MB)" in console.export_text()
    module = torch.export.load(tmp_path / "out" / "model.pt2").module()
    x, y = problem_for(one).data[1][1].take(torch.arange(about["checked_samples"]))
    found = module(x)
    assert torch.allclose(found.exp().sum(-1), torch.ones(len(x)), atol=1e-4)  # logarithms of probabilities
    assert float((found.argmax(-1) == y).float().mean()) == pytest.approx(about["score"])


def test_under_an_attack_that_breaks_w_clients_keep_what_they_learned_alone() -> None:
    """Attackers send ten times the negative of the honest mean: w is useless, and has no say."""
    environment = Environment(Sampled(rate=1.0), InnerProduct(share=0.34))
    attacked = plan(rounds=8, environment=environment, alone=Alone(epochs=10), scoring=Scoring(every=8, last=1))
    local = {}
    for name, method in {"fedavg": METHODS["fedavg"], "guarded": GUARDED}.items():
        *_, (_, result) = federate(replace(attacked, method=method))
        assert result.scores is not None
        local[name] = result.scores
    assert local["fedavg"].beta is not None
    assert local["fedavg"].beta < -0.3
    assert local["guarded"].beta is not None
    assert local["guarded"].beta > -0.02
    assert local["guarded"].clearly_harmed == 0
    assert local["guarded"].notes["weight/private"] > 0.9
