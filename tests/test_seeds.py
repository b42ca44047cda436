"""Random generators and the number of threads in a process with several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from lindt.seeds import isolated_random_state, seeded, with_threads

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", [seeded, isolated_random_state])
def test_a_block_of_another_thread_waits_and_leaves_the_callers_state(
    block: Callable[[int, torch.device], AbstractContextManager[None]],
) -> None:
    before = torch.get_rng_state()
    entered, left = threading.Event(), threading.Event()
    drawn: list[torch.Tensor] = []

    def first() -> None:
        with block(1, CPU):
            entered.set()
            other_is_inside.wait(0.3)
            drawn.append(torch.rand(3))
        left.set()

    def second() -> None:
        entered.wait()
        with block(2, CPU):
            other_is_inside.set()
            left.wait(0.3)
            drawn.append(torch.rand(3))

    other_is_inside = threading.Event()
    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = [torch.rand(3, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    assert torch.equal(torch.stack(drawn), torch.stack(alone))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_number_of_threads_holds_until_the_block_ends() -> None:
    inside = threading.Event()

    def other() -> None:
        torch.set_num_threads(3)  # of a new thread
        with with_threads(2):
            inside.set()

    with seeded(0, CPU), with_threads(torch.get_num_threads() + 1):
        thread = threading.Thread(target=other)
        thread.start()
        assert not inside.wait(0.2)
    thread.join()
    assert inside.is_set()
