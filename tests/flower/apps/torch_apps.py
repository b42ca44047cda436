"""Apps on torch in the shapes of Flower's examples.

quickstart-pytorch; advanced-pytorch, with a personal head in Context.state, a learning rate in the config and a
strategy with its own start(); opacus, with DP-SGD written by hand; fl-tabular, with one output; Lightning, where
`forward` is not what is trained; a transformer with dict samples and a causal mask of -inf; LoRA, with adapters only
on the wire; a residual network with BatchNorm under FedAdam.
"""

from __future__ import annotations

from typing import Any

import torch
from apps.federation import Case, evaluated, filled, first, tensors, trained
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg, Result
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def fit(model: nn.Module, x: Tensor, y: Tensor, rate: float = 0.1) -> float:
    """A few batches, drawn from torch's own generator."""
    optimizer, loss = torch.optim.SGD(model.parameters(), lr=3 * rate), torch.zeros(())
    model.train()
    for rows in torch.randperm(len(y)).chunk(2) * 2:
        optimizer.zero_grad()
        loss = cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    model.eval()
    outputs = model(x)
    return float(cross_entropy(outputs, y)), float((outputs.argmax(1) == y).float().mean())


def quickstart() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = filled(net(), msg), tensors(context, "train")
        loss = fit(model, x, y, float(msg.content["config"]["lr"]))
        return trained(msg, ArrayRecord(model.state_dict()), {"train_loss": loss, "num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        loss, acc = accuracy(filled(net(), msg), x, y)
        return evaluated(msg, eval_loss=loss, eval_acc=acc, num_examples=len(y))

    return app


class PersonalNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x))
        return found


def personal() -> ClientApp:
    """Each client keeps the head in its state, and puts it on whatever body it is sent."""
    app = ClientApp()

    def loaded(msg: Message, context: Context) -> PersonalNet:
        model = PersonalNet()
        filled(model, msg)
        if "head" in context.state:
            model.head.load_state_dict(context.state["head"].to_torch_state_dict())
        return model

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = loaded(msg, context), tensors(context, "train")
        fit(model, x, y, float(msg.content["config"]["lr"]))
        context.state["head"] = ArrayRecord(model.head.state_dict())
        return trained(msg, ArrayRecord(model.state_dict()), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        return evaluated(msg, accuracy=accuracy(loaded(msg, context), x, y)[1], num_examples=len(y))

    return app


class Keeping(FedAvg):
    """A start() of its own, which keeps the best aggregate, and a learning rate that falls."""

    best: float = -1.0
    rates: tuple[float, ...] = ()

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        if server_round % 5 == 0:
            config["lr"] = float(config["lr"]) * 0.5
        self.rates = (*self.rates, float(config["lr"]))
        return super().configure_train(server_round, arrays, config, grid)

    def start(  # type: ignore[override]
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, timeout: float = 3600,
        train_config: Any = None, evaluate_config: Any = None, evaluate_fn: Any = None,
    ) -> Result:  # fmt: skip
        result, arrays = Result(), initial_arrays
        for r in range(1, num_rounds + 1):
            replies = grid.send_and_receive(self.configure_train(r, arrays, train_config or ConfigRecord(), grid))
            found, metrics = self.aggregate_train(r, replies)
            arrays = found if found is not None else arrays
            result.train_metrics_clientapp[r] = metrics or MetricRecord()
            asked = self.configure_evaluate(r, arrays, evaluate_config or ConfigRecord(), grid)
            scored = self.aggregate_evaluate(r, grid.send_and_receive(asked)) or MetricRecord()
            result.evaluate_metrics_clientapp[r] = scored
            self.best = max(self.best, float(scored["accuracy"]))
        result.arrays = arrays
        return result


NOISE = 1.17


def linear() -> nn.Module:
    return nn.Linear(8, 2)


def private_sgd(used: list[float] | None = None) -> ClientApp:
    """DP-SGD: each sample's gradient is clipped, and noise is added. `used` hears the noise of every call."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = filled(linear(), msg), tensors(context, "train")
        (weight, bias) = model.parameters()
        with torch.no_grad():
            for _ in range(5):
                error_nC = torch.softmax(model(x), 1) - torch.nn.functional.one_hot(y, 2)
                # The gradient of one sample is the outer product of its error and (x, 1).
                longs_n = error_nC.norm(dim=1) * (x.square().sum(1) + 1).sqrt()
                clipped_nC = error_nC / longs_n.clamp(min=1.0)[:, None]
                weight -= 0.5 * (clipped_nC.T @ x + NOISE * torch.randn_like(weight)) / len(y)
                bias -= 0.5 * (clipped_nC.sum(0) + NOISE * torch.randn_like(bias)) / len(y)
        if used is not None:
            used.append(NOISE)
        metrics = {"num-examples": len(y), "noise_multiplier": NOISE}
        return trained(msg, ArrayRecord(model.state_dict()), metrics)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        loss, acc = accuracy(filled(linear(), msg), x, y)
        return evaluated(msg, loss=loss, accuracy=acc, num_examples=len(y))

    return app


def one_output() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def tabular() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = filled(one_output(), msg), tensors(context, "train")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.04)
        for _ in range(5):
            optimizer.zero_grad()
            binary_cross_entropy_with_logits(model(x)[:, 0], y.float()).backward()
            optimizer.step()
        return trained(msg, ArrayRecord(model.state_dict()), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        right = (filled(one_output(), msg)(x)[:, 0] > 0).long() == y
        return evaluated(msg, val_accuracy=100 * float(right.float().mean()), num_examples=len(y))  # in percent

    return app


class LitNet(nn.Module):
    """As a LightningModule: `forward` gives an embedding, `training_step` what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.encoder(x)
        return found

    def logits(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self(x).relu())
        return found

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(self.logits(batch[0]), batch[1])


def lightning() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = LitNet(), tensors(context, "train")
        filled(model, msg)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
        for _ in range(5):
            optimizer.zero_grad()
            model.training_step((x, y)).backward()
            optimizer.step()
        return trained(msg, ArrayRecord(model.state_dict()), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model, (x, y) = LitNet(), tensors(context, "test")
        filled(model, msg)
        right = model.logits(x).argmax(1) == y
        return evaluated(msg, test_acc=float(right.float().mean()), num_examples=len(y))

    return app


class Transformer(nn.Module):
    """One block over the eight numbers as tokens, with a causal mask of -inf among its buffers."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(1, 8), nn.Parameter(torch.randn(8, 8) / 2)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(64, 2)
        self.register_buffer("mask", torch.full((8, 8), -torch.inf).triu(1))

    def forward(self, values: Tensor) -> Tensor:
        tokens = self.embed(values[:, :, None]) + self.place
        q, k, v = self.qkv(tokens).chunk(3, -1)
        mixed = torch.softmax(q @ k.transpose(1, 2) / 8**0.5 + self.mask, -1) @ v
        found: Tensor = self.out((tokens + mixed).flatten(1))
        return found


def transformer() -> ClientApp:
    app = ClientApp()

    def batch(context: Context, split: str) -> dict[str, Tensor]:
        x, y = tensors(context, split)
        return {"input": x, "labels": y}

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, data = filled(Transformer(), msg), batch(context, "train")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for _ in range(5):
            optimizer.zero_grad()
            cross_entropy(model(data["input"]), data["labels"]).backward()
            optimizer.step()
        return trained(msg, ArrayRecord(model.state_dict()), {"num-examples": len(data["labels"])})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        data = batch(context, "test")
        loss, acc = accuracy(filled(Transformer(), msg), data["input"], data["labels"])
        return evaluated(msg, val_loss=loss, accuracy=acc, num_examples=len(data["labels"]))

    return app


def frozen_base() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    base = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    with torch.no_grad():
        for p in base.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    return base.requires_grad_(False)


class Adapters(nn.Module):
    """Low-rank A and B beside the two frozen layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ParameterList([nn.Parameter(torch.randn(4, n) / 4) for n in (8, 16)])
        self.b = nn.ParameterList([nn.Parameter(torch.zeros(n, 4)) for n in (16, 2)])

    def forward(self, base: nn.Module, x: Tensor) -> Tensor:
        first, act, last = base.children()
        hidden = act(first(x) + x @ self.a[0].T @ self.b[0].T)
        found: Tensor = last(hidden) + hidden @ self.a[1].T @ self.b[1].T
        return found


def lora() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        adapters, base, (x, y) = filled(Adapters(), msg), frozen_base(), tensors(context, "train")
        optimizer = torch.optim.SGD(adapters.parameters(), lr=0.4)
        for _ in range(5):
            optimizer.zero_grad()
            cross_entropy(adapters(base, x), y).backward()
            optimizer.step()
        return trained(msg, ArrayRecord(adapters.state_dict()), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        right = filled(Adapters(), msg)(frozen_base(), x).argmax(1) == y
        return evaluated(msg, accuracy=float(right.float().mean()), num_examples=len(y))

    return app


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.block, self.head = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        found: Tensor = self.head(x + self.block(x).relu())
        return found


def residual() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = filled(Residual(), msg), tensors(context, "train")
        fit(model, x, y, 0.05)
        return trained(msg, ArrayRecord(model.state_dict()), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        loss, acc = accuracy(filled(Residual(), msg), x, y)
        return evaluated(msg, loss=loss, accuracy=acc, num_examples=len(y))

    return app


NOT_WORSE = ("helps", "undecided")
CASES = {
    "quickstart": Case(quickstart, lambda: first(net), config={"lr": 0.1}, metrics=("train_loss",)),
    "personal head": Case(personal, lambda: first(PersonalNet), Keeping, {"lr": 0.1}, hurts=NOT_WORSE, helps=NOT_WORSE),
    "dp-sgd": Case(private_sgd, lambda: first(linear), metrics=("noise_multiplier",)),
    "tabular": Case(tabular, lambda: first(one_output)),
    "lightning": Case(lightning, lambda: first(LitNet)),
    "transformer": Case(transformer, lambda: first(Transformer)),
    "lora": Case(lora, lambda: first(Adapters)),
    "resnet, FedAdam": Case(residual, lambda: first(Residual), lambda: FedAdam(eta=0.1, tau=0.1)),
}
