"""Each parser of untrusted bytes, fuzzed for FUZZ_SECONDS (60) in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from untrusted import TARGETS

pytestmark = pytest.mark.torture

SECONDS = int(os.environ.get("FUZZ_SECONDS", "60"))


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_crashes_it(target: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("fuzz.py")
    kept = Path(os.environ.get("FUZZ_KEPT", tmp_path))
    words = [sys.executable, str(script), target, "--seconds", str(SECONDS), "--kept", str(kept)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS + 400)
    figure = next((line for line in done.stdout.splitlines() if line.startswith("FIGURE ")), "")
    sys.stdout.write(f"\n{figure}\n")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(figure.partition("executions=")[2].split()[0]) > 100
