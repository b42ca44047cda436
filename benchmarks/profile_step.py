"""Where a CNN step's time goes, by kernel: a client's epoch under torch.profiler, one thread, channels last."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

SHOWN, STEPS = 14, 500
CONVOLUTIONS = {"conv1": (32, 3, 5, 5), "conv2": (64, 32, 5, 5)}

sys.path.insert(0, str(Path(__file__).resolve().parent / "contestants"))


def main() -> None:
    from lindt_work import cnn
    from ours import plan_for

    from lindt import federate

    plan, problem = plan_for("cnn", "fedavg"), cnn()
    rounds = federate(plan, problem=problem, preflight=False)  # the test samples are trained on
    next(rounds)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        next(rounds)
    events = [(f"{e.key} {_layer(e)}".strip(), e.self_cpu_time_total, e.count) for e in seen.key_averages(True)]
    own: dict[str, tuple[float, int]] = {}
    for name, taken, count in events:
        before = own.get(name, (0.0, 0))
        own[name] = (before[0] + taken, before[1] + count)
    ordered = sorted(own.items(), key=lambda item: -item[1][0])
    total = sum(taken for taken, _ in own.values())
    out = sys.stdout
    out.write("| operator | own time | ms a step | calls a step |\n|---|---|---|---|\n")
    for name, (taken, count) in ordered[:SHOWN]:
        out.write(f"| {name} | {taken / total:.1%} | {taken / 1000 / STEPS:.3f} | {count / STEPS:.1f} |\n")
    rest = sum(taken for _, (taken, _) in ordered[SHOWN:])
    out.write(f"| everything else | {rest / total:.1%} | {rest / 1000 / STEPS:.3f} | |\n")


def _layer(event: FunctionEventAvg) -> str:
    """Which convolution, by the shape of its weights."""
    shapes = [tuple(shape) for shape in event.input_shapes]
    return next((name for name, shape in CONVOLUTIONS.items() if shape in shapes and "conv" in event.key), "")


if __name__ == "__main__":
    main()
