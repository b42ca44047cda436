"""Mistakes that give a believable false result: each is staged, and found before anything trains."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from mistakes import IDS, MISTAKES, Mistake, no_mistake
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, one_hot
from worlds import tiny, tiny_runtime

from lindt.data.examples import Rows
from lindt.data.partition import Iid, Roles
from lindt.data.sources import Text
from lindt.errors import UserError
from lindt.plan.file import preset_names, resolve
from lindt.plan.models import Linear, Mlp
from lindt.plan.plan import Alone, Data, Plan
from lindt.plan.problem import Problem, problem_for
from lindt.server.federation import federate
from lindt.server.preflight import ROWS, PreflightWarning, preflight
from lindt.weights import initial_weights

PLAN = resolve("own-task", ["method=fedavg"], rounds=1)
CLASSES, CENTRES = 4, torch.randn(4, 6, generator=torch.Generator().manual_seed(1)) * 3


def samples(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four clusters of six numbers."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    return CENTRES[y] + torch.randn(n, 6, generator=g), y


def healthy(clients: int = 6, n: int = 60, m: int = 20) -> list[tuple[Any, Any]]:
    return [(samples(n, 2 * i), samples(m, 2 * i + 1)) for i in range(clients)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def looked(clients: list[tuple[Any, Any]], model: Callable[[], nn.Module] = net, **rest: Any) -> tuple[str, ...]:
    """The warnings."""
    return preflight(PLAN, Problem(clients, model, **rest)).warnings


def refused(clients: list[tuple[Any, Any]], model: Callable[[], nn.Module] = net, **rest: Any) -> str:
    """What `federate` says before the first round."""
    with pytest.raises(UserError) as error:
        next(federate(PLAN, clients=clients, model=model, **rest))
    text = str(error.value)
    assert "\n" not in text
    assert "preflight=False" in text
    return text


def test_a_healthy_problem_has_no_finding() -> None:
    assert looked(healthy()) == ()


# Rows that stand in more than one place.


@pytest.mark.parametrize("order", ["same", "shuffled"])
def test_training_data_as_test_data_are_refused(order: str) -> None:
    clients = healthy()
    x, y = clients[2][0]
    rows = torch.arange(len(y)) if order == "same" else torch.randperm(len(y), generator=torch.Generator())
    clients[2] = ((x, y), (x[rows].clone(), y[rows].clone()))
    text = refused(clients)
    assert text.startswith("client 2: its test data are its training data")


def test_test_samples_that_are_all_trained_on_are_refused() -> None:
    clients = healthy()
    x, y = clients[4][0]
    clients[4] = ((x, y), (x[10:25], y[10:25]))
    assert refused(clients).startswith("client 4: all 15 of its test samples are also among its training samples")


def test_some_shared_samples_are_a_warning_with_their_number() -> None:
    clients = healthy()
    (x, y), (u, v) = clients[1]
    clients[1] = ((x, y), (torch.cat([u, x[:5]]), torch.cat([v, y[:5]])))
    (said,) = looked(clients)
    assert "client 1 (5 of 25)" in said
    assert "training samples" in said


def test_the_test_samples_of_one_client_among_the_training_samples_of_another_are_a_warning() -> None:
    clients = healthy()
    clients[0] = (clients[0][0], clients[5][0])
    (said,) = looked(clients)
    assert "client 0 (60 of 60)" in said
    assert "another client" in said


def test_one_client_several_times_is_a_warning() -> None:
    clients = healthy()
    clients[3] = (clients[1][0], clients[3][1])
    clients[5] = ((clients[1][0][0].flip(0), clients[1][0][1].flip(0)), clients[5][1])
    (said,) = looked(clients)
    assert "clients 1, 3 and 5 have the same training samples" in said


def test_a_test_set_that_all_clients_share_is_meant() -> None:
    test = samples(50, 99)
    assert looked([(train, test) for train, _ in healthy()]) == ()


def test_rows_that_repeat_by_nature_are_no_overlap() -> None:
    """Blank pictures, and tables of few different rows: a test row stands in the training data as often as any."""
    blank = [
        ((torch.cat([x, torch.zeros(20, 6)]), torch.cat([y, torch.zeros(20).long()])),
         (torch.cat([u, torch.zeros(6, 6)]), torch.cat([v, torch.zeros(6).long()])))
        for (x, y), (u, v) in healthy()
    ]  # fmt: skip
    assert looked(blank) == ()
    g = torch.Generator().manual_seed(0)

    def table(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(2, (n, 6), generator=g).float()
        return x, (x[:, 0] + 2 * x[:, 1]).long()

    assert looked([(table(200), table(40)) for _ in range(4)]) == ()


def test_a_few_samples_of_few_kinds_are_the_same_by_chance() -> None:
    g = torch.Generator().manual_seed(0)

    def pair() -> tuple[Tensor, Tensor]:
        x = torch.randint(2, (3, 6), generator=g).float() * torch.tensor([1, 1, 0, 0, 0, 0])
        return x, (x[:, 0] + 2 * x[:, 1]).long()

    assert looked([(pair(), pair()) for _ in range(300)]) == ()


# Labels.


def mixed(pair: tuple[Tensor, Tensor], seed: int = 0) -> tuple[Tensor, Tensor]:
    x, y = pair
    return x, y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]


def test_shuffled_labels_are_a_warning() -> None:
    everyone = [(mixed(train), mixed(test)) for train, test in healthy(8)]
    (said,) = looked(everyone)
    assert "labels" in said
    assert "shuffled" in said


def test_shuffled_test_labels_are_a_warning() -> None:
    (said,) = looked([(train, mixed(test)) for train, test in healthy(8, m=60)])
    assert "test labels" in said


def test_the_client_whose_labels_are_shuffled_is_named() -> None:
    clients = healthy(8, n=120)
    clients[3] = (mixed(clients[3][0]), clients[3][1])
    (said,) = [text for text in looked(clients) if "training labels" in text]
    assert "client 3" in said


# Evaluation.


class AlwaysDropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(dropout(x, 0.5))  # functional dropout is on by default


class NoisyByPython(AlwaysDropped):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * random.random())


@pytest.mark.parametrize("model", [AlwaysDropped, NoisyByPython])
def test_a_model_that_is_random_in_evaluation_is_refused(model: Callable[[], nn.Module]) -> None:
    assert refused(healthy(), model).startswith("model: two evaluations of the same samples differ")


def test_dropout_that_evaluation_switches_off_is_fine() -> None:
    assert looked(healthy(), lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))) == ()


class LearnsInEvaluation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.train()
        return self.out(self.norm(x))


def test_a_model_whose_buffers_change_in_evaluation_is_refused() -> None:
    assert refused(healthy(), LearnsInEvaluation).startswith("model: evaluating it changes norm.running_mean")


class CountsCalls(AlwaysDropped):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(x)


def test_a_counter_that_evaluation_changes_is_fine() -> None:
    assert looked(healthy(), CountsCalls) == ()


# Reading.


class Dataset:
    def __init__(self, pair: tuple[Tensor, Tensor]) -> None:
        self.x, self.y = pair

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


class InPlace(Dataset):
    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row].div_(2), self.y[row]


class Augmented(Dataset):
    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row] + 0.1 * torch.randn(6), self.y[row]


class AugmentedByNumpy(Dataset):
    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row] + float(np.random.normal()), self.y[row]  # the mistake


def copied(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].clone(), pair[1].clone()


@pytest.mark.parametrize("part", [0, 1])
def test_data_that_reading_changes_are_refused(part: int) -> None:
    clients = healthy()
    pair = list(clients[2])
    pair[part] = InPlace(copied(pair[part]))
    clients[2] = (pair[0], pair[1])
    text = refused(clients)
    assert text.startswith(f"client 2: reading the {['training', 'test'][part]} data changes them")


@pytest.mark.parametrize("kind", [Augmented, AugmentedByNumpy])
def test_augmentation_of_test_data_is_refused_and_of_training_data_a_warning(kind: type[Dataset]) -> None:
    clients = healthy()
    train, test = clients[1]
    assert refused([clients[0], (train, kind(test))]).startswith("client 1: two reads of the test data differ")
    (said,) = looked([*clients[2:], (kind(train), test)])
    assert "client 4" in said
    assert "training data" in said


def test_a_plain_dataset_is_fine() -> None:
    assert looked([(Dataset(train), Dataset(test)) for train, test in healthy()]) == ()


# Training and the model's function.


def zero_gradient(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs.detach(), y) + 0 * outputs.sum()


def test_a_detached_loss_is_refused() -> None:
    assert refused(healthy(), loss=zero_gradient).startswith("loss: a training step changes no weight")


class Unread(nn.Module):
    """Trains a copy that it does not predict with."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :CLASSES] + 0 * self.out(x) + (self.out(x) - self.out(x).detach())


def test_a_step_that_changes_weights_and_not_the_loss_is_a_warning() -> None:
    (said,) = looked(healthy(), Unread)
    assert "the loss" in said


def by_numpy() -> nn.Module:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.as_tensor(np.random.normal(size=parameter.shape)))  # the mistake
    return model


def test_a_model_that_is_not_drawn_from_torchs_seed_is_a_warning() -> None:
    (said,) = looked(healthy(), by_numpy)
    assert said.startswith("model: ")
    assert "seed" in said


def frozen_by_numpy() -> nn.Module:
    first = nn.Linear(6, 8).requires_grad_(False)
    with torch.no_grad():
        first.weight.copy_(torch.as_tensor(np.random.normal(size=(8, 6))))
    return nn.Sequential(first, nn.ReLU(), nn.Linear(8, CLASSES))


def test_frozen_weights_that_differ_at_each_call_are_refused() -> None:
    """Here and, before it, by the check of the model's function, which cannot be left out."""
    with pytest.raises(UserError, match=r"^model: its frozen weight 0\.weight differs"):
        preflight(PLAN, Problem(healthy(), frozen_by_numpy))
    with pytest.raises(UserError, match=r"^model: two calls with the same seed differ at 0\.weight"):
        next(federate(PLAN, clients=healthy(), model=frozen_by_numpy, preflight=False))


# The metric.


def per_sample_loss(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs, y, reduction="none")


def test_a_metric_that_falls_as_predictions_get_better_is_refused() -> None:
    text = refused(healthy(), metric=per_sample_loss)
    assert text.startswith("metric: it is higher for wrong predictions")


def test_a_metric_of_regression_that_falls_is_refused_and_its_negative_is_not() -> None:
    clients = [((x, x.sum(1, keepdim=True)), (u, u.sum(1, keepdim=True))) for (x, _), (u, _) in healthy()]

    def squares(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs - y).square().flatten()

    def line() -> nn.Module:
        return nn.Linear(6, 1)

    assert refused(clients, line, loss=mse_loss, metric=squares).startswith("metric: ")
    assert looked(clients, line, loss=mse_loss, metric=lambda o, y: -squares(o, y)) == ()


def hits(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.argmax(1) == y).float()


@pytest.mark.parametrize(
    ("chosen", "place"),
    [
        (lambda x, y: torch.ones(len(y), dtype=torch.bool), "client 0's test sample 0"),
        (lambda x, y: y == 3, None),
        (lambda x, y: x[:, 0] == 100, "client 4's training sample 41"),
        (lambda x, y: x[:, 0] == 101, "client 2's test sample 7"),
        (lambda x, y: x[:, 0] == 102, "client 5's validation sample 9"),
    ],
    ids=["of all", "of a class", "of a training sample", "of a test sample", "of a validation sample"],
)
def test_a_metric_that_is_nan_for_a_sample_is_refused(
    chosen: Callable[[Tensor, Tensor], Tensor], place: str | None
) -> None:
    clients = [(train, samples(15, 100 + i), test) for i, (train, test) in enumerate(healthy())]
    for client, part, row, value in ((4, 0, 41, 100.0), (2, 2, 7, 101.0), (5, 1, 9, 102.0)):
        clients[client][part][0][row, 0] = value

    class Last(nn.Module):
        """Its last output is the first input, so that the metric can know the sample."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.net(x), x[:, :1] - 1000], 1)

    def metric(outputs: Tensor, y: Tensor) -> Tensor:
        first = outputs[:, -1:] + 1000
        return torch.where(chosen(first.round(), y), torch.nan, hits(outputs, y))

    place = place or f"client 0's test sample {clients[0][2][1].tolist().index(3)}"
    text = refused(clients, Last, metric=metric)
    assert text.startswith(f"metric: it is NaN for {place}, which would leave the client without a score; return a")
    assert preflight(PLAN, Problem(clients, Last, metric=hits)).looked_at["metric values"] == "570 of 570 samples"


def test_a_metric_that_is_nan_where_the_outputs_are_is_none_of_its_mistakes() -> None:
    """The checks look at the untrained model; outputs that diverge later are those of a client that predicts badly."""

    class Diverged(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (x[:, :1] != 100)

    clients = healthy()
    clients[1][1][0][3] = 100.0
    found = preflight(
        PLAN, Problem(clients, lambda: Diverged(6, CLASSES), metric=lambda o, y: hits(o, y) + 0 * o[:, 0])
    )
    assert found.warnings == ()


def test_a_metric_that_cannot_tell_right_from_wrong_is_a_warning() -> None:
    (said,) = looked(healthy(), metric=lambda _outputs, y: torch.ones(len(y)))
    assert said.startswith("metric: ")


def test_metrics_that_rise_are_fine() -> None:
    def probability(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.softmax(1) * one_hot(y, CLASSES)).sum(1)

    assert looked(healthy(), metric=probability) == ()


def test_a_metric_that_takes_no_made_up_outputs_is_said_to_be_not_looked_at() -> None:
    def choosy(outputs: Tensor, y: Tensor) -> Tensor:
        if float(outputs.abs().max()) > 4:
            raise ValueError("logits above 4")
        return (outputs.argmax(1) == y).float()

    found = preflight(PLAN, Problem(healthy(), net, metric=choosy))
    assert found.warnings == ()
    assert found.looked_at["metric"].startswith("not checked")
    assert "logits above 4" in found.looked_at["metric"]


# No false alarm.

SMALL: dict[str, list[str]] = {
    "cifar-control": ["data.source=generated-pictures", "data.clients=20", "model.side=8", "model.kernel=2"],
    "cifar-nfl": ["data.source=generated-pictures", "data.clients=20", "model.side=8", "model.kernel=2"],
    "shake-control": [
        "data.source=generated-text", "data.clients=10", "data.allocation.least=100", "model.hidden=8",
        "data.text.window=20",
    ],
    "shake-nfl": [
        "data.source=generated-text", "data.clients=10", "data.allocation.least=100", "model.hidden=8",
        "data.text.window=20",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in preset_names() if name != "own-task"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_presets_have_no_finding(name: str, seed: int) -> None:
    plan = resolve(name, SMALL.get(name, ()), seed=seed)
    assert preflight(plan, problem_for(plan)).warnings == ()


OWN: dict[str, Plan] = {
    "breast-cancer": tiny(data=Data("breast-cancer", 6, 0.3, Iid()), model=Mlp(30)),
    "clusters": tiny(data=Data("generated-clusters", 20, 0.3, Iid()), model=Mlp(16)),
    "two-camps": tiny(data=Data("two-camps", 40, 0.3, Roles()), model=Mlp(16)),
    "two-camps-in-part": tiny(data=Data("two-camps-in-part", 40, 0.3, Iid()), model=Mlp(16)),
    "tiny": tiny(),
    "tiny-runtime": tiny_runtime(),
    "linear": tiny(model=Linear()),
}


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_generated_data_have_no_finding(name: str, seed: int) -> None:
    plan = replace(OWN[name], seed=seed)
    if plan.environment.threat.share and plan.data.source != "digits":
        plan = replace(plan, environment=PLAN.environment)
    assert preflight(plan, problem_for(plan)).warnings == ()


def test_text_that_repeats_itself_has_no_finding() -> None:
    """Windows dealt at random, of text with one short refrain: most test windows stand in the training data too."""
    plan = resolve("shake-nfl", SMALL["shake-nfl"], rounds=1)
    problem = problem_for(replace(plan, data=replace(plan.data, text=Text(window=4, split="shuffled"))))
    assert preflight(plan, problem).warnings == ()


# It leaves everything as it was.


def test_generators_and_first_weights_are_as_they_were() -> None:
    problem = Problem([(Augmented(copied(train)), test) for train, test in healthy(3)], by_numpy)
    initial = initial_weights(problem, PLAN)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    w = initial.w_P.clone()
    preflight(PLAN, problem)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]
    assert torch.equal(initial_weights(problem, PLAN).w_P, w)


def test_the_rounds_are_those_of_a_run_without_it() -> None:
    plan = tiny(rounds=2)
    with_it = [state.w for state, _ in federate(plan)]
    without = [state.w for state, _ in federate(plan, preflight=False)]
    assert all(torch.equal(one, other) for one, other in zip(with_it, without, strict=True))


def test_federate_warns_and_a_resumed_state_is_not_looked_at_again() -> None:
    clients = healthy()
    clients[3] = (clients[1][0], clients[3][1])
    plan = replace(PLAN, rounds=2, detection=tiny().detection, alone=Alone(private=False))
    with pytest.warns(PreflightWarning, match="clients 1 and 3"):
        state, _ = next(federate(plan, clients=clients, model=net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(federate(plan, clients=clients, model=net, state=state))
        next(federate(plan, clients=clients, model=net, preflight=False))


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
def test_federate_finds_each_mistake(mistake: Mistake) -> None:
    """tests/runs/test_play_preflight.py and tests/flower/test_mod_preflight.py stage the same ones."""
    plan = replace(PLAN, detection=tiny().detection, alone=Alone(private=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kind = UserError if mistake.refused else PreflightWarning
        with pytest.raises(kind, match=re.escape(mistake.said)):
            next(federate(plan, problem=mistake.problem()))
        next(federate(plan, problem=no_mistake()))


# A problem of any size takes a bounded time.


class Counted(Dataset):
    reads = 0

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        Counted.reads += 1
        return super().__getitem__(row)


def test_of_many_samples_a_bounded_number_is_read_and_said() -> None:
    x, y = samples(400_000, 0)
    half = torch.arange(200_000)
    everything = [(Rows(x, y, half[i::100]), Rows(x, y, 200_000 + half[i::100])) for i in range(100)]
    found = preflight(PLAN, Problem(everything, net))
    assert found.warnings == ()
    read = int(found.looked_at["rows"].split(" of ")[0].replace(",", ""))
    assert read <= ROWS
    assert "of 400,000 samples" in found.looked_at["rows"]


def test_slow_data_end_the_look_early(monkeypatch: pytest.MonkeyPatch) -> None:
    from lindt.server import preflight as module

    problem = Problem([(Counted(train), Counted(test)) for train, test in healthy(40)], net)
    preflight(PLAN, problem)
    whole, Counted.reads = Counted.reads, 0
    monkeypatch.setattr(module, "SECONDS", 0.0)
    found = preflight(PLAN, problem)
    assert Counted.reads < whole / 4
    assert "the time limit was reached" in found.looked_at["rows"]
