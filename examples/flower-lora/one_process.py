"""Play the app in this process, without a network: `python one_process.py [--one-vocabulary] [--rounds 24] [--seed 0]`.

At the end each client scores w, the model that it predicts with and its private model on text that neither its training
nor its evaluation has read. It needs a clone of the repository: the Grid is that of the tests.
"""

import argparse
import logging
import os
import random
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from statistics import mean

import torch
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import FedAvg

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "flower")]

from fake_grid import FakeGrid  # noqa: E402
from roles import client_app, task  # noqa: E402

from lindt.flower import NFLDetector  # noqa: E402
from lindt.flower.messages import Instruction  # noqa: E402
from lindt.flower.vault import Vault, default_folder  # noqa: E402


def play(config, clients, seed):
    """The run's metrics and its Grid. The server is that of roles/server_app.py."""
    torch.manual_seed(seed)
    random.seed(seed)  # FedAvg draws the order of the clients
    grid = FakeGrid(client_app.app, clients, config)
    arrays = ArrayRecord(task.adapters(task.base()))
    return NFLDetector(FedAvg()).start(grid, arrays, num_rounds=config["num-server-rounds"]), grid


def scores_on_unread_text(grid):
    """Of each client: the accuracy of w, that of the model it predicts with and its name, and that of P_i."""
    found = {}
    for message in grid.of("evaluate")[-len(grid.contexts) :]:  # those of the last round
        context, instruction = grid.contexts[message.metadata.dst_node_id], Instruction.read(message)
        client = context.node_config["partition-id"]
        name, chosen = client_app.app.chosen(message, context)
        alone = Vault(default_folder(), instruction.experiment, str(client)).private.newest(up_to=instruction.round)
        unread = task.own_text(context, "unread")
        w, predicts, private = (
            task.test(task.with_adapters(arrays.to_torch_state_dict()), unread)[1]
            for arrays in (message.content["arrays"], chosen, alone.arrays)
        )
        found[client] = w, predicts, name, private
    return dict(sorted(found.items()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--one-vocabulary", action="store_true", help="the control: plain roles")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = tomllib.loads((HERE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"two-vocabularies": not options.one_vocabulary}
    config |= {"num-server-rounds": options.rounds} if options.rounds else {}
    logging.getLogger("flwr").addFilter(lambda record: record.getMessage().startswith("lindt:"))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LINDT_PRIVATE"] = folder
        result, grid = play(config, task.CLIENTS, options.seed)
        found = scores_on_unread_text(grid)
    last = result.train_metrics_clientapp[config["num-server-rounds"]]
    print(*(f"{name} {last[f'lindt-{name}']:.2f}" for name in ("delta", "spread", "delta-product", "spread-product")))
    pools, largest = task.windows()
    print("on text that was not read before   w   predicts with   alone")
    for client, (w, predicts, name, private) in found.items():
        print(f"{client} {pools.role_names[largest[client]]:32} {w:.3f}   {predicts:.3f} ({name})   {private:.3f}")
    state = Counter((predicts > private) - (predicts < private) for _, predicts, _, private in found.values())
    means = (mean(scores[i] for scores in found.values()) for i in (0, 1, 3))
    print("mean: w {:.3f}, predicts with {:.3f}, alone {:.3f}".format(*means))
    print(f"better off than alone {state[1]}, unchanged {state[0]}, worse off {state[-1]}")
    print(f"{time.process_time():.0f} s of CPU time")


if __name__ == "__main__":
    main()
