"""Every text in a stranger's run folder, one at a time, replaced by commands to a terminal and by rich's markup."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from worlds import tiny

import lindt
from lindt.cli.main import main
from lindt.errors import PlanError, UserError, plain
from lindt.plan.file import read_toml
from lindt.protocols import Detection
from lindt.registry import component
from lindt.runs.play import run_plan

EVIL = "\x1b]0;title\x07\x1b[2J[/red]"  # sets the window's title, clears the screen, closes a tag that is not open
Path_ = tuple[str | int, ...]


def texts(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """The places of all texts; of a list, in its first entry."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from texts(part, (*at, name))
    elif isinstance(value, list) and value:
        yield from texts(value[0], (*at, 0))
    elif isinstance(value, str):
        yield at


def replaced(value: Any, at: Path_) -> Any:
    copied = json.loads(json.dumps(value))
    inside = copied
    for name in at[:-1]:
        inside = inside[name]
    inside[at[-1]] = EVIL
    return copied


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was stopped after two rounds, and the same run at its end; each with a warning and a refusal."""
    root = tmp_path_factory.mktemp("runs")
    plan = tiny(detection=component(Detection, "gain"))
    events = run_plan(plan, root / "stopped")
    list(islice(events, 1 + 5 + 2))
    events.close()
    about = json.loads((root / "stopped" / "run.json").read_text())
    about["checks"]["warnings"] = ["a warning"]
    (root / "stopped" / "run.json").write_text(json.dumps(about))
    shutil.copytree(root / "stopped", root / "ended")
    list(run_plan(None, root / "ended", resume=True))
    (root / "ended" / "run.json").write_text(json.dumps(about | {"noise": "plan", "task": "a.b:c"}))
    return {"stopped": root / "stopped", "ended": root / "ended"}


def changed_folders(folders: dict[str, Path], to: Path) -> Iterator[Path]:
    """A copy of a folder for each text in its files, and one copy whose own name is the text."""
    for kind, name in (
        ("stopped", "run.json"),
        ("ended", "run.json"),
        ("ended", "summary.json"),
        ("ended", "plan.toml"),
    ):
        text = (folders[kind] / name).read_text()
        value = read_toml(text, bits=64) if name == "plan.toml" else json.loads(text)
        for at in texts(value):
            folder = Path(shutil.copytree(folders[kind], to / "run"))
            new = replaced(value, at)
            (folder / name).write_text(tomli_w.dumps(new) if name == "plan.toml" else json.dumps(new))
            yield folder
            shutil.rmtree(folder)
    for kind in folders:
        folder = Path(shutil.copytree(folders[kind], to / EVIL.replace("/", "|")))
        yield folder
        shutil.rmtree(folder)


COMMANDS = ("show RUN", "runs RUNS", "table RUN -o OUT.csv", "report RUN -o OUT.html", "export RUN --client 0 -o OUT",
            "run --out RUN --resume", "run --branch RUN --out OUT")  # fmt: skip


@pytest.mark.slow
def test_no_text_of_a_folder_steers_the_terminal(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LINDT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "runs").mkdir()
    shown = 0
    for folder in changed_folders(folders, tmp_path / "runs"):
        words = {"RUN": str(folder), "RUNS": str(folder.parent)}
        for command in COMMANDS:
            out = tmp_path / "out"
            given = [words.get(word, word.replace("OUT", str(out))) for word in command.split()]
            monkeypatch.setattr(sys, "argv", ["lindt", *given])
            with pytest.raises(SystemExit):
                main()
            printed = "".join(capsys.readouterr())
            assert "\x1b" not in printed, (command, printed)
            assert "\x07" not in printed, (command, printed)
            shown += "\\x1b]0;title" in printed
            shutil.rmtree(out, ignore_errors=True)
    assert shown > 20  # the texts were printed, as escapes


@pytest.mark.slow
def test_python_warns_and_refuses_in_plain_text(folders: dict[str, Path], tmp_path: Path) -> None:
    for folder in changed_folders(folders, tmp_path):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                run = lindt.open(folder)
                texts = [str(run.verdict), repr(run)]
                run.resume(progress=False)
            except UserError as error:
                texts = [str(error)]
        for text in (*texts, *(str(one.message) for one in told)):
            assert "\x1b" not in text


def test_plain_text_by_hand() -> None:
    assert plain("a\x1b[2Jb\u202e\n") == "a\\x1b[2Jb\\u202e\\n"
    assert plain("a\n\tb\r", "\n\t") == "a\n\tb\\r"
    assert str(UserError("a\x07\nb")) == "a\\x07\nb"
    assert str(PlanError("a\x07", "b", "c\x1b")) == "a = 'b': c\\x1b"
