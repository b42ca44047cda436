"""The verdict's sentence, in every case."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
from folders import (
    SICK,
    WELL,
    about,
    decision,
    detection,
    gain_plan,
    helps,
    hurts,
    line,
    mended,
    method,
    plan,
    scores,
    summary,
    too_early,
    undecided,
    write_run,
)

from lindt.report.reading import group_of, method_words, read_run, repeat_command
from lindt.report.verdict import Verdict, detection_news, verdict


def said(folder: Path, lines: list[dict[str, Any]], *, running: bool = False, **options: Any) -> Verdict:
    write_run(folder, lines, **({"ended": False} if running else {}) | options)
    with (folder / "lock").open("w") as held:
        if running:
            fcntl.flock(held, fcntl.LOCK_EX)
        return verdict(read_run(folder))


BASIS = "(two standard errors, 12 clients, 400 validation samples)"
FARED_WELL = "mean gain +10.7 points, median +10.0, clearly better 2 of 3 clients, clearly worse 0 of 3"
FARED_ILL = "mean gain -15.0 points, median -20.0, clearly better 0 of 3 clients, clearly worse 2 of 3"


def test_too_early_is_grey_though_the_gain_is_below_zero(tmp_path: Path) -> None:
    found = said(tmp_path, too_early(), running=True, the_plan=gain_plan())
    assert found == Verdict(
        "waiting",
        "Too early to say",
        f"Too early to say whether federation helps: gain on validation data -10.0 +- 2.0 points {BASIS}; "
        f"on test data in round 4: {FARED_ILL} (running, round 4 of 10)",
    )
    ended = said(tmp_path / "short", too_early(), the_plan=gain_plan(rounds=4))  # digits-control --rounds 5
    assert (ended.tone, "hurts" in ended.sentence) == ("waiting", False)


def test_undecided_says_what_would_decide_it(tmp_path: Path) -> None:
    fared = "mean gain +0.3 points, median +0.0, clearly better 0 of 3 clients, clearly worse 0 of 3"
    found = said(tmp_path / "a", undecided(), the_plan=gain_plan())
    assert found == Verdict(
        "unknown",
        "Undecided",
        f"Undecided, at level 0.05: gain on validation data +0.4 +- 2.0 points {BASIS}; "
        f"3,200 validation samples would decide it if the gain stays as it is; on test data in round 10: {fared}",
    )
    assert "would decide" not in said(tmp_path / "b", undecided(needed=None), the_plan=gain_plan()).sentence
    silent = [line(1, detection=detection(decision("too early")))]
    assert said(tmp_path / "d", silent, ended=False, the_plan=gain_plan()).sentence == (
        "Too early to say whether federation helps: no client has reported its gain yet "
        "(stopped before its end, after round 1 of 10)"
    )
    silent = [line(1, detection=detection(decision("undecided")))]
    assert said(tmp_path / "c", silent, ended=False, the_plan=gain_plan()).sentence == (
        "Undecided, at level 0.05: no client reports its gain (stopped before its end, after round 1 of 10)"
    )


def test_helps(tmp_path: Path) -> None:
    assert said(tmp_path, helps(), the_plan=gain_plan()) == Verdict(
        "helps",
        "Federation helps",
        f"Federation helps since round 5, at level 0.05: gain on validation data +10.0 +- 2.0 points {BASIS}; "
        f"on test data in round 10: {FARED_WELL}",
    )


def test_hurts(tmp_path: Path) -> None:
    told = f"hurts since round 4, at level 0.05: gain on validation data -12.0 +- 2.0 points {BASIS}"
    rest = f"; on test data in round 10: {FARED_ILL}"
    found = said(tmp_path / "a", hurts(), the_plan=gain_plan())
    assert found == Verdict("hurts", "Federation hurts", f"Federation {told}; early warning in round 2{rest}")
    watched = gain_plan(method=method("global_only", "never"))
    assert said(tmp_path / "b", hurts(), the_plan=watched).sentence == (
        f"Federation {told}; early warning in round 2; this method has no recovery{rest}"
    )


@pytest.mark.parametrize(
    ("recovered", "tone", "headline", "words"),
    [
        (
            "helps",
            "mended",
            "It hurt and was mended",
            "is better than training alone (+3.0 +- 2.0 points, since round 8)",
        ),
        (
            "undecided",
            "hurts",
            "Federation hurts, recovery is on",
            "is not shown to be better or worse than training alone (+0.5 +- 2.0 points)",
        ),
        (
            "hurts",
            "hurts",
            "Federation hurts, with recovery too",
            "is worse than training alone (-3.0 +- 2.0 points, since round 8)",
        ),
    ],
)
def test_recovery_is_green_only_where_it_is_shown(
    tmp_path: Path, recovered: str, tone: str, headline: str, words: str
) -> None:
    found = said(tmp_path, hurts(recovering=True, recovered=recovered), the_plan=gain_plan())
    assert (found.tone, found.headline) == (tone, headline)
    assert found.sentence.startswith("The shared model alone hurts since round 4, at level 0.05: ")
    assert (
        "; recovery on since round 3: what the clients predict with is better than w (+8.0 +- 2.0 points, since "
        f"round 6) and {words}; on test data in round 10: "
    ) in found.sentence


def test_recovery_without_a_verdict(tmp_path: Path) -> None:
    """It began at the warning: what the clients predict with may help before anything is known of w."""
    early = hurts(recovering=True)[:3]
    found = said(tmp_path / "begun", early[:2], ended=False, the_plan=gain_plan())
    assert "; recovery on since round 3, its effect is not tested yet" in found.sentence
    for state, tone, headline in (("helps", "helps", "Recovery helps"), ("hurts", "hurts", "Recovery hurts")):
        early[2]["detection"]["recovered"] = decision(state, 0.02, since=3)
        found = said(tmp_path / state, early, ended=False, the_plan=gain_plan())
        assert (found.tone, found.headline) == (tone, headline)


def test_recovery_that_was_shown_to_be_worse_is_off(tmp_path: Path) -> None:
    found = said(tmp_path, hurts(recovering=True, recovered="undecided", switched_off=7), the_plan=gain_plan())
    assert (
        "; recovery was switched off in round 7: what the clients predicted with was shown to be worse than w; "
    ) in found.sentence
    assert (found.tone, found.headline) == ("hurts", "Federation hurts")


def test_other_tests_and_other_states(tmp_path: Path) -> None:
    guard = gain_plan(detection={"kind": "fl_guard"})
    assert "since round 4, by FL-GUARD's rule: gain" in said(tmp_path / "a", hurts(), the_plan=guard).sentence
    nameless = gain_plan(detection={"kind": "of-their-own"})
    assert "since round 4: gain on" in said(tmp_path / "b", hurts(), the_plan=nameless).sentence
    odd = [line(1, detection=detection(decision("=cmd()", 0.1)))]
    assert said(tmp_path / "c", odd, ended=False, the_plan=gain_plan()).headline == "Undecided"
    raw = said(tmp_path / "d", helps(), the_plan=gain_plan(), the_about=about(metric_in_percent=False))
    assert "gain on validation data +0.1000 +- 0.0200 (two" in raw.sentence


def test_what_is_new_in_a_round() -> None:
    def news(lines: list[dict[str, Any]]) -> list[str]:
        pairs = zip([None, *lines], lines, strict=False)
        return [text for before, now in pairs for text in detection_news(before, now, ", at level 0.05", True)]

    effect = "what the clients predict with"
    assert news(hurts(recovering=True)) == [
        f"round 2: early warning: gain on validation data -4.0 +- 2.0 points {BASIS}; no verdict yet",
        "round 2: recovery is on from round 3",
        f"round 4: verdict: federation hurts since round 4, at level 0.05: gain on validation data -8.0 +- 2.0 points "
        f"{BASIS}",
        f"round 6: {effect} is better than w (+8.0 +- 2.0 points, since round 6)",
        f"round 8: {effect} is better than training alone (+3.0 +- 2.0 points, since round 8)",
    ]
    assert news(hurts(recovering=True, recovered="undecided", switched_off=7))[-1] == (
        "round 7: recovery was switched off: what the clients predicted with was shown to be worse than w"
    )
    again = [*helps()[:6], undecided()[6]]
    assert news(again)[-1].startswith("round 7: verdict: undecided, at level 0.05: gain")
    assert news(undecided()) == news(mended()) == []


def refusing(lines: list[dict[str, Any]], client: int, rounds: int) -> list[dict[str, Any]]:
    reason = {"client": client, "reason": "NaN or infinity among the weights"}
    rest = [i for i in (0, 1, 2) if i != client]
    return [
        one | ({"answered": rest, "refused": [reason]} if one["round"] <= rounds else {"answered": [0, 1, 2]})
        for one in lines
    ]


def test_a_client_refused_in_most_rounds_is_named_and_not_counted(tmp_path: Path) -> None:
    lines = refusing(helps(), 2, 6)
    found = said(tmp_path / "a", lines, the_plan=gain_plan())
    assert found.sentence.endswith(
        "; on test data in round 10: mean gain +6.0 points, median +6.0, clearly better 1 of 2 clients, clearly worse "
        "0 of 2; left out of the gain on test data: client 2 (6 of its 10 updates refused, NaN or infinity among the "
        "weights)"
    )
    assert "left out" not in said(tmp_path / "b", refusing(helps(), 2, 5), the_plan=gain_plan()).sentence
    clients = about(4)["clients"]
    broken = about(4) | {"clients": [one | ({"not_finite": True} if one["client"] == 1 else {}) for one in clients]}
    found = said(tmp_path / "c", helps(), the_plan=gain_plan(), the_about=broken)
    assert found.sentence.endswith("left out of the gain on test data: client 1 (NaN or infinity in its data)")


def test_the_weights_of_the_others_stay(tmp_path: Path) -> None:
    lines = refusing([line(1, scores=scores([0.1, 0.3, -0.5]))], 2, 1)
    given = gain_plan(scoring={"metric": "accuracy", "weighting": "given", "weights": [3.0, 1.0, 5.0]})
    run = read_run(write_run(tmp_path, lines, the_plan=given))
    assert run.scored[0]["scores"]["beta"] == pytest.approx((3 * 0.1 + 0.3) / 4)
    assert (run.scored[0]["scores"]["harmed"], run.scored[0]["scores"]["clearly_better"]) == (0, 2)


def test_a_run_without_a_valid_update(tmp_path: Path) -> None:
    reasons = [{"client": 0, "reason": "NaN or infinity among the weights"}]
    lines = [line(r, answered=[], refused=reasons, scores=WELL) for r in (1, 2)]
    assert said(tmp_path / "a", lines) == Verdict(
        "hurts",
        "No valid update",
        "No valid update came back in any of 2 rounds, 2 were refused (NaN or infinity among the weights); "
        "the shared model never changed",
    )
    assert said(tmp_path / "b", lines, running=True).tone == "waiting"


def test_suspected_by_delta_and_well_at_the_end(tmp_path: Path) -> None:
    """It says what was measured: neither that NFL was confirmed nor that recovery mended it."""
    found = said(tmp_path, mended())
    assert found.sentence == (
        "Suspected by Delta since round 3; in that round the mean gain was -15.0 points against finished private "
        f"models, clearly worse 2 of 3 clients; recovery on since 4; on test data in round 10: {FARED_WELL}"
    )
    assert (found.tone, found.headline) == ("helps", "Gain above 0 now")


def test_now_is_the_last_scored_round(tmp_path: Path) -> None:
    found = said(tmp_path, mended(), the_summary=summary(mended(), beta=0.076))
    assert f"on test data in round 10: {FARED_WELL}" in found.sentence


def test_suspected_by_delta_while_it_runs(tmp_path: Path) -> None:
    found = said(tmp_path, mended()[:4], running=True)
    assert found.sentence == (
        "Suspected by Delta since round 3; in that round the mean gain was -15.0 points against finished private "
        "models, clearly worse 2 of 3 clients; recovery on since 4 (running, round 4 of 10)"
    )
    assert (found.tone, found.headline) == ("suspected", "Suspected by Delta")


def test_suspected_by_delta_and_ill_at_the_end(tmp_path: Path) -> None:
    lines = [*mended()[:-1], mended()[-1] | {"scores": scores([-0.3, -0.2, 0.1])}]
    found = said(tmp_path / "a", lines)
    assert (found.tone, found.headline) == ("hurts", "Gain below 0 now")
    assert said(tmp_path / "b", lines, running=True).tone == "suspected"


def test_a_method_without_recovery(tmp_path: Path) -> None:
    lines = [one | {"scores": SICK if one["scores"] else None} for one in mended()]
    found = said(tmp_path, lines, the_plan=plan(method=method("global_only")))
    assert f"; this method has no recovery; on test data in round 10: {FARED_ILL}" in found.sentence


def test_recovery_that_stopped_and_suspicion_again(tmp_path: Path) -> None:
    lines = mended()[:5]
    lines.append(line(6, count=0, detections=1, recovering=True, scores=WELL))
    found = said(tmp_path / "stopped", lines, the_summary=summary(lines))
    assert f"; recovery on from 4 to 6; on test data in round 6: {FARED_WELL}" in found.sentence
    lines.append(line(7, count=3, detections=2, flag=True, scores=SICK))
    found = said(tmp_path / "again", lines, ended=False)
    assert found.sentence == (
        "Suspected by Delta in round 3 and again since round 7; in that round the mean gain was -15.0 points against "
        "finished private models, clearly worse 2 of 3 clients; recovery on since 8 "
        "(stopped before its end, after round 7 of 10)"
    )


def test_without_private_models_nobody_knows(tmp_path: Path) -> None:
    unknown = {"private": None, "beta": None, "harmed": None, "clearly_harmed": None, "worst_tenth": None}
    blind = scores([0.1, 0.1], **unknown)
    blind["clients"] = [one | {"private": None, "beta": None} for one in blind["clients"]]
    lines = [one | {"scores": blind if one["scores"] else None} for one in mended()]
    assert said(tmp_path / "flagged", lines).sentence == (
        "Suspected by Delta since round 3; the gain is not known without private models; recovery on since 4; "
        "on test data in round 10: local 90.0, the gain is not known"
    )
    lines = [line(1, count=0, scores=blind)]
    found = said(tmp_path / "quiet", lines)
    assert found.sentence == (
        "Local accuracy 90.0; the gain is not known without private models; "
        "never flagged, Delta above epsilon = 0.1 in no round (r' = 2)"
    )
    assert found.tone == "unknown"


def test_a_rule_that_the_rounds_cannot_reach_is_named(tmp_path: Path) -> None:
    given = plan(rounds=2, method=method(recovery="on_detection"))
    found = said(tmp_path, [line(1, scores=WELL), line(2, scores=WELL)], the_plan=given)
    assert found.sentence.endswith("(r' = 2): it cannot be flagged in 2 rounds, since that takes more than r'")


@pytest.mark.parametrize(
    ("recovery", "tail"),
    [
        ("on_detection", "; never flagged, Delta above epsilon = 0.1 in one round (r' = 2)"),
        ("never", "; no detector watches"),
        ("always", "; recovery on from the first round, no detector"),
    ],
)
def test_helping_by_the_gain_on_test_data(tmp_path: Path, recovery: str, tail: str) -> None:
    found = said(tmp_path, [line(1, scores=WELL)], the_plan=plan(method=method(recovery=recovery)))
    text = f"Federation helps: {FARED_WELL} (test data, round 1)"
    assert found == Verdict("helps", "Federation helps", text + tail)


def test_a_gain_below_zero_is_no_verdict_before_the_end(tmp_path: Path) -> None:
    alarm = "Delta above epsilon = 0.1 in one round (r' = 2)"
    assert said(tmp_path / "a", [line(1, scores=SICK)], running=True) == Verdict(
        "unknown",
        "Gain below 0 so far",
        f"So far against finished private models: {FARED_ILL} (test data, round 1); not flagged yet, {alarm} "
        "(running, round 1 of 10)",
    )
    found = said(tmp_path / "b", [line(1, scores=SICK)])
    assert (found.tone, found.headline) == ("hurts", "Federation hurts")


def test_before_there_is_anything_to_say(tmp_path: Path) -> None:
    found = said(tmp_path / "new", [], running=True)
    assert found.sentence == "No round yet: first every client trains a model alone, the yardstick of its gain"
    assert said(tmp_path / "dead", [], ended=False).sentence == (
        "No round was played (stopped before its end, after round 0 of 10)"
    )
    found = said(tmp_path / "young", [line(1), line(2)], running=True)
    assert found.sentence.startswith("No round is scored yet; not flagged yet, Delta above epsilon = 0.1 in 2 rounds")


def test_a_metric_that_is_no_percentage(tmp_path: Path) -> None:
    found = said(tmp_path, [line(1, scores=WELL)], the_about=about(metric_in_percent=False))
    assert "mean gain +0.1067, median +0.1000, clearly" in found.sentence


@pytest.mark.parametrize(
    ("the_method", "words"),
    [
        (method(), "LINDT on detection"),
        (method("global_only"), "FedAvg, watched"),
        (method("global_only", "never"), "FedAvg"),
        (method(recovery="on_evidence"), "LINDT on evidence"),
        (method("global_only", "never", penalty={"kind": "proximal"}), "FedProx"),
        (method(recovery="always", aggregator={"kind": "trimmed_mean"}), "LINDT, trimmed mean"),
        (method("fine_tune_head", "always"), "FB"),
        ("lindt", "?"),  # a plan of another version
    ],
)
def test_methods_in_words(the_method: Any, words: str) -> None:
    assert method_words(plan(method=the_method)) == words


def test_a_name_cannot_add_words_to_the_command() -> None:
    assert repeat_command("a b/plan.toml", "x:y; rm -rf /") == (
        "lindt run 'a b/plan.toml' --out runs/again --task 'x:y; rm -rf /'"
    )


def test_seeds_are_one_group_and_anything_else_is_not() -> None:
    assert group_of(plan(), None) == group_of(plan(seed=7), None)
    assert len({group_of(plan(), None), group_of(plan(), "a:b"), group_of(plan(rounds=11), None)}) == 3
