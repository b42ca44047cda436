"""The app on the server: average the clients' weights."""

import random

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    torch.manual_seed(0)
    random.seed(0)  # Flower draws the clients of a round with it
    arrays = ArrayRecord(Net().state_dict())
    strategy = FedAvg(fraction_train=config["fraction-train"])
    strategy.start(grid, arrays, num_rounds=config["num-server-rounds"])
