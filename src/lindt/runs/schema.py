"""The fields of a run's files: the one description that writers, readers, tables, trackers and the page share.

Run files are input: a line is checked against its shape before it is used. A shape is a type, a list of one shape, a
table of shapes, or a `Nullable` shape. A table may hold more fields than its shape names, so that files of a newer
lindt can be read.
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
    """The shape without `Nullable`: that of a value which is present."""
    return shape.shape if isinstance(shape, Nullable) else shape


NUMBER, WHOLE, TEXT, FLAG = float, int, str, bool
# The numbers of a scored round, by their names in `server.scores.Scores`. To add a number, compute it there and name it
# here: lines, summaries, tables, trackers, Flower's metrics and the page then have it. In the summary a NUMBER is the
# mean over scored rounds, a WHOLE is that of the last scored round. Make a new number Nullable: earlier runs lack it.
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
# Of a panel of clients that stands for all: `server.scores.Panel`. Missing where all clients are scored.
PANEL: dict[str, Any] = {
    "expected": WHOLE,
    "clients": WHOLE,
    "of": WHOLE,
    "beta_low": Nullable(NUMBER),
    "beta_high": Nullable(NUMBER),
    "ipr_low": Nullable(NUMBER),
    "ipr_high": Nullable(NUMBER),
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
SOMETIMES = ("buffer_div", "reachable")  # fields of a line that are missing where they are None
# Of Flower runs: a note with the share of clients whose model was chosen on the data on which it is scored, what that
# means, and the adaptation in plan.toml where clients are never asked to recover.
CHOSEN = "chosen on the same data"
BEST_OF = "predict with the best of w, v_i and P_i on {} data, so that none can score worse than alone on {}"
DETECTION_ONLY = "detection_only"
NOT_NAMED = -1  # in place of a client's number, where a run withholds which clients took part
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
    "scores": Nullable(SCORES | {"clients": [CLIENT_SCORE], "notes": MapOf(NUMBER), "panel": Nullable(PANEL)}),
    "reports": Nullable([{"client": WHOLE} | REPORT]),
    "detection": Nullable(DETECTION),
}
# nodes.json of a run on Flower, sealed: the node of each client with the public key that it proved to have, and the
# nodes that claimed a client of another node. Flower's ids have 64 bits and are written as text.
NODES_FILE = "nodes.json"
NODES: dict[str, Any] = {
    "run": TEXT,
    "holders": [{"client": WHOLE, "node": TEXT, "key": TEXT}],
    "refused": [{"node": TEXT, "clients": [WHOLE]}],
}
# The checks before training and their warnings: `server.preflight.Checks`. Missing in runs of earlier versions; `made`
# is false where the checks were left out.
CHECKS: dict[str, Any] = {"made": FLAG, "warnings": [TEXT], "looked_at": Nullable(MapOf(TEXT))}
TIMING = {"round": WHOLE, "seconds": NUMBER}
# `task` of a run whose data and model come neither from the plan nor from a function: readers cannot load them.
FROM_FLOWER, FROM_PYTHON = "a Flower app", "Python objects"
ABOUT: dict[str, Any] = {
    "run": TEXT,
    "name": TEXT,
    "task": Nullable(TEXT),
    "class_names": [TEXT],
    "metric_in_percent": FLAG,
    "clients": [{"client": WHOLE, "train": WHOLE, "test": WHOLE, "attacker": FLAG, "labels": MapOf(WHOLE)}],
    "population": Nullable(WHOLE),  # N, where `clients` has only the panel of lazy clients
    "versions": Nullable(MapOf(TEXT)),
    "checks": Nullable(CHECKS),
    "noise": Nullable(TEXT),  # where noise comes from: plan or system; missing in earlier runs, whose noise was torch's
    "attempts": Nullable(WHOLE),  # on a deployment: how often the server was started
    "stopped": Nullable(FLAG),  # whether the user stopped the run before its end; removed when the run is resumed
    "keeps": Nullable([WHOLE]),  # the rounds whose checkpoints are kept for runs that branch; else missing
    "branched": Nullable({"run": TEXT, "name": TEXT, "round": WHOLE}),  # missing in a run with rounds of its own only
    "optimizer": Nullable(TEXT),  # the task's own optimizer, which the plan does not name; else missing
    "withheld": Nullable(FLAG),  # whether the folder omits which clients took part and measurements without noise
}
# A line of clients.jsonl, and of a lazy client in run.json: as there, with the round of the first visit and a hash.
VISITED: dict[str, Any] = {"round": WHOLE, **ABOUT["clients"][0], "data": TEXT}
SUMMARY: dict[str, Any] = {
    "rounds": WHOLE,
    "scored_rounds": WHOLE,
    **{name: Nullable(kind(shape)) for name, shape in SCORES.items()},
    "counted_clients": WHOLE,
    "panel": Nullable(PANEL),  # missing where all clients are scored
    "negative": Nullable(FLAG),
    "detected_at": Nullable([WHOLE]),
    "stopped_at": Nullable([WHOLE]),
    "recovery_rounds": Nullable(WHOLE),
    "refused_updates": Nullable(WHOLE),
    "metric_in_percent": FLAG,
    "detection": Nullable(DETECTION),  # after the last round
    "checks": Nullable(CHECKS),
    # What guarded prediction costs a client; missing for methods without guarded prediction.
    "prediction": Nullable({"models": WHOLE, "weights": WHOLE, "words": TEXT}),
    # Missing where the plan does not stop early. The final models are those of the best round.
    "early_stop": Nullable(
        {"best_round": WHOLE, "validation_score": NUMBER, "stopped_at": Nullable(WHOLE), "words": TEXT}
    ),
    "privacy": Nullable({"words": TEXT, "epsilon": Nullable(NUMBER), "delta": Nullable(NUMBER)}),
}

# The tables of these files and the meaning of each field, for the documentation's page about the run folder. A field
# that is added above is explained here (tests/runs/test_schema.py).
MEANINGS: dict[str, tuple[Mapping[str, Any], dict[str, str]]] = {
    "rounds.jsonl": (
        ROUND,
        {
            "round": "the round, from 1",
            "asked": "the clients that were asked to train",
            "answered": "the clients whose update was taken",
            "refused": "the clients whose update was refused, with the reason",
            "w_div": "mean distance of the clients' weights from the new global weights (Eq. 5)",
            "delta": "Delta: w_div less the length of the noise (Eq. 7)",
            "clean": "w_div around the aggregate before noise",
            "spread": "mean distance of the clipped updates from their plain mean",
            "median": "Delta with the median over clients in place of the mean",
            "clipped": "share of the updates that clipping shortened",
            "noise_norm": "length of the noise that the server added",
            "cosine": "mean cosine of the updates of the last layer, over pairs of clients",
            "buffer_div": "mean distance of the clients' float buffers from the joined ones",
            "reachable": "how many clients could have been asked; missing where all could",
            "recovering": "whether clients trained for recovery in this round",
            "flag": "whether clients will train for recovery in the next round",
            "count": "rounds so far in which the statistic was above epsilon (the paper's rule)",
            "quiet": "consecutive rounds below epsilon up to this one, which a stopping rule counts",
            "detections": "how often recovery has been switched on",
            "scores": "test scores; null in a round that is not scored",
            "reports": "the clients' reports of their gains on validation data",
            "detection": "the results of the test on these reports, after the round",
        },
    ),
    "rounds.jsonl: refused": (REFUSAL, {"client": "the client", "reason": "why its update was refused"}),
    "rounds.jsonl: scores": (
        SCORES | {"clients": [CLIENT_SCORE], "notes": MapOf(NUMBER), "panel": Nullable(PANEL)},
        {
            "central": "score of the global model on all test data; null where the method has no whole global model",
            "local": "mean score of what each client predicts with, on its own test data",
            "private": "mean score of the models that clients trained alone",
            "beta": "mean gain: the weighted mean of beta_i (Eq. 3)",
            "worst_tenth": "mean beta_i of the tenth of the clients that gain least",
            "median_gain": "median of beta_i",
            "ipr": "share of the clients with beta_i >= 0",
            "attack_central": "how often the backdoor gets its label from the global model",
            "attack_local": "how often the backdoor gets its label from the models that clients predict with",
            "harmed": "clients with beta_i < 0",
            "clearly_harmed": "clients with beta_i < 0 by more than chance explains (paired test, 95%)",
            "clearly_better": "clients with beta_i > 0 by the same test",
            "ties": "clients with beta_i = 0",
            "clients": "one entry for each client",
            "notes": "numbers that the method logs, averaged over the clients that log them",
            "panel": "intervals for all clients; missing where all are scored",
        },
    ),
    "rounds.jsonl and summary.json: panel": (
        PANEL,
        {
            "expected": "clients on the panel whose gain counts",
            "clients": "those of them with a known gain",
            "of": "clients that the panel stands for",
            "beta_low": "lower end of the 95% interval of the mean gain of all clients",
            "beta_high": "its upper end",
            "ipr_low": "lower end of the 95% interval of the share of all clients that are not worse off",
            "ipr_high": "its upper end",
        },
    ),
    "rounds.jsonl: scores.clients": (
        CLIENT_SCORE,
        {
            "client": "the client",
            "samples": "its test samples",
            "local": "score of what it predicts with",
            "private": "score of the model that it trained alone",
            "beta": "beta_i: local less private (Eq. 2)",
            "clear": "whether |beta_i| is more than chance explains (paired test, 95%)",
        },
    ),
    "rounds.jsonl: reports": (
        {"client": WHOLE} | REPORT,
        {
            "client": "the client",
            "samples": "its validation samples",
            "private": "the received global model against the finished private model",
            "equal_age": "the received global model against the private model after as many epochs",
            "adapted": "in recovery: what the client predicts with, against the global model",
            "adapted_private": "in recovery: what the client predicts with, against the private model",
            "first_batch": "score of the global model on the first training batch, less that of the private model",
        },
    ),
    "rounds.jsonl: a comparison in reports": (
        PAIRED,
        {
            "mean": "mean of the difference of each sample's score, first less second",
            "square": "mean square of that difference",
        },
    ),
    "rounds.jsonl: detection": (
        DETECTION,
        {
            "verdict": "does federation help: the global model against private models",
            "warning": "the round of the early warning",
            "recovery": "in recovery: what clients predict with, against the global model",
            "recovered": "in recovery: what clients predict with, against private models",
        },
    ),
    "rounds.jsonl: an answer in detection": (
        DECISION,
        {
            "state": "too early, undecided, helps or hurts",
            "since": "the round of the decision",
            "gain": "the estimate: mean over clients of what each reported last",
            "error": "its standard error",
            "clients": "clients that the estimate rests on",
            "samples": "their validation samples",
            "needed": "validation samples that would decide it, if the gain stays as it is",
        },
    ),
    "run.json": (
        ABOUT,
        {
            "run": "an id of the run",
            "name": "the plan's name",
            "task": "the function package.module:function of a task of the user's own",
            "class_names": "names of the classes",
            "metric_in_percent": "whether scores are shown in percent, which is times 100",
            "clients": "one entry for each client; of lazy clients for those that are scored",
            "population": "the number of clients, where `clients` has only those that are scored",
            "versions": "versions of lindt, torch and Python that computed the run",
            "checks": "what the checks before training found",
            "optimizer": "the task's own optimizer, which the plan does not name",
            "noise": "where noise comes from: plan (its seed) or system",
            "attempts": "on a deployment: how often the server was started",
            "stopped": "whether the user stopped the run before its end",
            "keeps": "rounds whose checkpoints are kept, for runs that branch from this one",
            "branched": "the run that the first rounds were taken from",
            "withheld": "whether the folder omits which clients took part and measurements without noise",
        },
    ),
    "run.json: clients": (
        ABOUT["clients"][0],
        {
            "client": "the client's number, from 0",
            "train": "its training samples",
            "test": "its test samples",
            "attacker": "whether it attacks",
            "labels": "samples of each class",
        },
    ),
    "run.json: branched": (
        kind(ABOUT["branched"]),
        {
            "run": "the id of the run that the first rounds were taken from",
            "name": "the name of its plan",
            "round": "the last round that was taken over",
        },
    ),
    "clients.jsonl": (
        VISITED,
        {
            "round": "the round in which a lazy client was first asked to train",
            "client": "the client's number, from 0",
            "train": "its training samples",
            "test": "its test samples",
            "attacker": "whether it attacks",
            "labels": "samples of each class",
            "data": "a hash of its samples, with which later visits are compared",
        },
    ),
    "run.json and summary.json: checks": (
        CHECKS,
        {
            "made": "false where the checks were left out",
            "warnings": "possible mistakes",
            "looked_at": "what each check looked at, by the check's name",
        },
    ),
    "timing.jsonl": (TIMING, {"round": "the round", "seconds": "how long it took"}),
    "summary.json": (
        SUMMARY,
        {
            "rounds": "rounds played",
            "scored_rounds": "scored rounds that the means are taken over: the last ones",
            **{name: "as in scores: mean over these rounds" for name, s in SCORES.items() if kind(s) is NUMBER},
            **{name: "as in scores: of the last scored round" for name, s in SCORES.items() if kind(s) is WHOLE},
            "counted_clients": "clients whose scores count",
            "panel": "intervals of the means over these rounds; missing where all clients are scored",
            "negative": "whether the mean beta of the last 10 scored rounds is below 0",
            "detected_at": "rounds in which the paper's rule switched recovery on",
            "stopped_at": "rounds in which recovery was switched off",
            "recovery_rounds": "rounds in which clients trained for recovery",
            "refused_updates": "updates that were refused",
            "metric_in_percent": "whether scores are shown in percent, which is times 100",
            "detection": "the results of the test on the reports, after the last round",
            "checks": "what the checks before training found",
            "early_stop": "where the plan stops early: the last round, and the round that the final models come from",
            "prediction": "what guarded prediction costs a client",
            "privacy": "the budget of differential privacy, in words and numbers",
        },
    ),
    "summary.json: prediction": (
        kind(SUMMARY["prediction"]),
        {
            "models": "models that a client holds to predict",
            "weights": "their weights in all",
            "words": "the same in words",
        },
    ),
    "summary.json: privacy": (
        kind(SUMMARY["privacy"]),
        {"words": "the guarantee in words", "epsilon": "epsilon of the budget", "delta": "delta of the budget"},
    ),
    "nodes.json": (
        NODES,
        {
            "run": "the run's id",
            "holders": "the node of each client, with the public key that it proved to have",
            "refused": "nodes that claimed a client of another node",
        },
    ),
}


def scores_record(scores: Any) -> dict[str, Any] | None:
    """The scores of a round as a line has them: without `panel` where all clients are scored."""
    found: dict[str, Any] | None = record(scores, ROUND["scores"])
    if found is not None and found["panel"] is None:
        del found["panel"]
    return found


def record(value: Any, shape: Any) -> Any:
    """Plain values to write: of an object only the attributes that `shape` names."""
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
    """The table in `text`; None where it is not JSON or of another shape, or has NaN or half a surrogate pair."""
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
        # Neither NaN nor infinity (1e999 is read as infinity); a whole number may be too large for a float.
        return type(value) in (int, float) and abs(value) < 1e300
    if shape is int:
        return type(value) is int and abs(value) < 2**53  # what a page's numbers can hold
    return type(value) is shape
