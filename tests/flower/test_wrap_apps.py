"""Apps in the shapes of Flower's own examples, unchanged and with two lines more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import numpy as np
import torch
from apps import other_apps, torch_apps
from apps.federation import CLIENTS, Case
from fake_grid import FakeGrid
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import Result

from lindt.flower import NFLDetector, wrap
from lindt.flower.messages import Visit

CASES = torch_apps.CASES | other_apps.CASES
ROUNDS = 12


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def play(case: Case, strategy: Any, app: Any, federation: str, rounds: int) -> tuple[Result, FakeGrid]:
    arrays = case.arrays()
    seed()
    grid = FakeGrid(app, CLIENTS, {"federation": federation})
    return strategy.start(grid, arrays, num_rounds=rounds, train_config=case.train_config()), grid


def two_lines(case: Case, folder: Path, federation: str, rounds: int = ROUNDS) -> tuple[Any, Result, FakeGrid]:
    detector = NFLDetector(case.strategy(), **case.detector)
    app = wrap(case.app(), folder=folder, **case.wrap)
    result, grid = play(case, detector, app, federation, rounds)
    return detector, result, grid


def bytes_of(message: Message) -> dict[str, Any]:
    """All that a reply says, apart from our one record."""
    assert not message.has_error()
    found: dict[str, Any] = {}
    for name, record in message.content.items():
        for key, value in record.items():
            if name != "lindt":
                found[f"{name}/{key}"] = value.data if isinstance(record, ArrayRecord) else value
    return found


def visits(grid: FakeGrid, kind: str = "train") -> list[Visit]:
    replies = [m for m in grid.received if m.metadata.message_type == kind]
    return [Visit.unpack(m.content["lindt"]["visit"]) for m in replies]


def check_bytes(case: Case, run: tuple[Any, Result, FakeGrid], rounds: int = ROUNDS) -> None:
    """The records of the app and its w are those of the app without our two lines."""
    plain, alone = play(case, case.strategy(), case.app(), "hurts", rounds)
    _, result, wrapped = run
    assert len(alone.received) == len(wrapped.received) == 2 * CLIENTS * rounds
    for theirs, ours in zip(alone.received, wrapped.received, strict=True):
        assert bytes_of(theirs) == bytes_of(ours)
        assert ours.content.keys() == theirs.content.keys() | {"lindt"}
    assert {k: a.data for k, a in plain.arrays.items()} == {k: a.data for k, a in result.arrays.items()}


def check_hurts(case: Case, run: tuple[Any, Result, FakeGrid], rounds: int = ROUNDS) -> None:
    """The verdict, the reports, the app's own metrics, and what recovery gains."""
    detector, result, grid = run
    assert detector.verdict.state in case.hurts
    assert [visit.problem for visit in visits(grid)] == [""] * CLIENTS * rounds
    reports = [m["lindt-reports"] for m in result.train_metrics_clientapp.values()]
    assert reports == [CLIENTS if case.reports else 0] * rounds
    flags = [m["lindt-recovering"] for m in result.train_metrics_clientapp.values()]
    if "hurts" not in case.hurts:
        assert flags == [0] * rounds
        return
    begun = flags.index(1) + 1
    assert begun <= rounds - 2
    for metric in case.metrics:  # alive in recovery
        assert result.train_metrics_clientapp[rounds][metric] is not None
    scores = detector.scores
    assert scores.local > scores.central
    assert scores.beta > -0.1  # no longer far below training alone
    assert (scores.clearly_harmed, scores.clearly_better) == (None, None)  # no sample is known
    assert scores.notes["chosen on the same data"] == 1.0
    assert result.train_metrics_clientapp[rounds]["lindt-recovery-gain"] > 0.1  # v_i alone, against w
    recovering = visits(grid)[begun * CLIENTS :]
    assert all(visit.recovers and visit.calls >= 1 for visit in recovering)


@pytest.mark.parametrize("name", CASES)
def test_where_federation_hurts_the_verdict_is_right_and_the_apps_records_stay_the_same(
    name: str, tmp_path: Path
) -> None:
    """To the last byte, in recovery too: the app's own call comes first, on w."""
    run = two_lines(CASES[name], tmp_path, "hurts")
    check_hurts(CASES[name], run)
    check_bytes(CASES[name], run)


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_right_where_federation_helps(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    # The residual app is decided in round 19 with two threads and in round 20 with one: 20 would hang on last bits.
    rounds = 40 if name == "resnet, FedAdam" else 20
    detector, result, _ = two_lines(case, tmp_path, "helps", rounds=rounds)
    assert detector.verdict.state in case.helps
    assert [m["lindt-recovering"] for m in result.train_metrics_clientapp.values()] == [0] * rounds
