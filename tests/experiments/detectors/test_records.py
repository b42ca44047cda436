"""Records: from a run's lines, to a small file and back."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from experiments.detectors.recorded import record, seen

from lindt.errors import UserError
from lindt_experiments.detectors import records


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = record(lambda i, r: (i - 1.5) / (r + 2), attackers=(3,))
    path = records.path_of(tmp_path, "key")
    records.write(path, made)
    found = records.read(path)
    assert found.rounds[-1].reports.keys() == made.rounds[-1].reports.keys()
    assert found.rounds[4].reports[2].private.mean == pytest.approx(made.rounds[4].reports[2].private.mean, rel=1e-8)
    records.write(tmp_path / "again.gz", found)
    assert (tmp_path / "again.gz").read_bytes() == path.read_bytes()
    assert records.read(tmp_path / "again.gz") == found


def test_the_cosine_is_recorded_and_old_records_have_none(tmp_path: Path) -> None:
    made = record(lambda i, r: 0.1, rounds=3)
    values = (0.25, None, -0.5)
    made = replace(
        made, rounds=tuple(replace(one, seen=seen(0.2, c)) for one, c in zip(made.rounds, values, strict=True))
    )
    path = tmp_path / "new.gz"
    records.write(path, made)
    assert records.read(path).cosines == values

    table = json.loads(gzip.decompress(path.read_bytes()))
    table["version"] = 1
    for one in table["rounds"]:
        del one[2][-1]  # seven numbers, as before
    path.write_bytes(gzip.compress(json.dumps(table).encode()))
    old = records.read(path)
    assert old.cosines is None
    assert old.rounds[0].seen == seen(0.2)
    records.write(tmp_path / "same.gz", old)
    assert records.read(tmp_path / "same.gz") == old
    table["version"] = 3
    path.write_bytes(gzip.compress(json.dumps(table).encode()))
    with pytest.raises(UserError, match="version 3"):
        records.read(path)


def test_evidence_comes_round_by_round_and_last_reports_are_the_last() -> None:
    made = record(lambda i, r: r / 100)
    evidence = list(made.evidence())
    assert [one.round for one in evidence] == list(range(1, 17))
    assert {one.rounds for one in evidence} == {16}
    assert {report.private.mean for report in made.last_reports.values()} == {0.16}


def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "broken.json.gz"
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match="broken"):
        records.read(path)


def test_lines_become_rounds() -> None:
    line = {
        "round": 1, "answered": [0, 2], "w_div": 2.0, "delta": 1.0, "clean": 1.0, "spread": 1.0, "median": 1.0,
        "clipped": 0.0, "noise_norm": 1.0, "scores": {"beta": -0.1},
        "reports": [
            {"client": 2, "samples": 5, "private": {"mean": -0.2, "square": 0.4},
             "equal_age": {"mean": 0.0, "square": 0.2}, "first_batch": None},
        ],
    }  # fmt: skip
    found = records.round_of(line)
    assert found.reports[2].private.square == 0.4
    assert found.seen is not None
    assert found.seen.delta == 1.0
    assert found.seen.cosine is None
    later = records.round_of(line | {"cosine": -0.25})
    assert later.seen is not None
    assert later.seen.cosine == -0.25
    assert list(records.betas_of([line, {"round": 2, "scores": None}])) == [(1, -0.1)]
    assert records.round_of({"round": 2, "answered": []}).seen is None
