"""Who says what: plays of a few lines whose roles can be read off by hand."""

from __future__ import annotations

from lindt.data.shakespeare import SAME, roles_of

HAMLET = """THE TRAGEDY

PERSONS.

Hamlet, a Prince.
Ghost.

ACT I.

Scene I. A platform.

[Enter Hamlet,
and a Ghost.]

Ham.
Whither wilt thou lead me?
  Speak;  I'll go no further.

Ghost.
Mark me.

Ham.
I will. [Aside.] Alas,

[The cock crows.]

poor ghost!

Ghost. My hour is almost come,
When I

Scene II. A hall.

A room with a fire.

Ham.
[Reads.]
Adieu.
"""


def test_a_play_of_ten_lines() -> None:
    assert roles_of(HAMLET, {}) == {
        "HAM": "Whither wilt thou lead me? Speak; I'll go no further. I will. Alas, poor ghost! Adieu.",
        "GHOST": "Mark me. My hour is almost come, When I",
    }


def test_names_in_capitals_with_a_period_or_without() -> None:
    text = (
        "ACT I.\n\nMRS. PAGE.\nHere is Falstaff.\n\n[Enter.]\n\nWelcome, Sir John.\n\nSONG.\n\nLa la.\n\nLION\nRoar.\n"
    )
    assert roles_of(text, {}) == {"MRS PAGE": "Here is Falstaff. Welcome, Sir John. La la.", "LION": "Roar."}


def test_a_direction_that_is_never_closed_ends_with_its_paragraph() -> None:
    text = "ACT I.\n\nKING.\nStay. [Exit the\nQueen\n\nShe is gone.\n\nFOOL.\n{Aside.] Aye.\n"
    assert roles_of(text, {}) == {"KING": "Stay. She is gone.", "FOOL": "Aye."}


def test_other_spellings_of_a_speaker_are_one_role() -> None:
    text = "ACT I.\n\nLouIS.\nOne.\n\nLOUIS.\nTwo.\n\nPERACLES.\nThree.\n\nPERICLES.\nFour.\n"
    assert roles_of(text, SAME["pericles"]) == {"LOUIS": "One. Two.", "PERICLES": "Three. Four."}
    assert list(roles_of(text, {})) == ["LOUIS", "PERACLES", "PERICLES"]


def test_no_play_no_roles() -> None:
    assert roles_of("It was a dark and stormy night.\n", {}) == {}
    assert roles_of("", {}) == {}


def test_a_long_unclosed_bracket_takes_no_long_time() -> None:
    assert roles_of("ACT I.\n\nKING.\nO " + "[" * 50_000 + " x", {}) == {"KING": "O"}
