"""The kernels of a CNN step one by one, on one thread, against sgemm, to find those that could be faster.

    .venv/bin/python benchmarks/kernels.py

Each is called repeatedly on the same tensors, so that caches hold more of the data than in a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from lindt.resources import keep_memory

TURNS, CALLS, BATCH = 60, 10, 10
CONV1 = 2e-6 * BATCH * 28 * 28 * 32 * 75  # MFLOP a call
CONV2 = 2e-6 * BATCH * 10 * 10 * 64 * 800
FC1 = 2e-6 * BATCH * 512 * 1600


def pictures(*shape: int) -> Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def backward(g: Tensor, x: Tensor, w: Tensor, to_x: bool, to_w: bool) -> Callable[[], object]:
    pair = [1, 1], [0, 0], [1, 1]
    wanted = [to_x, to_w, False]
    return lambda: torch.ops.aten.convolution_backward(g, x, w, [len(w)], *pair, False, [0, 0], 1, wanted)


def kernels() -> dict[str, tuple[Callable[[], object], float]]:
    x, w1, g1, b1 = pictures(BATCH, 3, 32, 32), pictures(32, 3, 5, 5), pictures(BATCH, 32, 28, 28), torch.zeros(32)
    h, w2, g2, b2 = pictures(BATCH, 32, 14, 14), pictures(64, 32, 5, 5), pictures(BATCH, 64, 10, 10), torch.zeros(64)
    flat, wide, g, b = torch.randn(BATCH, 1600), torch.randn(512, 1600), torch.randn(BATCH, 512), torch.zeros(512)
    a = torch.randn(1024, 1024)
    return {
        "sgemm, 1024 x 1024 x 1024": (lambda: a @ a, 2e-6 * 1024**3),
        "conv1 forward": (lambda: torch.conv2d(x, w1, b1), CONV1),
        "conv1 backward to its weights": (backward(g1, x, w1, False, True), CONV1),
        "conv2 forward": (lambda: torch.conv2d(h, w2, b2), CONV2),
        "conv2 backward to its input": (backward(g2, h, w2, True, False), CONV2),
        "conv2 backward to its weights": (backward(g2, h, w2, False, True), CONV2),
        "fc1 forward": (lambda: torch.addmm(b, flat, wide.t()), FC1),
        "fc1 backward to its input": (lambda: g.mm(wide), FC1),
        "fc1's step": (lambda: wide.addmm_(g.t(), flat, alpha=1e-9), FC1),
    }


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    sys.stdout.write("| kernel | GFLOP | ms | GF/s |\n|---|---|---|---|\n")
    with torch.no_grad():
        for name, (call, mflop) in kernels().items():
            times = []
            for _ in range(TURNS):
                begun = time.process_time()
                for _ in range(CALLS):
                    call()
                times.append((time.process_time() - begun) / CALLS)
            ms = 1e3 * median(times)
            sys.stdout.write(f"| {name} | {mflop / 1e3:.3f} | {ms:.2f} | {mflop / ms:.0f} |\n")


if __name__ == "__main__":
    main()
