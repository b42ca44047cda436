"""Cells that are played again after a change: what counts as a difference, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made import made

from lindt.errors import UserError
from lindt_experiments import again
from lindt_experiments.plans.catalog import Cell
from lindt_experiments.queue.gather import Origin
from lindt_experiments.results.outcomes import Outcome

# Deviations over the seeds, in points: FedAvg's local accuracy 2, FedProx's 4; FedAvg's beta 1.
KEPT = [
    *(made("cifar", "nfl", "fedavg", seed, local=50 + 2 * seed, beta=-20 + seed) for seed in range(3)),
    *(made("cifar", "nfl", "fedprox", seed, local=50 + 4 * seed, beta=-20.0) for seed in range(3)),
    made("cifar", "nfl", "lindt", local=80, beta=8),
    made("shake", "nfl", "lindt", local=40, beta=1),
]


def spread(*cell: str, score: str = "local") -> float | None:
    return again.spread(KEPT, Cell(*cell), "cpu", score)


def test_the_spread_is_the_cells_own_or_that_of_its_table() -> None:
    assert spread("cifar", "nfl", "fedavg") == pytest.approx(2.0)
    assert spread("cifar", "nfl", "fedavg", score="beta") == pytest.approx(1.0)
    assert spread("cifar", "nfl", "lindt") == pytest.approx(3.0)  # the median of 2 and 4
    assert spread("shake", "nfl", "lindt") == pytest.approx(3.0)  # no cell of SHAKE has three seeds
    assert again.spread(KEPT[:2], Cell("cifar", "nfl", "fedavg"), "cpu", "local") is None


def test_a_score_that_moves_by_more_than_the_spread_differs() -> None:
    new = [made("cifar", "nfl", "lindt", local=82.9, beta=8), made("shake", "nfl", "lindt", local=43.1, beta=1)]
    sheet, moved = again.compared(KEPT, new, "cpu")
    assert moved
    assert [row[:6] for row in sheet.rows if row[1] == "local"] == [
        ("cifar nfl lindt", "local", "80.0", "82.9", "+2.9", "3.0"),
        ("shake nfl lindt", "local", "40.0", "43.1", "+3.1", "3.0"),
    ]
    assert [row[6] for row in sheet.rows] == ["same", "same", "differs", "same"]
    assert not again.compared(KEPT, new[:1], "cpu")[1]
    longer = made("cifar", "nfl", "lindt", local=80.00001, beta=8)  # kept to five digits, and no spread is known
    assert not again.compared([one for one in KEPT if one.cell[2] == "lindt"][:1], [longer], "cpu")[1]
    assert again.differs(0.5, 0.5, None) is False
    assert again.differs(0.5, 0.5001, None) is True  # no seeds to tell a spread: any difference counts


def test_changed_files_and_missing_results_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    request: Any = SimpleNamespace(command="again", scale="smoke", runs=tmp_path, kept=lambda: list[Outcome]())
    origin = Origin("again", "abc+changes", "today")
    monkeypatch.setattr(again.Origin, "now", lambda _command: origin)
    with pytest.raises(UserError, match="files have changed since the last commit"):
        again.reproduce(request, None)  # type: ignore[arg-type]
    origin = replace(origin, commit="abc")
    with pytest.raises(UserError, match="cifar nfl fedavg: no kept result at scale smoke"):
        again.reproduce(request, None)  # type: ignore[arg-type]
