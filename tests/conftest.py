"""One thread everywhere: the suite's numbers are those of a run, and two busy cores do not fight."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
