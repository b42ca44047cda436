"""The stored points of figure 1: results/traces-<scale>.jsonl, one line per panel. Never imports torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from lindt.errors import UserError
from lindt.runs.files import write_whole

PANELS = ("normal", "non-IID", "inactive", "attacked", "noised")  # (a) to (e)
Point = tuple[float, float]


@final
@dataclass(frozen=True)
class LocalUpdate:
    """One client's update in one round: from the received w to its w_i."""

    round: int
    client: int
    attacker: bool
    start: Point
    end: Point


@final
@dataclass(frozen=True)
class Traces:
    """One panel: w^0 is the origin, both axes are in units of weight."""

    panel: str
    setting: str  # in words
    scale: str
    seed: int
    plan: str  # content key of the plan: each plan is played once
    rounds: int
    parameters: int  # P
    shares: Point  # the share of the variance of the traces on each axis
    global_trace: tuple[Point, ...]  # w^0 to w^R
    central_trace: tuple[Point, ...]  # the centralized reference, from the same w^0
    updates: tuple[LocalUpdate, ...]
    w_div: tuple[float, ...]  # Eq. 5 of each round, in all P dimensions, which the plane cannot show
    turns: tuple[float, ...]  # degrees between successive steps of w, in all P dimensions
    command: str
    commit: str
    date: str
    seconds: float


def path_of(folder: Path, scale: str) -> Path:
    return folder / f"traces-{scale}.jsonl"


def keep(folder: Path, scale: str, panels: Iterable[Traces]) -> Path:
    """Add the panels, or replace those of the same seeds; the file is replaced as a whole."""
    new = list(panels)
    replaced = {(panel.panel, panel.seed) for panel in new}
    others = [kept for kept in load(folder, scale) if (kept.panel, kept.seed) not in replaced]
    lines = sorted([*others, *new], key=lambda traces: (traces.seed, PANELS.index(traces.panel)))
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, scale)
    text = "".join(json.dumps(asdict(traces), allow_nan=False, separators=(",", ":")) + "\n" for traces in lines)
    write_whole(path, text.encode())
    return path


def load(folder: Path, scale: str) -> list[Traces]:
    path = path_of(folder, scale)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [_traces(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _traces(line: str, where: str) -> Traces:
    try:
        table: dict[str, Any] = json.loads(line)
        if table["panel"] not in PANELS:
            raise ValueError(table["panel"])
        table["updates"] = tuple(
            LocalUpdate(**(update | {"start": _point(update["start"]), "end": _point(update["end"])}))
            for update in table["updates"]
        )
        for name in ("global_trace", "central_trace"):
            table[name] = tuple(_point(pair) for pair in table[name])
        for name in ("w_div", "turns"):
            table[name] = tuple(float(value) for value in table[name])
        return Traces(**(table | {"shares": _point(table["shares"])}))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}: not traces ({error}); make them again with `lindt reproduce figure1`") from None


def _point(pair: Any) -> Point:
    x, y = pair
    return float(x), float(y)
