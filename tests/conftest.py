"""One thread everywhere: the suite's numbers are those of a run, and two busy cores do not fight."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

# All of their tests are slow, and they import what only the slow suite needs: transformers, Lightning, opacus and PEFT
# (6 CPU seconds), Playwright.
HEAVY = ("test_wrap_packages.py", "test_lora_example.py", "test_in_chromium.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the quick suite these would be imported for nothing, or be shown as skipped."""
    return True if collection_path.name in HEAVY and "not slow" in config.option.markexpr else None


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """A suite that a shell started in the background has SIGINT ignored, and so would every run it tells to stop."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
