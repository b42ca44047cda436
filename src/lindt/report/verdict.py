"""The verdict on a run in one sentence: does federation help or hurt, since when, how sure is that, what was done?

The same sentence in the terminal, in the page and in the report, and the words for what happens in a round. Never
imports torch, so that any log can use it.

Where clients report their gain on validation data (a round's `detection`), the verdict is that of the test, in one of
four states: too early, undecided, helps, hurts. Where they do not, Delta suspects, and the gain beta on test data is
told as it was measured. "Clearly" is the paired test of server/scores.py: one client's test set is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

from lindt.report.reading import DetectionRule, Run, adapts, detection_rule, gain_test, word_at
from lindt.server.scores import no_update

# Grey: waiting, unknown. Green: helps, mended. Orange: hurts. Yellow: suspected, by Delta alone.
Tone = Literal["helps", "mended", "hurts", "suspected", "unknown", "waiting"]
Detection = Mapping[str, Any]  # `detection` in a line of rounds.jsonl: runs.schema.DETECTION
Decision = Mapping[str, Any]  # one answer in it: runs.schema.DECISION


@final
@dataclass(frozen=True)
class Verdict:
    tone: Tone
    headline: str  # in two or three words
    sentence: str


@final
@dataclass(frozen=True)
class GainSummary:
    """How the clients fare on test data, in one scored round."""

    round: int
    beta: float | None
    median: float | None
    local: float
    clearly_better: int | None  # None where nothing is known sample by sample, so that nothing is clear
    clearly_harmed: int | None
    clients: int
    ipr: float | None  # the share of clients that are not worse off
    worst_tenth: float | None


def verdict(run: Run) -> Verdict:
    if not run.rounds:
        return _before_the_first_round(run)
    rule, flagged, detection = detection_rule(run.plan), detections(run.rounds), detection_of(run.rounds[-1])
    if not any(line["answered"] for line in run.rounds):
        found = _without_updates(run)
    elif detection is not None:
        found = _tested(run, detection)
    elif flagged:
        found = _flagged(run, flagged)
    elif not run.scored:
        found = Verdict("waiting", "Not scored yet", f"No round is scored yet{_watching(rule, run)}")
    else:
        found = _unflagged(run, rule)
    return Verdict(found.tone, found.headline, f"{found.sentence}{_left_out(run)}{_checked(run)}{_whereabouts(run)}")


def detections(rounds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The lines of the rounds in which NFL was suspected."""
    before = [{"detections": 0}, *rounds]
    return [line for old, line in zip(before, rounds, strict=False) if line["detections"] > old["detections"]]


def gain_summary(run: Run) -> GainSummary | None:
    """Now: the last scored round. A mean over several may reach back before recovery."""
    return _standing(run.scored[-1]) if run.scored else None


def _standing(line: Mapping[str, Any]) -> GainSummary:
    scores = line["scores"]
    betas = [one["beta"] for one in scores["clients"] if one.get("beta") is not None]
    clear = [one["beta"] for one in scores["clients"] if one.get("beta") is not None and one["clear"]]
    known = not betas or scores.get("clearly_better") is not None or "clearly_better" not in scores
    return GainSummary(
        line["round"],
        scores.get("beta"),
        median(betas) if betas else None,
        scores["local"],
        sum(beta > 0 for beta in clear) if known else None,
        (scores.get("clearly_harmed") or 0) if known else None,
        len(scores["clients"]),
        sum(beta >= 0 for beta in betas) / len(betas) if betas else None,
        scores.get("worst_tenth"),
    )


# What the test of the clients' reports says.

STATES = ("too early", "undecided", "helps", "hurts")
VALUES = {"hurts": -1, "too early": 0, "undecided": 0, "helps": 1}  # for charts and trackers, which take numbers
_TONES: dict[str, tuple[Tone, str]] = {
    "too early": ("waiting", "Too early to say"),
    "undecided": ("unknown", "Undecided"),
    "helps": ("helps", "Federation helps"),
    "hurts": ("hurts", "Federation hurts"),
}


def detection_of(line: Mapping[str, Any]) -> Detection | None:
    """What the test says after a round; None where clients report nothing. An unknown state counts as undecided."""
    found = line.get("detection")
    if found is None:
        return None
    names = ("verdict", "recovery", "recovered")
    return {**found, **{name: _known(found[name]) if found.get(name) else None for name in names}}


def _known(decision: Decision) -> Decision:
    return decision if decision["state"] in STATES else {**decision, "state": "undecided"}


def level(plan: Mapping[str, Any]) -> str:
    """`, at level 0.05`: what the verdict of this plan's test rests on."""
    test = gain_test(plan)
    return "" if test is None else level_words(test.kind, test.alpha)


def level_words(kind: str, alpha: float | None) -> str:
    if kind == "fl_guard":
        return ", by FL-GUARD's rule"
    return "" if alpha is None else f", at level {alpha:g}"


def decision_words(decision: Decision, level: str, percent: bool, subject: str = "Federation") -> str:
    """The test's answer to "does federation help?", with what it rests on."""
    state, gain = decision["state"], gain_words(decision, percent)
    if state == "too early":
        return f"Too early to say whether federation helps: {gain}"
    if state == "undecided":
        needed = decision.get("needed")
        until = "; more rounds may decide it" if decision["clients"] else ""
        if needed:
            until = f"; {needed:,} validation samples would decide it if the gain stays as it is"
        return f"Undecided{level}: {gain}{until}"
    return f"{subject} {state}{_since(decision)}{level}: {gain}"


def gain_words(decision: Decision, percent: bool) -> str:
    """`gain on validation data -21.3 +- 4.0 points (two standard errors, 15 clients, 412 validation samples)`."""
    if decision.get("gain") is None:
        return (
            "no client has reported its gain yet" if decision["state"] == "too early" else "no client reports its gain"
        )
    clients, samples = decision["clients"], decision["samples"]
    on = f"{clients} client{'' if clients == 1 else 's'}, {samples:,} validation samples"
    errors = "two standard errors, " if decision.get("error") is not None else ""
    return f"gain on validation data {interval(decision, percent)} ({errors}{on})"


def interval(decision: Decision, percent: bool) -> str:
    """`-21.3 +- 4.0 points`: the gain, plus and minus two standard errors."""
    gain, error = decision.get("gain"), decision.get("error")
    if gain is None:
        return "-"
    both = f" +- {points(2 * error, percent)}" if error is not None else ""
    return f"{points(gain, percent, sign=True)}{both}{' points' if percent else ''}"


def detection_news(before: Mapping[str, Any] | None, line: Mapping[str, Any], level: str, percent: bool) -> list[str]:
    """What changed in a round, a sentence each: a warning, a verdict, recovery on or off, and its effect.

    `before` and `line` are lines of rounds.jsonl, `before` None in the first round.
    """
    now = detection_of(line)
    if now is None:
        return []
    then = (detection_of(before) if before else None) or {}
    at, said = f"round {line['round']}: ", list[str]()
    if now.get("warning") is not None and then.get("warning") is None:
        yet = "" if now["verdict"]["state"] in ("helps", "hurts") else "; no verdict yet"
        said.append(f"{at}early warning: {gain_words(now['verdict'], percent)}{yet}")
    old, new = _state(then.get("verdict")), now["verdict"]["state"]
    if _changed(old, new):
        words = decision_words(now["verdict"], level, percent)
        said.append(f"{at}verdict: {words[0].lower()}{words[1:]}")
    was_on = bool(before and before["flag"])
    if line["flag"] and not was_on and not line["recovering"]:
        said.append(f"{at}recovery is on from round {line['round'] + 1}")
    for name, against in (("recovery", "w"), ("recovered", "training alone")):
        decision = now.get(name)
        if decision and _changed(_state(then.get(name)), decision["state"]):
            said.append(f"{at}{_effect(decision, against, percent)}")
    if was_on and not line["flag"]:
        said.append(f"{at}{_switched_off(before or {}, line)}")
    return said


def _state(decision: Decision | None) -> str:
    return str(decision["state"]) if decision else "too early"


def _changed(old: str, new: str) -> bool:
    """Whether there is news: something was decided, or is no longer."""
    return new != old and bool({old, new} & {"helps", "hurts"})


def _since(decision: Decision) -> str:
    return "" if decision.get("since") is None else f" since round {decision['since']}"


def _effect(decision: Decision, against: str, percent: bool) -> str:
    better = {"helps": "is better than", "hurts": "is worse than"}.get(
        decision["state"], "is not shown to be better or worse than"
    )
    since = f", since round {decision['since']}" if decision.get("since") is not None else ""
    known = decision.get("gain") is not None
    return f"what the clients predict with {better} {against}" + (
        f" ({interval(decision, percent)}{since})" if known else ""
    )


def _switched_off(before: Mapping[str, Any], line: Mapping[str, Any], when: bool = False) -> str:
    at = f" in round {line['round']}" if when else ""
    effects = [(detection_of(one) or {}).get("recovery") for one in (line, before) if one]
    shown = next((effect for effect in effects if effect), None)
    if shown and shown["state"] == "hurts":
        return f"recovery was switched off{at}: what the clients predicted with was shown to be worse than w"
    return f"recovery was switched off{at}"


def _tested(run: Run, detection: Detection) -> Verdict:
    """By the test of the clients' reports."""
    decision, recovered = detection["verdict"], _state(detection.get("recovered"))
    state, recovering = decision["state"], run.rounds[-1]["flag"] and adapts(run.plan)
    tone, headline = _TONES[state]
    if recovering and recovered == "helps" and state != "helps":
        tone, headline = ("mended", "It hurt and was mended") if state == "hurts" else ("helps", "Recovery helps")
    elif recovering and recovered == "hurts":
        tone, headline = "hurts", "Federation hurts, with recovery too" if state == "hurts" else "Recovery hurts"
    elif recovering and state == "hurts":
        headline = "Federation hurts, recovery is on"
    warning = detection.get("warning")
    warned = "" if warning is None else f"; early warning in round {warning}"
    # While recovery is on, clients predict with something else than the w that is judged here.
    subject = "The shared model alone" if recovering else "Federation"
    words = decision_words(decision, level(run.plan), run.percent, subject)
    return Verdict(tone, headline, f"{words}{warned}{_recovery(run, detection)}{_on_test_data(run)}")


def _recovery(run: Run, detection: Detection) -> str:
    """What recovery does, and what is known of it."""
    last, was_on = run.rounds[-1], any(line["recovering"] or line["flag"] for line in run.rounds)
    if not adapts(run.plan):
        return "; this method has no recovery" if detection["verdict"]["state"] == "hurts" else ""
    if not was_on:
        return ""
    if not last["flag"]:
        pairs = list(zip(run.rounds, run.rounds[1:], strict=False))
        off = [(before, line) for before, line in pairs if before["flag"] and not line["flag"]]
        return f"; {_switched_off(*off[-1], when=True)}" if off else ""
    begun = last["round"] + 1
    for line in reversed(run.rounds):
        if not line["recovering"]:
            break
        begun = line["round"]
    effects = [
        _effect(detection[name], against, run.percent)
        for name, against in (("recovery", "w"), ("recovered", "training alone"))
        if detection.get(name)
    ]
    if not effects:
        return f"; recovery on since round {begun}, its effect is not tested yet"
    first, *rest = effects
    second = "".join(f" and {text.removeprefix('what the clients predict with ')}" for text in rest)
    return f"; recovery on since round {begun}: {first}{second}"


def _on_test_data(run: Run) -> str:
    now = gain_summary(run)
    if now is None:
        return ""
    if now.beta is None:
        return f"; on test data in round {now.round}: local {points(now.local, run.percent)}, the gain is not known"
    return f"; on test data in round {now.round}: {_fared(now, run)}"


def _fared(now: GainSummary, run: Run) -> str:
    """`mean gain +5.9 points, median +2.1, clearly better 6 of 15 clients, clearly worse 0 of 15`."""
    assert now.beta is not None
    if now.clearly_harmed is None:
        return f"mean gain {_signed(now.beta, run)}, median {points(now.median, run.percent, sign=True)}"
    return (
        f"mean gain {_signed(now.beta, run)}, median {points(now.median, run.percent, sign=True)}, "
        f"clearly better {now.clearly_better} of {now.clients} clients, "
        f"clearly worse {now.clearly_harmed} of {now.clients}"
    )


# What Delta and the gain on test data say where clients report nothing.


def _flagged(run: Run, flagged: Sequence[Mapping[str, Any]]) -> Verdict:
    """Delta was above epsilon for too long: in the same round everyone was asked how they fare.

    The gain then compares a half-trained w with finished private models: it is told, and proves nothing.
    """
    last = flagged[-1]
    then = _standing(last) if last.get("scores") else None
    now = gain_summary(run) if run.scored and run.scored[-1]["round"] > last["round"] else None
    earlier = [str(line["round"]) for line in flagged[:-1]]
    since = f"in round {_listed(earlier)} and again since round {last['round']}" if earlier else ""
    since = since or f"since round {last['round']}"
    if then is None or then.beta is None:
        gain = "; the gain is not known without private models"
    else:
        gain = f"; in that round the mean gain was {_signed(then.beta, run)} against finished private models" + (
            "" if then.clearly_harmed is None else f", clearly worse {then.clearly_harmed} of {then.clients} clients"
        )
    after = _on_test_data(run) if now else ""
    tone: Tone
    if now is None or now.beta is None:
        tone, headline = "suspected", "Suspected by Delta"
    elif now.beta >= 0:
        tone, headline = "helps", "Gain above 0 now"
    else:
        tone, headline = "hurts" if run.state == "ended" else "suspected", "Gain below 0 now"
    return Verdict(tone, headline, f"Suspected by Delta {since}{gain}{_what_was_done(run, last)}{after}")


def _what_was_done(run: Run, last: Mapping[str, Any]) -> str:
    after = [line for line in run.rounds if line["round"] > last["round"]]
    stopped = next((line["round"] for line in after if not line["flag"]), None)
    if not adapts(run.plan):
        return "; this method has no recovery"
    if stopped is not None:
        return f"; recovery on from {last['round'] + 1} to {stopped}"
    return f"; recovery on since {last['round'] + 1}"


def _unflagged(run: Run, rule: DetectionRule | None) -> Verdict:
    now = gain_summary(run)
    assert now is not None
    alarm = _watching(rule, run)
    if now.beta is None:
        text = f"Local accuracy {points(now.local, run.percent)}" if run.percent else f"Local score {now.local:.4f}"
        return Verdict("unknown", "Gain unknown", f"{text}; the gain is not known without private models{alarm}")
    gain = f"{_fared(now, run)} (test data, round {now.round})"
    if now.beta < 0 and run.state != "ended":  # w is half-trained, the private models are finished
        return Verdict("unknown", "Gain below 0 so far", f"So far against finished private models: {gain}{alarm}")
    tone: Tone = "hurts" if now.beta < 0 else "helps"
    soon = "So far federation" if run.state == "running" else "Federation"
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
    text = f"; {never}, {what} above epsilon = {rule.epsilon:g} in {times} (r' = {rule.patience})"
    if run.planned is not None and rule.patience >= run.planned:
        text += f": it cannot be flagged in {run.planned} rounds, since that takes more than r'"
    return text


# Of any run.


def _before_the_first_round(run: Run) -> Verdict:
    if run.state == "running":
        text = "No round yet: first every client trains a model alone, the yardstick of its gain"
        return Verdict("waiting", "No round yet", text)
    return Verdict("waiting", "No round played", f"No round was played{_whereabouts(run) or ' before the run ended'}")


def _without_updates(run: Run) -> Verdict:
    """A run whose w no client ever changed: once it has ended, an error."""
    text = no_update(run.rounds)
    tone: Tone = "hurts" if run.state == "ended" else "waiting"
    return Verdict(tone, "No valid update", text[0].upper() + text[1:])


def _left_out(run: Run) -> str:
    """The clients that no gain counts, by name."""
    if not run.excluded or not any(line["answered"] for line in run.rounds):
        return ""
    named = [f"client {client} ({reason})" for client, reason in list(run.excluded.items())[:3]]
    more = f" and {len(run.excluded) - 3} clients more" if len(run.excluded) > 3 else ""
    return f"; left out of the gain on test data: {', '.join(named)}{more}"


def _checked(run: Run) -> str:
    """What makes the verdict doubtful, known before the first round."""
    checks, count = run.about.get("checks"), len(run.warnings)
    if checks is not None and not checks["made"]:
        return "; the checks before training were left out"
    return f"; the checks before training gave {count} warning{'' if count == 1 else 's'}" if count else ""


def _whereabouts(run: Run) -> str:
    at = run.rounds[-1]["round"] if run.rounds else 0
    of = f" of {run.planned}" if run.planned else ""
    return {
        "ended": "",
        "running": f" (running, round {at}{of})",
        "stopped": f" (stopped before its end, after round {at}{of})",
        "crashed": f" (stopped before its end, after round {at}{of})",
    }[run.state]


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
    """beta in the round of the suspicion, as it was measured: w is half-trained, the private models are finished."""
    scores = line["scores"]
    if not scores or scores["beta"] is None:
        return f"round {line['round']}: beta could not be measured"
    of = f"clearly worse off {scores['clearly_harmed']} of {len(scores['clients'])} clients"
    unit = " points" if percent else ""
    return f"round {line['round']}: beta is {points(scores['beta'], percent, sign=True)}{unit} now, {of}"


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
