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
from lindt.report.results import run_verdict, score_table
from lindt.report.terminal import ASCII, charts
from lindt.report.verdict import Fact, Verdict, detection_news, facts, points, scored_data, verdict
from lindt.runs.schema import FROM_FLOWER


def said(folder: Path, lines: list[dict[str, Any]], *, running: bool = False, **options: Any) -> Verdict:
    write_run(folder, lines, **({"ended": False} if running else {}) | options)
    with (folder / "lock").open("w") as held:
        if running:
            fcntl.flock(held, fcntl.LOCK_EX)
        return verdict(read_run(folder))


BASIS = "(two standard errors, 12 clients, 400 validation samples)"
FARED_WELL = (
    "the clients are 10.7 points more accurate than alone, on average (median +10.0, worst tenth +2.0); "
    "better off 3 of 3 clients (clearly 2), unchanged 0, worse off 0 (clearly 0)"
)
FARED_ILL = (
    "the clients are 15.0 points less accurate than alone, on average (median -20.0, worst tenth -30.0); "
    "better off 1 of 3 clients (clearly 0), unchanged 0, worse off 2 (clearly 2)"
)


def test_too_early_is_grey_though_the_gain_is_below_zero(tmp_path: Path) -> None:
    found = said(tmp_path, too_early(), running=True, the_plan=gain_plan())
    assert found == Verdict(
        "waiting",
        "Too early to say",
        f"Too early to say whether federation helps: the shared model is 10.0 +- 2.0 points less accurate than "
        f"training alone {BASIS}; the test begins in round 5; "
        f"on test data in round 4 {FARED_ILL} (running, round 4 of 10)",
    )
    ended = said(tmp_path / "short", too_early(), the_plan=gain_plan(rounds=4))  # digits-control --rounds 5
    assert (ended.tone, "hurts" in ended.sentence) == ("waiting", False)


@pytest.mark.parametrize(
    ("rounds", "start", "told"),
    [
        (
            4,
            0,
            f"{BASIS}; the test needs the reports of two rounds from round 5 on, but the run has 4: plan more rounds",
        ),
        (
            5,
            0,
            f"{BASIS}; the test needs the reports of two rounds from round 5 on, but the run has 5: plan more rounds",
        ),
        (6, 0, f"{BASIS}; the test begins in round 5"),
        (41, 0, f"{BASIS}; the test begins in round 11"),  # a quarter of the rounds
        (41, 8, f"{BASIS}; the test begins in round 8"),
        (41, 4, BASIS),  # it has begun
    ],
)
def test_too_early_says_when_the_test_begins(tmp_path: Path, rounds: int, start: int, told: str) -> None:
    the_plan = gain_plan(rounds=rounds, detection={"kind": "gain", "alpha": 0.05, "start": start})
    assert f"{told}; on test data" in said(tmp_path, too_early(), running=True, the_plan=the_plan).sentence


def test_a_wrapped_flower_app_is_scored_on_its_evaluation_data(tmp_path: Path) -> None:
    """Its evaluation returns means: there is no score per sample, and the test uses the same data."""
    means = scores([-0.3, -0.2, 0.05]) | {"clearly_harmed": None, "clearly_better": None}
    lines = [*too_early()[:3], too_early()[3] | {"scores": means}]
    app = about(task=FROM_FLOWER)
    run = read_run(write_run(tmp_path / "app", lines, the_plan=gain_plan(), the_about=app))
    assert "; on the app's evaluation data in round 4 the clients are" in verdict(run).sentence
    assert facts(run)[0].title.startswith("On the app's evaluation data, round 4, ")
    assert "mean gain over training alone, on the app's evaluation data, in points" in charts(run, ASCII, 60)
    dual = read_run(write_run(tmp_path / "dual", too_early(), the_plan=gain_plan(), the_about=app))
    own = read_run(write_run(tmp_path / "own", lines, the_plan=gain_plan()))
    assert scored_data(dual) == scored_data(own) == "test data"


def test_undecided_says_what_would_decide_it(tmp_path: Path) -> None:
    fared = (
        "the clients are 0.3 points more accurate than alone, on average (median 0.0, worst tenth -1.0); "
        "better off 1 of 3 clients (clearly 0), unchanged 1, worse off 1 (clearly 0)"
    )
    found = said(tmp_path / "a", undecided(), the_plan=gain_plan())
    assert found == Verdict(
        "unknown",
        "Undecided",
        "Undecided whether federation helps, at level 0.05: the shared model is 0.4 +- 2.0 points more accurate than "
        f"training alone {BASIS}; "
        f"3,200 validation samples would decide it if the gain stays as it is; on test data in round 10 {fared}",
    )
    assert "would decide" not in said(tmp_path / "b", undecided(needed=None), the_plan=gain_plan()).sentence
    silent = [line(1, detection=detection(decision("too early")))]
    assert said(tmp_path / "d", silent, ended=False, the_plan=gain_plan()).sentence == (
        "Too early to say whether federation helps: no client has reported its gain yet; the test begins in round 5 "
        "(stopped before its end, after round 1 of 10)"
    )
    silent = [line(1, detection=detection(decision("undecided")))]
    assert said(tmp_path / "c", silent, ended=False, the_plan=gain_plan()).sentence == (
        "Undecided whether federation helps, at level 0.05: no client reports its gain "
        "(stopped before its end, after round 1 of 10)"
    )


def test_helps(tmp_path: Path) -> None:
    assert said(tmp_path, helps(), the_plan=gain_plan()) == Verdict(
        "helps",
        "Federation helps",
        "Federation helps since round 5, at level 0.05: the shared model is 10.0 +- 2.0 points more accurate than "
        f"training alone {BASIS}; "
        f"on test data in round 10 {FARED_WELL}",
    )


def test_hurts(tmp_path: Path) -> None:
    ill = f"the shared model is 12.0 +- 2.0 points less accurate than training alone {BASIS}"
    told = f"hurts since round 4, at level 0.05: {ill}"
    rest = f"; on test data in round 10 {FARED_ILL}"
    found = said(tmp_path / "a", hurts(), the_plan=gain_plan())
    assert found == Verdict("hurts", "Federation hurts", f"Federation {told}; early warning in round 2{rest}")
    watched = gain_plan(method=method("global_only", "never"))
    assert said(tmp_path / "b", hurts(), the_plan=watched).sentence == (
        f"Federation {told}; early warning in round 2; this method has no recovery{rest}"
    )


def test_a_warning_after_the_verdict_is_not_told(tmp_path: Path) -> None:
    late = [one | {"detection": one["detection"] | {"warning": 6 if one["round"] >= 6 else None}} for one in hurts()]
    assert "warning" not in said(tmp_path, late, the_plan=gain_plan()).sentence


SHARED = f"hurts since round 4, at level 0.05: it is 12.0 +- 2.0 points less accurate than training alone {BASIS}"
RECOVERY = (
    "; early warning in round 2; recovery on since round 3: what the clients predict with is 8.0 +- 2.0 points more "
    "accurate than the shared model (shown since round 6)"
)


@pytest.mark.parametrize(
    ("recovered", "tone", "headline", "words"),
    [
        (
            "helps",
            "mended",
            "It hurt and was mended",
            "Recovery helps since round 8, at level 0.05: what the clients predict with is 3.0 +- 2.0 points more "
            f"accurate than training alone {BASIS}; the shared model alone {SHARED}{RECOVERY}; on test",
        ),
        (
            "undecided",
            "hurts",
            "Federation hurts, recovery is on",
            f"The shared model alone {SHARED}{RECOVERY} and 0.5 +- 2.0 points more accurate than training alone "
            "(not decided); on test",
        ),
        (
            "hurts",
            "hurts",
            "Federation hurts, with recovery too",
            "Recovery hurts since round 8, at level 0.05: what the clients predict with is 3.0 +- 2.0 points less "
            f"accurate than training alone {BASIS}; the shared model alone {SHARED}{RECOVERY}; on test",
        ),
    ],
)
def test_recovery_is_green_only_where_it_is_shown(
    tmp_path: Path, recovered: str, tone: str, headline: str, words: str
) -> None:
    """The sentence begins with what the headline says."""
    found = said(tmp_path, hurts(recovering=True, recovered=recovered), the_plan=gain_plan())
    assert (found.tone, found.headline) == (tone, headline)
    assert found.sentence.startswith(words)


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
        "; recovery was switched off in round 7: what the clients predicted with was shown to be worse than the "
        "shared model; "
    ) in found.sentence
    assert (found.tone, found.headline) == ("hurts", "Federation hurts")


def test_other_tests_and_other_states(tmp_path: Path) -> None:
    guard = gain_plan(detection={"kind": "fl_guard"})
    assert (
        "since round 4, by FL-GUARD's rule: the shared model" in said(tmp_path / "a", hurts(), the_plan=guard).sentence
    )
    nameless = gain_plan(detection={"kind": "of-their-own"})
    assert "since round 4: the shared model is" in said(tmp_path / "b", hurts(), the_plan=nameless).sentence
    odd = [line(1, detection=detection(decision("=cmd()", 0.1)))]
    assert said(tmp_path / "c", odd, ended=False, the_plan=gain_plan()).headline == "Undecided"
    raw = said(tmp_path / "d", helps(), the_plan=gain_plan(), the_about=about(metric_in_percent=False))
    assert "more validation samples against training alone than it loses, by 10.0 +- 2.0% of" in raw.sentence


def test_the_gain_of_an_own_metric_is_told_in_samples_won(tmp_path: Path) -> None:
    """The test of an own metric knows which model is better on a sample, not by how much."""
    raw, app = about(metric_in_percent=False), about(metric_in_percent=False, task=FROM_FLOWER)
    own = said(tmp_path / "own", helps(), the_plan=gain_plan(), the_about=raw).sentence
    words = "the shared model wins more validation samples against training alone than it loses, by 10.0 +- 2.0%"
    assert f"{words} of the samples {BASIS}" in own
    lost = said(tmp_path / "lost", hurts(), the_plan=gain_plan(), the_about=raw).sentence
    words = "the shared model loses more validation samples against training alone than it wins, by 12.0 +- 2.0%"
    assert words in lost
    none = {"clearly_harmed": None, "clearly_better": None}
    means = [one | {"scores": one["scores"] | none} if one["scores"] else one for one in helps()]
    wrapped = said(tmp_path / "app", means, the_plan=gain_plan(), the_about=app).sentence
    assert "better than training alone (0.1000 +- 0.0200, the difference of the scores over the sum of" in wrapped
    f1 = gain_plan(scoring={"metric": "macro_f1"})  # its gain on single samples is one of hits
    assert "is 10.0 +- 2.0 points more accurate than" in said(tmp_path / "f1", helps(), the_plan=f1).sentence


def test_a_good_test_with_bad_scores_is_not_green(tmp_path: Path) -> None:
    lines = helps()
    lines[-1]["scores"] = scores([0.1, 0.05, -0.9])  # better on more clients, worse on average: -25 points
    trained_too, many = "have trained on the validation data too", "the scores are of one round"
    whole = gain_plan(alone={"with_validation": True})
    for name, reason, the_plan in (
        ("percent", trained_too, whole),
        ("first P_i", many, gain_plan(alone={"with_validation": False})),
        ("app", many, whole),
        ("own", "also by how much", whole),
    ):
        raw = about(metric_in_percent=name != "own", task=FROM_FLOWER if name == "app" else None)
        found = said(tmp_path / name, lines, the_plan=the_plan, the_about=raw)
        assert (found.tone, found.headline) == ("unknown", "Test and scores disagree")
        assert found.sentence.startswith("Test and scores disagree: federation helps since round 5")
        assert reason in found.sentence
        assert (trained_too in found.sentence) == (name == "percent")


def test_a_gain_over_private_models_that_have_not_learned_is_not_green(tmp_path: Path) -> None:
    """By hand: private models are right on half of the samples, as is naming the most frequent label."""
    lines = helps()
    lines[-1]["scores"] = scores([0.1, 0.1, 0.1])
    for one in lines[-1]["scores"]["clients"]:
        one["private"] = 0.5
    clients = [{**one, "constant": 0.5} for one in about()["clients"]]
    given = gain_plan(scoring={"metric": "accuracy"})
    found = said(tmp_path, lines, the_plan=given, the_about=about() | {"clients": clients})
    assert (found.tone, found.headline) == ("unknown", "Private models too weak")
    assert "a gain over them says little" in found.sentence


def test_after_an_early_stop_the_scores_are_those_of_the_models_that_are_kept(tmp_path: Path) -> None:
    lines = [
        line(1, scores=scores([0.1, 0.1])),
        line(2, scores=scores([0.3, 0.1])),
        line(3, scores=scores([-0.1, 0.0])),
    ]
    stop = {"best_round": 2, "validation_score": 0.8, "stopped_at": 3, "words": "stopped in round 3"}
    run = read_run(write_run(tmp_path, lines, the_summary=summary(lines, early_stop=stop)))
    assert "on test data in round 2 the clients are 20.0 points more accurate" in verdict(run).sentence
    assert [row["beta"] for row in score_table(run).to_dict("records")] == [0.3, 0.1]
    assert run_verdict(run).round == 2


def shown(folder: Path, lines: list[dict[str, Any]], **options: Any) -> dict[str, dict[str, Fact]]:
    """The numbers under the verdict, by group and name."""
    found = facts(read_run(write_run(folder, lines, **options)))
    return {group.title: {fact.name: fact for fact in group.facts} for group in found}


def test_everyone_is_counted_under_the_verdict(tmp_path: Path) -> None:
    """By hand: gains of +6.25, 0, -10 and -30 points, the last two clearly so; the fourth client attacks."""
    betas = [0.0625, 0.0, -0.1, -0.3]
    lines = [line(1, scores=scores(betas, beta=sum(betas) / 4, worst_tenth=-0.3))]
    found = shown(tmp_path, lines)["On test data, round 1, 4 clients; the attacker is not counted"]
    assert {name: (fact.value, fact.note) for name, fact in found.items()} == {
        "gain over training alone": ("-8.4 points", "mean over the clients"),
        "clearly worse off": ("2 of 4", "by the paired test at 95%"),
        "clearly better off": ("0 of 4", "by the paired test at 95%"),
        "better / unchanged / worse": ("1 / 1 / 2", "50.0% not worse off (IPR)"),
        "median gain": ("-5.0", "the client in the middle"),
        "worst tenth": ("-30.0", "mean gain of those that gain least"),
    }
    sentence = verdict(read_run(tmp_path)).sentence
    assert "8.4 points less accurate than alone, on average (median -5.0, worst tenth -30.0)" in sentence
    assert "better off 1 of 4 clients (clearly 0), unchanged 1, worse off 2 (clearly 2)" in sentence


def test_clients_without_a_private_model_are_not_counted(tmp_path: Path) -> None:
    partly = scores([0.1, -0.2, 0.3])
    partly["clients"][2] |= {"private": None, "beta": None}
    found = shown(tmp_path / "a", [line(1, scores=partly)])[
        "On test data, round 1, 2 clients; the attacker is not counted"
    ]
    assert found["better / unchanged / worse"].value == "1 / 0 / 1"
    unclear = scores([0.1, -0.2], clear=[False, False], clearly_better=None, clearly_harmed=None)
    found = shown(tmp_path / "b", [line(1, scores=unclear)])[
        "On test data, round 1, 2 clients; the attacker is not counted"
    ]
    assert (found["clearly worse off"].value, found["clearly worse off"].note) == ("not known", "no score per sample")


def test_the_tests_own_verdicts_are_shown(tmp_path: Path) -> None:
    title = f"By the clients' reports {BASIS}"
    found = shown(tmp_path / "a", hurts(recovering=True), the_plan=gain_plan())[title]
    assert [(fact.name, fact.value, fact.note) for fact in found.values()] == [
        ("shared model against alone", "hurts since 4", "-12.0 +- 2.0 points"),
        ("early warning", "round 2", "against private models of equal age"),
        ("recovery against the shared model", "helps since 6", "+8.0 +- 2.0 points"),
        ("recovery against alone", "helps since 8", "+3.0 +- 2.0 points"),
    ]
    found = shown(tmp_path / "b", undecided(), the_plan=gain_plan())[title]
    assert [fact.value for fact in found.values()] == ["undecided", "none", "-", "-"]
    assert found["recovery against alone"].note == "recovery is off"
    watched = gain_plan(method=method("global_only", "never"))
    assert len(shown(tmp_path / "c", undecided(), the_plan=watched)[title]) == 2


def test_delta_stands_beside_the_detectors_own_epsilon(tmp_path: Path) -> None:
    found = shown(tmp_path / "a", mended())["By Delta"]
    assert found["Delta"] == Fact("Delta", "0.05", "the detector's epsilon is 0.1")
    assert found["rounds above epsilon"] == Fact("rounds above epsilon", "3", "suspected above r' = 2")
    assert set(shown(tmp_path / "b", [], ended=False)) == {"On test data: no round is scored yet", "By Delta"}
    unwatched = plan(method=method("global_only", "never"))
    assert "No detector watches" in shown(tmp_path / "c", [line(1)], ended=False, the_plan=unwatched)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0625, "+6.2"), (0.1875, "+18.8"), (-0.0625, "-6.2"), (0.0, "0.0"), (-1e-5, "0.0"), (None, "-")],
)
def test_a_half_goes_to_the_even_digit_and_zero_has_no_sign(value: float | None, text: str) -> None:
    assert points(value, sign=True) == text


def test_other_metrics_are_better_or_worse_and_a_gain_of_zero_is_neither(tmp_path: Path) -> None:
    f1 = plan(scoring={"metric": "macro_f1"})
    assert (
        "the clients are 10.7 points better than alone"
        in said(tmp_path / "a", [line(1, scores=WELL)], the_plan=f1).sentence
    )
    level = [line(1, detection=detection(decision("undecided", 0.0)), scores=WELL)]
    assert "the shared model is as accurate as training alone (+- 2.0 points) (two" in said(
        tmp_path / "b", level, the_plan=gain_plan()
    ).sentence  # fmt: skip


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
        "round 7: recovery was switched off: what the clients predicted with was shown to be worse than the shared "
        "model"
    )
    late = [one | {"detection": one["detection"] | {"warning": 6 if one["round"] >= 6 else None}} for one in hurts()]
    assert [text[:16] for text in news(late)] == ["round 4: verdict"]  # it warns of nothing that is not known
    again = [*helps()[:6], undecided()[6]]
    assert news(again)[-1].startswith("round 7: verdict: undecided, at level 0.05: gain")
    assert news(undecided()) == news(mended()) == []


def refusing(lines: list[dict[str, Any]], client: int, rounds: int) -> list[dict[str, Any]]:
    reason = {"client": client, "reason": "its weights hold NaN or infinity"}
    rest = [i for i in (0, 1, 2) if i != client]
    return [
        one | ({"answered": rest, "refused": [reason]} if one["round"] <= rounds else {"answered": [0, 1, 2]})
        for one in lines
    ]


def test_a_client_refused_in_most_rounds_is_named_and_not_counted(tmp_path: Path) -> None:
    lines = refusing(helps(), 2, 6)
    found = said(tmp_path / "a", lines, the_plan=gain_plan())
    assert found.sentence.endswith(
        "; on test data in round 10 the clients are 6.0 points more accurate than alone, on average (median +6.0, "
        "worst tenth +2.0); better off 2 of 2 clients (clearly 1), unchanged 0, worse off 0 (clearly 0); left out of "
        "the gain on test data: client 2 (6 of its 10 updates refused, its weights hold NaN or infinity)"
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
    reasons = [{"client": 0, "reason": "its weights hold NaN or infinity"}]
    lines = [line(r, answered=[], refused=reasons, scores=WELL) for r in (1, 2)]
    assert said(tmp_path / "a", lines) == Verdict(
        "hurts",
        "No valid update",
        "No valid update came back in any of 2 rounds, 2 were refused (its weights hold NaN or infinity); "
        "the shared model never changed",
    )
    assert said(tmp_path / "b", lines, running=True).tone == "waiting"


HALF_TRAINED = "(their private models were finished, the shared model was not)"


def test_suspected_by_delta_and_well_at_the_end(tmp_path: Path) -> None:
    """It says what was measured: neither that NFL was confirmed nor that recovery mended it."""
    found = said(tmp_path, mended())
    assert found.sentence == (
        "Suspected by Delta since round 3; in that round the clients were 15.0 points less accurate than alone, on "
        f"average, clearly worse off 2 of 3 {HALF_TRAINED}; recovery on since round 4; "
        f"on test data in round 10 {FARED_WELL}"
    )
    assert (found.tone, found.headline) == ("helps", "Better than alone now")


def test_now_is_the_last_scored_round(tmp_path: Path) -> None:
    found = said(tmp_path, mended(), the_summary=summary(mended(), beta=0.076))
    assert f"on test data in round 10 {FARED_WELL}" in found.sentence


def test_suspected_by_delta_while_it_runs(tmp_path: Path) -> None:
    found = said(tmp_path, mended()[:4], running=True)
    assert found.sentence == (
        "Suspected by Delta since round 3; in that round the clients were 15.0 points less accurate than alone, on "
        f"average, clearly worse off 2 of 3 {HALF_TRAINED}; recovery on since round 4 (running, round 4 of 10)"
    )
    assert (found.tone, found.headline) == ("suspected", "Suspected by Delta")


def test_suspected_by_delta_and_ill_at_the_end(tmp_path: Path) -> None:
    lines = [*mended()[:-1], mended()[-1] | {"scores": scores([-0.3, -0.2, 0.1])}]
    found = said(tmp_path / "a", lines)
    assert (found.tone, found.headline) == ("hurts", "Worse than alone now")
    assert said(tmp_path / "b", lines, running=True).tone == "suspected"


def test_a_method_without_recovery(tmp_path: Path) -> None:
    lines = [one | {"scores": SICK if one["scores"] else None} for one in mended()]
    found = said(tmp_path, lines, the_plan=plan(method=method("global_only")))
    assert f"; this method has no recovery; on test data in round 10 {FARED_ILL}" in found.sentence


def test_recovery_that_stopped_and_suspicion_again(tmp_path: Path) -> None:
    lines = mended()[:5]
    lines.append(line(6, count=0, detections=1, recovering=True, scores=WELL))
    found = said(tmp_path / "stopped", lines, the_summary=summary(lines))
    assert f"; recovery on from round 4 to 6; on test data in round 6 {FARED_WELL}" in found.sentence
    lines.append(line(7, count=3, detections=2, flag=True, scores=SICK))
    found = said(tmp_path / "again", lines, ended=False)
    assert found.sentence == (
        "Suspected by Delta in round 3 and again since round 7; in that round the clients were 15.0 points less "
        f"accurate than alone, on average, clearly worse off 2 of 3 {HALF_TRAINED}; recovery on since round 8 "
        "(stopped before its end, after round 7 of 10)"
    )


def test_without_private_models_nobody_knows(tmp_path: Path) -> None:
    unknown = {"private": None, "beta": None, "harmed": None, "clearly_harmed": None, "worst_tenth": None}
    blind = scores([0.1, 0.1], **unknown)
    blind["clients"] = [one | {"private": None, "beta": None} for one in blind["clients"]]
    lines = [one | {"scores": blind if one["scores"] else None} for one in mended()]
    assert said(tmp_path / "flagged", lines).sentence == (
        "Suspected by Delta since round 3; the gain is not known without private models; recovery on since round 4; "
        "on test data in round 10: local 90.0, the gain is not known"
    )
    lines = [line(1, count=0, scores=blind)]
    found = said(tmp_path / "quiet", lines)
    assert found.sentence == (
        "Local accuracy 90.0; the gain is not known without private models; "
        "never flagged, Delta above the detector's epsilon = 0.1 in no round (r' = 2)"
    )
    assert found.tone == "unknown"


def test_a_rule_that_the_rounds_cannot_reach_is_named(tmp_path: Path) -> None:
    given = plan(rounds=2, method=method(recovery="on_detection"))
    found = said(tmp_path, [line(1, scores=WELL), line(2, scores=WELL)], the_plan=given)
    assert found.sentence.endswith("(r' = 2): it cannot be flagged in 2 rounds, since that takes more than r'")


@pytest.mark.parametrize(
    ("recovery", "tail"),
    [
        ("on_detection", "; never flagged, Delta above the detector's epsilon = 0.1 in one round (r' = 2)"),
        ("never", "; no detector watches"),
        ("always", "; recovery on from the first round, no detector"),
    ],
)
def test_helping_by_the_gain_on_test_data(tmp_path: Path, recovery: str, tail: str) -> None:
    found = said(tmp_path, [line(1, scores=WELL)], the_plan=plan(method=method(recovery=recovery)))
    text = f"Federation helps: on test data in round 1 {FARED_WELL}"
    assert found == Verdict("helps", "Federation helps", text + tail)


def test_a_gain_below_zero_is_no_verdict_before_the_end(tmp_path: Path) -> None:
    alarm = "Delta above the detector's epsilon = 0.1 in one round (r' = 2)"
    assert said(tmp_path / "a", [line(1, scores=SICK)], running=True) == Verdict(
        "unknown",
        "Worse than alone so far",
        f"So far, with finished private models and an unfinished shared model: on test data in round 1 {FARED_ILL}; "
        f"not flagged yet, {alarm} "
        "(running, round 1 of 10)",
    )
    found = said(tmp_path / "b", [line(1, scores=SICK)])
    assert (found.tone, found.headline) == ("hurts", "Federation hurts")


def test_before_there_is_anything_to_say(tmp_path: Path) -> None:
    found = said(tmp_path / "new", [], running=True)
    assert found.sentence == "No round yet: first every client trains a model alone, which its gain is measured against"
    assert said(tmp_path / "dead", [], ended=False).sentence == (
        "No round was played (stopped before its end, after round 0 of 10)"
    )
    found = said(tmp_path / "young", [line(1), line(2)], running=True)
    assert found.sentence.startswith(
        "No round is scored yet; not flagged yet, Delta above the detector's epsilon = 0.1 in 2 rounds"
    )


def test_a_metric_that_is_no_percentage(tmp_path: Path) -> None:
    found = said(tmp_path, [line(1, scores=WELL)], the_about=about(metric_in_percent=False))
    assert (
        "the clients are 0.1067 better than alone, on average (median +0.1000, worst tenth +0.0200)" in found.sentence
    )


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


def test_a_gain_of_zero_or_a_panel_that_reaches_zero_is_not_called_help(tmp_path: Path) -> None:
    even = scores([0.0, 0.0])
    found = said(tmp_path / "even", [line(1, scores=even)], the_plan=plan(method=method(recovery="never")))
    assert (found.tone, found.headline) == ("unknown", "No difference")
    assert found.sentence.startswith("Federation makes no difference: on test data in round 1 the clients are as ")

    def panel(low: float | None, high: float | None) -> dict[str, Any]:
        bounds = {"beta_low": low, "beta_high": high, "ipr_low": 0.4, "ipr_high": 1.0}
        return {**WELL, "panel": {"expected": 3, "clients": 3, "of": 900, **bounds}}

    for low, high, headline in (
        (-0.02, 0.21, "Undecided"),
        (None, None, "Undecided"),
        (0.02, 0.19, "Federation helps"),
    ):
        lines = [line(1, scores=panel(low, high))]
        found = said(tmp_path / f"{low}", lines, the_plan=plan(method=method(recovery="never")))
        assert found.headline == headline
        assert FARED_WELL in found.sentence
