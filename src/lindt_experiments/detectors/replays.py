"""The replay of every detector on one record: the round of its alarm, its state at the end, and its evidence.

FedAvg does not use the reports. So a replay gives exactly the detector's answers during the run, and exactly its
answers if some clients had lied in their reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import Final, Literal

from lindt.protocols import ClientId, Detection, DetectionState, GainReport, Paired
from lindt.registry import component, kinds
from lindt.runs.replay import states_after
from lindt_experiments.detectors.readings import MOMENTS, Reading, moment
from lindt_experiments.detectors.records import Record

LIARS: Final = 0.25  # the share of clients that lie: first the attackers, then others up to this share
LIED_TO: Final = ("gain", "gain-median")

Alarm = Callable[[DetectionState], bool]
Score = Callable[[DetectionState], float | None]


def read_all(record: Record) -> dict[str, Reading]:
    """The readings of all detectors that need a record; `delta_reading` needs only Delta."""
    found = {}
    for prefix, told in _stories(record).items():
        for name, detection in _detections().items():
            if prefix and name not in LIED_TO:
                continue
            states = states_after(detection, told.evidence())
            found[f"{prefix}{name}"] = _reading(states, _hurts, _estimate_of(name))
            if name == "gain":
                found[f"{prefix}warning"] = _reading(states, _warned, _young_estimate)
    found["reader"] = perfect_reader(record)
    return found


def _detections() -> dict[str, Detection]:
    known = kinds(Detection)
    found: dict[str, Detection] = {
        "gain": component(Detection, "gain"),
        "gain-median": component(Detection, "gain", combine="median"),
    }
    if "fl_guard" in known:
        found["fl-guard"] = component(Detection, "fl_guard")
    return found


def _stories(record: Record) -> dict[str, Record]:
    """The record, and two copies in which a quarter of the clients lie; no copies where more clients attack."""
    found = {"": record}
    if len(record.attackers) <= round(LIARS * record.clients):
        found["lie-1 "] = with_lies(record, -1.0)
        found["lie+1 "] = with_lies(record, 1.0)
    return found


def liars_of(record: Record) -> frozenset[ClientId]:
    """The clients that lie: the attackers, and benign clients up to a quarter of all."""
    wanted = max(round(LIARS * record.clients), 1) - len(record.attackers)
    others = sorted(frozenset(range(record.clients)) - record.attackers)
    return record.attackers | frozenset(random.Random(f"liars {record.plan}").sample(others, max(wanted, 0)))


def with_lies(record: Record, said: float) -> Record:
    """The same run, in which each liar reports `said` for every number."""
    liars = liars_of(record)
    rounds = tuple(
        replace(
            played,
            reports={i: _lie(report, said) if i in liars else report for i, report in played.reports.items()},
        )
        for played in record.rounds
    )
    return replace(record, rounds=rounds)


def _lie(report: GainReport, said: float) -> GainReport:
    pair = Paired(said, 1.0)
    return replace(report, private=pair, equal_age=pair, first_batch=said)


def perfect_reader(record: Record) -> Reading:
    """The best that the validation samples allow: the sign of the mean of the honest clients' last reports.

    It knows which clients are honest and answers at the end. Its errors come only from the limited size of the V_i.
    """
    evidence: list[float | None] = []
    for share in MOMENTS.values():
        upto = replace(record, rounds=record.rounds[: moment(share, len(record.rounds))])
        gains = [report.private.mean for i, report in upto.last_reports.items() if i not in record.attackers]
        evidence.append(-fmean(gains) if gains else None)
    hurts = evidence[-1] is not None and evidence[-1] > 0
    end = len(record.rounds)
    return Reading(end if hurts else None, "hurts" if hurts else "helps", tuple(evidence))


def _reading(states: Sequence[DetectionState], alarm: Alarm, score: Score) -> Reading:
    first = next((round for round, state in enumerate(states, 1) if alarm(state)), None)
    known = [score(states[moment(share, len(states)) - 1]) for share in MOMENTS.values()]
    evidence = tuple(None if value is None else -value for value in known)
    # The early warning has no state other than its alarm.
    last = states[-1].verdict.state if alarm is _hurts else "hurts" if alarm(states[-1]) else "undecided"
    return Reading(first, last, evidence)


def _hurts(state: DetectionState) -> bool:
    return state.verdict.state == "hurts"


def _warned(state: DetectionState) -> bool:
    return state.warning is not None


def _estimate_of(name: str) -> Score:
    """The detector's estimate of the gain; before its first estimate, the clients' last reports by the same rule."""
    combine: Callable[[Sequence[float]], float] = fmean if name == "gain" else median
    kept: Literal["first_batch", "private"] = "first_batch" if name == "fl-guard" else "private"

    def score(state: DetectionState) -> float | None:
        if state.verdict.gain is not None:
            return state.verdict.gain
        latest = [report for _, report in state.reports.values()]
        values = [report.first_batch if kept == "first_batch" else report.private.mean for report in latest]
        known = [value for value in values if value is not None]
        return combine(known) if known else None

    return score


def _young_estimate(state: DetectionState) -> float | None:
    """The estimate of the gain over private models of equal age."""
    latest = [report.equal_age.mean for _, report in state.reports.values()]
    return fmean(latest) if latest else None
