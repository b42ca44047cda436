"""Page faults and CPU time of scoring 10,000 pictures in process, call by call.

    .venv/bin/python benchmarks/faults.py             # with the C library's own settings
    .venv/bin/python benchmarks/faults.py --keep      # with memory kept, as `lindt run` does

Without --keep the number of page faults depends on the layout of the heap.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

CALLS = 4

sys.path.insert(0, str(Path(__file__).resolve().parent / "contestants"))


def main() -> None:
    from lindt_work import evaluation
    from ours import plan_for

    from lindt.engines.inprocess import InProcess
    from lindt.resources import keep_memory
    from lindt.server.federation import begin, evaluate

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="keep memory, as `lindt run` does")
    if parser.parse_args().keep:
        keep_memory()
    torch.set_num_threads(1)
    plan, problem = plan_for("evaluation", "fedavg"), evaluation()
    engine, state = InProcess(plan, problem), begin(plan, problem)
    for _ in range(CALLS):
        faults, begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        evaluate(state, plan, problem, engine)
        taken, met = time.process_time() - begun, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        sys.stdout.write(f"{taken:.2f} s of CPU, {met:,} page faults\n")


if __name__ == "__main__":
    main()
