"""Mistakes that are refused before anything trains, by one sentence that names client or field and the fix.

Each one goes through `federate`; the tasks at the end go through `lindt run --task`, with exit code 2.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, l1_loss, mse_loss, one_hot

from lindt import Detector, PlanError, Problem, UserError, federate, intertwine
from lindt.plan.file import resolve
from lindt.plan.problem import Accuracy
from lindt.runs.play import RunEnded, run_plan

PLAIN = ("detection=delta", "alone.private=false")
PLAN = resolve("own-task", [*PLAIN, "method=fedavg"], rounds=1)
Pair = tuple[Tensor, Tensor]
Clients = list[tuple[Any, Any]]


def samples(n: int, seed: int) -> Pair:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.argmax(1)


def clients(change: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)) -> Clients:
    return [(change(*samples(40, 2 * i)), change(*samples(20, 2 * i + 1))) for i in range(3)]


def net() -> nn.Module:
    return nn.Linear(3, 3)


def one() -> nn.Module:
    return nn.Linear(3, 1)


class Listing:
    """A map-style data set."""

    def __init__(self, x: Tensor, y: Tensor, get: Callable[[Tensor, Tensor], Any] = lambda x, y: (x, y)) -> None:
        self.x, self.y, self.get = x, y, get

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> Any:
        return self.get(self.x[row], self.y[row])


def listed(get: Callable[[Tensor, Tensor], Any]) -> Clients:
    return clients(lambda x, y: Listing(x, y, get))


def with_value(client: int, part: int, row: int, value: float) -> Clients:
    found = clients()
    found[client][part][0][row, 1] = value
    return found


def validated(change: Callable[[Tensor, Tensor], Any]) -> list[tuple[Any, Any, Any]]:
    """Clients with a validation part, that of client 1 as `change` makes it."""
    parts = [samples(10, 100 + i) for i in range(3)]
    parts[1] = change(*parts[1])
    return [(train, part, test) for (train, test), part in zip(clients(), parts, strict=True)]


def error(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs[:, 0] - y.reshape(-1)).abs()


def minus_error(outputs: Tensor, y: Tensor) -> Tensor:
    return -error(outputs, y)


def total(x: Tensor, _: Tensor) -> Pair:
    """Regression: the sum of the features."""
    return x, x.sum(1)


def total_column(x: Tensor, _: Tensor) -> Pair:
    return x, x.sum(1, keepdim=True)


class Raises(nn.Linear):
    """An exception of the user's own in forward, two calls deep."""

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        raise KeyError("gate")


class WithoutGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().forward(x)


class RaisesInTraining(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            raise KeyError("only in training")
        return super().forward(x)


def raises(*_: object) -> Any:
    raise RuntimeError("mine")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "NaN in training inputs": (
        {"clients": with_value(1, 0, 7, float("nan"))},
        "client 1: the input of its training sample 7 is NaN or infinite; correct the value",
    ),
    "infinity in test inputs": (
        {"clients": with_value(2, 1, 19, float("-inf"))},
        "client 2: the input of its test sample 19 is NaN or infinite",
    ),
    "NaN in a data set": (
        {"clients": [(Listing(*a), Listing(*b)) for a, b in with_value(1, 1, 3, float("nan"))]},
        "client 1: the input of its test sample 3 is NaN or infinite",
    ),
    "NaN in a target": (
        {
            "clients": clients(lambda x, y: (x, torch.full((len(x), 1), float("nan")))),
            "model": one,
            "loss": mse_loss,
            "metric": minus_error,
        },
        "client 0: the target of its training sample 0 is NaN or infinite",
    ),
    "NaN in validation inputs": (
        {"clients": validated(lambda x, y: (x.where(x != x[4, 1], torch.nan), y))},
        "client 1: the input of its validation sample 4 is NaN or infinite; correct the value",
    ),
    "infinity in a validation data set": (
        {"clients": validated(lambda x, y: Listing(x.where(x != x[4, 1], torch.inf), y))},
        "client 1: the input of its validation sample 4 is NaN or infinite",
    ),
    "validation labels beyond the outputs": (
        {"clients": validated(lambda x, y: (x, y + 1))},
        "client 1, validation data: labels from 1 to 3, but the model has outputs for 0 to 2; number the classes",
    ),
    "float validation targets under accuracy": (
        {"clients": validated(lambda x, y: (x, y.float()))},
        "client 1, validation data: its targets are floats, and Accuracy compares classes",
    ),
    "validation inputs of another number of features": (
        {"clients": validated(lambda x, y: (x[:, :2], y))},
        "client 1, validation data: the model does not take inputs of shape (2, 2) (RuntimeError: mat1 and mat2",
    ),
    "float64 validation inputs": (
        {"clients": validated(lambda x, y: (x.double(), y))},
        "its inputs are float64 and the model's weights float32: give x.float()",
    ),
    "float targets under accuracy": (
        {"clients": clients(total), "model": one, "loss": l1_loss},
        "client 0: its targets are floats, and Accuracy compares classes; give metric=",
    ),
    "one output under accuracy": (
        {"model": one},
        "client 0: the model has one output per sample, and Accuracy compares the outputs of classes; give the model "
        "one output per class, or give metric=",
    ),
    "labels beyond the outputs": (
        {"model": lambda: nn.Linear(3, 2)},
        "client 0: labels from 0 to 2, but the model has outputs for 0 to 1; number the classes from 0",
    ),
    "a metric where lower is better": (
        {"metric": lambda outputs, y: cross_entropy(outputs, y, reduction="none")},
        "metric: it is higher for wrong predictions (5.013) than for right ones (0.01339), but higher has to be "
        "better; give its negative, metric=lambda outputs, y: -measure(outputs, y)",
    ),
    "an error as the metric of a regression": (
        {"clients": clients(total_column), "model": one, "loss": mse_loss, "metric": error},
        "metric: it is higher for wrong predictions",
    ),
    "an error as the metric of two classes with one output": (
        {
            "clients": clients(lambda x, y: (x, (y > 0).long())),
            "model": one,
            "loss": lambda outputs, y: binary_cross_entropy_with_logits(outputs[:, 0], y.float()),
            "metric": error,
        },
        "metric: it is higher for wrong predictions",
    ),
    "a loss of torch's that broadcasts": (
        {"clients": clients(total), "model": one, "loss": mse_loss, "metric": minus_error},
        "client 0, loss: outputs of shape (40, 1) and targets of shape (40,) broadcast, so that outputs are compared "
        "with targets of other samples; give both one shape",
    ),
    "an own loss that broadcasts": (
        {
            "clients": clients(total),
            "model": one,
            "loss": lambda outputs, y: (outputs - y).square().mean(),
            "metric": minus_error,
        },
        "client 0, loss: outputs of shape (40, 1) and targets of shape (40,) broadcast",
    ),
    "an own metric that broadcasts": (
        {
            "clients": clients(total),
            "model": one,
            "loss": lambda outputs, y: mse_loss(outputs[:, 0], y),
            "metric": lambda outputs, y: -(outputs - y).abs().mean(1),
        },
        "client 0, metric: outputs of shape (40, 1) and targets of shape (40,) broadcast",
    ),
    "a loss that takes two outputs and two labels by chance": (
        {"clients": clients(lambda x, y: (x, (y > 0).long())), "model": lambda: nn.Linear(3, 2), "loss": mse_loss},
        "client 0: the loss does not take outputs of shape (3, 2) and targets of shape (3,) (RuntimeError: ",
    ),
    "a loss that takes three outputs and three labels, which are as many as the samples tried": (
        {
            "clients": clients(lambda x, y: (x, y[:, None].repeat(1, 2))),
            "model": lambda: nn.Sequential(nn.Linear(3, 6), nn.Unflatten(1, (2, 3))),
            "loss": lambda outputs, y: (outputs[:, 0] - y[:, 0]).square().mean(),
        },
        "client 0: the loss does not take outputs of shape (4, 2, 3) and targets of shape (4, 2) (RuntimeError: ",
    ),
    "a model that computes without gradients": (
        {"model": lambda: WithoutGradient(3, 3)},
        "model: a training step changes no weight, as the outputs have no gradient; compute them from the weights, "
        "without torch.no_grad() and .detach()",
    ),
    "the same with an optimizer": (
        {"model": lambda: WithoutGradient(3, 3), "optimizer": lambda own: torch.optim.Adam(own)},
        "model: a training step changes no weight, as the outputs have no gradient;",
    ),
    "a detached loss": (
        {"loss": lambda outputs, y: cross_entropy(outputs.detach(), y)},
        "loss: a training step changes no weight, as the loss has no gradient; compute it from the outputs, without",
    ),
    "a module as the model": ({"model": net()}, "model: it is of type Linear; give a function that builds a new model"),
    "labels that are texts": (
        {"clients": clients(lambda x, y: (x, np.array(["cat"] * len(x))))},
        "clients[0], training data: its label is a text ('cat'); number the classes from 0",
    ),
    "a list of texts": (
        {"clients": clients(lambda x, y: (x, ["cat"] * len(x)))},
        "clients[0], training data: its label is a text ('cat'); number the classes from 0",
    ),
    "a data set with texts as labels": (
        {"clients": listed(lambda x, y: (x, "cat"))},
        "client 0: its label is a text ('cat'); number the classes from 0",
    ),
    "a data set with texts as inputs": (
        {"clients": listed(lambda x, y: ("a word", y))},
        "client 0: its input is a text ('a word'); turn it into a tensor of numbers",
    ),
    "a lazy layer": (
        {"model": lambda: nn.Sequential(nn.LazyLinear(3))},
        "model: 0.weight belongs to a lazy layer and has no size yet; give the sizes",
    ),
    "float64 inputs": (
        {"clients": clients(lambda x, y: (x.double(), y))},
        "its inputs are float64 and the model's weights float32: give x.float()",
    ),
    "uint8 inputs": (
        {"clients": clients(lambda x, y: (x.abs().to(torch.uint8), y))},
        "its inputs are uint8 and the model's weights float32: give x.float()",
    ),
    "one-hot targets": (
        {"clients": clients(lambda x, y: (x, one_hot(y, 3).float()))},
        "client 0: its targets are one-hot, and Accuracy compares classes; give y.argmax(1)",
    ),
    "the class of a loss": (
        {"loss": nn.CrossEntropyLoss},
        "loss: it is the class nn.CrossEntropyLoss; give an instance, nn.CrossEntropyLoss()",
    ),
    "the class of a metric": ({"metric": Accuracy}, "metric: it is the class Accuracy; give an instance, Accuracy()"),
    "the name of a loss": ({"loss": "mse"}, "loss: it is of type str; give a function of outputs and targets"),
    "the name of a metric": (
        {"metric": "accuracy"},
        "metric: it is a text, 'accuracy'; set a metric by name in the plan, "
        'overrides={"scoring.metric": ...} with one of accuracy, ',
    ),
    "a number as the metric": ({"metric": 3}, "metric: it is of type int; give metric=, a function of outputs"),
    "an optimizer's function that raises": (
        {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr="0.001")},  # type: ignore[arg-type]
        "optimizer: the function that builds it raised TypeError: ",
    ),
    "a float64 model": (
        {"model": lambda: net().double()},
        "model: weight is torch.float64; weights are sent as float32, call .float() on the model",
    ),
    "a class as the model": (
        {"model": nn.Linear},
        "'out_features'); give a function without arguments, such as `lambda: Net(...)`",
    ),
    "inputs of another shape at one client": (
        {"clients": [*clients(), *clients(lambda x, y: (x[:, :2], y))]},
        "cannot be multiplied (2x2 and 3x3)); those of client 0 have shape (2, 3): give all clients one shape",
    ),
    "whole numbers as inputs": (
        {"clients": clients(lambda x, y: (x.long(), y))},
        "its inputs are int64 and the model's weights float32: give x.float() unless they are tokens",
    ),
    "targets in a column": (
        {"clients": clients(lambda x, y: (x, y[:, None]))},
        "client 0: its targets have shape (2, 1), and Accuracy compares classes; give y.squeeze(1)",
    ),
    "a loss that is a float": (
        {"loss": lambda outputs, y: cross_entropy(outputs, y).item()},
        "client 0: the loss is a float; return a tensor, without .item() or float()",
    ),
    "a metric that is a float": (
        {"metric": lambda outputs, y: float(hits(outputs, y).mean())},
        "the metric returned a float; return a tensor with one number per sample",
    ),
    "a loss that is NaN": (
        {"loss": lambda outputs, y: cross_entropy(outputs, y) * float("nan")},
        "client 0: the loss of its first batch is nan, before any training; correct the loss",
    ),
    "a learning rate of 0": (
        {"optimizer": lambda parameters: torch.optim.Adam(parameters, lr=0.0)},
        "optimizer: its steps change no weight; give it a learning rate above 0",
    ),
    "an optimizer for a method with rules of its own": (
        {"plan": resolve("own-task", [*PLAIN, "method=apfl"]), "optimizer": lambda own: torch.optim.Adam(own)},
        "this method trains with plain SGD only, not with the optimizer of <lambda>; leave out optimizer,",
    ),
    "a schedule that needs a metric": (
        {"schedule": torch.optim.lr_scheduler.ReduceLROnPlateau},
        "give a schedule whose step() needs no argument",
    ),
    "a sparse tensor": (
        {"clients": clients(lambda x, y: (x.to_sparse(), y))},
        "clients[0], training data: a client's data has a sparse tensor; give x.to_dense()",
    ),
    "a path as data": ({"clients": [("train.csv", "test.csv")] * 3}, "training data: a client's data is of type str;"),
    "texts as weights": ({"weights": "abc"}, "weights: it is 'abc'; give one number for each client"),
    "a number as weights": ({"weights": 3.0}, "weights: it is 3.0; give one number for each client"),
    "a model that gives a tuple": (
        {"model": lambda: nn.LSTM(3, 3)},
        "client 0: the model returns an object of type tuple; return one tensor",
    ),
}


def refused(**changed: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        next(federate(changed.pop("plan", PLAN), **{"clients": clients(), "model": net} | changed))
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_refused_by_a_sentence(name: str) -> None:
    changed, sentence = REFUSED[name]
    assert sentence in str(refused(**changed))


def test_every_class_and_every_client_has_a_name_of_its_own() -> None:
    two = clients(lambda x, y: (x, (y > 0).long() if len(y) == 40 else y))  # class 2 in the test data only
    for own in (clients(), two):
        with pytest.raises(UserError) as caught:
            next(federate(PLAN, problem=Problem(own, net, class_names=("cat", "dog"))))
        assert str(caught.value) == (
            "class_names: it has 2, but client 0 has the label 2; give one name for each class, from that of class 0 on"
        )
    next(federate(PLAN, problem=Problem(clients(), net, class_names=("cat", "dog", "cow", "hen"))))  # no hen occurs
    with pytest.raises(UserError, match="client_names: 2 clients are named 'Bern'; give each client its own name"):
        Problem(clients(), net, client_names=("Bern", "Bonn", "Bern"))


@pytest.mark.parametrize("name", ["digits-control", "own.toml"])
def test_the_name_of_a_plan_is_no_plan(name: str) -> None:
    assert f"plan: it is of type str; give a Plan: lindt.resolve('{name}')" in str(refused(plan=name))


# What looks like a mistake and is none.


class Imputes(nn.Linear):
    """Takes a missing value as 0."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.nan_to_num(0.0))


class Casts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def hits(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs[:, 0] > 0) == (y > 0.5)).float()


def logistic(outputs: Tensor, y: Tensor) -> Tensor:
    return binary_cross_entropy_with_logits(outputs[:, 0], y.float())


def second_class(x: Tensor, y: Tensor) -> Pair:
    return x, (y > 0).float()


PLAYED: dict[str, dict[str, Any]] = {
    "a model that expects missing values": {
        "clients": with_value(1, 0, 7, float("nan")),
        "model": lambda: Imputes(3, 3),
    },
    "a model that casts": {"clients": clients(lambda x, y: (x.double(), y)), "model": lambda: Casts(3, 3)},
    "inputs that require a gradient": {"clients": clients(lambda x, y: (x.clone().requires_grad_(), y))},
    "a regression in two shapes": {
        "clients": clients(total),
        "model": one,
        "loss": lambda outputs, y: mse_loss(outputs[:, 0], y),
        "metric": minus_error,
    },
    "two classes, one output, float targets": {
        "clients": clients(second_class),
        "model": one,
        "loss": logistic,
        "metric": hits,
    },
    "two classes, one output, whole numbers": {
        "clients": clients(lambda x, y: (x, (y > 0).long())),
        "model": one,
        "loss": logistic,
        "metric": hits,
    },
    "labels as a list": {"clients": clients(lambda x, y: (x, y.tolist()))},
    "a lazy layer that has seen a batch": {"model": lambda: _called(nn.Sequential(nn.LazyLinear(3)))},
}


def _called(model: nn.Module) -> nn.Module:
    model(torch.zeros(2, 3))
    return model


@pytest.mark.parametrize("name", PLAYED)
def test_what_is_meant_is_played(name: str) -> None:
    ((_, result),) = federate(PLAN, **{"clients": clients(), "model": net} | PLAYED[name])
    assert result.round == 1


def test_a_first_batch_without_a_gradient_may_be_chance(tmp_path: Path) -> None:
    """A loss of a constant for samples of one class: client 0 begins with them, and trains in random order."""

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(outputs, y) if (y > 0).any() else torch.zeros(())

    (x, y), test = clients()[0]
    problem = Problem([((x[y.argsort()], y.sort()[0]), test), *clients()[1:]], net, loss=loss)
    *_, ended = run_plan(PLAN, tmp_path / "run", problem=problem)
    assert isinstance(ended, RunEnded)


# The user's own exceptions.


RAISED: dict[str, tuple[dict[str, Any], str, str]] = {
    "model": (
        {"model": lambda: Raises(3, 3)},
        "client 0: the model does not take inputs of shape (2, 3) (KeyError: 'gate'; test_checks.py, line ",
        "in project)",
    ),
    "model, in training only": (
        {"model": lambda: RaisesInTraining(3, 3)},
        "client 0: a training step on its samples fails (KeyError: 'only in training'; test_checks.py, line ",
        "in forward)",
    ),
    "model's function": (
        {"model": raises},
        "model: it cannot be built (RuntimeError: mine; test_checks.py, line ",
        "in raises)",
    ),
    "loss": (
        {"loss": raises},
        "client 0: the loss does not take outputs of shape (2, 3) and targets of shape (2,) (RuntimeError: mine; ",
        "in raises)",
    ),
    "metric": ({"metric": raises}, "client 0: the metric does not take outputs of shape (2, 3)", "in raises)"),
    "a late sample of a data set": (
        {"clients": listed(lambda x, y: (x, y) if float(x[0]) < 1 else raises())},
        "client 0: its labels cannot be read (RuntimeError: mine; test_checks.py, line ",
        "in raises)",
    ),
    "data set": ({"clients": listed(raises)}, "client 0: its samples cannot be read (RuntimeError: mine;", "in raises"),
}


@pytest.mark.parametrize("name", RAISED)
def test_an_exception_of_the_users_code_is_named_and_keeps_its_traceback(name: str) -> None:
    changed, begin, end = RAISED[name]
    found = refused(**changed)
    assert str(found).startswith(begin)
    assert end in str(found)
    assert found.__cause__ is not None
    files = [frame.filename for frame in traceback.extract_tb(found.__cause__.__traceback__)]
    assert files[-1] == __file__


class RaisesLate(nn.Linear):
    """In the second client's training."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += self.training
        if type(self).calls > 5:
            raise KeyError("late")
        return super().forward(x)


def test_an_exception_in_a_round_stays_what_it_is_and_says_whose_code_raised_it() -> None:
    RaisesLate.calls = 0
    with pytest.raises(KeyError, match="late") as caught:
        list(federate(PLAN, clients=clients(), model=lambda: RaisesLate(3, 3), preflight=False))
    (note,) = caught.value.__notes__
    assert note.startswith("raised by your own code (test_checks.py, line ")
    assert note.endswith("in forward) while client 1 was training in round 1")  # four batches each


def test_an_exception_of_lindts_own_is_not_called_the_users() -> None:
    from lindt.user_code import note_user_code, user_frames, user_traceback

    with pytest.raises(PlanError) as caught:
        resolve("own-task", rounds=0)
    found = caught.value.with_traceback(caught.tb.tb_next)  # without this file's own frame
    note_user_code(found, "nothing")
    assert not getattr(found, "__notes__", [])
    assert (user_frames(found), user_traceback(found)) == ([], "")


# Detector and intertwine.


@pytest.mark.parametrize("given", [{"epsilon": 0.1, "patience": 3}, {"rounds": 3}])
def test_modules_are_no_weights(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"clients\[0\]: it is a module \(Linear\); give its weights, model.state_dict"):
        Detector(**given).observe([net(), net()], net().state_dict())  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"new_global: it is a module"):
        Detector(**given).observe([net().state_dict()], net())  # type: ignore[arg-type]


def test_modules_are_no_gains() -> None:
    with pytest.raises(UserError, match=r"gains\[0\]: it is of type Linear; give a number in \[-1, 1\]"):
        Detector(rounds=3).observe(gains=[net()])  # type: ignore[list-item]


def test_a_dual_model_has_two_models() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    with pytest.raises(UserError, match=r"local_model: it is the same module as global_model; give it weights of"):
        intertwine(model, model)
    with pytest.raises(UserError, match=r"local_model: its 0\.weight is a weight of global_model, too"):
        intertwine(model, nn.Sequential(*model))


# The same through the command line.

TASK = """
import torch
from torch import nn
import lindt

def samples(seed):
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.argmax(1)

def clients():
    return [(samples(2 * i), samples(2 * i + 1)) for i in range(3)]

def not_a_number():
    found = clients()
    found[1][0][0][7, 1] = float("nan")
    return lindt.Problem(found, lambda: nn.Linear(3, 3))

def module():
    return lindt.Problem(clients(), nn.Linear(3, 3))

def texts():
    return lindt.Problem([((x, ["a"] * 40), (u, v)) for (x, _), (u, v) in clients()], lambda: nn.Linear(3, 3))

class Net(nn.Linear):
    def forward(self, x):
        return x @ torch.zeros(4, 3)

def wrong_shape():
    return lindt.Problem(clients(), lambda: Net(3, 3))

def fails():
    return clients()[7]
"""
TOLD = {
    "not_a_number": "client 1: the input of its training sample 7 is NaN or infinite",
    "module": "model: it is of type Linear; give a function that builds a new model",
    "texts": "clients[0], training data: its label is a text ('a'); number the classes from 0",
    "wrong_shape": "client 0: the model does not take inputs of shape (2, 3)",
    "fails": "task refused_task:fails: it failed (IndexError: list index out of range; refused_task.py, line ",
}


@pytest.mark.parametrize("name", TOLD)
def test_a_task_with_a_mistake_exits_with_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lindt.cli.main import main

    (tmp_path / "refused_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sets = [word for field in ("method=fedavg", "detection=delta", "alone.private=false") for word in ("--set", field)]
    monkeypatch.setattr("sys.argv", ["lindt", "run", "--task", f"refused_task:{name}", *sets])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    *above, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"error: {TOLD[name]}")
    if name in ("wrong_shape", "fails"):  # the user's own lines, and no others
        assert above[0] == "Traceback of your code (most recent call last):"
        assert [line for line in above if line.startswith("  File")] == [
            line for line in above if "refused_task" in line
        ]
        assert any("return clients()[7]" in line or "x @ torch.zeros(4, 3)" in line for line in above)
    else:
        assert not above
    assert not (tmp_path / "runs").exists()
