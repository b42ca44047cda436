"""The verdict on a run in one sentence: whether federation helps or hurts, since when, how certain, and what was done.

The terminal, the page and the report show the same sentence. The words for the events of a round are here, too. This
module does not import torch, so that any log can use it.

Where clients report their gain on validation data (a round's `detection`), the verdict is that of the test, in one of
four states: too early, undecided, helps, hurts. Where they do not, the rule on Delta may suspect NFL, and the sentence
gives the gain beta on test data as it was measured. "Clearly" means: by the paired test of server/scores.py, because
one client's test set is small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, final

from lindt.report.reading import DetectionRule, Run, adapts, detection_rule, gain_test, whole_at, word_at
from lindt.runs.schema import BEST_OF, CHOSEN, FROM_FLOWER
from lindt.server.detection.gain import first_round, too_short
from lindt.server.scores import no_update

# Colours: grey for waiting and unknown, green for helps and mended, orange for hurts, yellow for suspected by Delta.
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
class Fact:
    """A number under the verdict, as text: what it is, its value, and a note."""

    name: str
    value: str
    note: str


@final
@dataclass(frozen=True)
class FactGroup:
    title: str
    facts: tuple[Fact, ...]


@final
@dataclass(frozen=True)
class GainSummary:
    """The clients' gains on test data in one scored round."""

    round: int
    beta: float | None
    median: float | None
    local: float
    clearly_better: int | None  # None where there is no score per sample, which the paired test needs
    clearly_harmed: int | None
    clients: int  # with a known gain; all that were scored, where no gain is known
    better: int
    unchanged: int
    worse: int
    ipr: float | None  # the share of clients that are not worse off
    worst_tenth: float | None
    panel: Mapping[str, Any] | None = None  # `server.scores.Panel`; None where all clients are scored
    chosen: float = 0.0  # the share of clients whose model was chosen on the data on which it is scored


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
    """The gains in the scored round whose models the run has. A mean over several rounds could include rounds before
    recovery."""
    return _standing(run.final) if run.final else None


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
        len(betas) or len(scores["clients"]),
        sum(beta > 0 for beta in betas),
        sum(beta == 0 for beta in betas),
        sum(beta < 0 for beta in betas),
        sum(beta >= 0 for beta in betas) / len(betas) if betas else None,
        scores.get("worst_tenth"),
        scores.get("panel"),
        (scores.get("notes") or {}).get(CHOSEN, 0.0),
    )


# The test of the clients' reports.

STATES = ("too early", "undecided", "helps", "hurts")
VALUES = {"hurts": -1, "too early": 0, "undecided": 0, "helps": 1}  # for charts and trackers, which take numbers
_TONES: dict[str, tuple[Tone, str]] = {
    "too early": ("waiting", "Too early to say"),
    "undecided": ("unknown", "Undecided"),
    "helps": ("helps", "Federation helps"),
    "hurts": ("hurts", "Federation hurts"),
}


def detection_of(line: Mapping[str, Any]) -> Detection | None:
    """The test's results after a round; None where clients report nothing. An unknown state counts as undecided."""
    found = line.get("detection")
    if found is None:
        return None
    names = ("verdict", "recovery", "recovered")
    return {**found, **{name: _known(found[name]) if found.get(name) else None for name in names}}


def _known(decision: Decision) -> Decision:
    return decision if decision["state"] in STATES else {**decision, "state": "undecided"}


def level(plan: Mapping[str, Any]) -> str:
    """`, at level 0.05`: the level, or the name, of this plan's test."""
    test = gain_test(plan)
    return "" if test is None else level_words(test.kind, test.alpha)


def level_words(kind: str, alpha: float | None) -> str:
    if kind == "fl_guard":
        return ", by FL-GUARD's rule"
    return "" if alpha is None else f", at level {alpha:g}"


def decision_words(decision: Decision, level: str, percent: bool) -> str:
    """The test's answer to "does federation help?", in a line of a run's log."""
    state, gain = decision["state"], gain_words(decision, percent)
    if state == "too early":
        return f"Too early to say whether federation helps: {gain}"
    if state == "undecided":
        needed = decision.get("needed")
        until = "; more rounds may decide it" if decision["clients"] else ""
        if needed:
            until = f"; {needed:,} validation samples would decide it if the gain stays as it is"
        return f"Undecided{level}: {gain}{until}"
    return f"Federation {state}{_since(decision)}{level}: {gain}"


def gain_words(decision: Decision, percent: bool) -> str:
    """`gain on validation data -21.3 +- 4.0 points (two standard errors, 15 clients, 412 validation samples)`."""
    if decision.get("gain") is None:
        return (
            "no client has reported its gain yet" if decision["state"] == "too early" else "no client reports its gain"
        )
    what = "gain on validation data" if percent else "validation samples won less those lost, as a share,"
    return f"{what} {interval(decision, percent)} ({_basis(decision)})"


def _basis(decision: Decision) -> str:
    """`two standard errors, 15 clients, 412 validation samples`."""
    errors = "two standard errors, " if decision.get("error") is not None else ""
    return f"{errors}{counted(decision['clients'], 'client')}, {counted(decision['samples'], 'validation sample')}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def gain_by_test(decision: Decision, run: Run, other: str = "training alone") -> str:
    """What a test has found, after its subject: `is 12.0 +- 2.0 points less accurate than training alone`.

    The test takes a number from each client that lies in [-1, 1]. For an accuracy and for macro F1 that is the
    difference of the hits. For an own metric it is the share of samples won less the share lost, which says nothing of
    how much better a sample's value is, and for an app with one score of its evaluation a relative difference.
    """
    gain, error, what = decision["gain"], decision.get("error"), compared_by_test(run)
    if what == "hits":
        return f"is {compared(gain, run, error, other, hits=True)}"
    factor, digits = (1, 4) if what == "relative" else (100, 1)
    size = f"{abs(factor * gain):.{digits}f}"
    both = "" if error is None else f" +- {factor * 2 * error:.{digits}f}"
    if what == "relative":
        sign = "as good as" if float(size) == 0 else "better than" if gain > 0 else "worse than"
        return f"is {sign} {other} ({size}{both}, the difference of the scores over the sum of their sizes)"
    won, lost = ("loses", "wins") if gain < 0 else ("wins", "loses")
    return f"{won} more validation samples against {other} than it {lost}, by {size}{both}% of the samples"


def compared_by_test(run: Run) -> Literal["hits", "samples", "relative"]:
    """What the test compares: hits on single samples, samples won and lost, or one score for all evaluation data.

    The last is that of a wrapped Flower app without an accuracy.
    """
    if run.percent:
        return "hits"
    now = gain_summary(run)
    wrapped = run.about.get("task") == FROM_FLOWER and (now is None or now.clearly_harmed is None)
    return "relative" if wrapped else "samples"


def compared(
    gain: float, run: Run, error: float | None = None, other: str = "training alone", *, hits: bool = False
) -> str:
    """`12.0 +- 2.0 points less accurate than training alone`; `better` or `worse` for metrics other than accuracy.

    `hits`: the gain is that of the hits on single samples, as in the test, also where the metric is macro F1.
    """
    names = ("", "accuracy", "macro_f1") if hits else ("", "accuracy")
    accuracy = run.percent and word_at(run.plan, "scoring", "metric") in names
    more, less, same = ("more accurate", "less accurate", "accurate") if accuracy else ("better", "worse", "good")
    unit, size = " points" if run.percent else "", points(abs(gain), run.percent)
    both = "" if error is None else f"+- {points(2 * error, run.percent)}"
    if float(size) == 0:
        return f"as {same} as {other}{both and f' ({both}{unit})'}"
    return f"{size}{both and ' '}{both}{unit} {more if gain > 0 else less} than {other}"


def interval(decision: Decision, percent: bool) -> str:
    """`-21.3 +- 4.0 points`: the gain, plus and minus two standard errors."""
    gain, error = decision.get("gain"), decision.get("error")
    if gain is None:
        return "-"
    both = f" +- {points(2 * error, percent)}" if error is not None else ""
    return f"{points(gain, percent, sign=True)}{both}{' points' if percent else ''}"


def detection_news(before: Mapping[str, Any] | None, line: Mapping[str, Any], level: str, percent: bool) -> list[str]:
    """One sentence for each change in a round: a warning, a verdict, recovery on or off, and the effect of recovery.

    `before` and `line` are lines of rounds.jsonl, `before` None in the first round.
    """
    now = detection_of(line)
    if now is None:
        return []
    then = (detection_of(before) if before else None) or {}
    at, said = f"round {line['round']}: ", list[str]()
    already = (
        _state(then.get("verdict")) == now["verdict"]["state"] == "hurts"
    )  # a warning that comes after the verdict
    if now.get("warning") is not None and then.get("warning") is None and not already:
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
    """Whether a decision was made, changed or withdrawn."""
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
        worse = "what the clients predicted with was shown to be worse than the shared model"
        return f"recovery was switched off{at}: {worse}"
    return f"recovery was switched off{at}"


def _tested(run: Run, detection: Detection) -> Verdict:
    """The verdict of the test of the clients' reports."""
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
    late = state == "hurts" and None not in (warning, decision.get("since")) and warning > decision["since"]
    warned = "" if warning is None or late else f"; early warning in round {warning}"
    # While recovery is on, clients do not predict with the shared model, which this verdict is about.
    words = _on_shared_model(run, decision, alone=recovering)
    if recovering and recovered in ("helps", "hurts"):
        words = f"{_on_recovery(run, detection['recovered'])}; {words[0].lower()}{words[1:]}"
    tone, headline, doubt = _doubted(run, tone, headline)
    if doubt:  # the sentence begins with it: many readers read no further
        words = f"{headline}: {words[0].lower()}{words[1:]}"
    return Verdict(tone, headline, f"{words}{warned}{_recovery(run, detection)}{_on_test_data(run)}{doubt}")


def _doubted(run: Run, tone: Tone, headline: str) -> tuple[Tone, str, str]:
    """Tone and headline, and a reason where a good result of the test is doubtful: it is then not shown as good."""
    now = gain_summary(run)
    if tone not in ("helps", "mended"):
        return tone, headline, ""
    if now is not None and now.beta is not None and float(points(now.beta, run.percent)) < 0:
        return "unknown", "Test and scores disagree", f"; {_why_they_disagree(run)}"
    if run.weak is not None:
        return "unknown", "Private models too weak", f"; {run.weak}"
    return tone, headline, ""


def _why_they_disagree(run: Run) -> str:
    if not run.percent:
        return "the two disagree: the test counts on how many samples a model is better, the score also by how much"
    why = "the two disagree: the test weighs the reports of many rounds, the scores are of one round"
    alone = run.plan.get("alone")
    if isinstance(alone, dict) and alone.get("with_validation") is True and run.about.get("task") != FROM_FLOWER:
        why += ", and of private models that have trained on the validation data too"
    return why


def _on_shared_model(run: Run, decision: Decision, alone: bool) -> str:
    """The test's result for the shared model, with its data. `alone` is true while recovery is on."""
    state, gain = decision["state"], decision.get("gain")
    subject, it = ("the shared model alone", "it") if alone else ("federation", "the shared model")
    if gain is None:
        found = "no client has reported its gain yet" if state == "too early" else "no client reports its gain"
    else:
        found = f"{it} {gain_by_test(decision, run)} ({_basis(decision)})"
    if state == "too early":
        return f"Too early to say whether {subject} helps: {found}{_until_the_test(run)}"
    if state == "undecided":
        until = "; more rounds may decide it" if decision["clients"] else ""
        if needed := decision.get("needed"):
            until = f"; {counted(needed, 'validation sample')} would decide it if the gain stays as it is"
        return f"Undecided whether {subject} helps{level(run.plan)}: {found}{until}"
    return f"{subject[0].upper()}{subject[1:]} {state}{_since(decision)}{level(run.plan)}: {found}"


def _until_the_test(run: Run) -> str:
    """When the test begins, or that the run has too few rounds for it."""
    test = gain_test(run.plan)
    if test is None or test.kind != "gain":
        return ""
    start = whole_at(run.plan, "detection", "start") or 0
    if short := too_short(start, run.planned):
        return f"; {short}"
    first = first_round(start, run.planned)
    return f"; the test begins in round {first}" if run.rounds[-1]["round"] < first else ""


def _on_recovery(run: Run, decision: Decision) -> str:
    """The test's result for the models that clients predict with in recovery, against training alone."""
    found = gain_by_test(decision, run) if decision.get("gain") is not None else ""
    shown = f": what the clients predict with {found} ({_basis(decision)})" if found else ""
    return f"Recovery {decision['state']}{_since(decision)}{level(run.plan)}{shown}"


def _recovery(run: Run, detection: Detection) -> str:
    """Since when recovery is on, and its effect."""
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
    told = _state(detection.get("recovered")) in ("helps", "hurts")  # the sentence begins with that effect
    effects = [
        f"{gain_by_test(found, run, other)} ({_shown(found)})"
        for name, other in (("recovery", "the shared model"), ("recovered", "training alone"))
        if (found := detection.get(name)) and found.get("gain") is not None and not (told and name == "recovered")
    ]
    if not effects:
        return f"; recovery on since round {begun}{'' if told else ', its effect is not tested yet'}"
    effects[1:] = [effect.removeprefix("is ") if effects[0].startswith("is ") else effect for effect in effects[1:]]
    return f"; recovery on since round {begun}: what the clients predict with {' and '.join(effects)}"


def _shown(decision: Decision) -> str:
    decided = decision["state"] in ("helps", "hurts")
    return f"shown{_since(decision)}" if decided else "not decided"


def _on_test_data(run: Run) -> str:
    now = gain_summary(run)
    if now is None:
        return ""
    if now.beta is None:
        local = points(now.local, run.percent)
        return f"; on {scored_data(run)} in round {now.round}: local {local}, the gain is not known"
    return f"; {_fared(now, run)}"


def scored_data(run: Run) -> str:
    """The data on which clients are scored. A wrapped Flower app has one evaluation, which the test uses as well.

    Its scores are means. The clients of an app with a dual model have test data apart, with a score per sample.
    """
    now = gain_summary(run)
    wrapped = run.about.get("task") == FROM_FLOWER and now is not None and now.clearly_harmed is None
    return "the app's evaluation data" if wrapped else "test data"


def _fared(now: GainSummary, run: Run) -> str:
    """The mean gain, and how many clients are better off, unchanged and worse off."""
    assert now.beta is not None
    spread = f"median {points(now.median, run.percent, sign=True)}"
    if now.worst_tenth is not None:
        spread += f", worst tenth {points(now.worst_tenth, run.percent, sign=True)}"
    known = now.clearly_harmed is not None
    better, worse = (f" (clearly {n})" if known else "" for n in (now.clearly_better, now.clearly_harmed))
    return (
        f"on {scored_data(run)} in round {now.round} the clients are {compared(now.beta, run, other='alone')}, "
        f"on average ({spread}); better off {now.better} of {counted(now.clients, 'client')}{better}, "
        f"unchanged {now.unchanged}, worse off {now.worse}{worse}{_chosen_words(now)}{_panel_words(now, run)}"
    )


def _chosen_words(now: GainSummary) -> str:
    """Why no client is worse off where each chose its model on the data on which it is scored."""
    who = "the clients" if now.chosen == 1 else "the clients in recovery"
    return f"; {who} {BEST_OF.format('these', 'them')}" if now.chosen else ""


def _panel_words(now: GainSummary, run: Run) -> str:
    """What the panel says about all clients; empty where all clients are scored."""
    if now.panel is None:
        return ""
    found, low, high = now.panel, now.panel.get("beta_low"), now.panel.get("beta_high")
    words = f"; these clients are a random panel of {found['of']:,} clients"
    if low is not None and high is not None:
        ends = " to ".join(points(end, run.percent, sign=True) for end in (low, high))
        words += f", whose mean gain is {ends} (95% interval)"
    left = found["expected"] - found["clients"]
    return words + (f"; the interval leaves out {counted(left, 'client')} without an answer" if left else "")


# The numbers under the verdict.


def facts(run: Run) -> tuple[FactGroup, ...]:
    """The numbers that the page shows under the sentence, written by the functions that write the sentence."""
    detection = detection_of(run.rounds[-1]) if run.rounds else None
    return _facts_on_test_data(run), _facts_of_delta(run) if detection is None else _facts_of_reports(run, detection)


def _facts_on_test_data(run: Run) -> FactGroup:
    now = gain_summary(run)
    if now is None:
        return FactGroup("On test data: no round is scored yet", ())
    if now.beta is None:
        local = Fact("local", points(now.local, run.percent), "the gain is not known without private models")
        return FactGroup(f"On {scored_data(run)}, round {now.round}", (local,))
    unit = " points" if run.percent else ""
    attackers = sum(one["attacker"] for one in run.about["clients"])
    left = f"; the {counted(attackers, 'attacker')} are not counted" if attackers > 1 else ""
    left = "; the attacker is not counted" if attackers == 1 else left

    def clearly(number: int | None) -> str:
        return "not known" if number is None else f"{number} of {now.clients}"

    paired = "by the paired test at 95%" if now.clearly_harmed is not None else "no score per sample"
    share = "" if now.ipr is None else f"{points(now.ipr)}% not worse off (IPR)"
    return FactGroup(
        f"On {scored_data(run)}, round {now.round}, {counted(now.clients, 'client')}{left}",
        (
            Fact("gain over training alone", points(now.beta, run.percent, sign=True) + unit, "mean over the clients"),
            Fact("clearly worse off", clearly(now.clearly_harmed), paired),
            Fact("clearly better off", clearly(now.clearly_better), paired),
            Fact("better / unchanged / worse", f"{now.better} / {now.unchanged} / {now.worse}", share),
            Fact("median gain", points(now.median, run.percent, sign=True), "the client in the middle"),
            Fact("worst tenth", points(now.worst_tenth, run.percent, sign=True), "mean gain of those that gain least"),
            *_panel_facts(now, run),
        ),
    )


def _panel_facts(now: GainSummary, run: Run) -> tuple[Fact, ...]:
    if now.panel is None:
        return ()
    low, high = now.panel.get("beta_low"), now.panel.get("beta_high")
    known = low is not None and high is not None
    ends = " to ".join(points(end, run.percent, sign=True) for end in (low, high)) if known else "not known"
    return (Fact(f"mean gain of all {now.panel['of']:,} clients", ends, "95% interval, from a random panel"),)


def _facts_of_reports(run: Run, detection: Detection) -> FactGroup:
    decision, warning = detection["verdict"], detection.get("warning")
    found = [_decided("shared model against alone", decision, run)]
    found.append(
        Fact("early warning", "none" if warning is None else f"round {warning}", "against private models of equal age")
    )
    if adapts(run.plan):
        for name, other in (("recovery", "the shared model"), ("recovered", "alone")):
            title = f"recovery against {other}"
            known = detection.get(name)
            on = "not tested yet" if run.rounds[-1]["flag"] else "recovery is off"
            found.append(_decided(title, known, run) if known else Fact(title, "-", on))
    basis = f" ({_basis(decision)})" if decision.get("gain") is not None else ""
    what = ", samples won less samples lost as a share" if compared_by_test(run) == "samples" else ""
    return FactGroup(f"By the clients' reports{what}{basis}", tuple(found))


def _decided(name: str, decision: Decision, run: Run) -> Fact:
    since = "" if decision.get("since") is None else f" since {decision['since']}"
    return Fact(name, f"{decision['state']}{since}", interval(decision, run.percent))


def _facts_of_delta(run: Run) -> FactGroup:
    rule, last = detection_rule(run.plan), run.rounds[-1] if run.rounds else None
    value = last.get(rule.statistic if rule else "delta") if last else None
    what = "Delta" if rule is None or rule.statistic == "delta" else f"the {rule.statistic} divergence"
    shown = "-" if value is None else f"{value:.3g}"
    if rule is None:
        return FactGroup("No detector watches", (Fact(what, shown, "in the last round"),))
    above = Fact("rounds above epsilon", str(last["count"] if last else 0), f"suspected above r' = {rule.patience}")
    return FactGroup("By Delta", (Fact(what, shown, f"the detector's epsilon is {rule.epsilon:g}"), above))


# The verdict by Delta and by the gain on test data, where clients report nothing.


def _flagged(run: Run, flagged: Sequence[Mapping[str, Any]]) -> Verdict:
    """The rule on Delta flagged the run, and all clients were scored in the same round.

    That gain compares an unfinished w with finished private models: the sentence gives it, but it proves nothing.
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
        gain = f"; in that round the clients were {compared(then.beta, run, other='alone')}, on average" + (
            "" if then.clearly_harmed is None else f", clearly worse off {then.clearly_harmed} of {then.clients}"
        )
        gain += " (their private models were finished, the shared model was not)"
    after = _on_test_data(run) if now else ""
    tone: Tone
    if now is None or now.beta is None:
        tone, headline = "suspected", "Suspected by Delta"
    elif now.beta >= 0:
        tone, headline = "helps", "Better than alone now"
    else:
        tone, headline = "hurts" if run.state == "ended" else "suspected", "Worse than alone now"
    return Verdict(tone, headline, f"Suspected by Delta {since}{gain}{_what_was_done(run, last)}{after}")


def _what_was_done(run: Run, last: Mapping[str, Any]) -> str:
    after = [line for line in run.rounds if line["round"] > last["round"]]
    stopped = next((line["round"] for line in after if not line["flag"]), None)
    if not adapts(run.plan):
        return "; this method has no recovery"
    if stopped is not None:
        return f"; recovery on from round {last['round'] + 1} to {stopped}"
    return f"; recovery on since round {last['round'] + 1}"


def _unflagged(run: Run, rule: DetectionRule | None) -> Verdict:
    now = gain_summary(run)
    assert now is not None
    alarm = _watching(rule, run)
    if now.beta is None:
        text = f"Local accuracy {points(now.local, run.percent)}" if run.percent else f"Local score {now.local:.4f}"
        return Verdict("unknown", "Gain unknown", f"{text}; the gain is not known without private models{alarm}")
    gain = _fared(now, run)
    if now.beta < 0 and run.state != "ended":  # w is unfinished, the private models are finished
        text = f"So far, with finished private models and an unfinished shared model: {gain}{alarm}"
        return Verdict("unknown", "Worse than alone so far", text)
    so_far = " so far" if run.state == "running" else ""
    if now.beta == 0:
        return Verdict("unknown", "No difference", f"Federation makes no difference{so_far}: {gain}{alarm}")
    if now.panel is not None and not _beyond_zero(now.panel):
        return Verdict("unknown", "Undecided", f"The panel does not decide whether federation helps: {gain}{alarm}")
    tone: Tone = "hurts" if now.beta < 0 else "helps"
    soon = "So far federation" if run.state == "running" else "Federation"
    headline = f"{'So far it' if run.state == 'running' else 'Federation'} {tone}"
    return Verdict(tone, headline, f"{soon} {tone}: {gain}{alarm}")


def _beyond_zero(panel: Mapping[str, Any]) -> bool:
    """Whether the interval of the mean gain is known and does not contain 0."""
    low, high = panel.get("beta_low"), panel.get("beta_high")
    return low is not None and high is not None and (low > 0 or high < 0)


def _watching(rule: DetectionRule | None, run: Run) -> str:
    """The detector's state while it has not flagged the run."""
    if rule is None:
        always = word_at(run.plan, "method", "recovery", "kind") == "always" and adapts(run.plan)
        return "; recovery on from the first round, no detector" if always else "; no detector watches"
    count = run.rounds[-1]["count"]
    what = "Delta" if rule.statistic == "delta" else f"the {rule.statistic} divergence"
    never = "not flagged yet" if run.state == "running" else "never flagged"
    times = "one round" if count == 1 else f"{count} rounds" if count else "no round"
    text = f"; {never}, {what} above the detector's epsilon = {rule.epsilon:g} in {times} (r' = {rule.patience})"
    if run.planned is not None and rule.patience >= run.planned:
        text += f": it cannot be flagged in {run.planned} rounds, since that takes more than r'"
    return text


# Parts of the sentence for any run.


def _before_the_first_round(run: Run) -> Verdict:
    if run.state == "running":
        text = "No round yet: first every client trains a model alone, which its gain is measured against"
        return Verdict("waiting", "No round yet", text)
    return Verdict("waiting", "No round played", f"No round was played{_whereabouts(run) or ' before the run ended'}")


def _without_updates(run: Run) -> Verdict:
    """The verdict on a run without one valid update: once the run has ended, this is an error."""
    text = no_update(run.rounds)
    tone: Tone = "hurts" if run.state == "ended" else "waiting"
    return Verdict(tone, "No valid update", text[0].upper() + text[1:])


def _left_out(run: Run) -> str:
    """The clients that are left out of every gain, with the reasons."""
    if not run.excluded or not any(line["answered"] for line in run.rounds):
        return ""
    named = [f"client {client} ({reason})" for client, reason in list(run.excluded.items())[:3]]
    more = f" and {len(run.excluded) - 3} more clients" if len(run.excluded) > 3 else ""
    return f"; left out of the gain on test data: {', '.join(named)}{more}"


def _checked(run: Run) -> str:
    """The number of warnings from the checks before training, which make the verdict doubtful."""
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


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def points(value: float | None, percent: bool = True, sign: bool = False) -> str:
    """A score or a gain as text: 81.6, +7.6."""
    if value is None:
        return "-"
    text = f"{value * (100 if percent else 1):+.{1 if percent else 4}f}"
    if float(text) == 0:
        return text[1:]  # neither +0.0 nor -0.0
    return text if sign else text.removeprefix("+")


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
    """The gain in the round in which NFL was suspected: w is unfinished, the private models are finished."""
    scores = line["scores"]
    if not scores or scores["beta"] is None:
        return f"round {line['round']}: the gain over training alone could not be measured"
    of = f"clearly worse off {scores['clearly_harmed']} of {len(scores['clients'])} clients"
    gain = f"{points(abs(scores['beta']), percent)}{' points' if percent else ''}"
    sign = "worse" if scores["beta"] < 0 else "better"
    return f"round {line['round']}: the clients are {gain} {sign} than alone on average, {of}"


def stopped(line: Mapping[str, Any]) -> str:
    return f"round {line['round']}: recovery stopped; clients continue as in FedAvg, and detection starts again"


def refused(line: Mapping[str, Any]) -> list[str]:
    said = [
        f"round {line['round']}: refused the update of client {one['client']}: {one['reason']}"
        for one in line["refused"]
    ]
    if not line["answered"]:
        said.append(f"round {line['round']}: no valid update came back; the old weights are kept")
    return said
