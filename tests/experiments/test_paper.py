"""The paper's numbers, as far as they check each other: local less beta is the same private accuracy in every row."""

from __future__ import annotations

from collections import Counter

import pytest

from lindt.data.sizes import SCHEMES
from lindt_experiments.tables.paper import CLIENT_SIZES, one, printed


def test_every_number_is_there() -> None:
    rows = Counter(row.table for row in printed())
    assert rows == {3: 26, 4: 10, 5: 10, 6: 6, 7: 10, 10: 4, 11: 6, 12: 6, 13: 10}
    numbers = sum(3 - (row.central is None) for row in printed())
    assert numbers == 3 * 88 - 4  # FB's central accuracy is printed nowhere


@pytest.mark.parametrize(
    ("task", "world", "method", "central", "local", "beta"),
    [
        ("cifar", "nfl", "lindt-tm", 56.23, 82.82, 8.80),
        ("shake", "nfl", "fedprox", 40.20, 40.64, -6.55),
        ("cifar", "normal", "fb", None, 61.19, 18.14),
        ("cifar", "classes-2", "fedavg", 32.50, 32.19, -58.12),
        ("cifar", "active-0.5", "lindt", 57.47, 81.89, 7.87),
        ("cifar", "attack-0", "fedavg", 64.33, 64.95, -7.69),
        ("cifar", "sigma-0.01", "lindt", 31.19, 75.37, 1.35),
        ("shake", "balanced", "lindt", 52.57, 52.50, 9.21),
        ("shake", "attack-0.33", "fedavg", 25.20, 25.75, -21.37),
        ("shake", "sigma-0.007", "lindt", 51.10, 52.89, 5.70),
    ],
)
def test_a_handful(task: str, world: str, method: str, central: float | None, local: float, beta: float) -> None:
    row = one(task, world, method)
    assert row is not None
    assert (row.central, row.local, row.beta) == (central, local, beta)


def test_every_row_of_an_environment_implies_the_same_private_accuracy() -> None:
    """A slip of transcription would show here. Two rows of the paper itself are off by 0.1 and 0.2."""
    odd = {("cifar", "normal", "lindt"): 0.20, ("cifar", "classes-2", "lindt"): 0.10}
    for row in printed():
        fedavg = one(row.task, row.world, "fedavg")
        assert fedavg is not None
        wanted = fedavg.private + odd.get((row.task, row.world, row.method), 0.0)
        assert row.private == pytest.approx(wanted, abs=0.015), row


def test_the_implied_accuracies_are_those_that_are_compared_with() -> None:
    wanted = {
        ("cifar", "nfl"): 74.02,
        ("cifar", "classes-10"): 65.23,
        ("cifar", "classes-5"): 76.49,
        ("cifar", "classes-2"): 90.31,
        ("cifar", "iid"): 43.76,
        ("cifar", "normal"): 43.05,
        ("shake", "nfl"): 47.19,
        ("shake", "balanced"): 43.29,
    }
    for (task, world), private in wanted.items():
        row = one(task, world, "fedavg")
        assert row is not None
        assert row.private == pytest.approx(private)


def test_the_starred_rows_are_table_3s() -> None:
    for row in printed():
        if row.world == "nfl":
            first = one(row.task, "nfl", row.method)
            assert first is not None
            assert (row.central, row.local, row.beta) == (first.central, first.local, first.beta)


def test_client_sizes_are_those_of_the_allocations() -> None:
    assert sorted(CLIENT_SIZES.values()) == sorted((s.paper_mean, s.paper_std) for s in SCHEMES)


def test_a_cell_the_paper_does_not_print() -> None:
    assert one("cifar", "normal", "lindt-tm") is None
