"""The start of a worker process: what must be set before torch is imported, which takes seconds.

Started by engines/processes/engine.py as `python -m lindt.engines.processes.__main__ SOCKET SHARED SERVER`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from lindt.resources import keep_memory


def main(socket: int, shared: int, server: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then stops its workers
    _end_with(server)
    keep_memory()
    from lindt.engines.processes.worker import serve

    serve(socket, shared)


def _end_with(server: int) -> None:
    """On Linux: let the system kill this process when the server's process dies, even in the middle of a task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != server:  # the server died before the line above
            sys.exit(1)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
