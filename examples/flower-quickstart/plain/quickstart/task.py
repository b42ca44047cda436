"""The learning task: the model, the data, training and test."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.hidden(x))


@cache
def digits():
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    return ((x - x.mean()) / x.std()).float(), y


def load_data(partition_id, num_partitions, split):
    """A client's own samples: sorted by digit, each client holds two half digits."""
    x, y = digits()
    rows = y.argsort(stable=True).chunk(2 * num_partitions)
    own = torch.cat([rows[partition_id], rows[partition_id + num_partitions]])
    own = own[torch.randperm(len(own), generator=torch.Generator().manual_seed(partition_id))]
    own = own[:60] if split == "train" else own[60:]
    return DataLoader(TensorDataset(x[own], y[own]), batch_size=10, shuffle=split == "train")


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def train(net, loader, optimizer, epochs):
    """Returns the mean loss over the batches."""
    losses = []
    net.train()
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def test(net, loader):
    """Returns loss and accuracy."""
    net.eval()
    outputs = [(net(x), y) for x, y in loader]
    logits, y = (torch.cat(part) for part in zip(*outputs, strict=True))
    return cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()
