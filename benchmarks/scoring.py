"""The CPU time of scoring all clients, against a plain round: the paper's CIFAR federation in NFL, in this process.

    .venv/bin/python benchmarks/scoring.py                   # guarded recovery
    .venv/bin/python benchmarks/scoring.py --method lindt

On CIFAR-10 itself (`lindt data fetch cifar10`). Every honest client has a v_i; private models train for one epoch only,
since their quality does not change the time. Rounds differ by the attackers that are drawn: each trains five epochs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

from lindt.engines.inprocess import InProcess
from lindt.plan.plan import METHODS, Scoring
from lindt.plan.problem import problem_for
from lindt.protocols import Detection
from lindt.registry import component
from lindt.server.federation import begin, evaluate, play_round, train_privately
from lindt_experiments.plans.scales import plan_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=sorted(METHODS), default="guarded")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--scale", choices=("cpu", "paper"), default="paper")
    options = parser.parse_args()
    plan = plan_for("cifar", "nfl", "fedavg", options.scale, 0)
    alone = replace(plan.alone, epochs=1, patience=1, refit=False)
    plan = replace(plan, method=METHODS[options.method], alone=alone, detection=component(Detection, "gain"),
                   rounds=10_000, scoring=Scoring(every=10_000, last=1))  # fmt: skip
    problem = problem_for(plan)
    with tempfile.TemporaryDirectory() as aside:
        engine = InProcess(plan, problem, run="scoring", folder=Path(aside) / "v", cache=Path(aside) / "cache")
        state = begin(plan, problem, "scoring")
        for _ in train_privately(plan, problem, engine, state):
            pass
        plain, scored = [], []
        for _ in range(1 + options.rounds):
            start = time.process_time()
            state, _ = play_round(state, plan, problem, engine)
            plain.append(time.process_time() - start)
        known = next(iter(client.id for client in engine.clients if engine.versions.rounds(client.id)), None)
        for client in engine.clients if known is not None else []:
            if not engine.versions.rounds(client.id) and client.id not in client.worker.attackers:
                kept = engine.versions.read(known, max(engine.versions.rounds(known)))
                engine.versions.write(client.id, state.round, kept)
        for _ in range(3):
            start = time.process_time()
            evaluate(state, plan, problem, engine)
            scored.append(time.process_time() - start)
    a_round, scoring = mean(plain[1:]), mean(scored)
    rounds, scores = (", ".join(f"{one:.1f}" for one in taken) for taken in (plain[1:], scored))
    sys.stdout.write(
        f"{options.method}, {options.scale}: plain rounds {rounds} s, scoring {scores} s; a scored round takes "
        f"{1 + scoring / a_round:.2f} times a plain one\n"
    )


if __name__ == "__main__":
    main()
