"""The verdict's sentence, in every case."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest
from folders import about, line, mended, method, plan, scores, summary, write_run

from lindt.report.reading import group_of, method_words, read_run, repeat_command
from lindt.report.verdict import Verdict, verdict

SICK, WELL = scores([-0.3, -0.2, 0.05]), scores([0.02, 0.1, 0.2])


def said(folder: Path, lines: list[dict[str, Any]], *, running: bool = False, **options: Any) -> Verdict:
    write_run(folder, lines, **({"ended": False} if running else {}) | options)
    with (folder / "lock").open("w") as held:
        if running:
            fcntl.flock(held, fcntl.LOCK_EX)
        return verdict(read_run(folder))


def test_negative_federated_learning_mended(tmp_path: Path) -> None:
    found = said(tmp_path, mended())
    assert found.sentence == (
        "Negative federated learning since round 3: 2 of 3 clients were clearly worse off than alone, "
        "mean gain -15.0 points; recovery on since 4, now +10.7, no client clearly worse off"
    )
    assert (found.tone, found.headline) == ("mended", "It hurt and was mended")


def test_the_end_is_the_mean_of_the_last_scored_rounds(tmp_path: Path) -> None:
    found = said(tmp_path, mended(), the_summary=summary(mended(), beta=0.076))
    assert "now +7.6," in found.sentence


def test_some_are_still_worse_off(tmp_path: Path) -> None:
    lines = [*mended()[:-1], mended()[-1] | {"scores": scores([-0.2, 0.1, 0.3])}]
    assert said(tmp_path, lines).sentence.endswith("now +6.7, 1 client still clearly worse off")


def test_while_it_is_sick(tmp_path: Path) -> None:
    found = said(tmp_path, mended()[:4], running=True)
    assert found.sentence == (
        "Negative federated learning since round 3: 2 of 3 clients are clearly worse off than alone, "
        "mean gain -15.0 points; recovery on since 4 (running, round 4 of 10)"
    )
    assert (found.tone, found.headline) == ("hurts", "Federation hurts")


def test_recovery_that_did_not_help_yet(tmp_path: Path) -> None:
    lines = [*mended()[:-1], mended()[-1] | {"scores": scores([-0.3, -0.2, 0.1])}]
    assert (said(tmp_path, lines).tone, said(tmp_path, lines).headline) == ("hurts", "Federation still hurts")


def test_a_method_without_recovery(tmp_path: Path) -> None:
    lines = [one | {"scores": SICK if one["scores"] else None} for one in mended()]
    found = said(tmp_path, lines, the_plan=plan(method=method("global_only")))
    assert "; this method has no recovery, now -15.0, 2 clients still clearly worse off" in found.sentence


def test_recovery_that_stopped_and_nfl_again(tmp_path: Path) -> None:
    lines = mended()[:5]
    lines.append(line(6, count=0, detections=1, recovering=True, scores=WELL))
    found = said(tmp_path / "stopped", lines, the_summary=summary(lines))
    assert "; recovery on from 4 to 6, now +10.7, " in found.sentence
    lines.append(line(7, count=3, detections=2, flag=True, scores=SICK))
    found = said(tmp_path / "again", lines, ended=False)
    assert found.sentence == (
        "Negative federated learning in round 3 and again since round 7: 2 of 3 clients are clearly worse off than "
        "alone, mean gain -15.0 points; recovery on since 8 (stopped before its end, after round 7 of 10)"
    )


def test_suspected_but_not_confirmed(tmp_path: Path) -> None:
    lines = [one | {"scores": WELL if one["scores"] else None} for one in mended()]
    found = said(tmp_path, lines)
    assert found.sentence.startswith(
        "Suspected since round 3, not confirmed: none of 3 clients was clearly worse off than alone, mean gain +10.7"
    )
    assert found.tone == "suspected"


def test_without_private_models_nobody_knows(tmp_path: Path) -> None:
    unknown = {"private": None, "beta": None, "harmed": None, "clearly_harmed": None, "worst_tenth": None}
    blind = scores([0.1, 0.1], **unknown)
    lines = [one | {"scores": blind if one["scores"] else None} for one in mended()]
    assert said(tmp_path / "flagged", lines).sentence == (
        "Suspected since round 3, not confirmed: the gain is not known without private models; "
        "recovery on since 4, now local 90.0"
    )
    lines = [line(1, count=0, scores=blind)]
    found = said(tmp_path / "quiet", lines)
    assert found.sentence == (
        "Local accuracy 90.0; the gain is not known without private models; "
        "never flagged, Delta above epsilon = 0.1 in no round (r' = 2)"
    )
    assert found.tone == "unknown"


@pytest.mark.parametrize(
    ("recovery", "tail"),
    [
        ("on_detection", "; never flagged, Delta above epsilon = 0.1 in one round (r' = 2)"),
        ("never", "; no detector watches"),
        ("always", "; recovery on from the first round, no detector"),
    ],
)
def test_helping(tmp_path: Path, recovery: str, tail: str) -> None:
    found = said(tmp_path, [line(1, scores=WELL)], the_plan=plan(method=method(recovery=recovery)))
    text = "Federation helps: mean gain +10.7 points, none of 3 clients is clearly worse off than alone"
    assert found == Verdict("helps", "Federation helps", text + tail)


def test_hurting_without_an_alarm(tmp_path: Path) -> None:
    found = said(tmp_path, [line(1, scores=SICK)], running=True)
    assert found.sentence == (
        "So far federation hurts: mean gain -15.0 points, 2 of 3 clients are clearly worse off than alone; "
        "not flagged yet, Delta above epsilon = 0.1 in one round (r' = 2) (running, round 1 of 10)"
    )


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
    assert "mean gain +0.1067, none" in found.sentence


@pytest.mark.parametrize(
    ("the_method", "words"),
    [
        (method(), "LINDT on detection"),
        (method("global_only"), "FedAvg, watched"),
        (method("global_only", "never"), "FedAvg"),
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
