"""The lower bound: the round's 217.8 GFLOP as square float32 matrix products only, one thread per process."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from work import GFLOP, Report, rounds_wanted

SIDE = 1536


def multiply(gflop: float) -> None:
    torch.set_num_threads(1)
    a, b, c = (torch.ones(SIDE, SIDE) for _ in range(3))
    for _ in range(round(gflop * 1e9 / (2 * SIDE**3))):
        torch.mm(a, b, out=c)


def main() -> None:
    parser, parse = rounds_wanted()
    parser.add_argument("--processes", type=int, default=1)
    options = parse()
    count = options.processes
    report = Report(f"sgemm, {count} process{'es' * (count > 1)}", ("torch",), options.rounds)
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        report.play(lambda: list(pool.map(multiply, [GFLOP / count] * count)))
    report.end()


if __name__ == "__main__":
    main()
