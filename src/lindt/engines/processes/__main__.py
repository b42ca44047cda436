"""The first instant of a worker process: what must hold before torch is imported, which takes seconds.

Started by engines/processes/engine.py as `python -m lindt.engines.processes.__main__ SOCKET SHARED SERVER`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from lindt.resources import keep_memory


def main(socket: int, shared: int, server: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then lets us go
    _end_with(server)
    keep_memory()
    from lindt.engines.processes.worker import serve

    serve(socket, shared)


def _end_with(server: int) -> None:
    """Where the system can, be killed when the server's process dies in the middle of our task."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != server:  # it died before we could say so
            sys.exit(1)


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
