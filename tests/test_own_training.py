"""The snippets of docs/own-training.md run, and its plan is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lindt.client.training import Adamw
from lindt.plan.file import from_dict, from_toml

PAGE = (Path(__file__).parents[1] / "docs" / "own-training.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_plan_of_the_page_is_read() -> None:
    text, stop = snippets("toml")
    assert from_dict(from_toml(stop)).early_stop.patience == 5
    training = from_dict(from_toml(text)).training
    assert training.optimizer == Adamw(weight_decay=0.05)
    assert (training.rate, training.accumulate) == (0.001, 2)


def test_the_snippets_of_the_page_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for snippet in snippets("python"):
        exec(compile(snippet, "docs/own-training.md", "exec"), names)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["1", "2", "1", "2"]
