"""One description of a round's fields: what it names is what is computed, written, read, tabled, tracked and shown."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest
from folders import line
from worlds import tiny

import lindt
from lindt.protocols import Decision, DetectionState, Divergence, GainReport, Statistic
from lindt.report.reading import read_run
from lindt.report.typescript import TARGET, page_types
from lindt.runs.play import run_plan
from lindt.runs.schema import (
    CLIENT_SCORE,
    DECISION,
    DETECTION,
    DIVERGENCE,
    PANEL,
    REPORT,
    REPORTED,
    ROUND,
    SCORES,
    SOMETIMES,
    STATISTICS,
    SUMMARY,
    fits,
)
from lindt.server.scores import ClientScore, Panel, Scores

TESTS = Path(__file__).parents[1]


def names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def test_the_schema_names_what_is_computed() -> None:
    assert names(Scores) == {*SCORES, "clients", "notes", "panel"}
    assert names(Panel) == set(PANEL)
    assert names(ClientScore) == set(CLIENT_SCORE)
    assert names(Divergence) == set(DIVERGENCE)
    assert names(GainReport) == set(REPORT)
    assert names(Decision) == set(DECISION)
    assert names(DetectionState) == {*DETECTION, "numbers", "reports"}
    assert get_args(Statistic) == STATISTICS
    assert set(STATISTICS) <= set(DIVERGENCE)


def test_a_run_writes_the_fields_of_the_schema_and_no_others(tmp_path: Path) -> None:
    list(run_plan(tiny(), tmp_path / "run"))
    run = read_run(tmp_path / "run")
    assert [set(line) for line in run.rounds] == [set(ROUND) - {*REPORTED, *SOMETIMES}] * 4
    scored = run.scored[-1]["scores"]
    assert set(scored) == {*SCORES, "clients", "notes"}
    assert set(scored["clients"][0]) == set(CLIENT_SCORE)
    assert run.summary is not None
    left_out = {"prediction", "early_stop", "panel"}  # where a plan guards, stops early, or scores a panel
    assert set(run.summary) == set(SUMMARY) - left_out


def test_a_round_without_a_valid_update_has_no_divergence() -> None:
    told = {name: value for name, value in line(1).items() if name not in DIVERGENCE}
    assert fits(told, ROUND)
    assert not fits(told | {"delta": "far"}, ROUND)


def test_a_run_from_before_the_cosine_is_read(tmp_path: Path) -> None:
    list(run_plan(tiny(), tmp_path / "run"))
    file = tmp_path / "run" / "rounds.jsonl"
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert all(-1 <= one.pop("cosine") <= 1 for one in lines)
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert "cosine" not in read_run(tmp_path / "run").rounds[0]
    assert not fits(lines[0] | {"cosine": "near"}, ROUND)


def test_the_types_of_the_page_are_those_of_the_schema() -> None:
    assert TARGET.read_text(encoding="utf-8") == page_types(), "the schema has changed: run `make page`"


# A new score, `best_gain`, in the two files that it touches: old text, new text.
TWO_FILES = {
    "server/scores.py": [
        ("    attack_local: float | None\n", "    attack_local: float | None\n    best_gain: float | None\n"),
        (
            "        attack_local=attack[1],\n",
            "        attack_local=attack[1],\n        best_gain=max(one.beta or 0.0 for one in scores),\n",
        ),
    ],
    "runs/schema.py": [
        ('    "ties": Nullable(WHOLE),\n', '    "ties": Nullable(WHOLE),\n    "best_gain": Nullable(NUMBER),\n')
    ],
}


PLAY = """
import csv, json, sys
from pathlib import Path
from worlds import tiny
from lindt.report.payload import privacy_spent, whole_run
from lindt.report.reading import read_run
from lindt.report.tables import write_table
from lindt.report.typescript import page_types
from lindt.runs.play import run_plan
from lindt.trackers.base import end_values, round_values

out = Path(sys.argv[1])
list(run_plan(tiny(), out / "run"))
run = read_run(out / "run")
write_table([run], "round", out / "rounds.csv")
page = whole_run(run, "run", privacy_spent(run))
line = run.scored[-1]
print(json.dumps({
    "betas": [one["beta"] for one in line["scores"]["clients"]],
    "line": line["scores"]["best_gain"],
    "summary": run.summary["best_gain"],
    "table": list(csv.DictReader((out / "rounds.csv").open()))[-1]["best_gain"],
    "tracked": [round_values(line)["scores/best_gain"], end_values(run.summary)["end/best_gain"]],
    "page": [page["rounds"][-1]["scores"]["best_gain"], page["summary"]["best_gain"]],
    "types": page_types(),
}))
"""


PLAY_FLOWER = """
import json, sys
from pathlib import Path
from fake_grid import FakeGrid
from small_apps import arrays
from test_detector_resume import NODES, ZERO, detector, drifting
from lindt.report.reading import read_run

out = Path(sys.argv[1])
result = detector(out / "run").start(FakeGrid(drifting, NODES), arrays(**ZERO), num_rounds=2)
scored = {line["round"]: line["scores"] for line in read_run(out / "run").scored}
told = result.evaluate_metrics_clientapp
print(json.dumps([[scores["best_gain"], told[r]["lindt-best-gain"]] for r, scores in scored.items()]))
"""


def with_best_gain(tmp_path: Path, code: str) -> Any:
    """What the code prints, with a copy of the package in which two files were changed."""
    copy = tmp_path / "src" / "lindt"
    shutil.copytree(Path(lindt.__file__).parent, copy, ignore=shutil.ignore_patterns("node_modules", "__pycache__"))
    for name, changes in TWO_FILES.items():
        text = (copy / name).read_text()
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (copy / name).write_text(text)
    path = os.pathsep.join(map(str, (copy.parent, TESTS, TESTS / "flower")))
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_new_score_touches_two_files(tmp_path: Path) -> None:
    """Where it is computed, and the schema."""
    found = with_best_gain(tmp_path, PLAY)
    best = max(found["betas"])
    assert found["line"] == found["summary"] == best  # one round is averaged
    assert float(found["table"]) == best
    assert found["tracked"] == [best, best]
    assert found["page"] == [pytest.approx(best, rel=1e-3)] * 2
    assert found["types"].count("  best_gain: number | null;\n") == 2  # of a round's scores, and of a summary


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="Flower is not installed")
def test_a_new_score_is_in_flowers_rounds_and_metrics_as_well(tmp_path: Path) -> None:
    found = with_best_gain(tmp_path, PLAY_FLOWER)
    assert found
    assert all(written == told for written, told in found)
