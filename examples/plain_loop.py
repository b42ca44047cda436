"""A plain federated loop on digits, written without lindt. Only the lines marked `# lindt` were added.

Ten clients have two of the ten digits each. The averaged model is worse for them than the model that each can train
alone: negative federated learning. Clients report their gains on held-out data, and the server tests the reports; once
federation hurts, clients train a dual model.

    python examples/plain_loop.py [rounds]
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import lindt  # lindt


def digits_for(clients, skewed):
    """Training and test data (x, y) of each client: two digits each, or all ten, shuffled."""
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = ((x - x.mean()) / x.std()).float()
    rows = torch.randperm(len(y))
    rows = rows[y[rows].argsort(stable=True)] if skewed else rows
    shards = rows.chunk(2 * clients)  # sorted by digit, a shard is half a digit
    for i in range(clients):
        own = torch.cat([shards[i], shards[i + clients]])
        own = own[torch.randperm(len(own))]
        yield (x[own[:60]], y[own[:60]]), (x[own[60:]], y[own[60:]])


def train(loss_of, parameters, data, epochs=1):
    optimiser = torch.optim.SGD(parameters, lr=0.1)
    for _ in range(epochs):
        for rows in torch.randperm(len(data[1])).split(10):
            optimiser.zero_grad()
            loss_of(*(part[rows] for part in data)).backward()
            optimiser.step()


def train_one(model, data, epochs=1):
    train(lambda x, y: cross_entropy(model(x), y), model.parameters(), data, epochs)


@torch.no_grad()
def gain(model, alone, data):  # lindt
    """The accuracy of the shared model less that of the model trained alone, with the mean square over the samples."""
    d = (model(data[0]).argmax(1) == data[1]).double() - (alone(data[0]).argmax(1) == data[1]).double()  # lindt
    return lindt.Paired(float(d.mean()), float(d.square().mean()))  # lindt


@torch.no_grad()
def accuracy(predict, clients):
    """The mean over clients, in percent, on their own test data; `predict(i, x)` is the prediction of client i."""
    hits = [(predict(i, x).argmax(1) == y).float().mean() for i, (_, (x, y)) in enumerate(clients)]
    return float(100 * torch.stack(hits).mean())


def main(rounds=40, skewed=True):
    torch.set_num_threads(1)  # more threads do not help such a small model
    torch.manual_seed(0)
    clients = list(digits_for(10, skewed))
    held_out = [[part[:60] for part in test] for _, test in clients]  # lindt: no model trains on these samples
    clients = [(data, [part[60:] for part in test]) for data, test in clients]  # lindt: the others are the test data
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    alone = [copy.deepcopy(model) for _ in clients]
    for own, (data, _) in zip(alone, clients, strict=True):
        train_one(own, data, epochs=20)
    print(f"each client alone: {accuracy(lambda i, x: alone[i](x), clients):.1f}")

    detector, private = lindt.Detector(rounds=rounds, clients=len(clients)), {}  # lindt

    def predict(i, x):
        return lindt.intertwine(model, private[i])(x)[1] if i in private else model(x)  # lindt

    for r in range(1, rounds + 1):
        recovering, updated, gains = bool(private) or detector.negative, [], {}  # lindt: once on, recovery stays on
        for i in torch.randperm(len(clients))[:5].tolist():
            local, data = copy.deepcopy(model), clients[i][0]
            gains[i] = gain(model, alone[i], held_out[i])  # lindt
            if recovering:  # lindt
                dual = lindt.intertwine(local, private.setdefault(i, copy.deepcopy(local)))  # lindt
                train(lambda x, y, dual=dual: dual.joint_loss(cross_entropy, x, y), dual.parameters(), data)  # lindt
            else:
                train_one(local, data)
            updated.append(local.state_dict())
        average = {name: torch.stack([w[name] for w in updated]).mean(0) for name in updated[0]}
        model.load_state_dict(average)
        verdict = detector.observe(gains=gains, samples=60)  # lindt
        shared, used = accuracy(lambda i, x: model(x), clients), accuracy(predict, clients)
        if verdict.since == r or r % 10 == 0:
            found = f"{verdict.state}, gain {100 * verdict.gain:+.1f} +- {100 * verdict.error:.1f} points"
            print(f"round {r}: {found}; shared model {shared:.1f}, what the clients use {used:.1f}")
    return verdict, shared, used


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
