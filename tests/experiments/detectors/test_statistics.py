"""Shares with exact intervals and AUC, by numbers from textbooks and by hand."""

from __future__ import annotations

import pytest

from lindt_experiments.detectors.statistics import Share, area, share


def test_an_exact_interval() -> None:
    assert Share(0, 10).interval == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert Share(10, 10).interval == pytest.approx((0.6915, 1.0), abs=1e-4)
    assert Share(4, 20).interval == pytest.approx((0.0573, 0.4366), abs=1e-4)
    assert str(share([True, False])) == "0.500 (0.013-0.987)"
    assert (str(Share(0, 0)), Share(0, 0).value) == ("-", None)


def test_the_area_counts_pairs_in_order() -> None:
    assert area([2.0, 3.0], [0.0, 1.0]) == 1.0
    assert area([0.0], [1.0]) == 0.0
    assert area([1.0, 0.0], [0.5, 0.5]) == 0.5
    assert area([1.0], [1.0]) == 0.5  # a tie counts half
    assert area([1.0, None], [-1.0]) == 1.0  # nothing known is 0
    assert area([], [1.0]) is None
