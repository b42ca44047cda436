"""Notebooks of the documentation: run their cells, and show them as pages.

    python docs/generate/notebooks.py docs/tutorials/NAME.ipynb       # runs it and writes what its cells print into it

A notebook is JSON. Its code cells are run in order in one namespace, as a kernel does; of their output, text is kept.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(notebook: dict[str, Any]) -> list[str]:
    """Run the code cells; what each printed, and the value of its last expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    return [_run_cell(source(cell), names) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def _run_cell(code: str, names: dict[str, Any]) -> str:
    tree, said = ast.parse(code), io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(said):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
            if value is not None:
                said.write(f"{value!r}\n")
    return said.getvalue()


def with_outputs(notebook: dict[str, Any], said: list[str]) -> dict[str, Any]:
    """The notebook with this text under its code cells."""
    texts, cells = iter(said), []
    for number, cell in enumerate(notebook["cells"]):
        new = {**cell, "id": f"cell-{number}"}
        if cell["cell_type"] == "code":
            lines = next(texts).splitlines(keepends=True)
            new["execution_count"] = None
            new["outputs"] = [{"output_type": "stream", "name": "stdout", "text": lines}] if lines else []
        cells.append(new)
    return {**notebook, "cells": cells}


def as_markdown(path: Path) -> str:
    """The notebook as a page of the site: text, code, and what the code printed."""
    parts: list[str] = []
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        printed = "".join(line for output in cell["outputs"] for line in output["text"])
        if printed:
            parts.append(f"```text\n{printed.rstrip()}\n```")
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n[Download the notebook]({path.name}) to run it yourself.\n{rest}\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        found = read(Path(name))
        made = with_outputs(found, run(found))
        Path(name).write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
