"""Which aggregates count as the mean of the clients' vectors, plain or weighted by their sizes."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("flwr")

from lindt.flower.measure import RoundVectors, distances_of

LINE = (0.0, 4.0, 20.0)  # plain mean 8


@pytest.mark.parametrize(
    ("sizes", "aggregate", "mean"),
    [
        ((2, 2, 2), 8.0, True),
        ((2, 2, 2), 9.0, False),
        ((0.3, 0.3, 0.3), 8.0, True),
        ((2**53, 2**53, 2**53), 8.0, True),
        ((1, 3, 1), 6.4, True),  # the first and the last alike: 32 / 5
        ((1, 1, 2), 11.0, True),
        ((1e-12, 1.0, 1.0), 12.0, True),
        ((1, 3, 1), 8.0, True),  # a strategy may take the plain mean whatever the sizes
        ((1, 3, 1), 11.0, False),
    ],
)
def test_a_mean_is_known_for_all_sizes(sizes: tuple[float, ...], aggregate: float, mean: bool) -> None:
    def vector(value: float) -> tuple[np.ndarray, ...]:
        return (np.array([value, 0.0], np.float32),)

    round = RoundVectors(vector(aggregate), vector(0.0), [vector(value) for value in LINE])
    found = distances_of(round, np.array(sizes, np.float64))
    assert found.mean is mean
    assert found.spread_K == pytest.approx([8.0, 4.0, 12.0])  # around the plain mean
    assert found.far_K == pytest.approx([abs(value - aggregate) for value in LINE])
