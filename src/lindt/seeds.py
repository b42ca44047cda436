"""Seeds come from names, never from a shared stream.

A result then survives reordering, resuming and a change of engine: no generator's position has to be kept.
"""

from __future__ import annotations

import hashlib


def seed_for(seed: int, *names: str | int) -> int:
    """A 63-bit seed for one purpose: `seed_for(plan.seed, "noise", r)`."""
    text = "/".join([str(seed), *(str(name) for name in names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
