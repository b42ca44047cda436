"""Flower's simulation: Ray, two client actors of one CPU each, its Message API and its own FedAvg."""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

from time import perf_counter

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from plain_torch import WORKS, as_tensors, loss_of, train
from work import CLIENTS, Report, rounds_wanted

WORK = "LINDT_BENCH_WORK"  # the name of the work, which the actors inherit
client_app = ClientApp()
_kept: dict[str, object] = {}  # in an actor: objects that are made once and used in every round


@client_app.train()
def train_client(message: Message, context: Context) -> Message:
    work = WORKS[os.environ[WORK]]
    if not _kept:
        torch.set_num_threads(1)
        _kept.update(model=work.model(), clients=[as_tensors(client) for client in work.data()])
    model, (x, y) = _kept["model"], _kept["clients"][int(context.node_config["partition-id"])]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    train(model, x, y, batch=work.batch)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
    return Message(content=RecordDict(content), reply_to=message)


class Paced(FedAvg):
    """FedAvg that waits for a request before each round. Nothing else is changed."""

    def __init__(self, report: Report) -> None:
        super().__init__(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        self.report, self.started = report, 0.0

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid):
        self.started = perf_counter()
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies):
        replies = list(replies)
        assert sum(reply.has_content() for reply in replies) == CLIENTS
        found = super().aggregate_train(server_round, replies)
        self.report.took(perf_counter() - self.started)
        return found


def main() -> None:
    parser, parse = rounds_wanted()
    parser.add_argument("--work", choices=WORKS, default="cnn")
    options = parse()
    work, os.environ[WORK] = WORKS[options.work], options.work
    parameters = sum(p.numel() for p in work.model().parameters())
    report = Report("Flower simulation, Ray, 2 actors", ("flwr", "ray", "torch"), options.rounds, parameters)
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy, arrays = Paced(report), ArrayRecord(work.model().state_dict())
        while report.wanted():
            arrays = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1).arrays
        model = work.model()
        model.load_state_dict(arrays.to_torch_state_dict())
        report.end(loss_of(model, work.data()[0]))

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server_app, client_app, num_supernodes=CLIENTS, backend_config=resources)


if __name__ == "__main__":
    main()
