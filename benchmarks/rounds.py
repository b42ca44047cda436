"""A round in this process by processor time: the plain loop, lindt's FedAvg and lindt's dual, in alternation.

    python benchmarks/rounds.py resnet transformer

It is made for a machine with other work on it, where wall clock says nothing. One thread, two clients of 20 samples,
v_i in memory. Ratios are taken within a turn, and the first turn, which allocates memory, is left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "contestants"))

import ours
import torch
from lindt_work import problem_of
from plain import Loop
from plain_torch import WORKS, copied, mean
from table import spread

from lindt import federate
from lindt.engines.inprocess import InProcess
from lindt.resources import keep_memory
from lindt.server.federation import begin
from lindt.server.state import RunState

CLIENTS = 2


def rounds(work: str, method: str) -> Iterator[tuple[RunState, object]]:
    plan, problem = ours.plan_for(work, method), problem_of(work, CLIENTS)
    return federate(plan, problem=problem, engine=InProcess(plan, problem), state=begin(plan, problem))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("works", nargs="+", choices=WORKS)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    keep_memory()
    for work in options.works:
        loop = Loop(work, threads=1)
        single, dual = rounds(work, "fedavg"), rounds(work, "lindt-always")

        def plain(loop: Loop = loop) -> None:
            weights = copied(loop.model)
            loop.model.load_state_dict(mean([loop.client(i, weights) for i in range(CLIENTS)]))

        ways = {"plain": plain, "single": lambda one=single: next(one), "dual": lambda one=dual: next(one)}
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.turns + 1):
            for name, play in ways.items():
                taken[name].append(_seconds(play))
        for above, below in (("single", "plain"), ("dual", "single")):
            values = [a / b for a, b in zip(taken[above][1:], taken[below][1:], strict=True)]
            sys.stdout.write(f"{work}: {above} / {below} {spread(values)}\n")
        medians = ", ".join(f"{name} {spread(values[1:])} s" for name, values in taken.items())
        sys.stdout.write(f"{work}: {medians}\n")
        sys.stdout.flush()


def _seconds(play: Callable[[], object]) -> float:
    torch.set_num_threads(1)
    start = time.process_time()
    play()
    return time.process_time() - start


if __name__ == "__main__":
    main()
