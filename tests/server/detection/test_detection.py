"""Eq. 5 and 7 on numbers to check by hand, the rule `count > r'`, and the Detector for other loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lindt.errors import PlanError, UserError
from lindt.protocols import Divergence, Statistic
from lindt.server.aggregation import ClippedUpdates
from lindt.server.detection.detector import Detector
from lindt.server.detection.divergence import Rule, delta_of, divergence, is_negative, mean_cosine, measure
from lindt.weights import flat

ORIGIN = torch.zeros(2)
TWO = torch.tensor([[3.0, 4.0], [0.0, 0.0]])


def test_eq_5_is_the_mean_distance_to_the_global_optimum() -> None:
    assert divergence(TWO, ORIGIN) == 2.5  # (5 + 0) / 2
    assert divergence(TWO, torch.tensor([3.0, 0.0])) == 3.5  # (4 + 3) / 2


def test_eq_5_is_a_mean_of_norms_and_not_a_norm_of_the_mean() -> None:
    opposite = torch.tensor([[3.0, 4.0], [-3.0, -4.0]])
    assert divergence(opposite, opposite.mean(0)) == 5.0


def test_eq_7_takes_off_the_norm_of_the_noise() -> None:
    assert delta_of(TWO, ORIGIN, torch.tensor([0.6, 0.8])) == pytest.approx(1.5)  # 2.5 - 1
    assert delta_of(TWO, ORIGIN, ORIGIN) == 2.5


def test_identical_clients_under_noise_alone_have_a_delta_of_zero() -> None:
    noise = torch.tensor([6.0, 8.0])
    w_KP = torch.ones(3, 2)
    assert delta_of(w_KP, w_KP.mean(0) + noise, noise) == 0.0


vectors = st.lists(
    st.lists(st.integers(-50, 50), min_size=3, max_size=3), min_size=1, max_size=6
)  # whole numbers: shifts and orders are exact, save for the sum of the norms


@given(rows=vectors, w=st.lists(st.integers(-50, 50), min_size=3, max_size=3), data=st.data())
@settings(max_examples=100, deadline=None)
def test_divergence_ignores_a_common_shift_and_the_order_of_clients(
    rows: list[list[int]], w: list[int], data: st.DataObject
) -> None:
    w_KP, w_P = torch.tensor(rows, dtype=torch.float32), torch.tensor(w, dtype=torch.float32)
    shift_P = torch.tensor(data.draw(st.lists(st.integers(-1000, 1000), min_size=3, max_size=3)), dtype=torch.float32)
    order = data.draw(st.permutations(range(len(rows))))
    expected = divergence(w_KP, w_P)
    assert divergence(w_KP + shift_P, w_P + shift_P) == expected
    assert divergence(w_KP[order], w_P) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(float(np.linalg.norm(w_KP.numpy() - w_P.numpy(), axis=1).mean()), rel=1e-6)


def test_measure_gives_all_statistics_of_a_round() -> None:
    # w^{r-1} = 0; updates (6, 8) and (0, 0) with S = 5: clipped to (3, 4) and (0, 0), mean (1.5, 2).
    clipped_KP = ClippedUpdates(torch.tensor([[6.0, 8.0], [0.0, 0.0]]), torch.tensor([0.5, 1.0]))
    noise_P = torch.tensor([-1.5, -2.0])
    seen = measure(clipped_KP, torch.tensor([1.5, 2.0]) + noise_P, noise_P, clipped_KP.share())
    assert seen.w_div == 5.0  # (10 + 0) / 2 around (0, 0)
    assert seen.noise_norm == 2.5
    assert seen.delta == 2.5
    assert seen.clean == 5.0  # (7.5 + 2.5) / 2 around (1.5, 2)
    assert seen.spread == 2.5  # both clipped updates lie 2.5 from their mean
    assert seen.clipped == 0.5
    assert seen.median == 2.5  # of two clients as their mean


def test_one_far_client_moves_the_mean_and_not_the_median() -> None:
    w_KP = torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [1000.0]])
    seen = measure(ClippedUpdates(w_KP), torch.zeros(1), torch.tensor([0.25]), 0.0)
    assert (seen.delta, seen.median) == (1004 / 5 - 0.25, 1.0 - 0.25)


def test_clipping_alone_leaves_a_delta_but_no_spread() -> None:
    """Identical clients of update norm 30 with S = 15 give Delta 15: it has no limit of zero."""
    clipped_KP = ClippedUpdates(torch.tensor([[18.0, 24.0]] * 3), torch.full((3,), 0.5))
    seen = measure(clipped_KP, torch.tensor([9.0, 12.0]), ORIGIN, clipped_KP.share())
    assert (seen.delta, seen.clean, seen.spread) == (15.0, 15.0, 0.0)


U = [3.0, 4.0, 0.0]


@pytest.mark.parametrize(
    ("updates", "cosine"),
    [
        ([[2.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 0.1]], 0.0),  # at right angles
        ([U, U, U, U], 1.0),
        ([U, [-6.0, -8.0, 0.0]], -1.0),  # opposite, of other lengths
        ([U, U, [-3.0, -4.0, 0.0]], -1 / 3),  # the pairs 1, -1, -1
        ([U, [0.0, 0.0, 0.0], U], 1.0),  # a zero update has no direction: it is left out
        ([[3e-30, 4e-30, 0.0], [3e30, 4e30, 0.0]], 1.0),  # whose squares float32 cannot hold
        ([U, [0.0, 0.0, 0.0]], None),
        ([U], None),
    ],
)
def test_the_mean_cosine_of_pairs_by_hand(updates: list[list[float]], cosine: float | None) -> None:
    found = mean_cosine(torch.tensor(updates))
    assert found is None if cosine is None else found == pytest.approx(cosine, abs=1e-6)


def test_the_mean_cosine_is_that_of_all_pairs_one_by_one() -> None:
    rows_KL = np.random.default_rng(7).normal(size=(9, 5))
    pairs = [
        rows_KL[i] @ rows_KL[j] / np.linalg.norm(rows_KL[i]) / np.linalg.norm(rows_KL[j])
        for i in range(9)
        for j in range(i)
    ]
    assert mean_cosine(torch.tensor(rows_KL)) == pytest.approx(np.mean(pairs), abs=1e-12)


def test_measure_takes_the_cosine_of_the_last_layer_alone() -> None:
    clipped_KP = torch.tensor([[9.0, 1.0], [9.0, -1.0]])
    given = ClippedUpdates(clipped_KP), ORIGIN, ORIGIN, 0.0
    assert measure(*given, clipped_KP[:, 1:]).cosine == -1.0
    assert measure(*given).cosine is None


@pytest.mark.parametrize(("statistic", "value"), [("delta", 2.0), ("clean", 3.0), ("spread", 4.0), ("median", 7.0)])
def test_the_statistic_chosen_is_the_one_watched(statistic: Statistic, value: float) -> None:
    seen = Divergence(w_div=1.0, delta=2.0, clean=3.0, spread=4.0, clipped=5.0, noise_norm=6.0, median=7.0)
    assert seen.watched(statistic) == value


def counts(rule: Rule, values: list[float]) -> list[int]:
    found, count = [], 0
    for value in values:
        count = rule.count(count, value)
        found.append(count)
    return found


def test_counting_is_cumulative_in_alg_2_and_consecutive_by_option() -> None:
    values = [0.2, 0.2, 0.05, 0.2, 0.1, 0.3]  # 0.1 is not above epsilon
    assert counts(Rule(epsilon=0.1), values) == [1, 2, 2, 3, 3, 4]
    assert counts(Rule(epsilon=0.1, counting="consecutive"), values) == [1, 2, 0, 1, 0, 1]


def test_nfl_needs_more_than_r_prime_rounds() -> None:
    rule = Rule(patience=3)
    assert [rule.exceeded(count) for count in range(6)] == [False, False, False, False, True, True]
    assert [Rule(patience=0).exceeded(count) for count in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    ("field", "value"), [("epsilon", 0.0), ("epsilon", -1.0), ("epsilon", math.nan), ("patience", -1)]
)
def test_a_rule_that_cannot_be_is_refused(field: str, value: Any) -> None:
    with pytest.raises(PlanError, match=f"^{field} = "):
        Rule(**{field: value})


def test_is_negative_looks_at_the_last_ten_scored_rounds_only() -> None:
    assert not is_negative([-100.0] * 50 + [0.01] * 10)
    assert is_negative([100.0] * 50 + [-0.01] * 10)
    assert is_negative([100.0] + [-0.01] * 10)  # the eleventh from the end no longer counts
    assert not is_negative([0.0] * 10)  # beta >= 0 is no harm
    assert is_negative([-1.0, 0.5])  # fewer than ten: all of them
    assert not is_negative([-1.0, 0.5], last=1)
    with pytest.raises(ValueError, match="at least one"):
        is_negative([])


class TestDetector:
    def forms(self) -> dict[str, tuple[list[Any], Any, Any]]:
        """The same three vectors of (2, 1) in every form: clients (3, 4, 0) and 0 around 0, noise (0, 0, 1)."""
        a, b = np.array([[3.0], [4.0]]), np.array([0.0])
        zero, one = np.array([[0.0], [0.0]]), np.array([1.0])

        def state(top: Any, low: Any, count: int) -> dict[str, Tensor]:
            return {"top": torch.tensor(top), "low": torch.tensor(low), "n": torch.tensor(count)}

        mixed = dict(reversed(list(state(a, b, 7).items())))
        return {
            "tensors": ([torch.tensor([3.0, 4.0, 0.0]), torch.zeros(3)], torch.zeros(3), torch.tensor([0, 0, 1.0])),
            "a matrix": (torch.tensor([[3.0, 4.0, 0.0], [0, 0, 0]]), torch.zeros(3), torch.tensor([0, 0, 1.0])),  # type: ignore[dict-item]
            "arrays": ([np.array([3.0, 4.0, 0.0]), np.zeros(3)], np.zeros(3), np.array([0, 0, 1.0])),
            "lists of arrays": ([[a, b], [zero, b]], [zero, b], [zero, one]),
            "state dicts": ([mixed, state(zero, b, 900)], state(zero, b, 0), state(zero, one, 0)),
        }

    @pytest.mark.parametrize("form", ["tensors", "a matrix", "arrays", "lists of arrays", "state dicts"])
    def test_takes_weights_in_any_form(self, form: str) -> None:
        clients, new_global, noise = self.forms()[form]
        verdict = Detector(epsilon=0.1, patience=0).observe(clients, new_global)
        assert (verdict.w_div, verdict.delta, verdict.count, verdict.negative) == (2.5, 2.5, 1, True)
        assert Detector(0.1).observe(clients, new_global, noise).delta == 1.5

    def test_read_only_arrays_as_a_network_delivers_them(self) -> None:
        client = np.frombuffer(np.array([3.0, 4.0], dtype=np.float32).tobytes(), dtype=np.float32)
        assert not client.flags.writeable
        assert Detector(0.1).observe([client], np.zeros(2)).w_div == 5.0

    def test_a_modules_own_state_dict(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        w = model.state_dict()
        other = {name: tensor + 1 for name, tensor in w.items()}  # the counter and the statistics too
        # 4 + 2 of the linear layer, 2 + 2 of the norm's own weights: what BatchNorm measured is no part of w.
        assert Detector(0.1).observe([other], w).w_div == pytest.approx(math.sqrt(4 + 2 + 2 + 2), rel=1e-6)

    def test_state_dicts_in_another_order_are_the_same_weights(self) -> None:
        w = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).state_dict()
        assert Detector(0.1).observe([dict(reversed(w.items())), w], w).w_div == 0.0

    def test_counts_rounds_and_stays_negative_once_found(self) -> None:
        detector = Detector(epsilon=1.0, patience=2)
        far, near = torch.tensor([2.0]), torch.tensor([0.5])
        verdicts = [detector.observe([w_i], torch.zeros(1)) for w_i in (far, near, far, far, near, near)]
        assert [v.round for v in verdicts] == [1, 2, 3, 4, 5, 6]
        assert [v.count for v in verdicts] == [1, 1, 2, 3, 3, 3]
        assert [v.negative for v in verdicts] == [False, False, False, True, True, True]

    def test_consecutive_counting_forgets_the_count_but_not_the_verdict(self) -> None:
        detector = Detector(epsilon=1.0, patience=1, counting="consecutive")
        far, near = torch.tensor([2.0]), torch.tensor([0.5])
        verdicts = [detector.observe([w_i], torch.zeros(1)) for w_i in (far, near, far, far, near)]
        assert [v.count for v in verdicts] == [1, 0, 1, 2, 0]
        assert [v.negative for v in verdicts] == [False, False, False, True, True]

    @pytest.mark.parametrize(
        ("clients", "new_global", "noise", "message"),
        [
            ([], torch.zeros(2), None, "clients: the list is empty"),
            ([torch.zeros(2), torch.zeros(3)], torch.zeros(2), None, r"clients\[1\] has 3 weights .* has 2"),
            ([torch.tensor([math.nan, 0.0])], torch.zeros(2), None, "NaN"),
            ([torch.zeros(2)], torch.tensor([math.nan, 0.0]), None, "NaN"),
            ([torch.zeros(2)], torch.zeros(2), torch.zeros(3), "noise has 3 weights .* has 2"),
            ([{"n": torch.tensor(3)}], {"n": torch.tensor(3)}, None, "no floats"),
        ],
    )
    def test_bad_input_is_told_and_changes_nothing(
        self, clients: Any, new_global: Any, noise: Any, message: str
    ) -> None:
        detector = Detector(epsilon=0.1, patience=0)
        with pytest.raises(UserError, match=message):
            detector.observe(clients, new_global, noise)
        assert (detector.round, detector.count, detector.negative) == (0, 0, False)

    def test_flat_orders_a_state_dict_by_name(self) -> None:
        assert flat({"b": torch.tensor([2.0]), "a": torch.tensor([[1.0]])}).tolist() == [1.0, 2.0]


def test_the_detector_can_watch_the_other_statistics() -> None:
    clients, mean, noise = [torch.tensor([3.0, 0.0]), torch.tensor([-3.0, 0.0])], torch.tensor([0.0, 4.0]), torch.tensor([0.0, 4.0])  # fmt: skip  # noqa: E501
    found = {s: Detector(1.0, 0, statistic=s).observe(clients, mean, noise) for s in ("delta", "clean", "spread")}  # type: ignore[arg-type]
    assert found["delta"].watched == found["delta"].delta == pytest.approx(5.0 - 4.0)  # sqrt(3^2 + 4^2) - 4
    assert found["clean"].watched == pytest.approx(3.0)  # around (0, 0)
    assert found["spread"].watched == pytest.approx(3.0)
    assert [verdict.negative for verdict in found.values()] == [False, True, True]


class Tied(nn.Module):
    """An embedding whose weights are those of the output layer, under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5)
        self.out.weight = self.embedding.weight


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class TestTiedWeights:
    def test_a_tied_tensor_counts_once(self) -> None:
        clients, new = [Tied() for _ in range(3)], Tied()
        vectors = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (*clients, new)]
        expected = Detector(0.1).observe(vectors[:3], vectors[3]).delta
        states: list[Any] = [model.state_dict() for model in (*clients, new)]
        assert Detector(0.1).observe(states[:3], states[3]).delta == pytest.approx(expected)
        lists = [list(model.parameters()) for model in (*clients, new)]
        assert Detector(0.1).observe(lists[:3], lists[3]).delta == pytest.approx(expected)
        # An average is made of new tensors: that they are tied shows in the clients' state dicts.
        assert Detector(0.1).observe(states[:3], copied(new)).delta == pytest.approx(expected)
        assert Detector(0.1).observe([copied(model) for model in clients], states[3]).delta == pytest.approx(expected)
        noise = {name: torch.zeros_like(tensor) for name, tensor in states[3].items()}
        assert Detector(0.1).observe(states[:3], states[3], noise).delta == pytest.approx(expected)

    def test_two_names_of_one_tensor_that_differ_elsewhere_are_two_weights(self) -> None:
        zero = torch.zeros(2)
        verdict = Detector(0.1).observe([{"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}], {"a": zero, "b": zero})  # fmt: skip  # noqa: E501
        assert verdict.delta == pytest.approx(5.0)
