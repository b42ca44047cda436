"""A plain federated loop on digits, written without lindt. The lines marked `# lindt` are all that was added.

Ten clients hold two of the ten digits each. The averaged model serves each of them worse than what it can
learn alone: negative federated learning. The server sees it in the weights; the clients then train a dual model.

    python examples/plain_loop.py           # 40 rounds, a few seconds
    python examples/plain_loop.py 60
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import lindt  # lindt


def digits_for(clients, skewed):
    """(x, y) to train and to test for each client: two digits each, or all ten shuffled."""
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = ((x - x.mean()) / x.std()).float()
    rows = torch.randperm(len(y))
    order = y[rows].argsort(stable=True) if skewed else torch.arange(len(y))
    shards = list(rows[order].chunk(2 * clients))  # sorted by digit: a shard is half a digit
    mine = [torch.cat([shards[i], shards[i + clients]]) for i in range(clients)]
    mine = [own[torch.randperm(len(own))] for own in mine]
    return [((x[own[:60]], y[own[:60]]), (x[own[60:]], y[own[60:]])) for own in mine]


def train(loss_of, parameters, x, y, rate, epochs=1):
    optimiser = torch.optim.SGD(parameters, lr=rate)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(10):
            optimiser.zero_grad()
            loss_of(x[rows], y[rows]).backward()
            optimiser.step()


def accuracy(predict, clients):
    """In percent, the mean over the clients; `predict(i, x)` is how client i predicts."""
    with torch.no_grad():
        return 100 * sum(float((predict(i, x).argmax(1) == y).float().mean()) for i, (_, (x, y)) in enumerate(clients)) / len(clients)


def main(rounds=40, skewed=True, epsilon=0.3, patience=10):
    torch.set_num_threads(1)  # a model this small gains nothing from more
    torch.manual_seed(0)
    clients = digits_for(10, skewed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    alone = [copy.deepcopy(model) for _ in clients]
    for own, ((x, y), _) in zip(alone, clients, strict=True):
        train(lambda x, y, own=own: cross_entropy(own(x), y), own.parameters(), x, y, 0.1, epochs=20)
    print(f"each client alone: {accuracy(lambda i, x: alone[i](x), clients):.1f}")

    detector, private, negative = lindt.Detector(epsilon, patience), {}, False  # lindt

    def predict(i, x):
        if i in private:  # lindt
            return lindt.intertwine(model, private[i])(x)[1]  # lindt
        return model(x)

    for r in range(1, rounds + 1):
        updated = []
        for i in torch.randperm(len(clients))[:5].tolist():
            local, ((x, y), _) = copy.deepcopy(model), clients[i]
            if negative:  # lindt
                private.setdefault(i, copy.deepcopy(local))  # lindt: v_i stays with the client
                dual = lindt.intertwine(local, private[i])  # lindt
                train(lambda x, y, dual=dual: dual.joint_loss(cross_entropy, x, y), dual.parameters(), x, y, 0.1)  # lindt
            else:
                train(lambda x, y, local=local: cross_entropy(local(x), y), local.parameters(), x, y, 0.1)
            updated.append(local.state_dict())
        average = {name: torch.stack([w[name] for w in updated]).mean(0) for name in updated[0]}
        model.load_state_dict(average)
        verdict = detector.observe(updated, average)  # lindt
        shared, used = accuracy(lambda i, x: model(x), clients), accuracy(predict, clients)
        if verdict.negative != negative or r % 10 == 0:
            print(f"round {r}: Delta {verdict.delta:.3f}, above {epsilon} in {verdict.count} rounds, "
                  f"negative {verdict.negative}; the shared model {shared:.1f}, what clients use {used:.1f}")
        negative = verdict.negative  # lindt
    return verdict, shared, used


if __name__ == "__main__":
    main(*[int(a) for a in sys.argv[1:2]])
