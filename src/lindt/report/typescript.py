"""The page's types of a round, its scores and a summary: `make page` writes them into page/src/schema.ts.

The shapes are those of `lindt.report.payload`, which takes their fields from `lindt.runs.schema`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lindt.report.payload import PAGE_ROUND, PAGE_SCORES, PAGE_SUMMARY
from lindt.runs.schema import DECISION, DETECTION, FLAG, NUMBER, REFUSAL, STATISTICS, TEXT, WHOLE, MapOf, Nullable

TARGET = Path(__file__).parent / "page" / "src" / "schema.ts"
HEAD = """\
// Written by lindt/report/typescript.py from lindt/runs/schema.py: change the fields there, then run `make page`.
// Rates and gains are fractions.
"""
INTERFACES: dict[str, dict[str, Any]] = {
    "Refusal": REFUSAL,
    "Decision": DECISION,
    "Detection": DETECTION,
    "Scores": PAGE_SCORES,
    "Round": PAGE_ROUND,
    "Summary": PAGE_SUMMARY,
}
SCALARS: dict[type, str] = {NUMBER: "number", WHOLE: "number", TEXT: "string", FLAG: "boolean"}


def page_types() -> str:
    """The text of page/src/schema.ts."""
    statistics = " | ".join(f'"{name}"' for name in STATISTICS)
    parts = [HEAD, f"export type Statistic = {statistics};\n"]
    for title, fields in INTERFACES.items():
        lines = "".join(f"  {name}: {_type(shape)};\n" for name, shape in fields.items())
        parts.append(f"export interface {title} {{\n{lines}}}\n")
    return "\n".join(parts)


def _type(shape: Any) -> str:
    if isinstance(shape, Nullable):
        return f"{_type(shape.shape)} | null"
    if isinstance(shape, MapOf):
        return f"Record<string, {_type(shape.shape)}>"
    if isinstance(shape, list):
        item = _type(shape[0])
        return f"({item})[]" if " " in item else f"{item}[]"
    if isinstance(shape, dict):
        return next(title for title, fields in INTERFACES.items() if fields is shape)
    return SCALARS[shape]


if __name__ == "__main__":
    TARGET.write_text(page_types(), encoding="utf-8")
