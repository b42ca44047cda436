"""Runs' folders in every state, whole and damaged."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from pathlib import Path

import pytest
from folders import about, line, mended, plan, scores, write_run

from lindt.errors import UserError
from lindt.report import reading as lines_module
from lindt.report.reading import Reader, find_runs, read_run


def test_an_ended_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", mended()))
    assert run.state == "ended"
    assert [one["round"] for one in run.rounds] == list(range(1, 11))
    assert [one["round"] for one in run.scored] == [3, 9, 10]
    assert run.seconds[10] == 0.5
    assert (run.name, run.percent, run.planned, run.said) == ("by-hand", True, 10, ())


def test_the_lock_tells_a_running_run_from_a_crashed_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", mended(), ended=False)
    assert read_run(folder).state == "crashed"
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
    assert read_run(folder).state == "crashed"


def test_a_run_can_start_while_it_is_looked_at(tmp_path: Path) -> None:
    """A reader holds the lock for an instant; whoever wants to work on the run waits that out."""
    from lindt.runs.store import Store

    folder = write_run(tmp_path / "run", mended(), ended=False)
    reader = (folder / "lock").open()
    fcntl.flock(reader, fcntl.LOCK_SH)
    threading.Timer(0.05, reader.close).start()
    with Store.open(folder).locked():
        assert read_run(folder).state == "running"


BROKEN = [
    b"{half",
    b"[1]",
    b"{}",
    b"\xff\xfe",
    json.dumps(line(0)).encode(),
    json.dumps(line(3) | {"round": True}).encode(),
    json.dumps(line(3)).replace("0.2", "NaN").encode(),
    json.dumps(line(3)).replace("0.2", "1e999").encode(),
    json.dumps(line(3) | {"answered": ["<script>"]}).encode(),
    json.dumps(line(3) | {"scores": {"beta": "high"}}).encode(),
    b"[" * 100_000,
    b'{"round": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_line_is_passed_over_and_said(tmp_path: Path, broken: bytes) -> None:
    folder = write_run(tmp_path / "run", [line(1), line(2)], ended=False)
    with (folder / "rounds.jsonl").open("ab") as file:
        file.write(broken + b"\n" + json.dumps(line(4)).encode() + b"\n")
    run = read_run(folder)
    assert [one["round"] for one in run.rounds] == [1, 2, 4]
    assert run.said == ("1 broken line of rounds.jsonl left out",)


def test_half_a_line_is_broken_only_once_nobody_writes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [line(1)], ended=False)
    whole = json.dumps(line(2)).encode() + b"\n"
    reader = Reader(folder)
    with (folder / "rounds.jsonl").open("ab", buffering=0) as file, (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        file.write(whole[:20])
        assert (len(reader.read().rounds), reader.read().said) == (1, ())
        file.write(whole[20:])
        assert len(reader.read().rounds) == 2
        file.write(whole[:20])
    assert reader.read().said == ("1 broken line of rounds.jsonl left out",)


def test_a_client_that_falls_out_changes_earlier_rounds(tmp_path: Path) -> None:
    """Its page takes the run anew: the scores that it has are of other clients."""
    refusal = [{"client": 1, "reason": "NaN"}]
    lines = [line(1, scores=scores([0.1, 0.3])), line(2, answered=[0], refused=refusal)]
    folder = write_run(tmp_path, lines, ended=False)
    reader = Reader(folder)
    run = reader.read()
    assert (run.excluded, run.anew, run.scored[0]["scores"]["beta"]) == ({}, 0, pytest.approx(0.2))
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(line(3, answered=[0], refused=refusal)) + "\n")
    run = reader.read()
    assert (run.excluded, run.anew) == ({1: "2 of its 3 updates refused, NaN"}, 1)
    assert (run.scored[0]["scores"]["beta"], reader.read().anew) == (0.1, 1)


def test_a_reader_reads_on_and_begins_anew_where_a_run_was_cut_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [line(1), line(2), line(3)], ended=False)
    reader = Reader(folder)
    assert (len(reader.read().rounds), reader.read().anew) == (3, 0)
    played_again = [line(r, delta=0.3) for r in (1, 2, 3, 4)]
    aside = folder / "aside"
    aside.write_text("".join(json.dumps(one) + "\n" for one in played_again))
    os.replace(aside, folder / "rounds.jsonl")  # as `Store.resume` does; since then the run has caught up
    run = reader.read()
    assert ([one["delta"] for one in run.rounds], run.anew) == ([0.3] * 4, 1)
    (folder / "rounds.jsonl").write_text(json.dumps(line(1)) + "\n")
    run = reader.read()
    assert ([one["round"] for one in run.rounds], run.anew) == ([1], 2)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", [line(1), line(2), line(3)], ended=False)
    length = len(json.dumps(line(1))) + 1
    monkeypatch.setattr(lines_module, "LONGEST_LINE", length + 5)
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(line(4) | {"more": "x" * 3 * length}) + "\n" + json.dumps(line(5)) + "\n")
    run = read_run(folder)
    assert [one["round"] for one in run.rounds] == [1, 2, 3, 5]
    assert run.said == ("1 broken line of rounds.jsonl left out",)
    monkeypatch.setattr(lines_module, "LONGEST_FILE", length + 1)
    assert "rounds.jsonl is too large; the rounds after 2 were left out" in read_run(folder).said
    monkeypatch.setattr(lines_module, "WHOLE_FILE", 10)
    with pytest.raises(UserError, match=r"no readable run\.json"):
        read_run(folder)


def test_neither_links_nor_pipes_are_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps(line(1)) + "\n")
    folder = write_run(tmp_path / "run", [line(1)], ended=False)
    (folder / "rounds.jsonl").unlink()
    (folder / "rounds.jsonl").symlink_to(tmp_path / "secret")
    assert read_run(folder).rounds == ()
    (folder / "rounds.jsonl").unlink()
    os.mkfifo(folder / "rounds.jsonl")
    assert read_run(folder).rounds == ()


def test_damaged_files_get_a_sentence(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", mended())
    (folder / "summary.json").write_text("{}")
    (folder / "plan.toml").write_text("rounds =")
    run = read_run(folder)
    assert run.state == "ended"
    assert run.said == ("summary.json is damaged and was left out", "plan.toml is damaged and was left out")
    (folder / "run.json").write_text(json.dumps(about() | {"clients": 3}))
    with pytest.raises(UserError, match=r"run\.json is damaged"):
        read_run(folder)
    with pytest.raises(UserError, match="is not a run"):
        read_run(tmp_path)


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("b", "compared/lindt", "compared/fedavg", "a/b/c/d/too-deep"):
        write_run(tmp_path / "runs" / name, [line(1)], ended=False)
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "runs" / "b")
    found = [str(folder.relative_to(tmp_path / "runs")) for folder in find_runs(tmp_path / "runs")]
    assert found == ["b", "compared/fedavg", "compared/lindt"]
    assert find_runs(tmp_path / "runs" / "b") == [tmp_path / "runs" / "b"]
    with pytest.raises(UserError, match="is not a folder"):
        find_runs(tmp_path / "nowhere")


def _with_constants(*shares: float) -> dict[str, object]:
    found = about(clients=3)
    for one, share in zip(found["clients"], shares, strict=True):
        one["constant"] = share
    return found


def test_private_models_that_learned_nothing_are_told(tmp_path: Path) -> None:
    """Each of three clients is right on 0.8 of 50 samples alone: two standard errors are 0.09 to 0.1."""
    told = read_run(write_run(tmp_path / "equal", mended(), the_about=_with_constants(0.75, 0.8, 0.88))).said
    assert told == (
        "private models are right on 80.0% of the test samples, and always naming a client's most frequent label would "
        "be right on 81.0%: they are not clearly better, and a gain over them says little; change training.rate, or "
        "train them longer (alone.epochs)",
    )
    assert read_run(write_run(tmp_path / "better", mended(), the_about=_with_constants(0.5, 0.7, 0.8))).said == ()
    close = read_run(write_run(tmp_path / "close", mended(), the_about=_with_constants(0.6, 0.7, 0.84))).said
    assert "right on 71.3%: they are not clearly better" in close[0]  # 8.7 points, and two standard errors are 9.9
    # A client with one label says nothing: its private model cannot be better.
    assert read_run(write_run(tmp_path / "skewed", mended(), the_about=_with_constants(1.0, 0.95, 0.5))).said == ()
    assert read_run(write_run(tmp_path / "all", mended(), the_about=_with_constants(1.0, 1.0, 1.0))).said == ()
    own = plan(scoring={"metric": "macro_f1"})
    assert (
        read_run(write_run(tmp_path / "f1", mended(), the_plan=own, the_about=_with_constants(0.9, 0.8, 0.9))).said
        == ()
    )
    for wrong in ("0.8", None, [], float("1e308"), True):
        odd = about(clients=3)
        odd["clients"][0]["constant"] = wrong
        assert read_run(write_run(tmp_path / "odd", mended(), the_about=odd)).said == ()
