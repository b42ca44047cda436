"""One thread everywhere: the suite's numbers are those of a run, and two busy cores do not fight."""

from __future__ import annotations

import signal

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """A suite that a shell started in the background has SIGINT ignored, and so would every run it tells to stop."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
