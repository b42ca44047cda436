"""The comments of a source file, by line."""

from __future__ import annotations

import tokenize
from functools import cache
from pathlib import Path
from typing import Final

FOR_TOOLS: Final = ("noqa", "type:", "fmt:", "pragma")


@cache
def comments_of(file: Path) -> tuple[dict[int, str], frozenset[int]]:
    """The comment of each line that has one, and the lines that hold nothing else."""
    found: dict[int, str] = {}
    whole: set[int] = set()
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            text = token.string.lstrip("# ").strip()
            if token.type == tokenize.COMMENT and not text.startswith(FOR_TOOLS):
                line = token.start[0]
                found[line] = text
                if not token.line[: token.start[1]].strip():
                    whole.add(line)
    return found, frozenset(whole)


def comment_on(file: Path, first: int, last: int) -> str:
    """The comment behind a statement of these lines, else the lines of comment above it; empty where there is none."""
    found, whole = comments_of(file)
    if last in found:
        return found[last]
    above: list[str] = []
    while first - 1 in whole:
        first -= 1
        above.insert(0, found[first])
    return " ".join(above)
