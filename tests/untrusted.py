"""Changed copies of good inputs, for property tests of what meets untrusted bytes. The targets are the fuzzer's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent / "torture"))
import fuzz_seeds as seeds
from fuzz_targets import TARGETS, asked

__all__ = ["TARGETS", "asked", "changed", "fed", "seeds"]

# What parsers stumble over: nesting, numbers that are none, half a character, ways out of a folder.
BITS = [
    b"", b"\0", b"\n", b"[" * 3000, b"{", b"}", b'"', b"'", b"\xff", b"\\ud800", b"../", b"/", b"%00", b"%2e%2e%2f",
    b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"9" * 30, b"9" * 5000, b"0x" + b"f" * 5000, b"null", b"[]", b"{}",
    b"a." * 100, b"=", b"\r\n", b"\x7f" * 8, b"\x00" * 512,
]  # fmt: skip


@st.composite
def changed(draw: Callable[..., Any], seeds: list[bytes]) -> bytes:
    """A good input with up to four pieces of it replaced, cut out, repeated, or taken from another."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        a = draw(st.integers(0, len(data)))
        b = min(len(data), a + draw(st.integers(0, 40)))
        other = draw(st.sampled_from(seeds))
        c = draw(st.integers(0, len(other)))
        piece = draw(
            st.sampled_from(BITS)
            | st.binary(max_size=8)
            | st.just(data[a:b] * 2)
            | st.just(other[c : c + draw(st.integers(0, 200))])
        )
        data = data[:a] + piece + data[b:]
    return bytes(data)


def fed(name: str) -> tuple[Callable[[bytes], None], st.SearchStrategy[bytes]]:
    """A target and what to feed it."""
    target, seeds = TARGETS[name]
    return target, changed(seeds())
