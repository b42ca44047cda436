"""How often a client is called clearly worse off although both of its models are equally good.

    python benchmarks/chance_of_harm.py --seeds 3 --draws 5

Each client of the grid of attacks (docs/attacks.md) trains its private model on all of its data, and again from other
seeds: another first model, another order of batches. All of these are equally good by construction. Each further model
is compared with the first by the paired test that calls a client clearly worse off. The rate is what the counts of
docs/attacks.md and docs/recovery.md have to be compared with. It may be above one in forty, the share on each side of
a two-sided test at 95%: the test knows the chance of the test samples, not that of training.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace

import torch

from lindt.client.private_models import PrivateTraining
from lindt.plan.problem import problem_for
from lindt.server.scores import paired_p_value
from lindt_experiments.attacks.grid import GridCell, plan_for

OTHER_SEED = 1000  # far from the seeds of the grid


def compare(seed: int, draws: int) -> tuple[int, int, int, Counter[int]]:
    """Comparisons, clearly worse, clearly better, and clearly worse by client."""
    plan = plan_for(GridCell("no_threat", "mean", "on_evidence"), "cpu", seed)
    problem = problem_for(plan)
    compared = worse = better = 0
    by_client = Counter[int]()
    for client, (train, test) in enumerate(problem.data):
        right = []
        for draw in range(draws + 1):
            drawn = replace(plan, seed=seed + OTHER_SEED * draw)  # the data stay those of `problem`
            model = PrivateTraining(f"client {client}", train, test, drawn, problem, torch.device("cpu")).learn()
            right.append(model.outputs.argmax(1) == test.labels)
        for other in right[1:]:
            wins, losses = int((other & ~right[0]).sum()), int((right[0] & ~other).sum())
            compared += 1
            if paired_p_value(wins, losses) < 0.05:
                worse, better = worse + (losses > wins), better + (wins > losses)
                by_client[client] += losses > wins
    return compared, worse, better, +by_client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draws", type=int, default=5, help="further private models of each client")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    total = Counter[str]()
    for seed in range(asked.seeds):
        compared, worse, better, clients = compare(seed, asked.draws)
        total.update(compared=compared, worse=worse, better=better)
        say(f"seed {seed}: {worse} of {compared} clearly worse, {better} clearly better; by client {dict(clients)}")
    share = 100 * total["worse"] / total["compared"]
    say(f"together: {total['worse']} of {total['compared']} clearly worse ({share:.1f}%), {total['better']} better")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
