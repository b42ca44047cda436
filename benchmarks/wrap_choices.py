"""Two choices of `lindt.flower.wrap`: how far v_i is moved towards w before it trains, and when P_i pauses.

    python benchmarks/wrap_choices.py --seeds 0 1                # for the design
    python benchmarks/wrap_choices.py --seeds 10 11              # for the judgement
    python benchmarks/wrap_choices.py --seeds 0 --of patience    # one of the two tables

Wrapped apps (softmax regression in numpy, a small network in torch) on scikit-learn's digits, six clients with 60
training samples each, played in this process. A client's samples are split in three: for training, for evaluation
(which the app and lindt use), and for the judgement (which neither uses).

    even      every client has all digits
    dirichlet digits by Dirichlet(0.5)
    pairs     two digits per client
    camps     all digits; every second client labels digit d as 9 - d

PULL: recovery is on from the first round (the paper's rule with an epsilon of nearly 0). The number is the mean over
clients of the accuracy of v_i after 10 rounds. With 1, v_i starts from w in each round. PATIENCE: the numbers are the
accuracy of P_i after 24 rounds, with at most two calls per round, and the number of calls.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "flower"))
from fake_grid import FakeGrid

from lindt.flower import NFLDetector, client_app, wrap
from lindt.flower.vault import Vault

CLIENTS, TRAIN, TESTS = 6, 60, 60
PULLS, PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0), (2, 4, 8)
Samples = tuple[NDArray[np.float32], NDArray[np.int64]]
Data = list[dict[str, Samples]]


def deal(skew: str, seed: int) -> Data:
    """The samples of each client by split. Clients draw with replacement, so that there are enough of each digit."""
    rng = np.random.default_rng([seed, 17])
    x, y = load_digits(return_X_y=True)
    x = ((x - x.mean()) / x.std()).astype(np.float32)
    parts = {"train": 0, "evaluate": 1, "judge": 2}
    part_of = rng.integers(3, size=len(y))  # no sample is in two splits, of any client
    found: Data = []
    for client in range(CLIENTS):
        shares = np.full(10, 0.1)
        if skew == "dirichlet":
            shares = rng.dirichlet(np.full(10, 0.5))
        elif skew == "pairs":
            shares = np.zeros(10)
            shares[[(2 * client) % 10, (2 * client + 1) % 10]] = 0.5
        splits = {}
        for name, part in parts.items():
            digits = rng.choice(10, TRAIN if name == "train" else TESTS, p=shares)
            rows = np.array([rng.choice(np.flatnonzero((y == digit) & (part_of == part))) for digit in digits])
            labels = 9 - y[rows] if skew == "camps" and client % 2 else y[rows]
            splits[name] = x[rows], labels.astype(np.int64)
        found.append(splits)
    return found


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    found: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return found


class Regression:
    """Softmax regression in numpy: five steps on all samples."""

    def first(self, seed: int) -> ArrayRecord:
        return ArrayRecord({"weight": Array(np.zeros((64, 10))), "bias": Array(np.zeros(10))})

    def train(self, arrays: ArrayRecord, data: Samples) -> ArrayRecord:
        (x, y), weight, bias = data, arrays["weight"].numpy().copy(), arrays["bias"].numpy().copy()
        for _ in range(5):
            error = softmax(x @ weight + bias) - np.eye(10)[y]
            weight -= 0.1 * x.T @ error / len(y)
            bias -= 0.1 * error.mean(0)
        return ArrayRecord({"weight": Array(weight), "bias": Array(bias)})

    def test(self, arrays: ArrayRecord, data: Samples) -> tuple[float, float]:
        (x, y), weight, bias = data, arrays["weight"].numpy(), arrays["bias"].numpy()
        chances = softmax(x @ weight + bias)
        return float(-np.log(chances[range(len(y)), y] + 1e-12).mean()), float((chances.argmax(1) == y).mean())


class Network:
    """64 hidden units, one epoch of SGD."""

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def first(self, seed: int) -> ArrayRecord:
        torch.manual_seed(seed)
        return ArrayRecord(Network().net.state_dict())

    def train(self, arrays: ArrayRecord, data: Samples) -> ArrayRecord:
        self.net.load_state_dict(arrays.to_torch_state_dict())
        x, y = map(torch.from_numpy, data)
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        for rows in torch.randperm(len(y)).split(10):
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.net(x[rows]), y[rows]).backward()
            optimizer.step()
        return ArrayRecord(self.net.state_dict())

    @torch.no_grad()
    def test(self, arrays: ArrayRecord, data: Samples) -> tuple[float, float]:
        self.net.load_state_dict(arrays.to_torch_state_dict())
        x, y = map(torch.from_numpy, data)
        logits = self.net(x)
        return float(nn.functional.cross_entropy(logits, y)), float((logits.argmax(1) == y).float().mean())


MODELS: dict[str, Callable[[], Regression | Network]] = {"regression": Regression, "network": Network}
SKEWS = ("even", "dirichlet", "pairs", "camps")


def app_of(model: Regression | Network, data: Data) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        mine = data[int(context.node_config["partition-id"])]["train"]
        arrays = model.train(msg.content["arrays"], mine)
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": TRAIN})}), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        mine = data[int(context.node_config["partition-id"])]["evaluate"]
        loss, accuracy = model.test(msg.content["arrays"], mine)
        metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": TESTS})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def judged(name: str, skew: str, seed: int, rounds: int, kind: str, **how: Any) -> tuple[float, float, float]:
    """Accuracies on the samples for the judgement: of w, and of v_i ("adapted") or P_i ("private"); and P_i's calls."""
    data, model = deal(skew, seed), MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        detector = NFLDetector(FedAvg(fraction_evaluate=0.0), **how)
        grid = FakeGrid(wrap(app_of(model, data), folder=folder), CLIENTS)
        w = detector.start(grid, model.first(seed), num_rounds=rounds).arrays
        (experiment,) = (path.name for path in Path(folder).iterdir())
        shared, own, calls = [], [], []
        for client, splits in enumerate(data):
            found = getattr(Vault(Path(folder), experiment, str(client)), kind).newest(up_to=rounds)
            shared.append(model.test(w, splits["judge"])[1])
            own.append(model.test(found.arrays, splits["judge"])[1])
            calls.append(len(found.notes.get("scores", ())))
        return fmean(shared), fmean(own), fmean(calls)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def pulls(seeds: list[int]) -> None:
    head = "".join(f"{f'PULL {pull:g}':>11}" for pull in PULLS)
    say(f"{'v_i':<22}{'w':>7}{head}")
    means: dict[float, list[float]] = {pull: [] for pull in PULLS}
    for name in MODELS:
        for skew in SKEWS:
            shared, row = 0.0, []
            for pull in PULLS:
                client_app.PULL = pull  # type: ignore[misc]
                found = [judged(name, skew, s, 10, "adapted", epsilon=1e-9, patience=0) for s in seeds]
                shared, own = fmean(w for w, _, _ in found), fmean(v for _, v, _ in found)
                row.append(own)
                means[pull].append(own)
            say(f"{name + ', ' + skew:<22}{shared:>7.3f}{''.join(f'{own:>11.3f}' for own in row)}")
    say(f"{'mean':<29}{''.join(f'{fmean(means[pull]):>11.3f}' for pull in PULLS)}")


def patiences(seeds: list[int]) -> None:
    head = "".join(f"{f'PATIENCE {patience}':>20}" for patience in PATIENCES)
    say(f"{'P_i, calls':<22}{head}")
    means: dict[int, list[tuple[float, float]]] = {patience: [] for patience in PATIENCES}
    for name in MODELS:
        for skew in SKEWS:
            row = []
            for patience in PATIENCES:
                client_app.PATIENCE = patience  # type: ignore[misc]
                found = [judged(name, skew, s, 24, "private", recover=False) for s in seeds]
                row.append((fmean(p for _, p, _ in found), fmean(calls for _, _, calls in found)))
                means[patience].append(row[-1])
            say(f"{name + ', ' + skew:<22}{''.join(f'{own:>12.3f}{calls:>8.1f}' for own, calls in row)}")
    ends = [(fmean(p for p, _ in found), fmean(calls for _, calls in found)) for found in means.values()]
    say(f"{'mean':<22}{''.join(f'{own:>12.3f}{calls:>8.1f}' for own, calls in ends)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--of", choices=("pull", "patience"), help="only one of the two tables")
    asked = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    say(f"means over the seeds {', '.join(map(str, asked.seeds))}")
    if asked.of != "patience":
        pulls(asked.seeds)
    if asked.of != "pull":
        patiences(asked.seeds)


if __name__ == "__main__":
    main()
