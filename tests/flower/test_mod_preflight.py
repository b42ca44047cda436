"""Dual looks at its client's own data and model when it is first met, and warns in the client's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from mistakes import MISTAKES, Mistake, no_mistake
from small_apps import heard
from test_mod import context_of, mod, net, own_app, play, samples
from test_mod_gain import asked

from lindt.flower.protocol import instruction_of
from lindt.plan.problem import Problem

FOUND = "client 0: its test data are its training data"


@pytest.fixture(scope="module")
def grid() -> Any:
    return play(own_app([]), rounds=1, epsilon=1e9)


def said(grid: Any, folder: Path, rounds: int = 1, reports: bool = True, **settings: Any) -> list[str]:
    own = own_app([mod(folder, **settings)])
    with heard() as log:
        for round in range(1, rounds + 1):
            assert not own(asked(grid, net(), round, reports=reports), context_of(grid)).has_error()
    return [text for text in log if text.startswith("! ")]


def same(context: Any, _split: str) -> Any:
    return samples(context, "train")


def test_a_healthy_client_warns_of_nothing(grid: Any, tmp_path: Path) -> None:
    assert said(grid, tmp_path, private_epochs=1) == []


def test_test_data_that_are_trained_on_are_told_once(grid: Any, tmp_path: Path) -> None:
    log = said(grid, tmp_path, rounds=2, data=same, private_epochs=1)
    assert sum(text.startswith(f"! {FOUND}") for text in log) == 1


def test_it_can_be_left_out(grid: Any, tmp_path: Path) -> None:
    log = said(grid, tmp_path, rounds=2, data=same, private_epochs=1, preflight=False)
    assert not any(FOUND in text for text in log)
    assert log.count("! client 0: the checks before training were left out") == 1


def test_a_client_without_a_private_model_needs_no_test_data(grid: Any, tmp_path: Path) -> None:
    def train_only(context: Any, split: str) -> Any:
        assert split == "train"
        return samples(context, split)

    assert said(grid, tmp_path, reports=False, data=train_only) == []


def told_of(grid: Any, folder: Path, problem: Problem) -> list[str]:
    """What client 0 of a problem says when it is first met. The user's own training is not called for."""
    train, test = problem.clients[0]
    own = mod(
        folder,
        model=lambda _: problem.model(),
        data=lambda _, split: train if split == "train" else test,
        loss=problem.loss,
        private_epochs=1,
        **({} if problem.metric is None else {"metric": problem.metric}),
    )
    message = asked(grid, problem.model())
    with heard() as log:
        own._check(message, context_of(grid), instruction_of(message))
    return [text for text in log if text.startswith("! ")]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.task)
def test_a_client_tells_of_each_mistake_that_it_can_see(grid: Any, tmp_path: Path, mistake: Mistake) -> None:
    """Data that two clients share can be seen by neither of them."""
    log = told_of(grid, tmp_path, mistake.problem())
    assert any(mistake.said in text for text in log) is mistake.one_client_sees_it
    assert told_of(grid, tmp_path, no_mistake()) == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_client_with_one_sample_says_why_it_does_not_report_and_still_answers(
    grid: Any, tmp_path: Path, split: str
) -> None:
    def one(context: Any, which: str) -> Any:
        x, y = samples(context, which)
        return (x[:1], y[:1]) if which == split else (x, y)

    log = said(grid, tmp_path, data=one)
    assert any("client 0: no report: " in text and f"its {split} data have 1 sample" in text for text in log)


def test_a_folder_that_cannot_be_written_is_named_and_the_app_still_trains(grid: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (text,) = said(grid, tmp_path / "file", private_epochs=1)
    assert text.startswith(f"! client 0: no report: the folder of its models, {tmp_path / 'file'}, cannot be")
