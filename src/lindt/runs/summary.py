"""Lines of rounds.jsonl, and the part of a summary that follows from them. Plain values only, and no torch.

What needs the plan and the data stands in runs/about.py.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lindt.runs.schema import (
    DIVERGENCE,
    NOT_NAMED,
    NUMBER,
    REPORT,
    REPORTED,
    ROUND,
    SCORES,
    SOMETIMES,
    kind,
    record,
    scores_record,
)
from lindt.server.detection.divergence import is_negative
from lindt.server.scores import ClientGain, excluded_clients, panel_of, without_clients

if TYPE_CHECKING:
    from lindt.server.state import RoundResult


def round_line(result: RoundResult) -> dict[str, Any]:
    """One line of rounds.jsonl. Accuracies and gains are fractions."""
    seen, recovery = result.seen, result.recovery
    found = {**vars(recovery), "flag": recovery.on, **(vars(seen) if seen else {}), **vars(result)}
    absent = {*(() if seen else DIVERGENCE), *(REPORTED if result.reports is None else ())}
    absent |= {name for name in SOMETIMES if found[name] is None}
    line = {name: record(found[name], shape) for name, shape in ROUND.items() if name not in {*absent, "reports"}}
    line["scores"] = scores_record(result.scores)
    if result.reports is not None:
        line["reports"] = [{"client": i, **record(report, REPORT)} for i, report in sorted(result.reports.items())]
    return line


def withheld_line(line: Mapping[str, Any]) -> dict[str, Any]:
    """A round's line without the names of the clients, and without measurements of their updates before noise.

    It keeps how many clients were asked, answered and were refused, and the scores of the whole federation.
    """
    kept = {name: value for name, value in line.items() if name not in {*DIVERGENCE, "buffer_div", "reports"}}
    kept |= {name: [NOT_NAMED] * len(line[name]) for name in ("asked", "answered")}
    kept["refused"] = [{**one, "client": NOT_NAMED} for one in line["refused"]]
    return kept | {"scores": line["scores"] and {**line["scores"], "clients": [], "notes": {}}}


def software_versions() -> dict[str, str]:
    """The versions of lindt, torch and Python that compute a run; without torch where it is not installed."""
    import lindt

    try:
        torch = {"torch": version("torch")}
    except PackageNotFoundError:
        torch = {}
    return {"lindt": lindt.__version__, **torch, "python": platform.python_version()}


def summarise_rounds(
    lines: list[dict[str, Any]],
    last_scored: int,
    percent: bool,
    clients: Sequence[Mapping[str, Any]],
    weights: Mapping[int, float] | None = None,
    kept_round: int | None = None,
) -> dict[str, Any]:
    """The part of the summary that follows from rounds.jsonl; `clients` are those of run.json, `weights` alpha_i.

    `kept_round`: the round whose models the run keeps, after an early stop. The means end with it.
    """
    excluded = excluded_clients(lines, clients).keys()
    until = lines if kept_round is None else [line for line in lines if line["round"] <= kept_round]
    kept = [without_clients(line["scores"], excluded, weights) for line in until if line["scores"]]
    scored = [scores for scores in kept if scores]
    last = scored[-last_scored:]
    end = last[-1] if last else {"clients": ()}  # no client answered when it was asked to evaluate
    betas = [scores["beta"] for scores in scored if scores["beta"] is not None]
    panel = _panel(last, weights)
    return {
        "rounds": len(lines),
        "scored_rounds": len(last),
        **{
            name: _mean([scores.get(name) for scores in last]) if kind(shape) is NUMBER else end.get(name)
            for name, shape in SCORES.items()
        },
        "counted_clients": len(end["clients"]),
        **({} if panel is None else {"panel": panel}),
        "negative": is_negative(betas) if betas else None,
        "detected_at": _detections(lines),
        "stopped_at": [b["round"] for a, b in _pairs(lines) if a["flag"] and not b["flag"]],
        "recovery_rounds": sum(line["recovering"] for line in lines),
        "refused_updates": sum(len(line["refused"]) for line in lines),
        "metric_in_percent": percent,
        "detection": lines[-1].get("detection") if lines else None,
    }


def _panel(scored: Sequence[Mapping[str, Any]], weights: Mapping[int, float] | None) -> dict[str, Any] | None:
    """The panel's intervals of the means over these rounds, from each member's mean gain over them."""
    panel = scored[-1].get("panel") if scored else None
    if panel is None:
        return None
    betas: dict[int, list[float]] = {}
    for scores in scored:
        for one in scores["clients"]:
            if one.get("beta") is not None:
                betas.setdefault(one["client"], []).append(one["beta"])
    gains = [
        ClientGain(0.0, None, sum(found) / len(found), False, 1.0 if weights is None else weights.get(client, 0.0))
        for client, found in sorted(betas.items())
        if len(found) == len(scored)
    ]
    return vars(panel_of(gains, panel["expected"], panel["of"]))


def _detections(lines: list[dict[str, Any]]) -> list[int]:
    return [b["round"] for a, b in _pairs(lines) if b["detections"] > a["detections"]]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pairs(lines: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip([{"detections": 0, "flag": False}, *lines], lines, strict=False))
