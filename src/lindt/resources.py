"""The memory settings of a process that trains."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h of the GNU C library numbers them
LARGEST: Final = 256 << 20  # the most bytes of a block that is kept
AS_BEFORE: Final = 32 << 20  # the largest value that older versions of the library accept


def keep_memory() -> bool:
    """Let the C library keep freed blocks up to 256 MiB for later allocations; True where it can.

    By default it returns each large block to the system and requests the next one, with a page fault every 4 KiB:
    18,600 of them in a step of the paper's LSTM, a sixth of its time (docs/performance.md). It is for lindt's own
    processes, and for a process that starts workers; `federate` does not change the settings of a user's process.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST) or mallopt(M_MMAP_THRESHOLD, AS_BEFORE)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, 2 * LARGEST))
