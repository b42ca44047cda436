"""The memory that a process that trains keeps."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h of the GNU C library numbers them
LARGEST: Final = 256 << 20  # bytes of a block that is kept
AS_BEFORE: Final = 32 << 20  # the most that older versions of the library allow


def keep_memory() -> bool:
    """Blocks up to 256 MiB are kept for the next who asks; True where the C library can do that.

    By default it hands each large block back to the system and fetches the next one anew, a page fault every
    4 KiB: 18,600 of them in a step of the paper's LSTM, a sixth of its time (docs/performance.md). It is for
    processes of our own and for one that has workers; in another's, `federate` leaves such things alone.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    kept = mallopt(M_MMAP_THRESHOLD, LARGEST) or mallopt(M_MMAP_THRESHOLD, AS_BEFORE)
    return bool(kept and mallopt(M_TRIM_THRESHOLD, 2 * LARGEST))
