"""TOML that anybody may have written, into tables: bounded in size, in depth and in the time it takes to read.

The time is no formality: Python's reader takes quadratic time for `a.a.a.a = 1`. A file of 100 KB holds it for minutes.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

MOST_CHARACTERS: Final = 2 << 20  # the weights of 100,000 clients
MOST_PARTS: Final = 32  # of a dotted key
DEEPEST: Final = 64  # tables in tables; a plan's reach to 5
# Bare or quoted parts, each with the dot after it. Possessive, and begun only where a part can begin: linear.
_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY: Final = re.compile(rf"(?<![A-Za-z0-9_\\-])(?:{_PART}){{{MOST_PARTS}}}")


def read_toml(text: str, bits: int | None = None) -> dict[str, Any]:
    """The tables, or ValueError; with `bits`, also where a whole number in them has more."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, more than {MOST_CHARACTERS}")
    if _LONG_KEY.search(text):
        raise ValueError(f"a key has more than {MOST_PARTS} parts")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
    waiting: list[tuple[Any, int]] = [(found, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise ValueError("its lists or tables are nested too deeply")
        if isinstance(value, dict | list):
            waiting += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]
        elif bits is not None and isinstance(value, int) and value.bit_length() > bits:
            raise ValueError(f"a number of {value.bit_length()} bits")
    return found
