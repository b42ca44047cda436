"""The level of the gain test under exact nulls, and its power: simulated once, in results/detectors-nulls-<scale>.json.

The simulation is `detectors/nulls.py`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from lindt.protocols import Detection
from lindt.registry import component
from lindt.runs.files import write_whole
from lindt_experiments.detectors import nulls
from lindt_experiments.detectors.statistics import Share
from lindt_experiments.tables.sheets import Sheet

# The rounds of the cases of a scale, and the number of simulated runs of each case.
LENGTHS: Final[dict[str, dict[int, int]]] = {"smoke": {12: 5}, "cpu": {60: 600, 500: 100}}


def path_of(results: Path, scale: str) -> Path:
    return results / f"detectors-nulls-{scale}.json"


def measure(results: Path, scale: str, again: bool = False) -> Path:
    """Simulate the cases that are not stored yet."""
    path = path_of(results, scale)
    if path.exists() and not again:
        return path
    test = component(Detection, "gain")
    rows = [row for length, runs in LENGTHS[scale].items() for row in nulls.rates(test, nulls.nulls((length,)), runs)]
    length, runs = next(iter(LENGTHS[scale].items()))
    rows += nulls.rates(test, nulls.alternatives(length), runs)
    kept = [{"case": asdict(row.case), "runs": row.runs, **_counts(row)} for row in rows]
    results.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"alpha": test.alpha, "rows": kept}, indent=1) + "\n"
    write_whole(path, text.encode())
    return path


def _counts(row: nulls.Row) -> dict[str, int]:
    names = ("hurts_ever", "hurts_at_end", "warned")
    return {name: round(getattr(row, name).share * row.runs) for name in names}


def read(results: Path, scale: str) -> dict[str, Any] | None:
    path = path_of(results, scale)
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def worst(kept: dict[str, Any]) -> Share:
    """The case with the largest share of false "hurts"."""
    rows = [Share(row["hurts_ever"], row["runs"]) for row in kept["rows"] if not row["case"]["gain"]]
    return max(rows, key=lambda share: share.value or 0.0)


def sheets(kept: dict[str, Any]) -> list[Sheet]:
    """The level under the nulls, and the power where the gain is below 0."""
    nulls = [row for row in kept["rows"] if not row["case"]["gain"]]
    others = [row for row in kept["rows"] if row["case"]["gain"]]
    remark = (
        f"Simulated, {nulls[0]['case']['samples']} validation samples a client. The level of the test is "
        f"{kept['alpha']:g}; the early warning has the same level, for itself."
    )
    level = ("a true gain of 0 on unlimited data", 'false "hurts" in any round', "at the end", "early warning")
    power = ("a true gain below 0", '"hurts" in any round', "at the end", "early warning")
    found = [Sheet("The level under exact nulls", level, tuple(map(_shown, nulls)), (remark,))]
    if others:
        remark = "Simulated in the same way: how often the test finds a gain of that size."
        found.append(Sheet("The power", power, tuple(map(_shown, others)), (remark,)))
    return found


def _shown(row: dict[str, Any]) -> tuple[str, ...]:
    case = row["case"]
    words = f"{case['reporting']} of {case['clients']} clients report, {case['rounds']} rounds"
    if case["gain"]:
        words = f"{100 * case['gain']:g} points, {case['samples']} validation samples a client, {words}"
    drift = "constant w" if not case["drift"] else f"drifting w, {case['drift']:g} of the samples a round"
    shares = (str(Share(row[name], row["runs"])) for name in ("hurts_ever", "hurts_at_end", "warned"))
    return (f"{words}, {drift}", *shares)
