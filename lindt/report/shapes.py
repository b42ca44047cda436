"""What a line of a run's files must look like to be read: run files are input, not our own words.

A shape is a type, a list of one shape, a table of shapes, or `Maybe` of one. A table may hold more than its shape
names, so that a newer lindt's extra fields do no harm. Whoever reads after this check needs no other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Maybe:
    """May be null, and may be missing."""

    shape: Any


@final
@dataclass(frozen=True)
class Named:
    """A table whose keys are names that the file chooses."""

    shape: Any


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
NUMBER, WHOLE, TEXT, FLAG = float, int, str, bool

SCORES = {
    "central": NUMBER,
    "local": NUMBER,
    "private": Maybe(NUMBER),
    "beta": Maybe(NUMBER),
    "harmed": Maybe(WHOLE),
    "clearly_harmed": Maybe(WHOLE),
    "ties": Maybe(WHOLE),
    "worst_tenth": Maybe(NUMBER),
    "attack_central": Maybe(NUMBER),
    "attack_local": Maybe(NUMBER),
    "clients": [
        {
            "client": WHOLE,
            "samples": WHOLE,
            "local": NUMBER,
            "private": Maybe(NUMBER),
            "beta": Maybe(NUMBER),
            "clear": FLAG,
        }
    ],
    "notes": Named(NUMBER),
}
ROUND = {
    "round": WHOLE,
    "asked": [WHOLE],
    "answered": [WHOLE],
    "refused": [{"client": WHOLE, "reason": TEXT}],
    **{name: Maybe(NUMBER) for name in ("w_div", "delta", "clean", "spread", "median", "clipped", "noise_norm")},
    "recovering": FLAG,
    "flag": FLAG,
    "count": WHOLE,
    "detections": WHOLE,
    "scores": Maybe(SCORES),
}
TIMING = {"round": WHOLE, "seconds": NUMBER}
ABOUT = {
    "run": TEXT,
    "name": TEXT,
    "task": Maybe(TEXT),
    "class_names": [TEXT],
    "metric_in_percent": FLAG,
    "clients": [{"client": WHOLE, "train": WHOLE, "test": WHOLE, "attacker": FLAG, "labels": Named(WHOLE)}],
    "versions": Maybe(Named(TEXT)),
}
SUMMARY = {
    "rounds": WHOLE,
    "scored_rounds": WHOLE,
    **{name: Maybe(NUMBER) for name in ("central", "local", "private", "beta", "worst_tenth")},
    **{name: Maybe(NUMBER) for name in ("attack_central", "attack_local")},
    **{name: Maybe(WHOLE) for name in ("harmed", "clearly_harmed", "ties")},
    "counted_clients": WHOLE,
    "detected_at": Maybe([WHOLE]),
    "metric_in_percent": FLAG,
    "privacy": Maybe({"words": TEXT, "epsilon": Maybe(NUMBER), "delta": Maybe(NUMBER)}),
}


def parsed(text: bytes, shape: Mapping[str, Any]) -> dict[str, Any] | None:
    """A table of that shape, or None: no JSON, another shape, a number that is none, a character that is none."""
    try:
        written = text.decode("utf-8")  # by itself json.loads would take UTF-16 too
        found = json.loads(written)
        if _HALF.search(written):
            json.dumps(found, ensure_ascii=False).encode()  # half a surrogate pair cannot be sent to a browser
        return found if isinstance(found, dict) and fits(found, shape) else None
    except (ValueError, RecursionError):  # also an integer of 5,000 digits
        return None


def fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, Maybe):
        return value is None or fits(value, shape.shape)
    if isinstance(shape, Named):
        return isinstance(value, dict) and all(fits(inner, shape.shape) for inner in value.values())
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(fits(value.get(name), inner) for name, inner in shape.items())
    if shape is float:
        # Neither NaN nor infinity, as which 1e999 is read; a whole number may be too large for any float.
        return type(value) in (int, float) and abs(value) < 1e300
    if shape is int:
        return type(value) is int and abs(value) < 2**53  # what a page's numbers can hold
    return type(value) is shape
