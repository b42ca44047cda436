"""Memory that is kept is not fetched from the system again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lindt.resources import keep_memory

# 40 MiB taken and let go twenty times; told are the page faults after the first two.
SCRIPT = """
import resource, sys
if sys.argv[1] == "kept":
    from lindt.resources import keep_memory
    assert keep_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for turn in range(22):
    if turn == 2:
        before = faults()
    block = bytearray(b"1") * (40 << 20)
    del block
print(faults() - before)
"""


def faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only the GNU C library is told to keep memory")
def test_a_large_block_costs_its_page_faults_once() -> None:
    least = 20 * (40 << 20) // (2 << 20)  # of pages of 2 MiB, where the system gives such
    assert faults("as it comes") >= least
    assert faults("kept") < least / 10


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_memory()
