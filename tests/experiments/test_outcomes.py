"""What finished runs left: one line each, kept whole, read strictly."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lindt.errors import UserError
from lindt_experiments.queue.gather import _notes
from lindt_experiments.results.outcomes import Outcome, find, keep, load


def outcome(rounds: int = 4, **changes: Any) -> Outcome:
    made = Outcome(
        task="cifar",
        world="nfl",
        method="runtime",
        scale="cpu",
        seed=0,
        plan="0123",
        rounds=rounds,
        epsilon=0.1,
        patience=2,
        central=0.5,
        local=0.25,
        beta=-0.125,
        private=0.375,
        worst_tenth=-0.5,
        attack_central=None,
        attack_local=None,
        harmed=3,
        clearly_harmed=1,
        counted_clients=8,
        detected_at=(2,),
        stopped_at=(),
        delta=(0.5, None, 0.25, 0.125)[:rounds],
        w_div=(0.75, None, 0.5, 0.25)[:rounds],
        clean=(0.75, None, 0.5, 0.25)[:rounds],
        flag=(False, True, False, True)[:rounds],
        scored=(2, 4),
        local_curve=(0.125, 0.25),
        central_curve=(0.25, None),
        beta_curve=(-0.25, None),
        notes={"score/fc1": 0.75},
        command="lindt reproduce table3",
        commit="abc",
        date="2026-01-01",
        seconds=1.5,
        reduced="nothing",
    )
    return dataclasses.replace(made, **changes)


def test_a_result_of_another_plan_or_commit_stays(tmp_path: Path) -> None:
    first = outcome(commit="one", seconds=1.0)
    again = outcome(commit="one", seconds=2.0)  # same plan and commit: the first line is replaced
    for one in (first, again, outcome(commit="two"), outcome(commit="two", plan="new")):
        keep(tmp_path, one)
    assert [(one.plan, one.commit) for one in load(tmp_path)] == [("new", "two")]
    earlier = load(tmp_path / "earlier", "cpu")
    assert [(one.plan, one.commit) for one in earlier] == [("0123", "one"), ("0123", "two")]
    assert earlier[0].seconds == 2.0


def test_the_verdict_of_the_test_of_gains_is_a_note() -> None:
    verdict = {"gain": -0.2, "error": 0.01, "since": 40, "state": "hurts", "clients": 8, "samples": 90, "needed": None}
    line = {"scores": {"notes": {"alpha": 0.5}}, "detection": {"verdict": verdict, "warning": 30}}
    told = {"test/error": 0.01, "test/gain": -0.2, "test/since": 40.0, "test/warning": 30.0}
    assert _notes([line], [line]) == {"alpha": 0.5, **told}
    early = {"scores": None, "detection": {"verdict": verdict | {"since": None}, "warning": None}}
    assert _notes([line, early], [line]) == {"alpha": 0.5, "test/error": 0.01, "test/gain": -0.2}
    assert _notes([{"scores": None}], []) == {}  # no reports


def test_what_is_kept_comes_back(tmp_path: Path) -> None:
    keep(tmp_path / "results", outcome())
    assert load(tmp_path / "results") == load(tmp_path / "results", "cpu") == [outcome()]
    assert load(tmp_path / "results", "paper") == []
    assert json.loads((tmp_path / "results" / "cpu.jsonl").read_text())["flag"] == [[2, 2], [4, 4]]


def test_the_same_cell_is_replaced_and_lines_are_sorted(tmp_path: Path) -> None:
    for changes in ({"seed": 1}, {"world": "iid"}, {}, {"seed": 1, "local": 0.75}):
        keep(tmp_path, outcome(**changes))
    found = load(tmp_path)
    assert [(one.world, one.seed, one.local) for one in found] == [("iid", 0, 0.25), ("nfl", 0, 0.25), ("nfl", 1, 0.75)]
    keep(tmp_path, outcome(scale="smoke"))
    assert len((tmp_path / "cpu.jsonl").read_text().splitlines()) == 3
    assert [one.scale for one in load(tmp_path)] == ["smoke", "cpu", "cpu", "cpu"]


def test_find_takes_one_cell_by_seed() -> None:
    cells = [outcome(seed=2), outcome(seed=0), outcome(method="lindt"), outcome(scale="paper")]
    asked = {"task": "cifar", "world": "nfl", "method": "runtime", "scale": "cpu"}
    assert [one.seed for one in find(cells, **asked)] == [0, 2]
    assert [one.seed for one in find(cells, **asked, seed=2)] == [2]
    assert find(cells, **asked, seed=1) == []


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    long = tuple(0.123456789 + 1 / (n + 1) for n in range(500))
    curve = tuple(0.123456789 + 1 / (n + 3) for n in range(60))
    flags = tuple(n > 250 for n in range(500))
    keep(
        tmp_path,
        outcome(
            rounds=500,
            **dict.fromkeys(("delta", "w_div", "clean"), long),
            flag=flags,
            scored=tuple(range(60)),
            **dict.fromkeys(("local_curve", "central_curve", "beta_curve"), curve),
        ),
    )
    assert (tmp_path / "cpu.jsonl").stat().st_size < 25_000
    (found,) = load(tmp_path)
    assert found.delta == pytest.approx(long, rel=1e-4)
    assert found.flag == flags


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda table: table | {"local": "high"}, "local"),
        (lambda table: table | {"seed": 0.5}, "seed"),
        (lambda table: table | {"seed": True}, "seed"),
        (lambda table: table | {"flag": [[1, 2, 3]]}, "flag"),
        (lambda table: table | {"notes": {"a": "b"}}, "notes"),
        (lambda table: table | {"delta": [0.1]}, "delta"),
        (lambda table: table | {"local_curve": [0.1]}, "local_curve"),
        (lambda table: table | {"extra": 1}, "extra"),
        (lambda table: {k: v for k, v in table.items() if k != "beta"}, "beta"),
        (lambda table: table | {"scale": "paper"}, "wrong file"),
        (lambda table: [table], "no table"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, damage: Any, said: str) -> None:
    keep(tmp_path, outcome())
    keep(tmp_path, outcome(seed=1))
    path = tmp_path / "cpu.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + json.dumps(damage(json.loads(second))) + "\n")
    with pytest.raises(UserError, match=f"line 2.*{said}"):
        load(tmp_path)


def test_what_is_no_json_is_named_and_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "cpu.jsonl").write_text("<<<<<<< ours\n")
    for act in (lambda: load(tmp_path), lambda: keep(tmp_path, outcome())):
        with pytest.raises(UserError, match="line 1: no valid JSON"):
            act()
    assert (tmp_path / "cpu.jsonl").read_text() == "<<<<<<< ours\n"


def test_an_unknown_scale_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="choose among smoke, cpu, tenth, paper"):
        load(tmp_path, "large")


def test_reading_outcomes_does_not_import_torch() -> None:
    names = "lindt_experiments.results.outcomes, lindt_experiments.tables.sheets"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
