"""A run that stops early: by validation data, with the models of the best round, the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from worlds import tiny

from lindt import Plan, Problem, RunState, federate
from lindt.client.private_store import FolderStore
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.privacy import Gaussian
from lindt.errors import PlanError
from lindt.plan.file import from_dict, resolve, to_dict
from lindt.plan.models import SmallCnn
from lindt.plan.plan import METHODS, Alone, EarlyStop, Scoring, Training
from lindt.protocols import VALIDATION
from lindt.runs.about import early_stop
from lindt.runs.export import PlayedRun, client_model, export_client, load_played
from lindt.runs.play import RunEnded, check_engine, run_plan
from lindt.runs.store import Store
from lindt.server.detection.gain import Gain


def problem(validation: bool = True) -> Problem:
    """Noisy labels: a validation score that soon stops to rise."""
    generator = torch.Generator().manual_seed(3)
    made: list[tuple[Any, ...]] = []
    for _ in range(3):
        x = torch.randn(60, 4, generator=generator)
        y = (x[:, 0] + 2 * torch.randn(60, generator=generator) > 0).long()
        parts = [(x[a : a + 20], y[a : a + 20]) for a in (0, 20, 40)]
        made.append(tuple(parts) if validation else (parts[0], parts[2]))
    return Problem(made, lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)))


def plan(patience: int, method: str = "lindt", rounds: int = 12) -> Plan:
    return Plan(
        rounds=rounds,
        training=Training(rate=0.3, batch=5),
        environment=Environment(Sampled(rate=1.0)),
        method=METHODS[method],
        alone=Alone(private=False),
        scoring=Scoring(every=1, last=1),
        early_stop=EarlyStop(patience),
    )


def scores(played: list[tuple[RunState, Any]]) -> list[float]:
    return [result.scores.notes[VALIDATION] for _, result in played]


def test_it_stops_after_patience_rounds_and_ends_with_the_best_rounds_models(tmp_path: Path) -> None:
    whole = list(federate(plan(99), problem=problem(), preflight=False))
    played = list(federate(plan(3), problem=problem(), folder=tmp_path, preflight=False))
    found = scores(played)
    assert found == scores(whole)[: len(found)]  # stopping changes nothing before
    best = found.index(max(found)) + 1
    assert len(played) == best + 3 < 12
    state = played[-1][0]
    assert (state.round, state.model_round) == (best + 3, best)
    assert torch.equal(state.w, played[best - 1][0].w)
    assert not torch.equal(state.w, whole[best + 2][0].w)
    (home,) = tmp_path.iterdir()
    assert max(FolderStore(tmp_path, home.name).rounds(0)) == best  # v_i is that of the best round, too


def test_all_rounds_played_end_with_the_best_rounds_models() -> None:
    played = list(federate(plan(99, "fedavg", rounds=5), problem=problem(), preflight=False))
    best = scores(played).index(max(scores(played))) + 1
    assert best < 5
    assert torch.equal(played[-1][0].w, played[best - 1][0].w)
    assert played[-1][0].model_round == best


def test_a_resumed_run_stops_where_the_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = list(federate(plan(3), problem=problem(), preflight=False))
    begun = list(islice(federate(plan(3), problem=problem(), folder=tmp_path, preflight=False), 2))
    resumed = federate(plan(3), problem=problem(), folder=tmp_path, state=begun[-1][0], preflight=False)
    for (state, result), (other, same) in zip(whole, [*begun, *resumed], strict=True):
        assert torch.equal(state.w, other.w)
        assert result == same


def test_the_score_is_that_of_validation_data_not_of_test_data() -> None:
    made = problem()
    blank = [(train, validation, (x, 1 - y)) for train, validation, (x, y) in made.clients]  # type: ignore[misc]
    other = replace(made, clients=blank)
    assert scores(list(federate(plan(3), problem=made, preflight=False))) == scores(
        list(federate(plan(3), problem=other, preflight=False))
    )


def test_without_validation_data_it_is_refused() -> None:
    with pytest.raises(PlanError, match=r"early_stop.patience = 3: no client has a validation part"):
        next(federate(plan(3), problem=problem(validation=False)))
    with pytest.raises(PlanError, match=r"early_stop.patience = 3: on Flower"):
        check_engine("flower", plan(3), "cpu")
    with pytest.raises(PlanError, match=r"early_stop.patience = -1"):
        from_dict({"early_stop": {"patience": -1}})


def test_a_plan_says_it_only_where_it_stops_early() -> None:
    assert "early_stop" not in to_dict(resolve("digits-nfl"))
    asked = resolve("digits-nfl", ["early_stop.patience=4"])
    assert to_dict(asked)["early_stop"] == {"patience": 4}
    assert from_dict(to_dict(asked)) == asked


def test_the_summary_says_where_and_why() -> None:
    def lines(*values: float | None) -> list[dict[str, Any]]:
        found = [None if value is None else {"notes": {VALIDATION: value}} for value in values]
        return [{"round": i, "scores": one} for i, one in enumerate(found, 1)]

    said = early_stop(plan(2), lines(0.5, None, 0.7, 0.7, None, 0.6))
    assert said is not None
    assert (said["best_round"], said["stopped_at"]) == (3, 6)
    assert said["words"] == (
        "stopped in round 6: the clients' mean validation score was highest in round 3 (0.7) and no higher in 2 scored "
        "rounds since; the final models are those of round 3"
    )
    assert "and no higher in 1 scored round since" in (early_stop(plan(1), lines(0.5, 0.5)) or {})["words"]
    assert (early_stop(plan(2), lines(0.5, 0.6)) or {})["stopped_at"] is None
    assert early_stop(plan(0), lines(0.5)) is None


@pytest.mark.slow
def test_a_run_on_disk_resumes_to_the_same_stop_and_exports_the_best_rounds_model(tmp_path: Path) -> None:
    asked = tiny("lindt", rounds=8, detection=Gain(), early_stop=EarlyStop(1), scoring=Scoring(every=1, last=1))
    asked = replace(asked, model=SmallCnn())
    for _ in run_plan(asked, tmp_path / "whole", engine="inprocess", preflight=False):
        pass
    for event in run_plan(asked, tmp_path / "parts", engine="inprocess", preflight=False):
        if getattr(getattr(event, "result", None), "round", 0) == 1:
            break
    *_, ended = run_plan(None, tmp_path / "parts", engine="inprocess", resume=True, preflight=False)
    assert isinstance(ended, RunEnded)
    whole, parts = Store.open(tmp_path / "whole"), Store.open(tmp_path / "parts")
    assert whole.rounds() == parts.rounds()
    assert torch.equal(whole.state().w, parts.state().w)
    best = ended.summary["early_stop"]
    assert best["stopped_at"] == best["best_round"] + 1 == len(parts.rounds())
    client = next(line["answered"][0] for line in parts.rounds() if line["round"] == best["best_round"])
    said = export_client(tmp_path / "parts", client, tmp_path / "model")
    assert said["recorded_score"] == pytest.approx(said["score"])


def test_a_client_that_joined_after_the_best_round_predicts_with_w(tmp_path: Path) -> None:
    """Its v_i of a later round is deleted, and is not missed."""
    noisy = Environment(Sampled(rate=0.5), privacy=Gaussian(sigma=1.0))
    kept = {"detection": Gain(), "early_stop": EarlyStop(9), "scoring": Scoring(every=1, last=1)}
    asked = tiny("lindt", rounds=3, model=SmallCnn(), environment=noisy, **kept)
    list(run_plan(asked, tmp_path / "run", engine="inprocess", preflight=False))
    played = load_played(tmp_path / "run")
    met = [{i for line in lines for i in line["answered"]} for lines in _split(played)]
    late = met[1] - met[0]
    assert late
    for client in late:
        found = client_model(played, client)
        assert not found.adapted
        assert found.recorded == pytest.approx(found.score)


def _split(played: PlayedRun) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines up to the best round, and those after it."""
    found, best = played.store.rounds(), played.state.model_round
    return found[:best], found[best:]
