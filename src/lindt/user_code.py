"""Exceptions of the user's own code (model, loss, metric, data set, task), and the lines that raised them.

A frame is the user's if its file belongs neither to lindt nor to an installed package nor to Python.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lindt.errors import one_line

_HERE: Final = Path(__file__).parent
_INSTALLED: Final = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_PACKAGES: Final = {"site-packages", "dist-packages"}  # of any environment: pip --user, Debian's, a base environment's
_OTHERS: Final = tuple(
    f"{folder.resolve()}{os.sep}" for folder in (_HERE, _HERE.parent / "lindt_experiments", *_INSTALLED)
)


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's own files in an exception's traceback, the last call at the end."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _of_user(frame.filename)]


def _of_user(file: str) -> bool:
    """Whether a file is the user's, as `<stdin>` and a notebook's cells are; `<string>` is code of a dataclass."""
    if file.startswith(("<frozen ", "<string>")):
        return False
    path = Path(file).resolve()
    return not str(path).startswith(_OTHERS) and _PACKAGES.isdisjoint(path.parts)


def callable_without_arguments(function: Callable[..., Any]) -> bool:
    """Whether a function can be called without arguments, as far as its signature is known."""
    try:
        inspect.signature(function).bind()
    except ValueError:  # a function of C code may have no signature
        return True
    except TypeError:
        return False
    return True


def describe_error(error: BaseException) -> str:
    """An exception as part of a sentence: its type, its first line, and the line of the user's code it came from."""
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {one_line(text[0])}" if text else type(error).__name__
    frames = user_frames(error)
    return f"{said}; {_place(frames[-1])}" if frames else said


def _place(frame: traceback.FrameSummary) -> str:
    path = Path(frame.filename)
    file = "a notebook cell" if path.parent.name.startswith("ipykernel_") else path.name
    return f"{file}, line {frame.lineno}, in {frame.name}"


def user_traceback(error: BaseException | None) -> str:
    """The user's part of a traceback, in Python's format; empty where no line is the user's."""
    frames = user_frames(error) if error is not None else []
    if error is None or not frames:
        return ""
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "Traceback of your code (most recent call last):\n" + "".join(lines)


def note_user_code(error: BaseException, doing: str) -> None:
    """Add a note to an exception that the user's code raised. The exception itself is not changed."""
    frames = user_frames(error)
    if frames:
        error.add_note(f"raised by your own code ({_place(frames[-1])}) while {doing}")
