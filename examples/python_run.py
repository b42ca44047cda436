"""Whether federation helps each client, and which model each client gets.

    python python_run.py

The clients are a list of pairs (train, test) of tensors, the model any function that builds an nn.Module. The ten lines
of `main` are all that lindt needs; replace `clients` by data of your own. Here eight clients classify digits, and half
of them use other labels: they label 0 as 9. The shared model hurts them; their final models do not.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import lindt


def clients(count=8, others=4):
    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = ((x - x.mean()) / x.std()).float()
    rows = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).chunk(count)
    labels = [9 - y[mine] if i < others else y[mine] for i, mine in enumerate(rows)]
    return [((x[mine[:120]], own[:120]), (x[mine[120:]], own[120:])) for mine, own in zip(rows, labels, strict=True)]


def net():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main(rounds=30):
    mine = clients()
    run = lindt.run(clients=mine, model=net, overrides={"rounds": rounds}, out="runs/mine")
    print(run.verdict)
    print(run.scores[["client", "local", "private", "beta", "clear"]])
    for client, (_, (x, y)) in enumerate(mine):
        right = (run.predict(client, x).argmax(1) == y).float().mean()
        about = run.export(client, f"models/client-{client}")
        print(f"client {client}: {about['model']}, {100 * right:.1f}% right, in {about['folder']}")
    run.report("report.html")
    return run


if __name__ == "__main__":
    main()
