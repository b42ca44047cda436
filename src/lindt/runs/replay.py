"""Apply another detection test to the recorded reports of a run: its state after each round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lindt.errors import UserError
from lindt.protocols import Detection, DetectionState, Evidence
from lindt.server.detection.divergence import Rule
from lindt.server.detection.fl_guard import FlGuard
from lindt.server.detection.gain import Gain
from lindt.server.updates import unpack_report


def papers_rule(rounds: int) -> Rule:
    """The paper's rule with its default epsilon, and a patience in proportion: 25 of 80 rounds, as in the demo."""
    return Rule(epsilon=0.1, patience=rounds * 25 // 80)


def first_alarms(lines: Sequence[Mapping[str, Any]], clients: int, rounds: int) -> dict[str, int | None]:
    """The round in which each detector first calls the run negative, None where it never does.

    `delta` is the paper's rule on the recorded Delta. The other detectors need reports, and are missing where the
    lines have none.
    """
    found = {"delta": papers_rule(rounds).replay(line.get("delta") for line in lines)}
    if not lines or any(line.get("reports") is None for line in lines):
        return found
    for name, detection in (("gain", Gain()), ("fl_guard", FlGuard())):
        states = replay(detection, lines, clients, rounds)
        found[name] = _first(line["round"] for line, at in zip(lines, states, strict=True) if _hurts(at))
        if name == "gain":
            found["warning"] = next((at.warning for at in states if at.warning is not None), None)
    return found


def _hurts(state: DetectionState) -> bool:
    return state.verdict.state == "hurts"


def _first(rounds: Iterable[int]) -> int | None:
    return next(iter(rounds), None)


def replay(
    detection: Detection, lines: Iterable[Mapping[str, Any]], clients: int, rounds: int | None = None
) -> list[DetectionState]:
    """The state of `detection` after each line of rounds.jsonl, judged by the line's reports.

    `clients` is N, `rounds` the number of rounds that were planned. Nothing trains. Raises a UserError for a test that
    does not use reports, and where a line has none because the run did not ask for them.
    """
    if not detection.reports or detection.begin() is None:
        raise UserError(f"detection: {type(detection).__name__} does not use reports; replay a test that does")
    return states_after(detection, (_evidence(line, clients, rounds) for line in lines))


def _evidence(line: Mapping[str, Any], clients: int, rounds: int | None) -> Evidence:
    if line.get("reports") is None:
        raise UserError(f"round {line['round']} has no reports: this run's clients were not asked for any")
    reports = {one["client"]: unpack_report({k: one[k] for k in one if k != "client"}) for one in line["reports"]}
    return Evidence(line["round"], None, frozenset(reports), clients, rounds, reports)


def states_after(detection: Detection, rounds: Iterable[Evidence]) -> list[DetectionState]:
    """The state of a test of reports after each round."""
    state, states = detection.begin(), []
    for evidence in rounds:
        state = detection.judge(state, evidence)
        assert state is not None
        states.append(state)
    return states
