"""`lindt reproduce` from the outside: what is cut off comes to the same, and the whole scale smoke works."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lindt.cli.main import app
from lindt_experiments.plans.catalog import EXHIBITS, cells_of, named
from lindt_experiments.results.outcomes import load


def start(folder: Path, *arguments: str, cache: Path) -> subprocess.Popen[str]:
    places = ("--runs", str(folder / "runs"), "--results", str(folder / "results"))
    command = [sys.executable, "-m", "lindt.cli", "reproduce", *arguments, "--scale", "smoke", *places]
    env = os.environ | {"LINDT_CACHE": str(cache)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def results(folder: Path) -> list[dict[str, Any]]:
    """What is kept, without what tells of the moment."""
    kept = [json.loads(line) for line in (folder / "results" / "smoke.jsonl").read_text().splitlines()]
    return [{k: v for k, v in one.items() if k not in ("seconds", "date", "commit")} for one in kept]


@pytest.mark.slow
def test_what_is_cut_off_goes_on_and_comes_to_the_same(tmp_path: Path) -> None:
    """Cut off three times on the way, each time after seven rounds: one run has ended, another has begun."""
    asked = ("table6", "--json")
    straight = start(tmp_path / "straight", *asked, cache=tmp_path / "cache 1")
    assert straight.communicate()[1] == ""
    assert straight.returncode == 0

    folder = tmp_path / "cut"
    for how in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        cut = start(folder, *asked, cache=tmp_path / "cache 2")
        seen = 0
        for line in lines(cut):
            seen += line["event"] == "round"
            if seen == 7:
                cut.send_signal(how)
                break
        _, said = cut.communicate()
        assert cut.returncode == (-9 if how == signal.SIGKILL else 130)
        if how != signal.SIGKILL:
            assert "finished rounds are kept: `lindt reproduce table6 --scale smoke --seeds 1` continues" in said
        assert len(load(folder / "results")) < 6
    again = start(folder, *asked, cache=tmp_path / "cache 2")
    told = list(lines(again))
    assert again.communicate()[1] == ""
    assert again.returncode == 0
    assert told[-1]["failed"] == 0
    assert results(folder) == results(tmp_path / "straight")


@pytest.mark.slow
def test_everything_at_scale_smoke(tmp_path: Path) -> None:
    done = start(tmp_path, "all", cache=tmp_path / "cache")
    said, errors = done.communicate()
    assert (done.returncode, errors) == (0, "")
    kept = load(tmp_path / "results")
    assert {one.cell[:3] for one in kept} == set(cells_of(named("all")))
    for exhibit in EXHIBITS.values():
        if exhibit.kind not in ("figure", "traces"):
            page = (tmp_path / "results" / "tables" / f"smoke-{exhibit.name}.md").read_text()
            assert "missing" not in page
    assert "Table 13" in said
    asked = ["reproduce", "--claims", "--scale", "smoke", "--results", str(tmp_path / "results")]
    claims = CliRunner().invoke(app, asked)
    assert claims.exit_code == 0
    assert "0 not run" in claims.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--list prints them"),
        (["table9"], "'table9': choose among table3"),
        (["table3", "--scale", "huge"], "--scale huge: choose among smoke, cpu, tenth, paper"),
        (["table3", "--seeds", "0"], "--seeds 0: at least 1"),
        (["table3", "--task", "mnist"], "--task mnist: choose among cifar, shake"),
        (["table3", "--only", "fedsgd", "--dry-run"], "--only fedsgd: choose among fedavg"),
        (["table3", "--world", "nlf", "--dry-run"], "--world nlf: choose among nfl, normal"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["reproduce", *arguments])
    assert done.exit_code != 0
    assert said in str(done.exception)


def test_what_there_is_is_listed() -> None:
    done = CliRunner().invoke(app, ["reproduce", "--list"])
    assert done.exit_code == 0
    assert [line.split()[0] for line in done.output.splitlines()] == [
        *EXHIBITS,
        "detectors",
        "attacks",
        "recovery",
        "settings",
        "again",
    ]
    assert "table3     30 runs a seed" in done.output
