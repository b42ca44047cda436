"""A CNN step with the shortcuts of lindt/adaptations/thin.py against the same step without, by CPU time.

    .venv/bin/python benchmarks/thin_step.py          # with --dual the dual's joint step

Turns of 5 steps alternate, so that a busy spell hits neighbours alike, and each ratio is taken within a pair.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from lindt.adaptations import thin
from lindt.adaptations.base import descend
from lindt.adaptations.dual import Dual
from lindt.memory import keep_memory
from lindt.models import Cnn

PAIRS, STEPS, BATCH = 160, 5, 10
WIDE = {"whole": sys.maxsize, "thin": thin.WIDE}
Step = Callable[[Tensor, Tensor], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dual", action="store_true", help="the dual's joint step instead of a single model's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    steps: dict[str, Step] = {way: step_of(options.dual) for way in WIDE}
    ratios = []
    for pair in range(PAIRS):
        ways = ("whole", "thin") if pair % 2 else ("thin", "whole")
        taken = {way: turn(steps[way], way, pair) for way in ways}
        ratios.append(taken["thin"] / taken["whole"])
    low, _, high = quantiles(ratios, n=4)
    told = f"{median(ratios):.3f} ({low:.3f} to {high:.3f}), {PAIRS} pairs"
    sys.stdout.write(f"{'dual' if options.dual else 'single'} step, thin / whole: {told}\n")


def step_of(dual: bool) -> Step:
    torch.manual_seed(1)
    model = Cnn().build(10).to(memory_format=torch.channels_last).train()
    w = [*model.parameters()]
    if not dual:
        return lambda x_BCHW, y_B: descend(cross_entropy(model(x_BCHW), y_B), 0.1, 5.0, w)
    local = copy.deepcopy(model)
    v, both = [*local.parameters()], Dual().dual(model, local)
    return lambda x_BCHW, y_B: descend(both.joint_loss(cross_entropy, x_BCHW, y_B), 0.1, 5.0, w, v)


def turn(step: Step, way: str, seed: int) -> float:
    torch.manual_seed(seed)
    x_NCHW = torch.randn(STEPS * BATCH, 3, 32, 32).to(memory_format=torch.channels_last)
    y_N = torch.randint(10, (STEPS * BATCH,))
    thin.WIDE = WIDE[way]  # type: ignore[misc]
    begun = time.process_time()
    for x_BCHW, y_B in zip(x_NCHW.split(BATCH), y_N.split(BATCH), strict=True):
        step(x_BCHW, y_B)
    return time.process_time() - begun


if __name__ == "__main__":
    main()
