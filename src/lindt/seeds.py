"""What makes a result the same each time: seeds, the state of random generators, the number of threads.

Seeds come from names, never from a shared stream. A result then survives reordering, resuming and a change of engine:
no generator's position has to be kept.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def seed_for(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose: `seed_for(plan.seed, "noise", r)`."""
    text = "/".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout draws from torch's global generator: give it a seed of its own, then put it back."""
    import torch  # here, as below: readers of runs need no torch

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # the same, without asking after every accelerator
        else:
            torch.manual_seed(seed)
        yield


@contextmanager
def isolated_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Work with seeds of our own, and leave the user's generators as they were found."""
    import numpy as np

    ours, theirs = random.getstate(), np.random.get_state()
    try:
        with seeded(seed, device):
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Compute with a plan's number of threads, which decides the last bits of sums; then restore the caller's."""
    import torch

    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
