"""Where the fuzzer's targets may write, and what counts as an answer."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from lindt.errors import UserError

FOLDER = Path(tempfile.mkdtemp(prefix="lindt-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def written(name: str, content: bytes) -> Path:
    path = FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


class told(suppress):  # noqa: N801  # as `suppress` is
    """A UserError is an answer; so is its sentence, which must be one."""

    def __init__(self) -> None:
        super().__init__(UserError)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, UserError):
            assert str(error)
        return super().__exit__(kind, error, trace)
