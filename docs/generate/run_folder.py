"""The reference of a run's files, from `lindt.runs.schema`: each field with its type and its meaning.

python docs/generate/run_folder.py          # prints it
"""

from __future__ import annotations

import sys
from typing import Any, Final

from lindt.runs.schema import MEANINGS, MapOf, Nullable, kind

WORDS: Final = {float: "number", int: "whole number", str: "text", bool: "true or false"}


def markdown() -> str:
    """A section for each file, a table for each table in it."""
    lines: list[str] = []
    for name, (shape, meanings) in MEANINGS.items():
        lines += [f"{'###' if ':' in name else '##'} {name}", "", "| field | type | meaning |", "|---|---|---|"]
        lines += [f"| `{field}` | {words(inner)} | {meanings[field]} |" for field, inner in shape.items()]
        lines.append("")
    return "\n".join(lines)


def words(shape: Any) -> str:
    """A shape as a reader says it; a value that may be null may be missing, too."""
    inner = kind(shape)
    if isinstance(inner, list):
        found = f"list of {'tables' if isinstance(inner[0], dict) else words(inner[0]) + 's'}"
    elif isinstance(inner, MapOf):
        found = f"table of names, each with a {words(inner.shape)}"
    else:
        found = "table" if isinstance(inner, dict) else WORDS[inner]
    return f"{found} or null" if isinstance(shape, Nullable) else found


if __name__ == "__main__":
    sys.stdout.write(markdown())
