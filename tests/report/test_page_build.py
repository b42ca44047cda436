"""The page as committed is what its source gives."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import lindt
from lindt.report.page import empty_page

SOURCE = Path(lindt.__file__).parent / "report" / "page"


def test_the_built_page_is_of_the_source_beside_it() -> None:
    """Without npm: the page names a hash of what it was built from. `make page` builds it anew."""
    origin = hashlib.sha256()
    files = [f"src/{path.name}" for path in sorted((SOURCE / "src").iterdir())]
    for name in [*files, "build.mjs", "package.json", "package-lock.json"]:
        origin.update(f"{name}\0".encode() + (SOURCE / name).read_bytes() + b"\0")
    found = re.search(r'<meta name="built-from" content="([0-9a-f]*)">', empty_page())
    assert found
    assert found[1] == origin.hexdigest(), "the page's source has changed: run `make page`"


def test_the_lock_names_no_registry() -> None:
    text = (SOURCE / "package-lock.json").read_text()
    assert "resolved" not in text
    assert text.count('"integrity": "sha512-') >= 3


@pytest.mark.slow
def test_building_anew_gives_the_same_bytes(tmp_path: Path) -> None:
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        pytest.skip("npm is not installed")
    copy = shutil.copytree(SOURCE, tmp_path / "page", ignore=shutil.ignore_patterns("node_modules", "built.html"))
    for command in ([npm, "ci"], [npm, "run", "check"], [node, "build.mjs", str(tmp_path / "built.html")]):
        subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "built.html").read_bytes() == (SOURCE / "built.html").read_bytes()
