"""The flag of Alg. 2, driven round by round with evidence made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from lindt.errors import PlanError
from lindt.protocols import Divergence, Evidence, Recovery, RecoveryState
from lindt.server.recovery import Always, EveryoneTreated, Never, OnDetection, Persist, QuietRounds

HIGH, LOW = 0.5, 0.05  # around epsilon = 0.1


def seen(delta: float, clean: float = 0.0, spread: float = 0.0) -> Divergence:
    return Divergence(w_div=delta, delta=delta, clean=clean, spread=spread, clipped=0.0, noise_norm=0.0, median=0.0)


def drive(
    policy: Recovery, deltas: list[float | None], answered: list[set[int]] | None = None, clients: int = 4
) -> list[RecoveryState]:
    """The state after each round; None is a round without a valid update."""
    states, state = [], policy.begin()
    for index, delta in enumerate(deltas):
        who = answered[index] if answered else {0}
        found = None if delta is None else seen(delta)
        state = policy.judge(state, Evidence(index + 1, found, frozenset(who), clients))
        states.append(state)
    return states


def flags(states: list[RecoveryState]) -> list[bool]:
    return [state.on for state in states]


def test_never_stays_off_and_always_stays_on() -> None:
    assert flags([Never().begin(), *drive(Never(), [HIGH] * 5)]) == [False] * 6
    assert flags([Always().begin(), *drive(Always(), [LOW] * 5)]) == [True] * 6


def test_alg_2_sets_the_flag_when_the_count_exceeds_r_prime() -> None:
    states = drive(OnDetection(patience=2), [HIGH, LOW, HIGH, HIGH, LOW, LOW])
    assert not OnDetection().begin().on
    assert [s.count for s in states] == [1, 1, 2, 3, 3, 3]
    assert flags(states) == [False, False, False, True, True, True]
    assert [s.detections for s in states] == [0, 0, 0, 1, 1, 1]


def test_consecutive_counting_starts_anew_after_a_quiet_round() -> None:
    states = drive(OnDetection(patience=1, counting="consecutive"), [HIGH, LOW, HIGH, HIGH])
    assert flags(states) == [False, False, False, True]


def test_a_delta_of_exactly_epsilon_is_neither_above_nor_quiet() -> None:
    (state,) = drive(OnDetection(epsilon=0.1), [0.1])
    assert (state.count, state.quiet) == (0, 0)


def test_the_second_strategy_never_stops() -> None:
    assert not Persist()(RecoveryState(True, 9, 999, frozenset(range(9)), 1), clients=4)
    assert all(flags(drive(OnDetection(patience=0, stop=Persist()), [HIGH] + [LOW] * 50)))


def test_the_first_strategy_stops_when_everyone_had_a_round_of_recovery() -> None:
    policy = OnDetection(patience=0, stop=EveryoneTreated())
    # Round 1 detects: its clients trained without the dual, so they are not treated by it.
    states = drive(policy, [HIGH] * 5, [{0, 1, 2, 3}, {0, 1}, {1, 2}, {0, 2}, {3}])
    assert [s.treated for s in states] == [set(), {0, 1}, {0, 1, 2}, {0, 1, 2}, set()]
    assert flags(states) == [True, True, True, True, False]


def test_the_third_strategy_stops_after_consecutive_quiet_rounds() -> None:
    policy = OnDetection(patience=0, stop=QuietRounds(3))
    states = drive(policy, [HIGH, LOW, LOW, HIGH, LOW, LOW, LOW])
    assert [s.quiet for s in states] == [0, 1, 2, 0, 1, 2, 0]
    assert flags(states) == [True] * 6 + [False]


def test_quiet_rounds_before_detection_do_not_stop_it() -> None:
    policy = OnDetection(patience=1, stop=QuietRounds(2))
    assert flags(drive(policy, [HIGH, LOW, LOW, HIGH, LOW])) == [False, False, False, True, True]


def test_after_a_stop_everything_starts_at_zero_and_it_may_be_detected_again() -> None:
    policy = OnDetection(patience=1, stop=QuietRounds(1))
    states = drive(policy, [HIGH, HIGH, LOW, HIGH, HIGH, LOW])
    assert states[2] == RecoveryState(on=False, count=0, quiet=0, treated=frozenset(), detections=1)
    # In Alg. 2 `count > r'` still holds and would restart it in round 4.
    assert flags(states) == [False, True, False, False, True, False]
    assert [s.detections for s in states] == [0, 1, 1, 1, 2, 2]


def test_once_leaves_it_off_for_good() -> None:
    states = drive(OnDetection(patience=0, stop=QuietRounds(1), again="once"), [HIGH, LOW, HIGH, HIGH, HIGH])
    assert flags(states) == [True, False, False, False, False]
    assert states[-1].detections == 1


@pytest.mark.parametrize("stop", [Persist(), EveryoneTreated(), QuietRounds(1)])
@pytest.mark.parametrize("on", [False, True])
def test_a_round_without_updates_changes_nothing(stop: Any, on: bool) -> None:
    state = RecoveryState(on, count=250, quiet=9, treated=frozenset({1, 2, 3}), detections=int(on))
    policy = OnDetection(stop=stop)
    assert policy.judge(state, Evidence(7, None, frozenset(), 4)) == state


@pytest.mark.parametrize(("statistic", "expected"), [("delta", [1, 0, 0]), ("clean", [0, 1, 0]), ("spread", [0, 0, 1])])
def test_only_the_chosen_statistic_is_watched(statistic: Any, expected: list[int]) -> None:
    policy = OnDetection(statistic=statistic)
    evidence = [seen(HIGH), seen(LOW, clean=HIGH), seen(LOW, spread=HIGH)]
    found = [policy.judge(policy.begin(), Evidence(1, s, frozenset({0}), 4)) for s in evidence]
    assert [state.count for state in found] == expected
    assert [state.quiet for state in found] == [1 - count for count in expected]


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: OnDetection(epsilon=0.0), "epsilon"),
        (lambda: OnDetection(patience=-1), "patience"),
        (lambda: QuietRounds(0), "rounds"),
    ],
)
def test_impossible_values_are_refused(build: Any, field: str) -> None:
    with pytest.raises(PlanError, match=f"^{field} = "):
        build()
