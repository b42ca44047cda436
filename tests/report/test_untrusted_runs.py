"""Runs' folders that anybody may have written: read, or refused in words; nothing in them ends a page or a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from folders import about, line, mended, plan, write_run
from hypothesis import given, settings
from rich.console import Console
from untrusted import fed

from lindt.errors import UserError
from lindt.report.payload import privacy_spent, whole_run
from lindt.report.reading import read_run
from lindt.report.terminal import show
from lindt.runs.store import Store, read_lines

target, runs = fed("run")
go_on, _ = fed("store")


@given(data=runs)
@settings(max_examples=80, deadline=None)
def test_a_changed_run_is_shown_or_refused_in_words(data: bytes) -> None:
    target(data)


@given(data=runs)
@settings(max_examples=80, deadline=None)
def test_a_changed_run_goes_on_or_is_refused_in_words(data: bytes) -> None:
    go_on(data)


@pytest.mark.parametrize("content", [json.dumps(about(name="\ud800")), json.dumps(about(x={"\udfff": 1}))])
def test_half_a_character_is_damage(tmp_path: Path, content: str) -> None:
    """JSON can write it, no server can send it."""
    folder = write_run(tmp_path, mended())
    (folder / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run.json is damaged"):
        read_run(folder)
    (folder / "run.json").write_bytes(json.dumps(about(name="\U0001f600")).encode())  # two halves make one
    assert read_run(folder).name == "\U0001f600"
    (folder / "run.json").write_bytes(json.dumps(about()).encode("utf-16"))
    with pytest.raises(UserError, match=r"run.json is damaged"):
        read_run(folder)


def test_the_plan_names_no_other_field_than_a_statistic(tmp_path: Path) -> None:
    method = plan()["method"]
    method["recovery"]["statistic"] = "asked"  # a list in each line
    run = read_run(write_run(tmp_path, mended(), the_plan=plan(method=method)))
    show(Console(file=io.StringIO()), run)
    assert whole_run(run, "a", privacy_spent(run))["rule"]["statistic"] == "delta"


@pytest.mark.parametrize("text", ["a." * 10**5 + "a = 1", f"seed = 0x{'f' * 5000}", "a = " + "[" * 10**5])
def test_a_plan_that_cannot_be_read_is_left_out(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path, mended())
    (folder / "plan.toml").write_text(text)
    run = read_run(folder)
    assert run.said == ("plan.toml is damaged and was left out",)
    assert whole_run(run, "a", privacy_spent(run))["method"] == "?"


def test_lines_that_are_none_do_not_resume(tmp_path: Path) -> None:
    folder = write_run(tmp_path, mended(), ended=False)
    for odd in ("[" * 10**5, json.dumps(line(1) | {"round": "1"}), json.dumps(line(True)), "9" * 5000):
        (folder / "rounds.jsonl").write_text(odd + "\n")
        with pytest.raises(UserError, match="a damaged line"):
            list(read_lines(folder / "rounds.jsonl"))
    (folder / "run.json").write_text("[" * 10**5)
    with pytest.raises(UserError, match=r"no readable run.json"):
        Store.open(folder)
