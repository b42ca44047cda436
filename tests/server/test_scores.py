"""Scores: accuracy and F1, gains by hand (Eq. 2, 3), who is harmed, and the paired test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from scipy.stats import t as student_t
from sklearn.metrics import accuracy_score, f1_score
from torch import Tensor
from torch.nn.functional import one_hot

from lindt.errors import UserError
from lindt.plan.problem import METRICS, Accuracy, MacroF1, MeanOf
from lindt.protocols import ClientTally, Metric
from lindt.server.scores import (
    ClientGain,
    Scores,
    _student,
    paired_p_value,
    panel_of,
    summarise,
    weighted_gain,
    without_clients,
    worst_tenth,
)

CLASSES = 5
labels = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=40)


def outputs(predicted: list[int]) -> Tensor:
    return one_hot(torch.tensor(predicted), CLASSES).to(torch.float32)


def test_accuracy_by_hand() -> None:
    tally = Accuracy().tally(outputs([0, 1, 2, 2]), torch.tensor([0, 1, 1, 2]))
    assert tally.tolist() == [3.0, 4.0]
    assert Accuracy().value(tally) == 0.75


def test_macro_f1_by_hand() -> None:
    # Class 0: 1 hit, 1 missed, 0 false: 2/3. Class 1: 1 hit, 0 missed, 1 false: 2/3. Class 3: missed: 0.
    # Class 4: false only: 0. Class 2 does not occur and does not count.
    tally = MacroF1().tally(outputs([0, 1, 1, 4]), torch.tensor([0, 0, 1, 3]))
    assert MacroF1().value(tally) == pytest.approx((2 / 3 + 2 / 3 + 0 + 0) / 4)


@pytest.mark.parametrize("metric", [Accuracy(), MacroF1()])
@pytest.mark.parametrize(
    ("out", "y"),
    [
        (torch.eye(3), torch.tensor([[0], [1], [2]])),  # nine comparisons of three samples
        (torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 1, 2])),  # one prediction for all
        (torch.eye(3), torch.tensor(0)),
        (torch.zeros(3, 2, 4), torch.tensor([0, 1, 2])),
    ],
)
def test_labels_of_another_shape_are_not_stretched(metric: Metric, out: Tensor, y: Tensor) -> None:
    for score in (metric.per_sample, metric.tally):
        with pytest.raises(
            UserError, match=r"outputs of shape .* and targets of shape .* are not one class per predic"
        ):
            score(out, y)


@given(pairs=labels)
@settings(max_examples=100, deadline=None)
def test_parity_with_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    truth, predicted = [a for a, _ in pairs], [b for _, b in pairs]
    out, y = outputs(predicted), torch.tensor(truth)
    f1, accuracy = MacroF1(), Accuracy()
    expected = f1_score(truth, predicted, average="macro", zero_division=0.0)
    assert f1.value(f1.tally(out, y)) == pytest.approx(expected, abs=1e-12)
    assert accuracy.value(accuracy.tally(out, y)) == pytest.approx(accuracy_score(truth, predicted), abs=1e-12)


CLOSENESS = MeanOf(lambda out, y: out[torch.arange(len(y)), y] - 0.25)


@pytest.mark.parametrize("metric", [Accuracy(), MacroF1(), CLOSENESS])
@given(parts=st.lists(labels, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_sum_of_tallies_is_the_tally_of_the_pool(metric: Metric, parts: list[list[tuple[int, int]]]) -> None:
    tallies = [metric.tally(outputs([b for _, b in part]), torch.tensor([a for a, _ in part])) for part in parts]
    everything = [pair for part in parts for pair in part]
    pooled = metric.tally(outputs([b for _, b in everything]), torch.tensor([a for a, _ in everything]))
    assert torch.equal(torch.stack(tallies).sum(0), pooled)


def test_a_users_metric_is_the_mean_of_one_number_a_sample() -> None:
    metric = MeanOf(lambda out, y: -(out[:, 0] - y).square())
    out, y = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 1.0, 3.0])
    assert metric.per_sample(out, y).tolist() == [0.0, -1.0, -4.0]
    assert metric.tally(out, y).tolist() == [-5.0, 3.0]
    assert metric.value(metric.tally(out, y)) == pytest.approx(-5 / 3)
    assert not metric.percent


@pytest.mark.parametrize("function", [lambda out, y: out.mean(), lambda out, y: out, lambda out, y: y[:1]])
def test_a_metric_of_another_shape_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match="for 3 samples; return one number per sample"):
        MeanOf(function).per_sample(torch.zeros(3, 2), torch.zeros(3))


def test_the_named_metrics() -> None:
    assert {"accuracy": Accuracy(), "macro_f1": MacroF1()} == METRICS
    assert all(metric.percent for metric in METRICS.values())
    for metric in METRICS.values():
        assert metric.per_sample(outputs([0, 3]), torch.tensor([0, 1])).tolist() == [1.0, 0.0]


@given(wins=st.integers(0, 300), losses=st.integers(0, 300))
@settings(max_examples=100, deadline=None)
def test_the_paired_test_is_mcnemars_exact_one(wins: int, losses: int) -> None:
    expected = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert paired_p_value(wins, losses) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(0, 0, 1.0), (0, 5, 2 / 32), (0, 6, 2 / 64), (6, 0, 2 / 64), (1, 1, 1.0), (1, 7, 18 / 256), (5000, 5000, 1.0)],
)
def test_the_paired_test_by_hand(wins: int, losses: int, p: float) -> None:
    assert paired_p_value(wins, losses) == pytest.approx(p)


def fraction(hits: int, of: int) -> Tensor:
    return torch.tensor([float(hits), float(of)], dtype=torch.float64)


def client(local: int, private: int | None, of: int = 10, central: int = 0, **rest: int) -> ClientTally:
    alone = None if private is None else fraction(private, of)
    return ClientTally(of, fraction(central, of), fraction(local, of), alone, **rest)


def scores(tallies: list[ClientTally], counted: set[int] | None = None, **options: Any) -> Scores:
    return summarise(
        dict(enumerate(tallies)),
        Accuracy(),
        counted=frozenset(range(len(tallies)) if counted is None else counted),
        alphas=options.pop("alphas", dict.fromkeys(range(len(tallies)), 1.0)),
        **options,
    )


THREE = [client(8, 6), client(5, 6), client(18, 24, of=30)]  # beta_i = 0.2, -0.1, -0.2


@pytest.mark.parametrize(
    ("alphas", "beta", "local", "private"),
    [
        ((1.0, 1.0, 1.0), -0.1 / 3, 1.9 / 3, 2.0 / 3),  # equal
        ((10.0, 10.0, 30.0), (2 - 1 - 6) / 50, (8 + 5 + 18) / 50, (6 + 6 + 24) / 50),  # by size
        ((3.0, 1.0, 0.0), 0.5 / 4, (2.4 + 0.5) / 4, (1.8 + 0.6) / 4),  # given
    ],
)
def test_beta_is_the_weighted_gain(alphas: tuple[float, ...], beta: float, local: float, private: float) -> None:
    found = scores(THREE, alphas=dict(enumerate(alphas)))
    assert [c.beta for c in found.clients] == pytest.approx([0.2, -0.1, -0.2])
    assert found.beta == pytest.approx(beta)
    assert (found.local, found.private) == pytest.approx((local, private))
    assert found.local - found.private == pytest.approx(found.beta)  # type: ignore[operator]


def test_only_the_ratio_of_the_weights_matters() -> None:
    assert weighted_gain([1.0, 0.0], [2.0, 6.0]) == weighted_gain([1.0, 0.0], [0.25, 0.75]) == 0.25


def test_the_central_score_pools_everyones_test_data() -> None:
    found = scores([client(0, 0, of=10, central=10), client(0, 0, of=90, central=0)], counted={0})
    assert found.central == 0.1  # not the mean of 1 and 0, and client 1 is in it
    assert [c.client for c in found.clients] == [0]


def test_who_is_harmed_clearly_harmed_and_even() -> None:
    found = scores(
        [
            client(4, 10, losses=6),  # p = 2/64: clearly
            client(5, 10, losses=5),  # p = 2/32: maybe chance
            client(7, 7, wins=3, losses=3),  # a tie
            client(10, 3, wins=7),  # clearly better off: no harm
            client(9, 8, wins=1),  # better off, maybe chance
        ]
    )
    assert (found.harmed, found.clearly_harmed, found.ties) == (2, 1, 1)
    assert [c.clear for c in found.clients] == [True, False, False, True, False]
    assert found.worst_tenth == pytest.approx(-0.6)
    assert (found.median_gain, found.clearly_better) == (0.0, 1)
    assert found.ipr == pytest.approx(3 / 5)  # a tie is not worse off


@pytest.mark.parametrize(("clients", "mean"), [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (21, 1.0), (100, 4.5)])
def test_the_worst_tenth_is_rounded_up(clients: int, mean: float) -> None:
    assert worst_tenth([float(i) for i in reversed(range(clients))]) == mean


def test_without_private_models_there_is_no_gain() -> None:
    found = scores([client(8, None), client(6, None)])
    assert found.local == pytest.approx(0.7)
    gains = (found.private, found.beta, found.harmed, found.clearly_harmed, found.ties, found.worst_tenth, found.ipr)
    assert gains == (None,) * 7
    assert [(c.private, c.beta, c.clear) for c in found.clients] == [(None, None, False)] * 2


def test_a_client_without_a_private_score_leaves_the_others_their_gain() -> None:
    found = scores([client(8, 6), client(5, None), client(4, 5)], alphas={0: 1.0, 1: 7.0, 2: 3.0})
    assert found.ipr == pytest.approx(1 / 2)  # of the two whose gain is known
    assert found.beta == pytest.approx((1 * 0.2 + 3 * -0.1) / 4)
    assert found.private == pytest.approx((1 * 0.6 + 3 * 0.5) / 4)
    assert (found.harmed, found.clearly_harmed, found.ties) == (1, 0, 0)
    assert found.worst_tenth == pytest.approx(-0.1)
    assert found.local == pytest.approx((0.8 + 7 * 0.5 + 3 * 0.4) / 11)  # of all three
    assert found.without_private == (1,)
    assert scores([client(8, 6)]).without_private == ()


def test_gains_whose_weights_are_all_zero_have_no_mean() -> None:
    found = scores([client(8, 6), client(5, None)], alphas={0: 0.0, 1: 1.0})
    assert (found.beta, found.private, found.local) == (None, None, 0.5)


def test_attackers_are_left_out_of_the_local_scores() -> None:
    found = scores([client(8, 6), client(0, 10, losses=10), client(6, 6)], counted={0, 2})
    assert (found.local, found.beta, found.harmed) == (pytest.approx(0.7), pytest.approx(0.1), 0)


def test_the_backdoors_success() -> None:
    found = scores(
        [
            client(0, 0, attack_chances=4, attack_central=3, attack_local=1),
            client(0, 0, attack_chances=6, attack_central=2, attack_local=6),
        ],
        counted={0},
    )
    assert found.attack_central == 0.5  # 5 of 10, over everyone
    assert found.attack_local == 0.25  # 1 of 4, over those counted
    quiet = scores([client(0, 0), client(0, 0)])
    assert (quiet.attack_central, quiet.attack_local) == (None, None)


def test_notes_are_averaged_over_the_clients_that_log_them() -> None:
    found = scores(THREE, notes=[{"alpha": 0.1, "score": 1.0}, {"alpha": 0.3}])
    assert found.notes == {"alpha": pytest.approx(0.2), "score": 1.0}
    assert scores(THREE).notes == {}


def test_the_order_in_which_clients_answer_does_not_matter() -> None:
    tallies = dict(enumerate(THREE))
    reverse = dict(reversed(tallies.items()))
    options: Any = {"counted": frozenset({0, 1, 2}), "alphas": {0: 1.0, 1: 2.0, 2: 3.0}}
    assert summarise(tallies, Accuracy(), **options) == summarise(reverse, Accuracy(), **options)
    assert math.isfinite(summarise(tallies, Accuracy(), **options).local)


def gains(betas: Sequence[float], weights: Sequence[float] = ()) -> list[ClientGain]:
    alphas = weights or [1.0] * len(betas)
    return [ClientGain(0.5, 0.5 - b, b, False, alpha) for b, alpha in zip(betas, alphas, strict=True)]


def test_a_panels_interval_by_hand() -> None:
    # Mean 0.2, variance 0.01, of 3 of 12 clients: error sqrt(0.01 / 3 * 9 / 12) = 0.05, Student's t 4.3027.
    found = panel_of(gains([0.1, 0.2, 0.3]), 4, 12)
    assert (found.expected, found.clients, found.of) == (4, 3, 12)
    assert found.beta_low == pytest.approx(0.2 - 4.3027 * 0.05, abs=1e-5)
    assert found.beta_high == pytest.approx(0.2 + 4.3027 * 0.05, abs=1e-5)
    assert found.ipr_high == 1.0
    # All clients: nothing is missing. Equal weights of any size are no weights.
    whole = panel_of(gains([0.1, 0.2, -0.3]), 3, 3)
    assert (whole.beta_low, whole.ipr_low, whole.ipr_high) == (whole.beta_high, 2 / 3, 2 / 3)
    assert panel_of(gains([0.1, 0.2, 0.3], [7.0] * 3), 4, 12).beta_low == pytest.approx(found.beta_low)
    assert panel_of(gains([0.1]), 2, 12).beta_low is None


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 20, 999])
def test_the_quantile_of_student(freedom: int) -> None:
    assert _student(freedom) == pytest.approx(float(student_t.ppf(0.975, freedom)), rel=0.005)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_panels_intervals_cover_the_mean_of_all_clients(weighted: bool) -> None:
    """Of a skewed population, drawn again and again, about 95% of the intervals contain the value of all clients."""
    draw = np.random.default_rng(5)
    N, m, times = 2000, 200, 400
    betas = draw.exponential(0.1, N) - 0.08
    alphas = draw.integers(1, 50, N).astype(float) if weighted else np.ones(N)
    mean, share = float((alphas * betas).sum() / alphas.sum()), float((betas >= 0).mean())
    covered = [0, 0]
    for _ in range(times):
        rows = draw.choice(N, m, replace=False)
        found = panel_of(gains(betas[rows].tolist(), alphas[rows].tolist()), m, N)
        assert found.beta_low is not None
        assert found.ipr_low is not None
        covered[0] += found.beta_low <= mean <= found.beta_high  # type: ignore[operator]
        covered[1] += found.ipr_low <= share <= found.ipr_high  # type: ignore[operator]
    assert all(0.91 <= times_covered / times <= 0.985 for times_covered in covered)


def test_leaving_a_client_out_of_a_panel_moves_its_interval() -> None:
    panel = panel_of(gains([0.1, 0.2, 0.9]), 3, 12)
    clients = [
        {"client": i, "local": 0.5, "private": 0.5 - b, "beta": b, "clear": False}
        for i, b in enumerate([0.1, 0.2, 0.9])
    ]
    found = without_clients({"clients": clients, "panel": vars(panel)}, {2})
    assert found is not None
    assert found["panel"] == vars(panel_of(gains([0.1, 0.2]), 2, 12))
