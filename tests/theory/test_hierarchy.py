"""docs/scale.md: what edges must send so that a root that sees no client's weights still knows the divergence.

Legend: K clients answering, P parameters, E edges.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lindt.server.detection.divergence import divergence


def edges(seed: int, K: int, E: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """Updates of K clients, the same dealt to E edges, and the server's step: their mean and some noise."""
    draw = torch.Generator().manual_seed(seed)
    updates_KP = torch.randn(K, 37, generator=draw, dtype=torch.float64)
    cuts = sorted(torch.randint(0, K + 1, (E - 1,), generator=draw).tolist())
    shares = list(updates_KP.tensor_split(cuts))
    step_P = updates_KP.mean(0) + 0.3 * torch.randn(37, generator=draw, dtype=torch.float64)
    return updates_KP, shares, step_P


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(1, 40), E=st.integers(1, 7))
def test_one_number_an_edge_gives_w_div_exactly_once_the_step_is_known(seed: int, K: int, E: int) -> None:
    updates_KP, shares, step_P = edges(seed, K, E)
    sums = [sum(float(torch.linalg.vector_norm(u - step_P)) for u in share) for share in shares]  # the second pass
    assert math.fsum(sums) / K == pytest.approx(divergence(updates_KP, step_P), rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), K=st.integers(1, 40), E=st.integers(1, 7))
def test_sums_and_sums_of_squares_give_the_root_mean_square_in_one_pass(seed: int, K: int, E: int) -> None:
    updates_KP, shares, step_P = edges(seed, K, E)
    total_P = torch.stack([share.sum(0) for share in shares]).sum(0)  # T
    squares = math.fsum(float((share * share).sum()) for share in shares)  # Q
    mean_square = squares / K - 2 * float(step_P @ total_P) / K + float(step_P @ step_P)
    direct = float(((updates_KP - step_P) ** 2).sum(1).mean())
    assert mean_square == pytest.approx(direct, rel=1e-9)
    # Jensen: never below w_div, so that an alarm cannot be missed by it, only raised too early.
    assert math.sqrt(mean_square) >= divergence(updates_KP, step_P) * (1 - 1e-12)


def test_a_trimmed_mean_of_trimmed_means_is_another_number() -> None:
    """Order statistics do not add up: 1, 2, 9 and 3, 4, 5 have trimmed means 2 and 4, all six have 3.5."""
    from lindt.server.aggregation import TrimmedMean

    left, right = torch.tensor([[1.0], [2.0], [9.0]]), torch.tensor([[3.0], [4.0], [5.0]])
    join = TrimmedMean(0.2)
    parts = torch.stack([join(left, torch.ones(3)), join(right, torch.ones(3))])
    assert parts.mean().item() == 3.0
    assert join(torch.cat([left, right]), torch.ones(6)).item() == 3.5
