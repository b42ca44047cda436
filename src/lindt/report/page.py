"""The page as one file: `page/built.html`. `lindt watch` serves it empty, `lindt report` writes the runs into it."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from lindt.report.payload import budget_is_open, privacy_spent, privacy_spent_so_far, whole_run
from lindt.report.reading import Run, check_file, read_runs
from lindt.runs.files import write_whole

HOLE = '<script type="application/json" id="data">null</script>'


def empty_page() -> str:
    return files("lindt.report").joinpath("page/built.html").read_text(encoding="utf-8")


def page_with(runs: Sequence[dict[str, Any]]) -> str:
    """The page with the runs' values in it. No text in the values can end the element that holds them."""
    text = json.dumps({"runs": runs}, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    before, found, after = empty_page().partition(HOLE)
    assert found, "built.html has no element for the values; build it again with `make page`"
    return f"{before}{HOLE.replace('null', text)}{after}"


def write_report(folders: Sequence[Path], out: Path, named: str = "-o") -> list[Run]:
    """Write one self-contained file about one run or several; returns the runs. A folder means all runs in it."""
    runs = read_runs(folders)
    check_file(out, named)
    budgets = [privacy_spent_so_far(run) if budget_is_open(run) else privacy_spent(run) for run in runs]
    values = [whole_run(*each) for each in zip(runs, ids_of([run.folder for run in runs]), budgets, strict=True)]
    write_whole(out, page_with(values).encode())
    return runs


def ids_of(folders: Sequence[Path]) -> list[str]:
    """An id for each run: as few of its last folder names as make it unique, because a report names no full paths."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        ids = ["/".join(part[-length:]) for part in parts]
        if len(set(ids)) == len(ids):
            return ids
    return [f"run {n}" for n in range(1, len(folders) + 1)]


def script_hashes(page: str) -> tuple[str, str]:
    """The hashes of the page's own script and style, for a policy that allows no others."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    return _hash(script), _hash(style)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
