"""Every method that adapts, in whole runs: resumed, in worker processes, exported, detected first, under attack."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from worlds import tiny, tiny_runtime

from lindt.client.adaptations.guarded import Guarded
from lindt.client.adaptations.partial_sharing import PartialSharing
from lindt.client.training import Proximal
from lindt.engines.processes.engine import Processes
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.environment.threats import InnerProduct, LabelFlip, SignFlip, Threat
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Alone, Method, Plan, Scoring
from lindt.plan.problem import problem_for
from lindt.protocols import Aggregator, Detection, Recovery
from lindt.registry import component, kinds
from lindt.runs.export import export_client
from lindt.runs.play import run_plan
from lindt.server.federation import federate

NEW = ("ditto", "fl-guard", "fedper", "fedrep", "fedbabu", "fedala")
MOST = [pytest.param(name, marks=pytest.mark.slow) if name == "fedala" else name for name in NEW]  # it learns longest
WITHOUT_GLOBAL = ("fedper", "fedrep")
OTHERS = [name for name in NEW if name != "fedper"]


def slow(*values: object) -> ParameterSet:
    return pytest.param(*values, marks=pytest.mark.slow)


# Each setting meets one method that shares a part of w in the quick suite; each other method meets one setting.
FIRST = ["fedper", *map(slow, OTHERS)]
AGGREGATORS = sorted(kinds(Aggregator))
INNER, FLIP = InnerProduct(share=0.34), LabelFlip(share=0.34, classes=10)


def plan_of(name: str, **changes: object) -> Plan:
    return tiny(name, **{"model": SmallCnn(), "scoring": Scoring(every=1, last=1), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ditto" else pytest.mark.slow) for name in NEW]
)
def test_a_resumed_run_has_the_same_bytes(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    list(run_plan(plan, tmp_path / "straight", engine="inprocess"))
    events = run_plan(plan, tmp_path / "run", engine="inprocess")
    for _ in islice(events, 1 + 5 + 2):  # the private models of the honest clients, then two rounds
        pass
    events.close()
    assert len((tmp_path / "run/rounds.jsonl").read_text().splitlines()) in (2, 3)
    list(run_plan(None, tmp_path / "run", engine="inprocess", resume=True))
    for file in ("rounds.jsonl", "summary.json"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "straight" / file).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRST)
def test_processes_give_the_bytes_of_in_process(name: str) -> None:
    plan = plan_of(name)
    problem = problem_for(plan)
    engine = Processes(plan, problem, workers=2)
    try:
        there = list(federate(plan, problem=problem, engine=engine))
    finally:
        engine.close()
    for (a, x), (b, y) in zip(federate(plan, problem=problem), there, strict=True):
        assert torch.equal(a.w, b.w)
        assert x == y


@pytest.mark.parametrize("name", MOST)
def test_a_client_is_exported_as_one_module(name: str, tmp_path: Path) -> None:
    plan = plan_of(name, rounds=2, environment=Environment(Sampled(rate=1.0)))
    list(run_plan(plan, tmp_path / "run", engine="inprocess"))
    about = export_client(tmp_path / "run", 1, tmp_path / "out")
    assert about["recorded_score"] is not None  # export_client compares the two
    assert about["model"].startswith("the client's own")


def test_a_guarded_client_without_a_global_model_is_exported(tmp_path: Path) -> None:
    method = Method(adaptation=Guarded(PartialSharing()))
    plan = plan_of("fedavg", method=method, rounds=2, environment=Environment(Sampled(rate=1.0)))
    list(run_plan(plan, tmp_path / "run", engine="inprocess"))
    about = export_client(tmp_path / "run", 1, tmp_path / "out")
    assert about["recorded_score"] is not None
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    # w, the 650 weights of the private layer, and P_i
    assert (summary["prediction"]["models"], summary["prediction"]["weights"]) == (2, 2 * 13_706 + 650)


@pytest.mark.parametrize("name", [*MOST, *(pytest.param(name, marks=pytest.mark.slow) for name in ("fine-tune", "fb"))])
def test_it_recovers_once_nfl_is_detected(name: str) -> None:
    """Before that it is FedAvg, bit for bit; after it clients do better with what they adapt than w does."""
    plan = tiny_runtime(rounds=5, scoring=Scoring(every=1, last=1))
    plan = replace(plan, method=replace(plan.method, adaptation=METHODS[name].adaptation))
    rounds = list(federate(plan))
    fedavg = [state.w for state, _ in federate(replace(plan, method=METHODS["fedavg"]))]
    assert [result.recovering for _, result in rounds] == [False, False, True, True, True]
    assert all(torch.equal(rounds[r][0].w, fedavg[r]) for r in (0, 1))
    scores = [result.scores for _, result in rounds]
    assert scores[1] is not None
    assert scores[-1] is not None
    assert scores[-1].local > scores[1].local
    assert scores[1].central is not None  # of w, as it was before
    assert (scores[-1].central is None) == (name in WITHOUT_GLOBAL)
    assert (scores[-1].attack_central is None) == (name in WITHOUT_GLOBAL)
    assert scores[-1].attack_local is not None


def test_w_keeps_its_private_layers_from_the_detection_on() -> None:
    plan = tiny_runtime(rounds=5)
    plan = replace(plan, method=replace(plan.method, adaptation=METHODS["fedper"].adaptation))
    w = [state.w for state, _ in federate(plan)]
    assert not torch.equal(w[0][-650:], w[1][-650:])
    assert torch.equal(w[1][-650:], w[4][-650:])
    assert not torch.equal(w[1][:-650], w[4][:-650])


@pytest.mark.parametrize(
    ("name", "aggregator"),
    [*product(["fedper"], AGGREGATORS), *map(slow, OTHERS, AGGREGATORS)],
)
def test_every_aggregator_with_a_penalty(name: str, aggregator: str) -> None:
    method = replace(METHODS[name], aggregator=component(Aggregator, aggregator), penalty=Proximal(0.1))
    environment = Environment(Sampled(rate=1.0), SignFlip(share=0.17), Gaussian())
    plan = plan_of("fedavg", method=method, rounds=2, alone=Alone(private=False), environment=environment)
    *_, (state, result) = federate(plan)
    assert result.seen is not None
    assert not result.refused
    assert torch.isfinite(state.w).all()
    assert result.scores is not None
    assert 0 < result.scores.local <= 1


@pytest.mark.parametrize(
    ("name", "threat"),
    [("fedper", INNER), ("fedper", FLIP), slow("ditto", FLIP), *(slow(name, INNER) for name in OTHERS)],
)
def test_attackers_take_part(name: str, threat: Threat) -> None:
    """What they send changes w, and with partial sharing the shared layers alone."""
    plan = plan_of(name, rounds=2, alone=Alone(private=False), environment=Environment(Sampled(rate=1.0), threat))
    honest = replace(plan, environment=Environment(Sampled(rate=1.0)))
    *_, (attacked, _) = federate(plan)
    *_, (healthy, _) = federate(honest)
    moved = attacked.w != healthy.w
    assert moved[:-650].any()
    assert bool(moved[-650:].any()) == (name not in ("fedper", "fedrep", "fedbabu"))


@pytest.mark.parametrize(
    ("name", "detection"),
    [("fedper", "gain"), ("fedper", "fl_guard"), slow("ditto", "fl_guard"), *(slow(name, "gain") for name in OTHERS)],
)
def test_every_detector(name: str, detection: str) -> None:
    """Without a whole global model a report compares what the client predicts with to its private model."""
    plan = plan_of(name, rounds=3, detection=component(Detection, detection))
    for _, result in federate(plan):
        assert result.reports
        for report in result.reports.values():
            assert report.adapted_private is not None
            if name in WITHOUT_GLOBAL:
                assert report.adapted is None
                assert report.private == report.adapted_private
            else:
                assert report.adapted is not None


def test_recovery_on_evidence_without_a_global_model() -> None:
    """It is not switched off by a comparison with a w that nobody uses."""
    method = Method(adaptation=PartialSharing(), recovery=component(Recovery, "on_evidence"))
    plan = plan_of("fedavg", rounds=12, method=method, alone=Alone(epochs=10), detection=component(Detection, "gain"))
    results = [result for _, result in federate(plan)]
    on = [result.round for result in results if result.recovering]
    assert on == list(range(on[0], 13))
    assert results[-1].detection is not None
    assert results[-1].detection.recovery is None
    assert results[-1].detection.recovered is not None


@pytest.mark.parametrize("name", FIRST)
def test_guarded_around_it(name: str) -> None:
    plan = plan_of("fedavg", method=Method(adaptation=Guarded(METHODS[name].adaptation)), rounds=2,
                   environment=Environment(Sampled(rate=1.0)), detection=component(Detection, "gain"))  # fmt: skip
    *_, (_, result) = federate(plan)
    assert result.scores is not None
    weights = {note for note in result.scores.notes if note.startswith("weight/")}
    members = {"weight/adapted", "weight/private"} | (set() if name in WITHOUT_GLOBAL else {"weight/global"})
    assert weights == members
    assert (result.scores.central is None) == (name in WITHOUT_GLOBAL)


def test_the_files_and_the_budget_say_what_is_shared(tmp_path: Path) -> None:
    list(run_plan(plan_of("fedper"), tmp_path / "run", engine="inprocess"))
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["central"] is None
    assert summary["attack_central"] is None
    assert summary["local"] is not None
    assert "clients send all layers but the last: noise and clipping cover these" in summary["privacy"]["words"]
    list(run_plan(plan_of("fedavg"), tmp_path / "plain", engine="inprocess"))
    assert "clients send" not in json.loads((tmp_path / "plain/summary.json").read_text())["privacy"]["words"]
