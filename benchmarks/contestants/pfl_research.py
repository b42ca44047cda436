"""pfl-research: its FederatedAveraging on its simulated backend, in one process of two threads.

With --processes 2, in two processes of one thread that reduce with gloo, with the environment variables of torchrun.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from time import perf_counter

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from plain_torch import WORKS, Work, as_tensors, loss_of
from torch import Tensor, nn
from work import CLIENTS, MAX_NORM, RATE, Report, rounds_wanted

NEVER = 1_000_000


class Net(nn.Module):
    """A model with the loss and metrics that pfl calls."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.layers = work.model()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return nn.functional.cross_entropy(self.layers(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, object]:
        return {}


class Paced(TrainingProcessCallback):
    """Waits for a request before each round."""

    def __init__(self, report: Report | None) -> None:
        self.report, self.started = report, 0.0

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self._wanted()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int):
        if self.report:
            self.report.took(perf_counter() - self.started)
        return not self._wanted(), Metrics()

    def _wanted(self) -> bool:
        """The first process receives the request, and sends it to the others."""
        go = torch.tensor(float(self.report.wanted() if self.report else 0))
        self.started = perf_counter()
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(go, src=0)
        return bool(go)


class Shuffled:
    """A client's samples in a new order in every round, as for every contestant."""

    def __init__(self, work: Work) -> None:
        self.clients = [as_tensors(client) for client in work.data()]

    def __call__(self, i: int) -> PyTorchTensorDataset:
        x, y = self.clients[i]
        rows = torch.randperm(len(y))
        return PyTorchTensorDataset((x[rows], y[rows]))


def main(options: argparse.Namespace) -> None:
    several, rank = options.processes > 1, int(os.environ.get("RANK", 0))
    torch.set_num_threads(1 if several else 2)
    torch.manual_seed(rank)
    np.random.seed(0)
    name = f"pfl-research, {options.processes} processes" if several else "pfl-research, 2 threads"
    work = WORKS[options.work]
    data = FederatedDataset(Shuffled(work), get_user_sampler("minimize_reuse", list(range(CLIENTS))))
    net = Net(work)
    parameters = sum(p.numel() for p in net.parameters())
    report = Report(name, ("pfl", "torch"), options.rounds, parameters) if rank == 0 else None
    # At a rate of 1 the central optimizer adds the mean update.
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=NEVER, evaluation_frequency=NEVER, train_cohort_size=CLIENTS, val_cohort_size=None
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=RATE, local_batch_size=work.batch, local_max_grad_norm=MAX_NORM
        ),
        callbacks=[Paced(report)],
    )
    if report:
        report.end(loss_of(net.layers, work.data()[0]))


def start(processes: int) -> int:
    """Start the processes as torchrun does; the first has this process's standard input and output."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    everyone = {
        "TORCHELASTIC_RUN_ID": "bench", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env=os.environ | everyone | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(processes)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    parser, parse = rounds_wanted()
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--work", choices=WORKS, default="cnn")
    options = parse()
    if options.processes > 1 and "RANK" not in os.environ:
        sys.exit(start(options.processes))
    main(options)
