"""Checks before training for mistakes that end in a believable false result.

`server.checks` asks whether a problem can be played at all. Here it can, and the question is whether its result would
mean anything: test samples that were trained on, a model that is random in evaluation, a metric where lower is better.
An error is refused: its result would mean nothing. A warning may be meant: it is kept with the run and shown with its
verdict. docs/reliability.md lists the checks.

A look takes seconds for a problem of any size: a bounded number of samples is read (`ROWS`, `BYTES`), and after
`SECONDS` the checks that read data look at no further client. `Checks.looked_at` says how far each one came. Nothing
that trains later is changed: random generators are put back, and models are built for the look alone.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lindt.client.training import global_step
from lindt.data.examples import Listed, sample_hashes
from lindt.errors import UserError, one_line
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem
from lindt.protocols import Context, Examples, Loss, Metric
from lindt.seeds import isolated_random_state, with_threads
from lindt.weights import first_model, initial_weights, read_w

ROWS: Final = 60_000  # samples that are hashed, of all clients together
BYTES: Final = 2**30  # of theirs
SECONDS: Final = 5.0  # after which no further client's data are looked at
READ_TWICE: Final = 50  # clients
NEIGHBOURS: Final = 64  # samples of a client's training and test data among which neighbours are looked for
FEW_CLIENTS: Final = 8  # fewer have more samples looked at, as many as so many clients would have
FEATURES: Final = 1024  # of a sample, by which its distance to others is taken
FEW: Final = 16  # samples that are evaluated twice, or trained on
MEANT: Final = "where this is meant, leave the checks out (--no-preflight, or preflight=False)"


class PreflightWarning(UserWarning):
    """What a look before training found that may be meant."""


@final
@dataclass(frozen=True)
class Finding:
    severity: Literal["error", "warning"]
    text: str


@final
@dataclass(frozen=True)
class Checks:
    """What is kept with a run. `looked_at` says, by the name of a check, what was looked at."""

    made: bool
    warnings: tuple[str, ...] = ()
    looked_at: Mapping[str, str] = field(default_factory=dict)


NOT_MADE: Final = Checks(made=False)


@final
@dataclass(frozen=True)
class Subject:
    """What is looked at. `clients` are name, training and test data; `context` is what a first training step takes."""

    clients: Sequence[tuple[str, Examples, Examples]]
    build: Callable[[], nn.Module]  # from the same seed at every call
    loss: Loss
    metric: Metric
    context: Callable[[nn.Module, Examples], Context]
    device: torch.device


def preflight(plan: Plan, problem: Problem) -> Checks:
    """Look at a problem that `check` has passed. Raises a UserError where the result would mean nothing."""

    def context(model: nn.Module, train: Examples) -> Context:
        return Context(
            client=0,
            round=1,
            rate=plan.training.rate_at(1),
            max_norm=plan.training.max_norm,
            batch=plan.training.batch,
            train=train,
            loss=problem.loss,
            penalty=plan.method.penalty,
            received_P=read_w(model),
            generator=torch.Generator().manual_seed(0),
            device=torch.device("cpu"),
        )

    initial_weights(problem, plan)  # before the look: a model that is not drawn from the seed is built in this order
    subject = Subject(
        [(f"client {i}", train, test) for i, (train, test) in enumerate(problem.data)],
        lambda: first_model(problem, plan),
        problem.loss,
        problem.metric_for(plan),
        context,
        torch.device("cpu"),
    )
    looked_at: dict[str, str] = {}
    with with_threads(plan.threads):
        findings = look(subject, looked_at)
    for finding in findings:
        if finding.severity == "error":
            raise UserError(f"{finding.text}; {MEANT}")
    return Checks(True, tuple(finding.text for finding in findings), looked_at)


def look(subject: Subject, looked_at: dict[str, str]) -> list[Finding]:
    """All findings, those of the model first. The random generators are as they were afterwards."""
    until = time.monotonic() + SECONDS
    with isolated_random_state(0, subject.device), torch.enable_grad():
        model, again = subject.build(), subject.build()
        found = [*_drawn(model, again, looked_at), *_evaluated(subject, model, looked_at)]
        if not any(finding.severity == "error" for finding in found):
            found += [*_stepped(subject, again, looked_at), *_scored(subject, model, looked_at)]
        found += _read_twice(subject, until, looked_at)
        found += _labels(subject, until, looked_at)
        found += _shared_rows(subject, until, looked_at)
    return found


# The model, the loss and the metric.


def _drawn(model: nn.Module, again: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """The model's function, called twice from one seed, gives the same weights."""
    looked_at["model"] = "two calls from one seed"
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    theirs = _tensors(again)
    differ = [name for name, tensor in _tensors(model).items() if name in theirs and not _same(tensor, theirs[name])]
    kept = [name for name in differ if name in frozen]  # they do not travel with w
    if kept:
        yield Finding(
            "error",
            f"model: its frozen weight {kept[0]} differs at each call from the same seed, so that clients would "
            "average weights of different models; draw it from torch's generator, or load it",
        )
    elif differ:
        yield Finding(
            "warning",
            f"model: two calls from the same seed give other weights ({differ[0]}), so that no run can be repeated; "
            "draw them from torch's generator",
        )


@torch.no_grad()
def _evaluated(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Two evaluations agree, and change nothing."""
    name, _, test = subject.clients[0]
    x = test.take(_some(len(test), FEW))[0].to(subject.device)
    looked_at["evaluation"] = f"{len(x)} samples of {name}, twice"
    model = copy.deepcopy(model).to(subject.device).eval()
    before = {key: tensor.clone() for key, tensor in _tensors(model).items()}
    outputs = []
    for seed in (1, 2):
        with isolated_random_state(seed, subject.device):
            outputs.append(model(x.clone()))
    floats = {key: tensor for key, tensor in _tensors(model).items() if tensor.is_floating_point()}  # not counters
    changed = [key for key, tensor in floats.items() if key in before and not _same(tensor, before[key])]
    if changed:
        yield Finding(
            "error",
            f"model: evaluating it changes {changed[0]}, so that it learns from test samples; leave its layers in the "
            "mode that eval() sets",
        )
    elif not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6, equal_nan=True):
        yield Finding(
            "error",
            "model: two evaluations of the same samples differ, it is random in evaluation mode too; use nn.Dropout, "
            "or dropout(..., training=self.training)",
        )


def _stepped(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """One training step changes the weights, and the loss. A client's first batch may have no gradient by chance."""
    moved, model = False, model.to(subject.device)
    for tried, (_, train, _) in enumerate(subject.clients[:4], 1):
        looked_at["step"] = f"{tried} of {len(subject.clients)} clients, one batch each"
        now, ctx = copy.deepcopy(model).train(), subject.context(model, train)
        x, y = (part.to(subject.device) for part in train.take(_some(len(train), min(FEW, ctx.batch))))
        w, (before, reaches) = read_w(now), _loss(subject, now, x, y)
        if reaches:
            with isolated_random_state(3, subject.device):
                global_step(ctx, now)((x, y))
        after, _ = _loss(subject, now, x, y)
        moved = moved or not _same(w, read_w(now))
        if moved and before != after:
            return
    if moved:
        yield Finding(
            "warning",
            f"loss: a training step changes weights, but the loss of the same batch stays {before:.6g}; check that the "
            "model predicts with the weights that it trains",
        )
    else:
        yield Finding(
            "error",
            "loss: a training step changes no weight, the gradient is 0; do not detach outputs or loss, or train with "
            "a larger training.rate",
        )


def _loss(subject: Subject, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, bool]:
    """The loss of a batch, and whether a gradient reaches anything from it."""
    with isolated_random_state(4, subject.device):  # the same dropout each time
        value = subject.loss(model(x.clone()), y)
        return float(value.detach()), value.requires_grad


@torch.no_grad()
def _scored(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """The metric of right predictions is above that of wrong ones."""
    chosen = [subject.clients[int(i)] for i in _some(len(subject.clients), 8)]
    targets = [test.take(_some(len(test), 64))[1] for _, _, test in chosen]
    y = torch.cat([one for one in targets if one.shape[1:] == targets[0].shape[1:]])
    x = chosen[0][2].take(torch.arange(1))[0].to(subject.device)
    made_up = _right_and_wrong(y, model.to(subject.device).eval()(x).shape[1:])
    if made_up is None:
        looked_at["metric"] = "not looked at, outputs and targets are neither classes nor of one shape"
        return
    try:
        right, wrong = (subject.metric.value(subject.metric.tally(outputs, y)) for outputs in made_up)
    except Exception as error:  # noqa: BLE001  # the user's metric may ask for more than a shape
        why = f"{type(error).__name__}: {one_line(str(error))}"
        looked_at["metric"] = f"not looked at, it takes no outputs that are made up ({why})"
        return
    looked_at["metric"] = f"right and wrong outputs, made up for {len(y)} targets"
    if right < wrong:
        yield Finding(
            "error",
            f"metric: it is higher for wrong predictions ({wrong:.4g}) than for right ones ({right:.4g}), and higher "
            "counts as better; give its negative",
        )
    elif right == wrong:
        yield Finding(
            "warning", f"metric: it gives right and wrong predictions of {len(y)} targets the same value, {right:.4g}"
        )


def _right_and_wrong(y: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Outputs that predict `y`, and outputs that predict something else; None where it is not known how to."""
    wanted = (len(y), *shape)
    if not y.is_floating_point() and y.shape == wanted[:-1]:
        classes = wanted[-1]
        if classes < 2 or int(y.min()) < 0 or int(y.max()) >= classes:
            return None
        return 5.0 * one_hot(y, classes).float(), 5.0 * one_hot((y + 1) % classes, classes).float()
    if y.numel() != math.prod(wanted):
        return None
    targets = y.to(torch.float32).reshape(wanted)
    if bool(((targets == 0) | (targets == 1)).all()):  # two classes: as logits, and as probabilities
        return 2 * targets - 1, 1 - 2 * targets
    return targets, targets + max(float(targets.std(correction=0)), 1.0)


# The data.


def _read_twice(subject: Subject, until: float, looked_at: dict[str, str]) -> list[Finding]:
    """Two reads of the same samples agree."""
    changed: dict[int, list[str]] = {0: [], 1: []}
    random: dict[int, list[str]] = {0: [], 1: []}
    chosen = [subject.clients[int(i)] for i in _some(len(subject.clients), READ_TWICE)]
    seen = 0
    for name, *parts in chosen:
        if seen and time.monotonic() > until:
            break
        seen += 1
        for part, data in enumerate(parts):
            rows = _some(len(data), 4)
            if _changes_in_place(data):
                changed[part].append(name)
                continue
            reads = []
            for seed in (1, 2):
                with isolated_random_state(seed, subject.device):
                    reads.append(data.take(rows))
            if not all(_same(one, other) for one, other in zip(*reads, strict=True)):
                random[part].append(name)
    looked_at["reads"] = f"{seen} of {len(subject.clients)} clients, 4 samples each, twice"
    found = []
    for part, kind in enumerate(("training", "test")):
        if changed[part]:
            found.append(
                Finding(
                    "error",
                    f"{_named(changed[part])}: reading its {kind} data changes them, each read gives other values; "
                    "let the dataset change a copy",
                )
            )
    if random[1]:
        found.append(
            Finding(
                "error",
                f"{_named(random[1])}: two reads of its test data differ, so that no score of them can be repeated; "
                "switch augmentation off in test data",
            )
        )
    if random[0]:
        found.append(
            Finding(
                "warning",
                f"{_named(random[0])}: two reads of its training data differ (augmentation?), so that a validation "
                "part of them is random too, shared samples cannot be seen, and a --task cannot be resumed",
            )
        )
    return found


def _changes_in_place(data: Examples) -> bool:
    """Whether a second read of a sample changes what the first one gave: they are the same memory."""
    first = _raw(data)
    before = first.clone()
    _raw(data)
    return not _same(first, before)


def _raw(data: Examples) -> Tensor:
    if isinstance(data, Listed):
        return torch.as_tensor(data.dataset[0][0])
    return data.take(torch.zeros(1, dtype=torch.int64))[0]


@final
@dataclass(frozen=True)
class _Hashed:
    """The samples of a client, hashed: all of them, or a spread of them."""

    name: str
    train: Counter[int]
    test: Counter[int]
    whole: tuple[int, int]  # samples of both parts, hashed or not

    @property
    def telling(self) -> bool:
        """Whether the training samples are so different that two draws of them are not the same by chance."""
        return len(self.train) >= 20 or (len(self.train) >= 5 and self.twice < 0.2 * self.train.total())

    @property
    def same(self) -> bool:
        return self.whole[0] == self.whole[1] and self.train == self.test and self.telling

    @property
    def trained_on(self) -> int:
        return sum(count for sample, count in self.test.items() if sample in self.train)

    @property
    def twice(self) -> int:
        """Training samples that stand more than once in the training data."""
        return sum(count for count in self.train.values() if count > 1)


def _shared_rows(subject: Subject, until: float, looked_at: dict[str, str]) -> list[Finding]:
    """Samples that stand in more than one place: in training and test data, or at several clients.

    Samples repeat by nature, too: blank pictures, tables of few different rows, a refrain in a text. If training and
    test samples are draws of the same kind, a test sample stands in the training data about as often as a training
    sample stands there twice. Only what is clearly more than that is told.
    """
    hashed = list(_hashed(subject, until))
    every = sum(len(train) + len(test) for _, train, test in subject.clients)
    read = sum(one.train.total() + one.test.total() for one in hashed)
    early = ", then time was up" if time.monotonic() > until else ""
    looked_at["rows"] = f"{read:,} of {every:,} samples, {len(hashed)} of {len(subject.clients)} clients{early}"
    return [*_own_overlap(hashed), *_same_clients(hashed), *_other_overlap(hashed)]


def _hashed(subject: Subject, until: float) -> Iterator[_Hashed]:
    clients = subject.clients
    every = sum(len(train) + len(test) for _, train, test in clients)
    x, y = clients[0][1].take(torch.arange(1))
    allowed = min(ROWS, BYTES // max(1, x.nbytes + y.nbytes))
    most = every if every <= allowed else max(2, allowed // (2 * len(clients)))
    for index, (name, train, test) in enumerate(clients):
        if index and time.monotonic() > until:
            return
        counts = [
            Counter(_in_time(sample_hashes(data, _some(len(data), most), labels=True), until)) for data in (train, test)
        ]
        yield _Hashed(name, counts[0], counts[1], (len(train), len(test)))


def _in_time(hashes: Iterator[int], until: float) -> Iterator[int]:
    """Those that come until time is up, and the first few in any case."""
    for count, sample in enumerate(hashes):
        if count >= FEW and time.monotonic() > until:
            return
        yield sample


def _own_overlap(hashed: Sequence[_Hashed]) -> list[Finding]:
    same = [one for one in hashed if one.same]
    if same:
        more = f", as are those of {len(same) - 1} clients more" if len(same) > 1 else ""
        return [
            Finding(
                "error",
                f"{same[0].name}: its test data are its training data ({same[0].whole[1]} samples){more}; "
                "give test samples that it does not train on",
            )
        ]
    twice = sum(one.twice for one in hashed)
    overlap = {one.name: (one.trained_on, one.test.total()) for one in hashed if one.trained_on}
    if not _more_than_chance(overlap, hashed, twice):
        return []
    for one in hashed:
        tested = one.test.total()
        if one.trained_on == tested == one.whole[1] >= 5 and one.twice < 0.5 * one.train.total():
            return [
                Finding(
                    "error",
                    f"{one.name}: all {tested} of its test samples stand among its training samples; "
                    "give test samples that it does not train on",
                )
            ]
    return [
        Finding(
            "warning",
            f"test samples stand among the same client's training samples: {_counted(overlap)}; "
            "scores of them are too high",
        )
    ]


def _same_clients(hashed: Sequence[_Hashed]) -> Iterator[Finding]:
    groups: dict[tuple[int, frozenset[tuple[int, int]]], list[str]] = {}
    for one in hashed:
        if one.telling:
            groups.setdefault((one.whole[0], frozenset(one.train.items())), []).append(one.name)
    for names in groups.values():
        if len(names) > 1:
            numbers = [name.removeprefix("client ") for name in names]
            shown = numbers[:10] if len(numbers) <= 10 else [*numbers[:10], f"{len(numbers) - 10} more"]
            yield Finding(
                "warning",
                f"clients {', '.join(shown[:-1])} and {shown[-1]} hold the same training samples; "
                "their data count as often",
            )


def _other_overlap(hashed: Sequence[_Hashed]) -> list[Finding]:
    """Test samples of one client among the training samples of others, but not among its own."""
    holders = Counter(sample for one in hashed for sample in one.train)

    def elsewhere(one: _Hashed, sample: int) -> bool:
        return holders[sample] > (sample in one.train)

    twice = sum(count for one in hashed for sample, count in one.train.items() if elsewhere(one, sample))
    overlap: dict[str, tuple[int, int]] = {}
    for one in hashed:
        shared = sum(count for sample, count in one.test.items() if sample not in one.train and elsewhere(one, sample))
        if shared:
            overlap[one.name] = (shared, one.test.total())
    if not _more_than_chance(overlap, hashed, twice):
        return []
    return [
        Finding(
            "warning",
            f"test samples stand among the training samples of another client: {_counted(overlap)}; "
            "w trains on them, a model trained alone does not",
        )
    ]


def _more_than_chance(overlap: Mapping[str, tuple[int, int]], hashed: Sequence[_Hashed], twice: int) -> bool:
    """Whether more test samples are shared than training samples (`twice` of all) would let expect.

    A training sample has one training sample less to be equal to than a test sample has: n / (n - 1) allows for it.
    """
    rate = (twice + 1) / (sum(one.train.total() for one in hashed) + 1)
    sizes = [(one.train.total(), one.test.total()) for one in hashed]
    expected = sum(tested * min(1.0, rate * n / max(1, n - 1)) for n, tested in sizes)
    return sum(shared for shared, _ in overlap.values()) > expected + 3 * math.sqrt(expected)


@final
@dataclass(frozen=True)
class _Agreement:
    """How often the nearest training sample has the same label, and how often it had if labels were shuffled."""

    name: str
    samples: int
    hits: float
    chance: float  # in samples

    @property
    def deviation(self) -> float:
        # A sample may be the nearest one of several, so that their hits come together: twice the variance.
        return math.sqrt(max(1.0, 2 * self.chance * (1 - self.chance / self.samples)))


def _labels(subject: Subject, until: float, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Labels have to do with the samples: the nearest other sample has the same label more often than by chance.

    Of classes and of inputs that are numbers: tokens have no distance.
    """
    found: dict[str, list[_Agreement]] = {"training": [], "test": []}
    seen, most = 0, max(NEIGHBOURS, NEIGHBOURS * FEW_CLIENTS // len(subject.clients))
    for name, train, test in subject.clients:
        if seen and time.monotonic() > until:
            break
        seen += 1
        (x, y), (u, v) = (data.take(_some(len(data), most)) for data in (train, test))
        if y.is_floating_point() or y.dim() != 1 or x.dtype in (torch.int32, torch.int64):
            looked_at["labels"] = "not looked at, targets are no classes or inputs have no distance"
            return
        step = max(1, -(-x[0].numel() // FEATURES))
        x, u = (part.reshape(len(part), -1)[:, ::step].float() for part in (x, u))
        if not torch.isfinite(x.sum() + u.sum()):
            continue
        mean, spread = x.mean(0), x.std(0, correction=0) + 1e-6
        x, u = (x - mean) / spread, (u - mean) / spread
        classes = torch.unique(torch.cat([y, v]), return_inverse=True)[1]  # a label may be -1
        n, y, v = len(y), classes[: len(y)], classes[len(y) :]
        counts = torch.bincount(y, minlength=int(classes.max()) + 1).double()
        among = float((counts * (counts - 1)).sum() / max(1, n - 1))
        if n > 2:
            hits = (y[torch.cdist(x, x).fill_diagonal_(math.inf).argmin(1)] == y).sum()
            found["training"].append(_Agreement(name, n, float(hits), among))
        hits = (y[torch.cdist(u, x).argmin(1)] == v).sum()
        found["test"].append(_Agreement(name, len(v), float(hits), float(counts[v].sum() / n)))
    looked_at["labels"] = f"{seen} of {len(subject.clients)} clients, up to {most} samples of a part"
    for kind, clients in found.items():
        if (finding := _by_chance(kind, clients)) is not None:
            yield finding
            return  # test labels are compared with training labels


def _by_chance(kind: str, clients: Sequence[_Agreement]) -> Finding | None:
    """All labels, or those of single clients, that agree no more than shuffled ones: where a relation would be seen."""
    samples = sum(one.samples for one in clients)
    if not samples:
        return None
    every = _Agreement("", samples, sum(one.hits for one in clients), sum(one.chance for one in clients))
    above = every.hits - every.chance
    if above < 2 * every.deviation and 0.25 * (samples - every.chance) > 6 * every.deviation:
        return Finding(
            "warning",
            f"{kind} labels: in {every.hits / samples:.0%} of cases the nearest training sample has the same label, it "
            f"would in {every.chance / samples:.0%} if labels were shuffled; check that samples and labels are in one "
            "order",
        )
    share = above / max(1e-9, samples - every.chance)
    alone = [
        one.name
        for one in clients
        if one.samples >= 20
        and share * (one.samples - one.chance) > 6 * one.deviation
        and one.hits - one.chance < 0.5 * one.deviation
    ]
    if not alone:
        return None
    return Finding(
        "warning",
        f"{_named(alone)}: its {kind} labels are like shuffled ones, those of other clients are not; check that its "
        "samples and labels are in one order",
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _some(n: int, most: int) -> Tensor:
    """Up to `most` of n rows, spread evenly."""
    return torch.arange(n) if n <= most else torch.arange(most) * n // most


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(one, other)


def _named(names: Sequence[str]) -> str:
    """The first few."""
    more = f" and {len(names) - 3} clients more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _counted(overlap: Mapping[str, tuple[int, int]]) -> str:
    worst = sorted(overlap.items(), key=lambda one: -one[1][0])
    return _named([f"{name} ({shared:,} of {tested:,})" for name, (shared, tested) in worst])
