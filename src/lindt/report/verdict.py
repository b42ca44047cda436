"""The verdict on a run in one sentence: is federation helping, whom does it hurt, since when, what was done?

The same sentence in the terminal, in the page and in the report. "Clearly" is the paired test of server/scores.py: one
client's test set is small. Delta only suspects; the gain beta judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from lindt.report.reading import DetectionRule, Run, adapts, detection_rule, word_at

Tone = Literal["helps", "mended", "hurts", "suspected", "unknown", "waiting"]


@final
@dataclass(frozen=True)
class Verdict:
    tone: Tone
    headline: str  # in two or three words
    sentence: str


@final
@dataclass(frozen=True)
class GainSummary:
    """How the clients fare: after one scored round, or at the end over the last ones."""

    beta: float | None
    local: float | None
    clearly_harmed: int
    clients: int


def verdict(run: Run) -> Verdict:
    if not run.rounds:
        return _before_the_first_round(run)
    rule, flagged = detection_rule(run.plan), detections(run.rounds)
    if flagged:
        found = _flagged(run, flagged)
    elif not run.scored:
        found = Verdict("waiting", "Not scored yet", f"No round is scored yet{_watching(rule, run)}")
    else:
        found = _unflagged(run, rule)
    return Verdict(found.tone, found.headline, f"{found.sentence}{_whereabouts(run)}")


def detections(rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of the rounds in which NFL was suspected."""
    before = [{"detections": 0}, *rounds]
    return [line for old, line in zip(before, rounds, strict=False) if line["detections"] > old["detections"]]


def gain_summary(run: Run) -> GainSummary | None:
    """Now: the last scored round; once the run has ended the mean over its last ones, as the paper reports it."""
    if not run.scored:
        return None
    now = _standing(run.scored[-1])
    if run.summary is None:
        return now
    return GainSummary(run.summary.get("beta"), run.summary.get("local"), now.clearly_harmed, now.clients)


def _standing(line: Mapping[str, Any]) -> GainSummary:
    scores = line["scores"]
    return GainSummary(scores.get("beta"), scores["local"], scores.get("clearly_harmed") or 0, len(scores["clients"]))


def _flagged(run: Run, flagged: Sequence[Mapping[str, Any]]) -> Verdict:
    """Delta was above epsilon for too long: in the same round everyone was asked how they fare."""
    last = flagged[-1]
    then = _standing(last) if last.get("scores") else None
    scored_since = [line for line in run.scored if line["round"] > last["round"]]
    now = gain_summary(run) if scored_since else None
    earlier = [str(line["round"]) for line in flagged[:-1]]
    since = f"in round {_listed(earlier)} and again since round {last['round']}" if earlier else ""
    since = since or f"since round {last['round']}"
    done = _what_was_done(run, last, now)
    if then is None or then.beta is None:
        text = f"Suspected {since}, not confirmed: the gain is not known without private models"
        return Verdict("suspected", "Suspected", f"{text}{done}")
    who = _clearly_worse(then, "were" if now else "are")
    gain = f"{who}, mean gain {_signed(then.beta, run)}"
    if then.beta >= 0:
        text = f"Suspected {since}, not confirmed: {gain}"
        hurts = now is not None and now.beta is not None and now.beta < 0
        return Verdict("hurts" if hurts else "suspected", "Suspected, not confirmed", f"{text}{done}")
    tone: Tone
    if now is None or now.beta is None:
        tone, headline = "hurts", "Federation hurts"
    elif now.beta < 0:
        tone, headline = "hurts", "Federation still hurts"
    elif adapts(run.plan):
        tone, headline = "mended", "It hurt and was mended"
    else:
        tone, headline = "helps", "It hurt, now it helps"
    return Verdict(tone, headline, f"Negative federated learning {since}: {gain}{done}")


def _what_was_done(run: Run, last: Mapping[str, Any], now: GainSummary | None) -> str:
    after = [line for line in run.rounds if line["round"] > last["round"]]
    stopped = next((line["round"] for line in after if not line["flag"]), None)
    if not adapts(run.plan):
        text = "; this method has no recovery"
    elif stopped is not None:
        text = f"; recovery on from {last['round'] + 1} to {stopped}"
    else:
        text = f"; recovery on since {last['round'] + 1}"
    if now is None:
        return text
    if now.beta is None:
        return text + f", now local {points(now.local, run.percent)}"
    return text + f", now {points(now.beta, run.percent, sign=True)}, {_still(now)}"


def _unflagged(run: Run, rule: DetectionRule | None) -> Verdict:
    now = gain_summary(run)
    assert now is not None
    alarm = _watching(rule, run)
    if now.beta is None:
        text = f"Local accuracy {points(now.local, run.percent)}" if run.percent else f"Local score {now.local:.4f}"
        return Verdict("unknown", "Gain unknown", f"{text}; the gain is not known without private models{alarm}")
    soon = "So far federation" if run.state == "running" else "Federation"
    who = _clearly_worse(now, "are")
    gain = f"mean gain {_signed(now.beta, run)}, {who}"
    tone: Tone = "hurts" if now.beta < 0 else "helps"
    headline = f"{'So far it' if run.state == 'running' else 'Federation'} {tone}"
    return Verdict(tone, headline, f"{soon} {tone}: {gain}{alarm}")


def _watching(rule: DetectionRule | None, run: Run) -> str:
    """What the detector says while it has not flagged anything."""
    if rule is None:
        always = word_at(run.plan, "method", "recovery", "kind") == "always" and adapts(run.plan)
        return "; recovery on from the first round, no detector" if always else "; no detector watches"
    count = run.rounds[-1]["count"]
    what = "Delta" if rule.statistic == "delta" else f"the {rule.statistic} divergence"
    never = "not flagged yet" if run.state == "running" else "never flagged"
    times = "one round" if count == 1 else f"{count} rounds" if count else "no round"
    return f"; {never}, {what} above epsilon = {rule.epsilon:g} in {times} (r' = {rule.patience})"


def _before_the_first_round(run: Run) -> Verdict:
    if run.state == "running":
        text = "No round yet: first every client trains a model alone, the yardstick of its gain"
        return Verdict("waiting", "No round yet", text)
    return Verdict("waiting", "No round played", f"No round was played{_whereabouts(run) or ' before the run ended'}")


def _whereabouts(run: Run) -> str:
    at = run.rounds[-1]["round"] if run.rounds else 0
    of = f" of {run.planned}" if run.planned else ""
    return {
        "ended": "",
        "running": f" (running, round {at}{of})",
        "crashed": f" (stopped before its end, after round {at}{of})",
    }[run.state]


def _clearly_worse(now: GainSummary, verb: str) -> str:
    if now.clearly_harmed == 0:
        return f"none of {now.clients} clients {'was' if verb == 'were' else 'is'} clearly worse off than alone"
    if now.clearly_harmed == 1:
        verb = {"are": "is", "were": "was"}[verb]
    return f"{now.clearly_harmed} of {now.clients} clients {verb} clearly worse off than alone"


def _still(now: GainSummary) -> str:
    if now.clearly_harmed == 0:
        return "no client clearly worse off"
    return f"{now.clearly_harmed} client{'s' if now.clearly_harmed > 1 else ''} still clearly worse off"


def _signed(beta: float, run: Run) -> str:
    return points(beta, run.percent, sign=True) + (" points" if run.percent else "")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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
