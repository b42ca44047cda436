"""What happened, in plain words. Reads values, never imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def points(value: float | None, percent: bool = True, sign: bool = False) -> str:
    """A score or a gain as people read it: 81.6, +7.6."""
    if value is None:
        return "-"
    return f"{value * (100 if percent else 1):{'+' if sign else ''}.{1 if percent else 4}f}"


def plain(text: str) -> str:
    """A name from a run's files as one line of text: what would steer a terminal is shown, not obeyed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def suspected(line: Mapping[str, Any], epsilon: float, patience: int, statistic: str, adapts: bool) -> str:
    what = "Delta" if statistic == "delta" else f"the {statistic} divergence"
    done = (
        f"recovery is on from round {line['round'] + 1}: the clients now train a model of their own along with it"
        if adapts
        else "this method has no recovery, so nothing is done about it"
    )
    return (
        f"round {line['round']}: NFL suspected: {what} was above epsilon = {epsilon:g} in {line['count']} rounds, "
        f"more than r' = {patience}; {done}"
    )


def measured(line: Mapping[str, Any], percent: bool) -> str:
    """The suspicion held against beta, which was measured in the same round."""
    scores = line["scores"]
    if not scores or scores["beta"] is None:
        return f"round {line['round']}: not confirmed: beta could not be measured"
    of = f"{scores['clearly_harmed']} of {len(scores['clients'])} clients are clearly worse off than alone"
    gain = f"the mean gain beta is {points(scores['beta'], percent, sign=True)} points, {of}"
    if scores["beta"] < 0:
        return f"round {line['round']}: NFL confirmed: {gain}"
    return f"round {line['round']}: not confirmed: {gain}"


def stopped(line: Mapping[str, Any]) -> str:
    return f"round {line['round']}: recovery stopped; clients go on as in FedAvg and detection starts anew"


def refused(line: Mapping[str, Any]) -> list[str]:
    said = [
        f"round {line['round']}: refused the update of client {one['client']}: {one['reason']}"
        for one in line["refused"]
    ]
    if not line["answered"]:
        said.append(f"round {line['round']}: no valid update came back; the old weights are kept")
    return said
