"""What a run's files hold, field by field: the one description that writers, readers, tables, trackers and page share.

Run files are input: a line is checked against its shape before it is read. A shape is a type, a list of one shape, a
table of shapes, or `Nullable` of one. A table may hold more than its shape names, so that a newer lindt's extra fields
do no harm.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True)
class Nullable:
    """May be null, and may be missing."""

    shape: Any


@final
@dataclass(frozen=True)
class MapOf:
    """A table whose keys are names that the file chooses."""

    shape: Any


def kind(shape: Any) -> Any:
    """The shape of a value that is there."""
    return shape.shape if isinstance(shape, Nullable) else shape


NUMBER, WHOLE, TEXT, FLAG = float, int, str, bool
# The numbers of a scored round, by the names that they have in `server.scores.Scores`. To add one, compute it there and
# name it here: lines, summaries, tables, trackers, Flower's metrics and the page follow. A NUMBER is averaged in the
# summary, a WHOLE is that of the last scored round. A new one is Nullable: earlier runs do not have it.
SCORES: dict[str, Any] = {
    "central": Nullable(NUMBER),  # null where the method has no whole global model
    "local": NUMBER,
    "private": Nullable(NUMBER),
    "beta": Nullable(NUMBER),
    "worst_tenth": Nullable(NUMBER),
    "median_gain": Nullable(NUMBER),
    "ipr": Nullable(NUMBER),
    "attack_central": Nullable(NUMBER),
    "attack_local": Nullable(NUMBER),
    "harmed": Nullable(WHOLE),
    "clearly_harmed": Nullable(WHOLE),
    "clearly_better": Nullable(WHOLE),
    "ties": Nullable(WHOLE),
}
# One client in a scored round: `server.scores.ClientScore`.
CLIENT_SCORE: dict[str, Any] = {
    "client": WHOLE,
    "samples": WHOLE,
    "local": NUMBER,
    "private": Nullable(NUMBER),
    "beta": Nullable(NUMBER),
    "clear": FLAG,
}
# What the server measures in a round: `protocols.Divergence`. Missing where no valid update came back.
DIVERGENCE: dict[str, Any] = {
    name: Nullable(NUMBER)
    for name in ("w_div", "delta", "clean", "spread", "median", "clipped", "noise_norm", "cosine")
}  # earlier runs have no `cosine`
STATISTICS = ("delta", "clean", "spread", "median")  # of DIVERGENCE, those that a detector may watch
REFUSAL = {"client": WHOLE, "reason": TEXT}
# A client's report of its gain on its validation part: `protocols.GainReport`.
PAIRED: dict[str, Any] = {"mean": NUMBER, "square": NUMBER}
REPORT: dict[str, Any] = {
    "samples": WHOLE,
    "private": PAIRED,
    "equal_age": PAIRED,
    "adapted": Nullable(PAIRED),
    "adapted_private": Nullable(PAIRED),
    "first_batch": Nullable(NUMBER),
}
# What the test of the reports says after a round: `protocols.DetectionState`.
DECISION: dict[str, Any] = {
    "state": TEXT,
    "since": Nullable(WHOLE),
    "gain": Nullable(NUMBER),
    "error": Nullable(NUMBER),
    "clients": WHOLE,
    "samples": WHOLE,
    "needed": Nullable(WHOLE),
}
DETECTION: dict[str, Any] = {
    "verdict": DECISION,
    "warning": Nullable(WHOLE),
    "recovery": Nullable(DECISION),
    "recovered": Nullable(DECISION),
}
REPORTED = ("reports", "detection")  # fields of a line that are missing where clients report nothing
SOMETIMES = ("buffer_div", "reachable")  # ... and those that are missing where there is nothing to say
NOT_NAMED = -1  # in place of a client's number, where a run withholds who took part
# A line of rounds.jsonl: the fields of a RoundResult, of its Divergence and of its RecoveryState, whose `on` is `flag`.
ROUND: dict[str, Any] = {
    "round": WHOLE,
    "asked": [WHOLE],
    "answered": [WHOLE],
    "refused": [REFUSAL],
    **DIVERGENCE,
    "buffer_div": Nullable(NUMBER),  # missing where the model has no float buffers, and in earlier runs
    "reachable": Nullable(WHOLE),  # clients that could have been asked; missing where all N could
    "recovering": FLAG,
    "flag": FLAG,
    "count": WHOLE,
    "quiet": Nullable(WHOLE),
    "detections": WHOLE,
    "scores": Nullable(SCORES | {"clients": [CLIENT_SCORE], "notes": MapOf(NUMBER)}),
    "reports": Nullable([{"client": WHOLE} | REPORT]),
    "detection": Nullable(DETECTION),
}
# nodes.json of a run on Flower, sealed: the node of each client with the public key that it proved to have, and the
# nodes that claimed a client of another one. Flower's ids have 64 bits and are written as text.
NODES_FILE = "nodes.json"
NODES: dict[str, Any] = {
    "run": TEXT,
    "holders": [{"client": WHOLE, "node": TEXT, "key": TEXT}],
    "refused": [{"node": TEXT, "clients": [WHOLE]}],
}
# What was looked at before training, and what of it may be a mistake: `server.preflight.Checks`. Missing in runs of
# earlier versions; `made` is false where the checks were left out.
CHECKS: dict[str, Any] = {"made": FLAG, "warnings": [TEXT], "looked_at": Nullable(MapOf(TEXT))}
TIMING = {"round": WHOLE, "seconds": NUMBER}
ABOUT = {
    "run": TEXT,
    "name": TEXT,
    "task": Nullable(TEXT),
    "class_names": [TEXT],
    "metric_in_percent": FLAG,
    "clients": [{"client": WHOLE, "train": WHOLE, "test": WHOLE, "attacker": FLAG, "labels": MapOf(WHOLE)}],
    "versions": Nullable(MapOf(TEXT)),
    "checks": Nullable(CHECKS),
    "noise": Nullable(TEXT),  # where noise comes from: plan or system; missing in earlier runs, whose noise was torch's
    "attempts": Nullable(WHOLE),  # on a deployment: how often the server was started
    "stopped": Nullable(FLAG),  # whether somebody stopped the run before its end; resuming it takes the mark away
    "withheld": Nullable(FLAG),  # whether the folder leaves out who took part and what is measured without noise
}
SUMMARY: dict[str, Any] = {
    "rounds": WHOLE,
    "scored_rounds": WHOLE,
    **{name: Nullable(kind(shape)) for name, shape in SCORES.items()},
    "counted_clients": WHOLE,
    "negative": Nullable(FLAG),
    "detected_at": Nullable([WHOLE]),
    "stopped_at": Nullable([WHOLE]),
    "recovery_rounds": Nullable(WHOLE),
    "refused_updates": Nullable(WHOLE),
    "metric_in_percent": FLAG,
    "detection": Nullable(DETECTION),  # after the last round
    "checks": Nullable(CHECKS),
    # What guarded prediction costs a client; missing where the method does not guard.
    "prediction": Nullable({"models": WHOLE, "weights": WHOLE, "words": TEXT}),
    "privacy": Nullable({"words": TEXT, "epsilon": Nullable(NUMBER), "delta": Nullable(NUMBER)}),
}


def record(value: Any, shape: Any) -> Any:
    """Plain values to write: of an object the attributes that `shape` names, and no others."""
    if value is None:
        return None
    shape = kind(shape)
    if isinstance(shape, MapOf):
        return dict(value)
    if isinstance(shape, list):
        return [record(item, shape[0]) for item in value]
    if isinstance(shape, dict):
        return {name: record(getattr(value, name), inner) for name, inner in shape.items()}
    return value


_HALF = re.compile(r"\\u[dD][89a-fA-F]")


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
    if isinstance(shape, Nullable):
        return value is None or fits(value, shape.shape)
    if isinstance(shape, MapOf):
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
