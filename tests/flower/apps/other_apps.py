"""Apps in other shapes: scikit-learn, numpy with a loss alone, mods of an app and of a function, records and metric
names of one's own, and an app that uploads updates."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from apps.federation import FEATURES, Case, evaluated, filled, first, numbers, tensors, trained
from apps.torch_apps import accuracy, fit, net
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

Next = Any


def scikit() -> ClientApp:
    app = ClientApp()

    def model_of(msg: Message) -> LogisticRegression:
        weights, bias = msg.content["arrays"].to_numpy_ndarrays()
        model = LogisticRegression(warm_start=True, max_iter=1)
        model.coef_, model.intercept_, model.classes_ = weights.copy(), bias.copy(), np.array([0, 1])
        return model

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = model_of(msg), numbers(context, "train")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # one step a round, as meant
            model.fit(x, y)
        return trained(msg, ArrayRecord([model.coef_, model.intercept_]), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model, (x, y) = model_of(msg), numbers(context, "test")
        loss = log_loss(y, model.predict_proba(x), labels=[0, 1])
        return evaluated(msg, test_logloss=loss, accuracy=model.score(x, y), num_examples=len(y))

    return app


def logits(w: NDArray[Any], x: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = x @ w[:-1] + w[-1]
    return found


def plain_numpy() -> ClientApp:
    """Logistic regression by hand, from zeros; its evaluation says a loss and nothing else."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        w, (x, y) = msg.content["arrays"]["w"].numpy().copy(), numbers(context, "train")
        for _ in range(20):
            rows = np.random.permutation(len(y))[:10]
            error = 1 / (1 + np.exp(-logits(w, x[rows]))) - y[rows]
            w -= 0.1 * np.append(x[rows].T @ error, error.sum()) / len(rows)
        return trained(msg, ArrayRecord({"w": Array(w)}), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = numbers(context, "test")
        signed = (2 * y - 1) * logits(msg.content["arrays"]["w"].numpy(), x)
        return evaluated(msg, test_loss=float(np.logaddexp(0, -signed).mean()), num_examples=len(y))

    return app


def counting(message: Message, context: Context, call_next: Next) -> Message:
    """A mod of one's own: counts the trainings in Context.state, and tells the count."""
    reply: Message = call_next(message, context)
    kept = context.state["trainings"]["count"] if "trainings" in context.state else 0
    if message.metadata.message_type == "train":
        context.state["trainings"] = MetricRecord({"count": int(kept) + 1})  # type: ignore[arg-type]
        reply.content["metrics"]["trainings"] = int(kept) + 1  # type: ignore[index, call-overload, arg-type]
    return reply


def with_functions(app: ClientApp, mods: list[Any]) -> ClientApp:
    @app.train(mods=mods)
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = filled(net(), msg), tensors(context, "train")
        fit(model, x, y)
        return trained(msg, ArrayRecord(model.state_dict()), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        return evaluated(msg, accuracy=accuracy(filled(net(), msg), x, y)[1], num_examples=len(y))

    return app


def custom_mods() -> ClientApp:
    return with_functions(ClientApp(mods=[counting, arrays_size_mod]), [])


def function_mods() -> ClientApp:
    """Client-side differential privacy, as it has to be written."""
    return with_functions(ClientApp(), [LocalDpMod(clipping_norm=5.0, sensitivity=1e-4, epsilon=10.0, delta=1e-5)])


class Reading(FedAvg):
    """Reads a record and a metric of its own from each reply; a KeyError ends the run."""

    def __init__(self) -> None:
        super().__init__(weighted_by_key="samples")
        self.seen: list[tuple[str, float]] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        for reply in replies:
            self.seen.append((str(reply.content["device"]["name"]), float(reply.content["metrics"]["grad_norm"])))  # type: ignore[index, arg-type]
            assert reply.content.keys() == {"arrays", "metrics", "device"}  # and nothing of ours
        return super().aggregate_train(server_round, replies)


def own_records() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = filled(net(), msg), tensors(context, "train")
        loss, drawn = fit(model, x, y), float(np.random.rand())
        metrics = {"samples": len(y), "grad_norm": loss + drawn}
        return trained(msg, ArrayRecord(model.state_dict()), metrics, device=ConfigRecord({"name": "cpu"}))

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        loss, acc = accuracy(filled(net(), msg), x, y)
        return evaluated(msg, auc=acc, f1=acc, accuracy=acc, balanced_acc=acc, loss=loss, samples=len(y))

    return app


class AddUpdates(FedAvg):
    """The aggregate of the replies is an update of w."""

    w: ArrayRecord

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self.w = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        update, metrics = super().aggregate_train(server_round, replies)
        if update is None:
            return update, metrics
        w = {name: array.numpy() + update[name].numpy() for name, array in self.w.items()}
        return ArrayRecord({name: Array(value) for name, value in w.items()}), metrics


def updates() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, (x, y) = filled(net(), msg), tensors(context, "train")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        fit(model, x, y)
        moved = {name: value - before[name] for name, value in model.state_dict().items()}
        return trained(msg, ArrayRecord(moved), {"num-examples": len(y)})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        return evaluated(msg, accuracy=accuracy(filled(net(), msg), x, y)[1], num_examples=len(y))

    return app


def zeros() -> ArrayRecord:
    return ArrayRecord({"w": Array(np.zeros(FEATURES + 1))})


def sk_zeros() -> ArrayRecord:
    return ArrayRecord([np.zeros((1, FEATURES)), np.zeros(1)])


CASES = {
    "scikit-learn": Case(scikit, sk_zeros),
    "numpy, loss only": Case(plain_numpy, zeros),
    "custom mods": Case(custom_mods, lambda: first(net), metrics=("trainings",)),
    "function-level DP": Case(
        function_mods, lambda: first(net), hurts=("undecided",), helps=("undecided",), reports=False
    ),
    "own records": Case(own_records, lambda: first(net), Reading, wrap={"score": "accuracy"}, metrics=("grad_norm",)),
    "updates": Case(updates, lambda: first(net), AddUpdates, detector={"replies": "updates"}),
}
