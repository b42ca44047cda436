"""Where a CNN step's time goes, by kernel: a client's epoch under torch.profiler, one thread, channels last."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent / "contestants"))


def main() -> None:
    from lindt_work import cnn
    from ours import plan_for

    from lindt import federate

    plan, problem = plan_for("cnn", "fedavg"), cnn()
    rounds = federate(plan, problem=problem)
    next(rounds)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        next(rounds)
    torch.set_num_threads(1)
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events)
    steps = 500
    sys.stdout.write("| operator | own time | ms a step | calls a step |\n|---|---|---|---|\n")
    for event in events[:12]:
        own = event.self_cpu_time_total
        sys.stdout.write(
            f"| `{event.key}` | {own / total:.1%} | {own / 1000 / steps:.3f} | {event.count / steps:.1f} |\n"
        )
    rest = sum(event.self_cpu_time_total for event in events[12:])
    sys.stdout.write(f"| everything else | {rest / total:.1%} | {rest / 1000 / steps:.3f} | |\n")


if __name__ == "__main__":
    main()
