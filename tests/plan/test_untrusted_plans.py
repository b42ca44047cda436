"""Plans that anybody may have written: a plan or a sentence, soon, whatever stands in them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from untrusted import fed

from lindt.errors import PlanError, UserError, in_short, one_line
from lindt.plan.file import MOST_CHARACTERS, from_dict, from_toml, override, read_toml

target, plans = fed("plan")


@given(data=plans)
@settings(max_examples=150, deadline=None)
def test_a_changed_plan_is_a_plan_or_a_sentence(data: bytes) -> None:
    target(data)


@pytest.mark.parametrize(
    "text",
    [
        "a." * 50_000 + "a = 1",
        "[" + "a." * 50_000 + "a]",
        "x = {" + '"a" . ' * 50_000 + "a = 1}",
        "'\"'." * 50_000 + "a = 1",
        '"\\"".' * 50_000 + "a = 1",
        '"\\\\".' * 50_000 + "a = 1",
        "a = " + "[" * 50_000,
        "a = " + "{a.a.a.a = " * 100 + "1" + "}" * 100,
    ],
)
def test_keys_and_lists_without_end_are_refused_at_once(text: str) -> None:
    """By itself Python's reader takes minutes over the first."""
    start = time.monotonic()
    with pytest.raises(UserError, match=r"is not valid TOML: .*(a key has more than|nested too deeply)"):
        from_toml(text)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "text", ["a" * 10**6, '"' + '\\"' * 10**6, ("a." * 31 + "a ") * 10**4, "'\"" * 10**6, "\\" * 10**6]
)
def test_the_search_for_long_keys_takes_no_longer_than_the_text(text: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match="is not valid TOML"):
        from_toml(text)
    assert time.monotonic() - start < 10


def test_what_is_long_but_no_key_is_read() -> None:
    text = f"{'a.' * 30}b = 1\nname = '{'x.' * 20}'\nlist = [{'0.5, ' * 1000}]"
    found = read_toml(text)
    assert (len(found["list"]), found["name"]) == (1000, "x." * 20)
    with pytest.raises(ValueError, match="more than 2097152"):
        read_toml("#" * (MOST_CHARACTERS + 1))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (f"data = 0x{'f' * 5000}", "data"),
        (f"[method.adaptation]\nkind = 0x{'f' * 5000}", "method.adaptation.kind"),
        (f"rounds = {'[' * 60}{']' * 60}", "rounds"),
        (f"name = '{'x' * 10**6}'", "name"),
        (f"{'x' * 10**6} = 1", "xxx"),
    ],
)
def test_an_error_is_a_sentence_whatever_the_value(text: str, field: str) -> None:
    """Numbers that Python does not write out, and values of a megabyte."""
    with pytest.raises(PlanError) as caught:
        from_dict(from_toml(text))
    assert str(caught.value).startswith(field)
    assert len(str(caught.value)) < 1000


def test_tables_without_end_are_a_sentence_too() -> None:
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(PlanError, match=r"^rounds = \{'a': "):
        from_dict({"rounds": deep})
    with pytest.raises(UserError, match="it has 5001 parts"):
        override({}, "a." * 5000 + "a=1")


def test_what_others_say_is_one_line_that_steers_nothing() -> None:
    assert one_line("a\x1b[31m\n\tb\r\x00" + "c" * 10**6) == "a [31m b " + "c" * 291
    assert in_short("x" * 300).startswith("'xxx")
    assert len(in_short("x" * 300)) == 200
    assert in_short([10**5000]) == "a list too long to show"
    assert in_short((1, "a", None)) == "(1, 'a', None)"
