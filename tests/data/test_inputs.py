"""Samples as people have them: DataLoaders, collate functions, dicts, several inputs, Hugging Face's interface."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lindt import Plan, Problem, federate
from lindt.data.examples import Collated, Listed, LocalWork, Rows, add_samples, as_examples, pool, sample_hashes, subset
from lindt.data.inputs import take_inputs
from lindt.environment import Environment
from lindt.environment.participation import Sampled
from lindt.environment.threats import Backdoor
from lindt.errors import PlanError, UserError
from lindt.plan.plan import METHODS, Alone, Scoring, Training
from lindt.plan.problem import settled
from lindt.protocols import Inputs, tensors_of

A, B_ = torch.arange(20.0).reshape(10, 2), torch.arange(10, 20).reshape(10, 1)
Y = torch.arange(10) % 2
ROWS = torch.tensor([3, 1])


class Pairs(Dataset[Any]):
    """((a, b), y) samples."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> Any:
        return (A[row], B_[row]), int(Y[row])


class HuggingFace:
    """A stand-in with the interface of datasets.Dataset: features, column names, rows as dicts of plain lists."""

    features = {"input_ids": "Sequence", "attention_mask": "Sequence", "labels": "ClassLabel"}  # noqa: RUF012
    column_names = tuple(features)

    def __init__(self, lengths: list[int] | None = None, **also: Any) -> None:
        self.lengths, self.also = lengths or [4] * 10, also

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, n: int) -> HuggingFace:
        return HuggingFace(self.lengths[:n])

    def __getitem__(self, row: int) -> dict[str, Any]:
        length = self.lengths[row]
        ids = [1 + (row + place) % 6 for place in range(length)]
        return {"input_ids": ids, "attention_mask": [1] * length, "labels": row % 2, **self.also}


def padded(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A collate function: pads to the longest sample of the batch."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def column(name: str) -> Tensor:
        return torch.tensor([sample[name] + [0] * (longest - len(sample[name])) for sample in samples])

    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": column("input_ids"), "attention_mask": column("attention_mask"), "labels": labels}


class Tokens(nn.Module):
    """As Hugging Face's models: called by names, returns an object with logits."""

    attach_points = ("body",)

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask.unsqueeze(-1).float()
        mean = (self.table(input_ids) * mask).sum(1) / mask.sum(1)
        return SimpleNamespace(logits=self.head(torch.relu(self.body(mean))), loss=None)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(1, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.left(a) - self.right(b.float())
        return out


def x_of(found: object) -> Inputs:
    assert isinstance(found, Inputs)
    return found


@pytest.mark.parametrize(
    ("samples", "names"),
    [
        (Pairs(), [0, 1]),
        (((A, B_), Y), [0, 1]),
        (({"a": A, "b": B_.numpy()}, Y), ["a", "b"]),
        ({"a": A, "b": B_, "label": Y}, ["a", "b"]),
        ([{"a": A[i], "b": B_[i], "target": Y[i]} for i in range(10)], ["a", "b"]),
        (DataLoader(Pairs(), batch_size=4, shuffle=True), [0, 1]),
    ],
)
def test_several_inputs_are_taken_by_place_or_by_name(samples: object, names: list[Any]) -> None:
    examples = as_examples(samples)
    x, y = examples.take(ROWS)
    assert list(x_of(x).values) == names
    first, second = tensors_of(x)
    assert torch.equal(first, A[ROWS])
    assert torch.equal(second, B_[ROWS])
    assert torch.equal(y, Y[ROWS])
    assert torch.equal(examples.labels, Y)


@pytest.mark.parametrize(
    "samples",
    [
        {"img": A, "label": Y},
        [{"img": A[i], "label": int(Y[i])} for i in range(10)],
        DataLoader(TensorDataset(A, Y), batch_size=3),
        DataLoader([{"img": A[i], "label": int(Y[i])} for i in range(10)], batch_size=3),  # type: ignore[arg-type]
        DataLoader(TensorDataset(A, Y), collate_fn=lambda s: (torch.stack([a for a, _ in s]), [int(y) for _, y in s])),
    ],
)
def test_one_input_is_a_tensor(samples: object) -> None:
    x, y = as_examples(samples).take(ROWS)
    assert torch.equal(x, A[ROWS])
    assert torch.equal(y, Y[ROWS])
    assert y.dtype == torch.int64


def test_plain_pairs_are_what_they_were() -> None:
    assert isinstance(as_examples((A, Y)), Rows)
    assert isinstance(as_examples(TensorDataset(A, Y)), Listed)
    assert isinstance(as_examples([(A[0], 1), (A[1], 0)]), Listed)


def test_a_subset_sampler_is_followed() -> None:
    loader = DataLoader(TensorDataset(A, Y), sampler=SubsetRandomSampler([2, 5, 7]))
    examples = as_examples(loader)
    assert len(examples) == 3
    assert torch.equal(examples.take(torch.arange(3))[0], A[[2, 5, 7]])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (Stream(), "is of type Stream: it is a stream without a length"),
        (DataLoader(Stream()), "dataset is of type Stream: it is a stream"),
        (DataLoader(TensorDataset(A, Y), batch_size=None), "a DataLoader has no batch_size"),
        (DataLoader(TensorDataset(A, Y), sampler=WeightedRandomSampler([1.0] * 10, 10)), "has a WeightedRandomSampler"),
        ({"a": A, "b": B_}, "a sample has the fields .*give one label"),
        ({"labels": Y}, "at least one input"),
        ({"train": [], "test": []}, "a client's data is of type dict"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_a_sentence(samples: object, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"clients\[1\], training data: .*{sentence}"):
        Problem([((A, Y), (A, Y)), (samples, samples)], TwoInputs)


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (TensorDataset(A, B_, Y), r"a sample is a list of 3 parts; give pairs .*\(\(x1, x2\), y\)"),
        (HuggingFace(text="hello"), "a sample's 'text' is text, 'hello'; give tokens as numbers, or leave it out"),
        (
            [{"x": A[row], "label": "no"} for row in range(2)],
            "a sample's 'label' is text, 'no'; number the classes from 0$",
        ),
        (HuggingFace([3, 4]), "samples have 'input_ids' of different shapes.*collate_fn"),
    ],
)
def test_samples_that_make_no_batch_say_why(samples: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        as_examples(samples).take(torch.arange(2))


def test_a_batch_is_padded_by_the_users_function_apart_from_others() -> None:
    examples = as_examples(DataLoader(HuggingFace([2, 3, 6, 4]), batch_size=2, collate_fn=padded))
    work = LocalWork(examples, 1)
    widths = [x_of(x).values["input_ids"].shape[1] for x, _ in work.batches(1, torch.Generator().manual_seed(0))]
    assert sorted(widths) == [2, 3, 4, 6]  # gathered at once all would be 6 wide
    assert examples.labels.tolist() == [0, 1, 0, 1]
    hashes = list(sample_hashes(examples, labels=False))
    assert hashes[1:] == list(sample_hashes(subset(examples, torch.arange(1, 4)), labels=False))


def test_inputs_move_split_and_join_as_a_tensor_does() -> None:
    x = Inputs({"a": A, "b": B_})
    assert len(x) == 10
    assert x.device == torch.device("cpu")
    parts = x.split([4, 6])
    joined = torch.cat(parts)  # type: ignore[call-overload]
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(joined), (A, B_), strict=True))
    with pytest.raises(UserError, match=r"torch.isfinite takes one tensor"):
        torch.isfinite(x)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"the inputs \['a', 'b'\] have \[9, 10\] samples"):
        Inputs({"a": A, "b": B_[:9]})


def test_hashes_see_every_input() -> None:
    import hashlib

    def hashed(b: Tensor) -> tuple[str, list[int]]:
        examples, digest = as_examples(((A, b), Y)), hashlib.sha256()
        add_samples(digest, examples)
        return digest.hexdigest(), list(sample_hashes(examples, labels=True))

    other = B_.clone()
    other[4] = 99
    (first, rows), (second, changed) = hashed(B_), hashed(other)
    assert first != second
    assert [i for i in range(10) if rows[i] != changed[i]] == [4]


def test_pooled_samples_of_several_inputs_come_in_order() -> None:
    both = pool([as_examples(Pairs()), as_examples(((A, B_), Y))])
    x, _ = both.take(torch.tensor([12, 3, 0]))
    assert torch.equal(tensors_of(x)[1], B_[[2, 3, 0]])


# Whole federations.


def plan(method: str = "fedavg", **changes: Any) -> Plan:
    return Plan(
        rounds=2,
        training=Training(batch=5),
        environment=Environment(Sampled(rate=1.0)),
        method=METHODS[method],
        alone=Alone(epochs=1, patience=1),
        scoring=Scoring(every=1, last=1),
        **changes,
    )


@pytest.mark.parametrize("method", ["guarded", "fb"])
@pytest.mark.filterwarnings("ignore::lindt.server.preflight.PreflightWarning")
def test_a_model_of_hugging_faces_kind_trains_and_adapts(method: str) -> None:
    asked = plan(method)
    if method == "fb":
        asked = replace(asked, method=replace(asked.method, adaptation=replace(asked.method.adaptation, epochs=1)))  # type: ignore[type-var]
    made = [(HuggingFace([4] * n), HuggingFace([4] * 5)) for n in (10, 12)]
    states = [state for state, _ in federate(asked, clients=made, model=Tokens)]
    assert torch.isfinite(states[-1].w).all()
    assert not torch.equal(states[0].w, states[1].w)


def test_several_inputs_train_as_one_tensor_of_both_does() -> None:
    class Joined(TwoInputs):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x[:, :2], x[:, 2:])

    x = torch.cat([A, B_.float()], 1) / 20
    several = [((((x[:, :2], x[:, 2:]), Y)), ((x[:, :2], x[:, 2:]), Y))] * 2
    one = [((x, Y), (x, Y))] * 2
    found = [s.w for s, _ in federate(plan(), clients=several, model=TwoInputs, preflight=False)][-1]
    expected = [s.w for s, _ in federate(plan(), clients=one, model=Joined, preflight=False)][-1]
    torch.testing.assert_close(found, expected)


def test_backdoors_need_samples_of_one_tensor() -> None:
    asked = replace(plan(), environment=Environment(Sampled(rate=1.0), Backdoor(share=0.5, relabel=((0, 1),))))
    with pytest.raises(PlanError, match=r"environment.threat = 'backdoor': .* one input, and these have several"):
        next(federate(asked, clients=[(((A, B_), Y), ((A, B_), Y))] * 2, model=TwoInputs))


def test_the_batch_size_of_loaders_is_the_plans() -> None:
    def problem(*sizes: int) -> Problem:
        return Problem([(DataLoader(TensorDataset(A, Y), batch_size=size), (A, Y)) for size in sizes], nn.Identity)

    assert settled(Plan(), problem(4, 4)).training.batch == 4
    assert settled(plan(), Problem([((A, Y), (A, Y))] * 2, nn.Identity)).training.batch == 5
    with pytest.raises(PlanError, match=r"training.batch = 5: the DataLoaders have batch_size = 4"):
        settled(plan(), problem(4, 4))
    with pytest.raises(UserError, match="have batch_size 4, 8; give all the same batch_size"):
        problem(4, 8)


def test_hooks_keep_the_names_of_the_model() -> None:
    assert list(take_inputs(Tokens()).state_dict()) == list(Tokens().state_dict())
    assert isinstance(as_examples(HuggingFace()), Collated)


# A validation part of the user's own.


def test_a_given_validation_part_is_v() -> None:
    from lindt.plan.problem import fingerprint, split_validation

    held = (A[:3], Y[:3])
    problem = Problem([((A, Y), held, (A, Y))] * 2, TwoInputs)
    train, validation = split_validation(Plan(), problem, 0)
    assert len(train) == 10
    assert validation is not None
    assert torch.equal(validation.take(torch.arange(3))[0], A[:3])
    assert len(problem.data[0]) == 2
    assert fingerprint(problem) != fingerprint(Problem([((A, Y), (A, Y))] * 2, TwoInputs))
    with pytest.raises(UserError, match="1 of 2 have a validation part; give one to all"):
        Problem([((A, Y), held, (A, Y)), ((A, Y), (A, Y))], TwoInputs)
    with pytest.raises(UserError, match=r"clients\[0\]: its validation part is empty"):
        Problem([((A, Y), (A[:0], Y[:0]), (A, Y))] * 2, TwoInputs)


def test_a_given_validation_part_is_reported_on_by_the_clients_that_report_only() -> None:
    made = [((A, Y), (A[:4], Y[:4]), (A, Y))] * 2
    plain = list(federate(plan(), clients=made, model=lambda: nn.Linear(2, 2), preflight=False))
    assert all(result.reports is None for _, result in plain)
    from lindt.server.detection.gain import Gain

    asked = plan(detection=Gain())
    reported = list(federate(asked, clients=made, model=lambda: nn.Linear(2, 2), preflight=False))
    assert {report.samples for _, result in reported for report in (result.reports or {}).values()} == {4}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ((0, 20, 0, 20, 40, 60), "client 0: its validation data are its training data"),
        ((0, 20, 40, 60, 40, 60), "client 0: its test data are its validation data"),
    ],
)
def test_a_validation_part_that_is_trained_or_tested_on_is_refused(rows: tuple[int, ...], sentence: str) -> None:
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    a, b, c, d, e, f = rows
    first = ((x[a:b], y[a:b]), (x[c:d], y[c:d]), (x[e:f], y[e:f]))
    other = tuple((2 * u[:20] + 1, y[:20]) for u in (x, x[20:], x[40:]))
    with pytest.raises(UserError, match=sentence):
        next(federate(plan(), clients=[first, other], model=lambda: nn.Linear(2, 2)))


def test_a_field_that_the_model_does_not_take_is_named() -> None:
    clients = [({"a": A, "b": B_, "row": torch.arange(10), "labels": Y},) * 2] * 2
    with pytest.raises(UserError, match=r"'row'.*the inputs of a sample are a, b, row: leave out"):
        next(federate(plan(), clients=clients, model=TwoInputs, preflight=False))


def test_a_client_that_is_a_dict_of_its_parts_is_told_how_to_give_them() -> None:
    parts = {"train": (A, Y), "test": (A, Y)}
    with pytest.raises(UserError, match=r"clients\[0\]: it is of type dict; give a pair \(client\[\"train\"\], client"):
        Problem([parts, parts], TwoInputs)  # type: ignore[list-item]
