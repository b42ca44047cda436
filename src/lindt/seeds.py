"""Reproducibility: seeds, the state of random generators, the number of threads.

Seeds are derived from names, never from a shared stream. So a result does not depend on the order of work, on resuming
or on the engine, and no generator's state has to be stored.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

# The generators and the number of threads belong to the process. Runs in several threads take turns: otherwise one
# would draw from the other's seed, and restore its state.
_ours: Final = threading.RLock()


def seed_for(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose: `seed_for(plan.seed, "noise", r)`."""
    text = "/".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generator, which dropout draws from, and restore its state at the end."""
    import torch  # here, as below: readers of runs need no torch

    with _ours, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type == "cpu":
            torch.default_generator.manual_seed(seed)  # the same, without a call to each accelerator
        else:
            torch.manual_seed(seed)
        yield


@contextmanager
def isolated_random_state(seed: int, device: torch.device) -> Iterator[None]:
    """Seed all generators for the block, and restore the user's states at the end."""
    import numpy as np

    with seeded(seed, device):
        pythons, numpys = random.getstate(), np.random.get_state()
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            random.setstate(pythons)
            np.random.set_state(numpys)


@contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Compute with a plan's number of threads, which decides the last bits of sums; then restore the caller's."""
    import torch

    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    with _ours:
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
