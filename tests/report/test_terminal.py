"""`lindt runs`, `show`, `table` and the small chart, as a terminal shows them."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from datetime import datetime
from operator import itemgetter
from pathlib import Path

import pytest
from folders import about, gain_plan, hurts, line, mended, plan, scores, undecided, write_run
from rich.console import Console

from lindt.cli.show import table
from lindt.errors import UserError
from lindt.report import reading
from lindt.report.page import write_report
from lindt.report.payload import privacy_spent_so_far
from lindt.report.reading import read_run
from lindt.report.tables import write_table
from lindt.report.terminal import ASCII, chart, run_rows, runs_table, show
from lindt.report.verdict import verdict
from lindt.runs.files import locked_folder


def terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)


def text_of(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_chart_puts_each_value_where_it_belongs() -> None:
    values = [(1, 4.0), (2, 2.0), (3, 0.0), (4, 2.0)]
    drawn = chart("title", values, against=2.0, span=(1, 4), events={3: "D"}, height=5, marks=ASCII, decimals=0)
    assert drawn == [
        "title",
        "4 |*   ",
        "  |    ",
        "2 |-*-*",
        "  |    ",
        "0 |  * ",
        "  +----",
        "     D",
        "   1  4  round",
    ]


def test_many_rounds_are_averaged_into_the_columns_there_are() -> None:
    values = [(r, float(r <= 50)) for r in range(1, 101)]
    drawn = chart("t", values, against=0.0, span=(1, 100), width=10, height=2, marks=ASCII, decimals=0)
    assert drawn[1:3] == ["1 |*****     ", "0 |-----*****"]
    assert chart("t", [], against=0.0, span=(0, 0)) == ["t: nothing yet"]


def test_the_numbers_of_the_first_and_last_round_are_apart() -> None:
    drawn = chart("t", [(1, 1.0), (2, 1.0)], against=0.0, span=(1, 2), height=2, marks=ASCII, decimals=0)
    assert drawn[-1] == "   1 2  round"
    assert chart("t", [(1, 1.0)], against=0.0, span=(1, 1), height=2, marks=ASCII, decimals=0)[-1] == "   1  round"


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_wraps_between_words_and_cuts_nothing_off(tmp_path: Path, width: int) -> None:
    run = read_run(write_run(tmp_path / "run", mended()))
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, force_terminal=True)
    show(console, run)
    told, _, repeat = text_of(console).partition("repeat:")
    assert max(map(len, told.splitlines())) <= width
    words = told.split()
    assert " ".join(words[: len(verdict(run).sentence.split())]) == verdict(run).sentence
    assert "mean gain over training alone, on test data, in points" in " ".join(words)
    assert "plan.toml --out runs/again" in repeat.replace("\n", "")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_narrow_list_of_runs_leaves_out_whole_columns_and_names_them(tmp_path: Path, width: int) -> None:
    write_run(tmp_path / "good", mended())
    (write_run(tmp_path / "odd", [line(1)], ended=False) / "run.json").write_text("{}")
    console = terminal(width)
    console.print(runs_table(run_rows(tmp_path), width))
    said = text_of(console)
    assert "\N{HORIZONTAL ELLIPSIS}" not in said
    head, good = (
        next(text.split() for text in said.splitlines() if text.split()[:1] == [name]) for name in ("run", "good")
    )
    assert head[:2] == ["run", "state"]
    assert head[-1] == "verdict"
    assert (good[1], good[-2:]) == ("ended", ["flagged", "3"])
    left_out = [name for name in ("changed", "method", "round", "beta", "worse") if name not in head]
    assert bool(left_out) == (width <= 80)
    told = " ".join(said.split())
    assert (f"not shown in a narrow terminal: {', '.join(left_out)}" in told) == bool(left_out)
    assert "odd: run.json is damaged, or another version of lindt wrote it" in told.replace(" / ", "/")


def test_show_says_the_verdict_and_draws(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", mended()))
    console = terminal(200)
    show(console, run)
    said = text_of(console)
    assert verdict(run).sentence in said
    assert "by-hand, LINDT on detection, seed 0, ended" in said
    assert "Delta against epsilon = 0.1" in said
    assert "mean gain over training alone, on test data, in points" in said
    assert "D: NFL suspected by Delta, recovery on from the next round" in said
    assert "plan.toml --out runs/again" in said


def test_show_names_no_seed_for_a_flower_app(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", mended())
    plan = (folder / "plan.toml").read_text()
    (folder / "plan.toml").write_text(plan.replace("seed = 0\n", ""))
    console = terminal(200)
    show(console, read_run(folder))
    assert "by-hand, LINDT on detection, ended" in text_of(console)


def test_runs_are_listed_with_state_day_method_and_gain(tmp_path: Path) -> None:
    write_run(tmp_path / "good", mended())
    write_run(tmp_path / "dead", [line(1)], ended=False)
    _last_written(tmp_path / "dead", datetime(2001, 2, 3, 12))
    (write_run(tmp_path / "odd", [line(1)], ended=False) / "run.json").write_text("{}")
    console = terminal(160)
    console.print(runs_table(list(run_rows(tmp_path))))
    rows = [row.split() for row in text_of(console).splitlines()]
    now = f"{datetime.fromtimestamp((tmp_path / 'good' / 'summary.json').stat().st_mtime):%H:%M}"
    assert ["good", "ended", now, "LINDT", "on", "detection", "10/10", "+10.7", "0/3", "flagged", "3"] in rows
    assert ["dead", "crashed", "2001-02-03", "LINDT", "on", "detection", "1/10", "-", "-", "not", "flagged"] in rows
    assert any(row[:2] == ["odd", "unreadable"] for row in rows)


def _last_written(folder: Path, then: datetime) -> None:
    for path in folder.iterdir():
        os.utime(path, (then.timestamp(), then.timestamp()))


def test_running_runs_are_listed_first_then_the_latest(tmp_path: Path) -> None:
    for day, name in enumerate(("c", "a", "b", "d"), 1):
        _last_written(write_run(tmp_path / name, mended(), ended=name != "c"), datetime(2001, 2, day))
    (tmp_path / "c" / "run.json").write_text(json.dumps(about() | {"stopped": True}))
    with locked_folder(tmp_path / "a", wait=0, busy="busy"):
        (tmp_path / "a" / "summary.json").unlink()
        _last_written(tmp_path / "a", datetime(2000, 1, 1))
        rows = run_rows(tmp_path)
    states = [(row["run"], row["state"]) for row in rows]
    assert states == [("a", "running"), ("d", "ended"), ("b", "ended"), ("c", "stopped")]


def test_a_name_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J[bold]x[/]"
    folder = write_run(tmp_path / "run", mended(), the_about=about(name=evil), the_plan=plan(name=evil))
    console = terminal()
    show(console, read_run(folder))
    console.print(runs_table(list(run_rows(tmp_path))))
    assert "\x1b" not in text_of(console)
    assert "\\x1b[2J[bold]x[/]" in text_of(console)


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_a_table_of_no_run_or_into_no_folder_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", mended())
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        table([tmp_path / "empty"], tmp_path / "t.csv")
    for out, complaint in ((tmp_path / "none" / "t.csv", "there is no folder"), (tmp_path / "empty", "is a folder")):
        with pytest.raises(UserError, match=complaint):
            table([run], out)
        with pytest.raises(UserError, match=complaint):
            write_report([run], out)
    table([run, run.parent], tmp_path / "t.csv")
    assert len(rows_of(tmp_path / "t.csv")) == 10  # a run that is named twice is there once


def test_what_is_left_out_of_a_table_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "runs" / "a", mended())
    lines = (run / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(reading, "LONGEST_FILE", len(b"".join(lines[:4])))
    table([run], tmp_path / "t.csv")
    said = capsys.readouterr().out
    assert "rounds.jsonl is too large; the rounds after 4 were left out" in said
    assert "t.csv: 4 rows" in said
    for n in range(5):
        (tmp_path / "runs" / f"b{n}").mkdir()
    monkeypatch.setattr(reading, "MOST_FOLDERS", 4)
    for command in (lambda: table([tmp_path / "runs"], tmp_path / "u.csv"), lambda: list(run_rows(tmp_path / "runs"))):
        with pytest.raises(UserError, match="runs: it holds more than 4 folders; name a folder that holds fewer"):
            command()
    assert not (tmp_path / "u.csv").exists()


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_without_clients_is_reported(tmp_path: Path, ended: bool) -> None:
    noisy = plan(environment={"privacy": {"kind": "gaussian", "sigma": 0.01, "S": 15.0}})
    run = write_run(tmp_path / "a", mended(), the_about=about(0), the_plan=noisy, ended=ended)
    write_report([run], tmp_path / "r.html")
    assert privacy_spent_so_far(read_run(run)).words == "not known: run.json names no clients"


def test_a_table_per_round_and_per_client(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, mended())) for name in ("a", "b")]
    assert write_table(runs, "round", tmp_path / "r.csv") == 20
    rows = rows_of(tmp_path / "r.csv")
    assert [row["run"] for row in rows] == ["a"] * 10 + ["b"] * 10
    assert (rows[2]["beta"], rows[2]["clearly_harmed"], rows[0]["beta"]) == ("-0.15", "2", "")
    assert (rows[9]["score/fc1"], rows[9]["seconds"], rows[9]["answered"]) == ("0.9", "0.5", "2")
    assert write_table(runs[:1], "client", tmp_path / "c.csv") == 9  # three clients in three scored rounds
    rows = rows_of(tmp_path / "c.csv")
    assert {key: rows[0][key] for key in ("round", "client", "beta", "clear", "train", "classes", "answered")} == {
        "round": "3", "client": "0", "beta": "-0.3", "clear": "True", "train": "40", "classes": "2", "answered": "True",
    }  # fmt: skip
    with pytest.raises(UserError, match=r"name a \.csv or a \.parquet file"):
        write_table(runs, "round", tmp_path / "x.txt")
    with pytest.raises(UserError, match="choose among round, client"):
        write_table(runs, "epoch", tmp_path / "x.csv")


def test_a_table_has_the_verdict_of_each_round(tmp_path: Path) -> None:
    lines = hurts(recovering=True)
    write_table([read_run(write_run(tmp_path / "a", lines, the_plan=gain_plan()))], "round", tmp_path / "r.csv")
    names = ("verdict", "since", "gain", "gain_error", "warning", "recovery", "recovered", "median_gain")
    rows = [tuple(row[name] for name in names) for row in rows_of(tmp_path / "r.csv")]
    assert rows[0] == ("too early", "", "-0.02", "0.01", "", "", "", "")
    assert rows[9] == ("hurts", "4", "-0.12", "0.01", "2", "helps", "helps", "0.1")
    write_table([read_run(write_run(tmp_path / "b", mended()))], "round", tmp_path / "r.csv")
    assert rows_of(tmp_path / "r.csv")[9]["verdict"] == ""


def test_show_draws_the_gain_on_validation_data(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", hurts(recovering=True), the_plan=gain_plan()))
    console = terminal(200)
    show(console, run)
    said = text_of(console)
    assert "gain on validation data in points, now -12.0 +- 2.0 points" in said
    assert "T: the test begins; W: early warning; !: verdict hurts" in said
    assert "NFL suspected" not in said


def test_a_list_of_runs_has_the_verdict_of_each(tmp_path: Path) -> None:
    write_run(tmp_path / "bad", hurts(), the_plan=gain_plan())
    write_run(tmp_path / "odd", undecided(), the_plan=gain_plan())
    rows = sorted(run_rows(tmp_path), key=itemgetter("run"))
    assert (rows[0]["alpha"], rows[0]["detection"]["verdict"]) == (0.05, hurts()[-1]["detection"]["verdict"])
    assert (rows[0]["median_gain"], rows[0]["clearly_better"], rows[0]["left_out_clients"]) == (-0.2, 0, [])
    console = terminal(160)
    console.print(runs_table(rows))
    lines = [line.split() for line in text_of(console).splitlines()]
    cells = [line[:2] + line[3:] for line in lines]  # without the time
    assert ["bad", "ended", "LINDT", "on", "evidence", "10/10", "-15.0", "2/3", "hurts", "4"] in cells
    assert ["odd", "ended", "LINDT", "on", "evidence", "10/10", "+0.3", "0/3", "undecided"] in cells


def test_parquet_says_what_csv_says(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    runs = [read_run(write_run(tmp_path / "a", mended()))]
    for per in ("round", "client"):
        write_table(runs, per, tmp_path / "t.csv")
        write_table(runs, per, tmp_path / "t.parquet")
        found = parquet.read_table(tmp_path / "t.parquet").to_pylist()
        words = [{key: "" if value is None else str(value) for key, value in row.items()} for row in found]
        assert words == rows_of(tmp_path / "t.csv")
    empty = [read_run(write_run(tmp_path / "b", [line(1, scores=scores([0.1]))]))]
    write_table(empty, "round", tmp_path / "t.parquet")
    assert str(parquet.read_schema(tmp_path / "t.parquet").field("attack_local").type) == "double"  # no value at all


def test_a_name_cannot_become_a_formula(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", mended(), the_about=about(name="=1+2"))
    write_table([read_run(folder)], "round", tmp_path / "r.csv")
    assert rows_of(tmp_path / "r.csv")[0]["name"] == "'=1+2"
    named = about()
    named["clients"][0]["name"] = "@mine"
    write_table([read_run(write_run(tmp_path / "named", mended(), the_about=named))], "client", tmp_path / "c.csv")
    assert [row["client_name"] for row in rows_of(tmp_path / "c.csv")[:2]] == ["'@mine", ""]


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The real command, in a Python that says which heavy packages it took."""
    code = (
        "import sys, atexit\n"
        "heavy = ('torch', 'matplotlib', 'starlette', 'uvicorn', 'numpy', 'scipy', 'pyarrow')\n"
        "atexit.register(lambda: sys.stderr.write('took ' + ' '.join(n for n in heavy if n in sys.modules)))\n"
        f"sys.argv = ['lindt', *{arguments!r}]\n"
        "from lindt.cli.main import main\nmain()"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=os.environ | {"COLUMNS": "120"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_commands_answer_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", mended())
    (tmp_path / "none").mkdir()
    for arguments, words in [
        (("runs",), "LINDT on detection"),
        (("runs", "none"), "no runs in none yet"),
        (("show", "runs/one"), "Suspected by Delta since round 3"),
        (("table", "runs", "-o", "t.csv"), "t.csv: 10 rows"),
        (("report", "runs", "-o", "r.html"), "r.html: 1 run, "),
    ]:
        done = command(*arguments, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert done.stderr == "took "
    row = json.loads(command("show", "runs/one", "--json", folder=tmp_path).stdout)
    assert (row["state"], row["beta"], row["clearly_harmed"], row["left_out"]) == (
        "ended",
        pytest.approx(0.32 / 3),
        0,
        [],
    )
    done = command("show", "nowhere", folder=tmp_path)
    assert (done.returncode, "error: nowhere is not a run" in done.stderr) == (2, True)
