"""The lock of a file: one process at a time, and a sentence for those that come too late."""

from __future__ import annotations

import fcntl
import math
import threading
from pathlib import Path

import pytest

from lindt.errors import UserError
from lindt.runs import files
from lindt.runs.files import locked


def test_a_held_lock_is_refused_in_the_callers_words(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        locked(path, wait=0, busy="nobody"),
        pytest.raises(UserError, match=r"^it is taken$"),
        locked(path, wait=0.1, busy="it is taken"),
    ):
        raise AssertionError
    with locked(path, wait=0, busy="it is free again"):
        pass


def test_a_held_lock_is_waited_for(tmp_path: Path) -> None:
    path, order = tmp_path / "lock", list[str]()
    holder = path.open("w")
    fcntl.flock(holder, fcntl.LOCK_EX)
    timer = threading.Timer(0.2, lambda: (order.append("released"), holder.close()))
    timer.start()
    with locked(path, wait=math.inf, busy=""):
        order.append("taken")
    timer.join()
    assert order == ["released", "taken"]


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_file: object, _how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", flock)
    with (
        pytest.raises(UserError, match=r"cannot be locked .No locks available."),
        locked(tmp_path / "a", wait=9, busy=""),
    ):
        raise AssertionError
