"""The trackers of a run and the values that they get. When a tracker fails, the run goes on without it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

from lindt.errors import UserError
from lindt.plan.file import to_dict
from lindt.report.verdict import VALUES, detection_of
from lindt.runs.play import Event, RoundFollowed, RoundPlayed, RunEnded, RunStarted
from lindt.runs.schema import DIVERGENCE, SCORES

# The package that each tracker needs. The extra and the module in this folder have the tracker's name.
TRACKERS = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}


def check_trackers(names: Sequence[str]) -> None:
    """Refuse unknown trackers and trackers that are not installed, before anything is written."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--track {name}: choose among {', '.join(TRACKERS)}")
        if importlib.util.find_spec(TRACKERS[name]) is None:
            raise UserError(f"--track {name} needs a package that is not installed: pip install 'lindt[{name}]'")


@final
class TrackerSet:
    """A run's trackers. `say` is called with a sentence when one of them fails."""

    def __init__(self, names: Sequence[str], say: Callable[[str], None]) -> None:
        self.names, self.say = list(dict.fromkeys(names)), say
        self.trackers: dict[str, Tracker] = {}

    def begin(self, folder: Path, run: str, plan: Mapping[str, Any], done: int) -> None:
        """Open the trackers. `run` is the run's id, the same when the run is resumed after `done` rounds."""
        for name in self.names:
            module = importlib.import_module(f"lindt.trackers.{name}_")
            self._safely(name, partial(module.open_run, folder, run, str(plan["name"]), settings(plan), done))

    def round(self, line: Mapping[str, Any]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._safely(name, partial(tracker.round, line["round"], round_values(line)))

    def end(self, summary: Mapping[str, Any]) -> None:
        for name, tracker in list(self.trackers.items()):
            self._safely(name, partial(tracker.end, end_values(summary)))

    def close(self) -> None:
        for name, tracker in list(self.trackers.items()):
            self._safely(name, tracker.close)
        self.trackers.clear()

    def _safely(self, name: str, tell: Callable[[], Tracker | None]) -> None:
        try:
            if (opened := tell()) is not None:
                self.trackers[name] = opened
        except Exception as error:  # noqa: BLE001  # an unreachable tracker must not end a long run
            self.trackers.pop(name, None)
            reason = str(error).splitlines()[0] if str(error) else ""
            self.say(f"--track {name} failed, and the run goes on without it: {type(error).__name__} {reason}")


class Tracker(Protocol):
    """One run in one tracker; opened when the run begins or is resumed."""

    def round(self, round: int, values: Mapping[str, float]) -> None: ...
    def end(self, values: Mapping[str, float]) -> None:
        """The run has ended, with these results."""
        ...

    def close(self) -> None:
        """Called last, whether the run has ended or was stopped."""
        ...


def round_values(line: Mapping[str, Any]) -> dict[str, float]:
    """A round's numbers by name, without those that were not measured in it."""
    scores: Mapping[str, Any] = line["scores"] or {}
    values = {
        **{f"detection/{name}": line.get(name) for name in (*DIVERGENCE, "count")},
        "detection/recovering": line["recovering"],
        **{f"detection/{name}": value for name, value in detection_values(line).items()},
        "clients/answered": len(line["answered"]),
        "clients/refused": len(line["refused"]),
        **{_score_name(name): scores.get(name) for name in SCORES},
        **{f"adaptation/{name}": value for name, value in (scores.get("notes") or {}).items()},
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def detection_values(told: Mapping[str, Any]) -> dict[str, float | None]:
    """The test's results in a line or a summary as numbers: -1 hurts, 0 too early or undecided, 1 helps."""
    detection = detection_of(told)
    if detection is None:
        return {}
    verdict, effects = detection["verdict"], {name: detection.get(name) for name in ("recovery", "recovered")}
    return {
        "verdict": VALUES[verdict["state"]],
        "since": verdict.get("since"),
        "gain": verdict.get("gain"),
        "gain_error": verdict.get("error"),
        "validation_samples": verdict["samples"],
        "warning": detection.get("warning"),
        **{name: VALUES[effect["state"]] for name, effect in effects.items() if effect},
    }


def _score_name(name: str) -> str:
    return name.replace("_", "/", 1) if name.startswith("attack_") else f"scores/{name}"


def end_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """The results: means over the last scored rounds."""
    names = (*SCORES, "recovery_rounds", "refused_updates")
    values = {f"end/{name}": summary.get(name) for name in names}
    detected = summary.get("detected_at")
    values["end/detected_at"] = detected[0] if detected else None
    values |= {f"end/{name}": value for name, value in detection_values(summary).items()}
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


def track_events(events: Iterator[Event], names: Sequence[str], say: Callable[[str], None]) -> Iterator[Event]:
    tracking = TrackerSet(names, say)
    try:
        for event in events:
            if isinstance(event, RunStarted):
                store = event.store
                tracking.begin(store.folder, store.run, to_dict(event.plan), event.round)
            elif isinstance(event, RoundPlayed | RoundFollowed):
                tracking.round(event.line)
            elif isinstance(event, RunEnded):
                tracking.end(event.summary)
            yield event
    finally:
        tracking.close()
