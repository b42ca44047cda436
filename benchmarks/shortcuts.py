"""The CPU time of a recorded training step of lindt, against the same step in full.

    .venv/bin/python benchmarks/shortcuts.py                       # the paper's CNN
    .venv/bin/python benchmarks/shortcuts.py --model cpu --dual    # the `cpu` scale's, as a dual; also digits, head

`long` is plain autograd, `taped` replays the same steps from a tape (client/training.py). Turns of 5 steps alternate,
so that other work on the machine affects both alike, and each ratio is taken within a turn.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lindt.client.adaptations.dual import Dual
from lindt.client.training import BEFORE, GradientStep
from lindt.plan.models import Cnn, SmallCnn
from lindt.resources import keep_memory

STEPS, BATCH = 5, 10
WAYS = ("long", "taped")
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "paper": (Cnn().build, (3, 32, 32)),
    "cpu": (Cnn(side=16, kernel=3, channels=(16, 32), units=(128, 64)).build, (3, 16, 16)),
    "digits": (SmallCnn().build, (1, 8, 8)),
    "head": (lambda: nn.Sequential(nn.Linear(64, 10)), (64,)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="paper")
    parser.add_argument("--dual", action="store_true", help="the dual's joint step instead of a single model's")
    parser.add_argument("--turns", type=int, default=160)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    build, shape = MODELS[options.model]
    steps = {way: descent_of(way, build, options.dual) for way in WAYS}
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    warm = BEFORE // STEPS + 2  # turns until the tape is recorded
    for number in range(warm + options.turns):
        for way in WAYS if number % 2 else WAYS[::-1]:
            seconds = turn(steps[way], shape, number)
            taken[way] += [seconds] if number >= warm else []
    kind = f"{options.model}, {'dual' if options.dual else 'single'}"
    sys.stdout.write(f"{kind}: {1e3 * median(taken['taped']):.2f} ms a step, {options.turns} turns\n")
    ratios = [a / b for a, b in zip(taken["taped"], taken["long"], strict=True)]
    low, _, high = quantiles(ratios, n=4)
    sys.stdout.write(f"  taped / long: {median(ratios):.3f} ({low:.3f} to {high:.3f})\n")


def descent_of(way: str, build: Callable[[], nn.Module], dual: bool) -> GradientStep:
    torch.manual_seed(1)
    model = build().to(memory_format=torch.channels_last).train()
    kind = "benchmark" if way == "taped" else None
    if not dual:
        return GradientStep(lambda x, y: cross_entropy(model(x), y), [[*model.parameters()]], [model], kind)
    local = copy.deepcopy(model)
    both, groups = Dual().dual(model, local), [[*model.parameters()], [*local.parameters()]]
    return GradientStep(lambda x, y: both.joint_loss(cross_entropy, x, y), groups, [model, local], kind)


def turn(down: GradientStep, shape: tuple[int, ...], seed: int) -> float:
    """Seconds a step."""
    torch.manual_seed(seed)
    x_N, y_N = torch.randn(STEPS * BATCH, *shape), torch.randint(10, (STEPS * BATCH,))
    batches: list[tuple[Tensor, Tensor]] = list(zip(x_N.split(BATCH), y_N.split(BATCH), strict=True))
    if len(shape) == 3:
        batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]
    begun = time.process_time()
    for batch in batches:
        down(batch, 0.1, 5.0)
    return (time.process_time() - begun) / STEPS


if __name__ == "__main__":
    main()
