"""Attackers: what is in their batches, how long they train, what they want, and when they stop."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from lindt.client.training import fit
from lindt.data.examples import Listed, LocalWork, Rows
from lindt.environment.threats import Backdoor, NextCharacter, NoThreat, Relabelled, Threat, Until
from lindt.errors import PlanError
from lindt.protocols import Examples

EVERYTHING_Y = torch.arange(200) % 10  # 20 of each class, over all clients
EVERYTHING = Rows(torch.arange(200.0)[:, None], EVERYTHING_Y, torch.arange(200))  # x is the row's number
OWN_ROWS = torch.arange(100, 142)  # an attacker's 42 samples: 6 batches of 7, some of deer and dog
OWN = Rows(EVERYTHING.x, EVERYTHING.y, OWN_ROWS)
HONEST = LocalWork(OWN, epochs=1)


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batches(work: LocalWork, size: int = 10) -> list[tuple[list[int], list[int]]]:
    return [([int(row) for row in x[:, 0]], y.tolist()) for x, y in work.batches(size, draw())]


def corrupted(threat: Threat, round: int = 1) -> LocalWork:
    return threat.corrupt(HONEST, threat.pool(EVERYTHING), round)


def test_each_batch_of_ten_is_seven_own_and_three_backdoor_samples() -> None:
    found = batches(corrupted(Backdoor()))
    assert len(found) == 6
    own: list[int] = []
    for rows, labels in found:
        assert len(rows) == len(labels) == 10
        assert labels[:7] == [row % 10 for row in rows[:7]]  # true-labelled, even deer and dog
        assert set(rows[:7]) <= set(OWN_ROWS.tolist())
        assert [(row % 10, label) in {(4, 7), (5, 6)} for row, label in zip(rows[7:], labels[7:], strict=True)] == [
            True
        ] * 3
        own += rows[:7]
    assert sorted(own) == OWN_ROWS.tolist()  # an epoch: each own sample once


def test_the_last_batch_is_short_of_own_samples_only() -> None:
    work = LocalWork(Rows(EVERYTHING.x, EVERYTHING.y, torch.arange(100, 110)), epochs=1)
    found = batches(Backdoor().corrupt(work, Backdoor().pool(EVERYTHING), 1))
    assert [len(rows) for rows, _ in found] == [10, 3 + 3]


@pytest.mark.parametrize("everything", [EVERYTHING, Listed([(EVERYTHING.x[i], int(i % 10)) for i in range(200)])])
def test_the_pool_is_every_training_sample_of_the_source_classes(everything: Examples) -> None:
    pool = Backdoor().pool(everything)
    assert pool is not None
    assert len(pool) == 40
    assert Counter(pool.labels.tolist()) == {7: 20, 6: 20}
    x, y = pool.take(torch.arange(40))
    assert {int(row) for row in x[:, 0]} == {row for row in range(200) if row % 10 in (4, 5)}
    assert y.tolist() == [7 if int(row) % 10 == 4 else 6 for row in x[:, 0]]


def test_the_pool_is_drawn_from_evenly() -> None:
    work = Backdoor(per_batch=9).corrupt(HONEST, Backdoor().pool(EVERYTHING), 1)
    taken = Counter(
        int(row) for seed in range(50) for x, _ in work.batches(10, draw(seed)) for row in x[1:, 0]
    )  # 50 epochs of 42 batches: 18,900 of 40 samples
    assert sum(taken.values()) == 18_900
    assert len(taken) == 40
    assert max(abs(count - 472.5) for count in taken.values()) < 5 * 472.5**0.5


def test_a_swap_of_two_classes_is_taken_at_once() -> None:
    assert Backdoor(relabel=((4, 7), (7, 4))).goal(torch.tensor([4, 7, 1])).tolist() == [7, 4, -1]


def test_other_counts_and_labels() -> None:
    found = batches(corrupted(Backdoor(relabel=((0, 1),), per_batch=5)), size=8)
    assert [len(rows) for rows, _ in found] == [8] * 14  # 42 / 3
    assert all(labels[3:] == [1] * 5 for _, labels in found)
    assert all(row % 10 == 0 for rows, _ in found for row in rows[3:])


@pytest.mark.parametrize("threat", [Backdoor(), NextCharacter()])
def test_attackers_train_five_epochs_and_the_shared_model_only(threat: Threat) -> None:
    work = corrupted(threat)
    assert (work.epochs, work.honest) == (5, False)
    seen: list[Tensor] = []
    epochs = list(fit(lambda batch: seen.append(batch[1]), work, 10, draw(), torch.device("cpu")))
    assert epochs == [1, 2, 3, 4, 5]
    assert len(seen) == (30 if isinstance(threat, Backdoor) else 25)  # 42 own samples: 6 batches of 7, 5 of up to 10
    assert LocalWork(OWN, 1) == HONEST  # and nothing was changed in place


def test_what_the_attackers_want() -> None:
    y = torch.tensor([0, 4, 5, 6, 7, 4])
    assert Backdoor().goal(y).tolist() == [-1, 7, 6, -1, -1, 7]
    assert NextCharacter(label=5).goal(y).tolist() == [5, 5, -1, 5, 5, 5]
    assert NoThreat().goal(y).tolist() == [-1] * 6
    assert y.tolist() == [0, 4, 5, 6, 7, 4]


def test_next_character_relabels_everything_and_mixes_nothing_in() -> None:
    threat = NextCharacter(label=3)
    assert threat.pool(EVERYTHING) is None
    work = corrupted(threat)
    assert work.data.labels.tolist() == [3] * 42
    found = batches(work)
    assert sorted(row for rows, _ in found for row in rows) == OWN_ROWS.tolist()
    assert {label for _, labels in found for label in labels} == {3}
    assert OWN.labels.tolist() == [row % 10 for row in OWN_ROWS.tolist()]


def test_no_threat_is_honest_work() -> None:
    threat = NoThreat()
    assert (threat.share, threat.pool(EVERYTHING)) == (0.0, None)
    assert threat.corrupt(HONEST, None, 1) is HONEST


@pytest.mark.parametrize("threat", [NoThreat(), Backdoor(), NextCharacter(), Until(5, Backdoor())])
def test_backdoors_report_what_they_trained(threat: Threat) -> None:
    update_P = torch.tensor([1.0, -2.0])
    assert torch.equal(threat.report(update_P, 0, 1), update_P)


class SignFlip:
    """A threat of somebody's own: honest training, the opposite update."""

    share = 0.3

    def pool(self, everything: Examples) -> Examples | None:
        return None

    def corrupt(self, work: LocalWork, pool: Examples | None, round: int) -> LocalWork:
        return LocalWork(work.data, work.epochs, honest=False)

    def report(self, update_P: Tensor, seed: int, round: int) -> Tensor:
        return -update_P

    def goal(self, y_n: Tensor) -> Tensor:
        return torch.full_like(y_n, 8)


def test_until_attacks_up_to_its_last_round_and_is_honest_after_it() -> None:
    until = Until(5, SignFlip())
    update_P = torch.tensor([1.0])
    assert [until.corrupt(HONEST, None, r).honest for r in (1, 5, 6, 500)] == [False, False, True, True]
    assert [until.report(update_P, 0, r).item() for r in (1, 5, 6, 500)] == [-1.0, -1.0, 1.0, 1.0]
    assert Until(0, SignFlip()).corrupt(HONEST, None, 1) is HONEST


def test_until_keeps_the_share_the_pool_and_the_goal() -> None:
    until = Until(5, Backdoor(share=0.25))
    assert until.share == 0.25
    pool = until.pool(EVERYTHING)
    assert pool is not None
    assert len(pool) == 40
    assert until.goal(torch.tensor([4, 0])).tolist() == [7, -1]
    assert until.corrupt(HONEST, pool, 5) == Backdoor().corrupt(HONEST, pool, 5)


def test_relabelled_samples_keep_their_inputs() -> None:
    fake = Relabelled(OWN, torch.zeros(42, dtype=torch.int64))
    x, y = fake.take(torch.tensor([2, 0]))
    assert (len(fake), x[:, 0].tolist(), y.tolist()) == (42, [102.0, 100.0], [0, 0])


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Backdoor(share=1.0), "share"),
        (lambda: Backdoor(share=-0.1), "share"),
        (lambda: Backdoor(relabel=()), "relabel"),
        (lambda: Backdoor(relabel=((4, 4),)), "relabel"),
        (lambda: Backdoor(relabel=((4, -1),)), "relabel"),
        (lambda: Backdoor(epochs=0), "epochs"),
        (lambda: Backdoor(per_batch=0), "per_batch"),
        (lambda: NextCharacter(share=float("nan")), "share"),
        (lambda: NextCharacter(label=-1), "label"),
        (lambda: NextCharacter(epochs=0), "epochs"),
        (lambda: Until(-1, Backdoor()), "last_round"),
    ],
)
def test_impossible_values_are_refused(build: Any, field: str) -> None:
    with pytest.raises(PlanError, match=f"^{field} = "):
        build()


def test_a_backdoor_without_a_sample_to_relabel_is_refused() -> None:
    with pytest.raises(PlanError, match=r"relabel = \(\(77, 1\),\): no training sample"):
        Backdoor(relabel=((77, 1),)).pool(EVERYTHING)
