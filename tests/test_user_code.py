"""Which lines of a traceback are the user's, and how errors are shown in a notebook."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lindt.errors import UserError
from lindt.user_code import describe_error, user_frames

FAILS = "def fails():\n    raise ValueError('no such column')\n"


def raised_in(file: Path) -> ValueError:
    """An error of a function in this file."""
    names: dict[str, object] = {}
    exec(compile(FAILS, str(file), "exec"), names)
    with pytest.raises(ValueError, match="no such column") as caught:
        names["fails"]()  # type: ignore[operator]
    assert caught.tb.tb_next is not None
    return caught.value.with_traceback(caught.tb.tb_next)  # without this file's own frame


@pytest.mark.parametrize(
    "folder", ["home/.local/lib/python3.11/site-packages/pack", "usr/lib/python3/dist-packages", "base/site-packages"]
)
def test_packages_of_other_environments_are_not_the_users(tmp_path: Path, folder: str) -> None:
    assert user_frames(raised_in(tmp_path / folder / "module.py")) == []
    assert [frame.name for frame in user_frames(raised_in(tmp_path / "mine" / "module.py"))] == ["fails"]


def test_a_cell_of_a_notebook_is_called_one(tmp_path: Path) -> None:
    cell = raised_in(tmp_path / "ipykernel_123" / "2413722639.py")
    assert describe_error(cell) == "ValueError: no such column; a notebook cell, line 2, in fails"
    script = raised_in(tmp_path / "mine.py")
    assert describe_error(script) == "ValueError: no such column; mine.py, line 2, in fails"


def test_a_notebook_shows_the_users_lines_and_the_sentence_only(tmp_path: Path) -> None:
    shown = UserError("rounds = 0: give 1 or more")
    assert shown._render_traceback_() == ["UserError: rounds = 0: give 1 or more"]
    shown.__cause__ = raised_in(tmp_path / "mine.py")
    first, *between, last = shown._render_traceback_()
    assert first == "Traceback of your code (most recent call last):"
    assert between == [f'  File "{tmp_path / "mine.py"}", line 2, in fails', "ValueError: no such column"]
    assert last == "UserError: rounds = 0: give 1 or more"


@pytest.mark.slow
def test_a_shell_of_ipython_asks_the_error_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    shell_of = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    shell = shell_of.instance()
    try:
        shell.run_cell("import lindt\nlindt.resolve('no-such-preset')")
    finally:
        shell_of.clear_instance()
        sys.modules.pop("IPython", None)
    said = capsys.readouterr().out
    assert "UserError: plan 'no-such-preset': No such file or directory" in said
    assert "file.py" not in said  # lindt/plan/file.py, which raises it
