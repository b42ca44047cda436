"""The page as one file: `page/built.html`, alone for `lindt watch`, with the runs' values inside for `lindt report`."""

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
    """The page with values inside. No text of theirs can end the element they stand in, or begin another."""
    text = json.dumps({"runs": runs}, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    before, found, after = empty_page().partition(HOLE)
    assert found, "built.html has no place for the values; build it anew with `make page`"
    return f"{before}{HOLE.replace('null', text)}{after}"


def write_report(folders: Sequence[Path], out: Path) -> list[Run]:
    """One self-contained file of one run or several; returns what it holds. A folder of runs stands for them all."""
    runs = read_runs(folders)
    check_file(out)
    budgets = [privacy_spent_so_far(run) if budget_is_open(run) else privacy_spent(run) for run in runs]
    values = [whole_run(*each) for each in zip(runs, ids_of([run.folder for run in runs]), budgets, strict=True)]
    write_whole(out, page_with(values).encode())
    return runs


def ids_of(folders: Sequence[Path]) -> list[str]:
    """Each run by as few of its folders' names as tell it from the others: no machine's paths in a report."""
    parts = [folder.resolve().parts for folder in folders]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        ids = ["/".join(part[-length:]) for part in parts]
        if len(set(ids)) == len(ids):
            return ids
    return [f"run {n}" for n in range(1, len(folders) + 1)]


def script_hashes(page: str) -> tuple[str, str]:
    """The hashes of the page's own script and style, for a policy that lets no other run."""
    style = page.partition("<style>")[2].partition("</style>")[0]
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    return _hash(script), _hash(style)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
