"""What a tracker is given: names and plain numbers, the same for every tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

DETECTION = ("delta", "w_div", "clean", "spread", "median", "clipped", "noise_norm", "count")
SCORES = ("central", "local", "private", "beta", "worst_tenth", "harmed", "clearly_harmed")
ATTACK = ("attack_central", "attack_local")


class Tracker(Protocol):
    """One run in one tracker; made when the run begins, or goes on."""

    def round(self, round: int, values: Mapping[str, float]) -> None: ...
    def end(self, values: Mapping[str, float]) -> None:
        """The run has ended, with these results."""
        ...

    def close(self) -> None:
        """No more comes, whether the run has ended or not."""
        ...


def round_values(line: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers by name; what was not measured in it is left out."""
    scores: Mapping[str, Any] = line["scores"] or {}
    values = {
        **{f"detection/{name}": line.get(name) for name in DETECTION},
        "detection/recovering": line["recovering"],
        "clients/answered": len(line["answered"]),
        "clients/refused": len(line["refused"]),
        **{f"scores/{name}": scores.get(name) for name in SCORES},
        **{f"attack/{name.removeprefix('attack_')}": scores.get(name) for name in ATTACK},
        **{f"adaptation/{name}": value for name, value in (scores.get("notes") or {}).items()},
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def end_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """The results: means over the last scored rounds."""
    names = (*SCORES, *ATTACK, "recovery_rounds", "refused_updates")
    values = {f"end/{name}": summary.get(name) for name in names}
    detected = summary.get("detected_at")
    values["end/detected_at"] = detected[0] if detected else None
    return {name: float(value) for name, value in values.items() if value is not None}


def settings(table: Mapping[str, Any], under: str = "") -> dict[str, str | int | float | bool]:
    """A plan's fields by their full names: `environment.privacy.sigma`."""
    found: dict[str, str | int | float | bool] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= settings(value, f"{under}{name}.")
        else:
            found[f"{under}{name}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return found
