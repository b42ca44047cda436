"""Checks before training for mistakes that give a plausible but false result.

`server.checks` refuses problems that cannot run. The checks here find problems that run, but whose result means
nothing: test samples that are also trained on, a model that is random in evaluation, a metric where lower is better.
An error stops the run. A warning may be intended: it is stored with the run and shown with its verdict.
docs/reliability.md lists the checks.

The checks take a few seconds for a problem of any size: a limited number of samples is read (`ROWS`, `BYTES`), and
after `SECONDS` the checks that read data stop at the current client. `Checks.looked_at` says how much each check read.
The checks do not change the training: the states of random generators are restored, and the checks build models of
their own.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from lindt.client.training import global_step
from lindt.data.examples import Listed, Rows, sample_hashes
from lindt.errors import UserError, one_line
from lindt.plan.metrics import Accuracy, MacroF1
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem
from lindt.protocols import Context, Examples, Loss, Metric, has_several, tensors_of
from lindt.seeds import isolated_random_state, with_threads
from lindt.user_code import describe_error, user_frames
from lindt.weights import first_model, initial_weights, read_w

ROWS: Final = 60_000  # the most samples that are hashed, over all clients
BYTES: Final = 2**30  # the most bytes of these samples
SECONDS: Final = 5.0  # after this time no further client's data are read
READ_TWICE: Final = 50  # the most clients whose data are read twice
NEIGHBOURS: Final = 64  # samples of a client's training data, and of its test data, that are searched for neighbours
FEW_CLIENTS: Final = 8  # with fewer clients more samples of each are read: in total as many as for 8 clients
FEATURES: Final = 1024  # the most numbers of a sample that its distance to other samples is computed from
FEW: Final = 16  # samples that are evaluated twice, or trained on
MEANT: Final = "if this is intended, switch the checks off (--no-preflight, or preflight=False)"


class PreflightWarning(UserWarning):
    """A finding of the checks before training that may be intended."""


@final
@dataclass(frozen=True)
class Finding:
    severity: Literal["error", "warning"]
    text: str


@final
@dataclass(frozen=True)
class Checks:
    """The result of the checks, stored with a run. `looked_at` says for each check, by name, what it read."""

    made: bool
    warnings: tuple[str, ...] = ()
    looked_at: Mapping[str, str] = field(default_factory=dict)


NOT_MADE: Final = Checks(made=False)


@final
@dataclass(frozen=True)
class Subject:
    """The problem to check. `clients` are name, training and test data; `context` builds that of a training step."""

    clients: Sequence[tuple[str, Examples, Examples]]
    build: Callable[[], nn.Module]  # from the same seed at every call
    loss: Loss
    metric: Metric
    context: Callable[[nn.Module, Examples], Context]
    device: torch.device
    validation: Sequence[Examples] = ()  # the user's validation data, one for each client, or empty


def preflight(plan: Plan, problem: Problem) -> Checks:
    """Check a problem that `check` has passed. Raises a UserError where the result would mean nothing."""

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

    initial_weights(problem, plan)  # before the checks: a model that ignores the seed depends on the order of calls
    subject = Subject(
        [(f"client {i}", *problem.data[i]) for i in problem.checked],
        lambda: first_model(problem, plan),
        problem.loss,
        problem.metric_for(plan),
        context,
        torch.device("cpu"),
        [problem.validation[i] for i in problem.checked] if problem.validation else (),
    )
    looked_at: dict[str, str] = {}
    if len(problem.checked) < len(problem.data):
        looked_at["clients"] = f"{len(problem.checked)} of {len(problem.data):,} clients, drawn at random"
    try:
        with with_threads(plan.threads):
            findings = look(subject, looked_at)
            findings += _validated(subject)
    except UserError:
        raise
    except Exception as error:
        if not user_frames(error):
            raise
        raise UserError(
            f"your code raised an exception in the checks before training ({describe_error(error)}); correct it there, "
            "or switch the checks off (--no-preflight, or preflight=False)"
        ) from error
    for finding in findings:
        if finding.severity == "error":
            raise UserError(f"{finding.text}; {MEANT}")
    return Checks(True, tuple(finding.text for finding in findings), looked_at)


def _validated(subject: Subject) -> list[Finding]:
    """Check that the user's validation data share no samples with the training data, nor with the test data."""
    until, found = time.monotonic() + SECONDS, list[Finding]()
    both = list(zip(subject.clients, subject.validation, strict=False))  # empty without validation data of the user's
    if both:
        trained = replace(subject, clients=[(name, train, part) for (name, train, _), part in both])
        tested = replace(subject, clients=[(name, part, test) for (name, _, test), part in both])
        found += _own_overlap(list(_hashed(trained, until)), "validation", "training")
        found += _own_overlap(list(_hashed(tested, until)), "test", "validation")
    return found


def look(subject: Subject, looked_at: dict[str, str]) -> list[Finding]:
    """All findings, those of the model first. The states of the random generators are restored at the end."""
    until = time.monotonic() + SECONDS
    with isolated_random_state(0, subject.device), torch.enable_grad():
        model, again = subject.build(), subject.build()
        found = list(_finite(subject, model, looked_at))  # NaN would make the results of the checks below meaningless
        if not found:
            found += [*_drawn(model, again, looked_at), *_evaluated(subject, model, looked_at)]
        if not _refuses(found):
            found += _paired(subject, model, looked_at)
        if not _refuses(found):
            found += [*_stepped(subject, again, looked_at), *_measured(subject, model, looked_at)]
        if not _refuses(found):
            found += _scored(subject, model, looked_at)
        found += _read_twice(subject, until, looked_at)
        found += _labels(subject, until, looked_at)
        found += _shared_rows(subject, until, looked_at)
    return found


def _refuses(found: Sequence[Finding]) -> bool:
    return any(finding.severity == "error" for finding in found)


# The model, the loss and the metric.


def _drawn(model: nn.Module, again: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that two calls of the model's function with one seed give the same weights."""
    looked_at["model"] = "two calls with one seed"
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    theirs = _tensors(again)
    differ = [name for name, tensor in _tensors(model).items() if name in theirs and not _same(tensor, theirs[name])]
    kept = [name for name in differ if name in frozen]  # frozen weights are not sent with w
    if kept:
        yield Finding(
            "error",
            f"model: its frozen weight {kept[0]} differs between two calls with the same seed, so that clients would "
            "average weights of different models; draw it from torch's generator, or load it",
        )
    elif differ:
        yield Finding(
            "warning",
            f"model: two calls with the same seed give other weights ({differ[0]}), so that no run can be repeated; "
            "draw them from torch's generator",
        )


@torch.no_grad()
def _evaluated(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that two evaluations give the same outputs, and do not change the model."""
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
            f"model: evaluating it changes {changed[0]}, so that it learns from test samples; do not change the mode "
            "that eval() sets",
        )
    elif not torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-6, equal_nan=True):
        yield Finding(
            "error",
            "model: two evaluations of the same samples differ: it is random in evaluation mode; use nn.Dropout, "
            "or dropout(..., training=self.training)",
        )


def _stepped(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that one training step changes the weights and the loss, of one of four clients at least.

    A client's first batch may have no gradient by chance.
    """
    moved, model = False, model.to(subject.device)
    for tried, (name, train, _) in enumerate(subject.clients[:4], 1):
        looked_at["step"] = f"{tried} of {len(subject.clients)} clients, one batch each"
        now, ctx = copy.deepcopy(model).train(), subject.context(model, train)
        x, y = (part.to(subject.device) for part in train.take(_some(len(train), min(FEW, ctx.batch))))
        w, (before, reaches) = read_w(now), _loss(subject, now, x, y)
        if reaches:
            with isolated_random_state(3, subject.device):
                global_step(ctx, now)((x, y))
        after, _ = _loss(subject, now, x, y)
        moved = moved or not _same(w, read_w(now))
        if reaches and not math.isfinite(before):
            yield Finding(
                "error", f"{name}: the loss of its first batch is {before}, before any training; correct the loss"
            )
            return
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
            "loss: a training step changes no weight, the gradient is 0; do not detach outputs or loss, or set a "
            "larger training.rate",
        )


def _loss(subject: Subject, model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, bool]:
    """The loss of a batch, and whether it has a gradient."""
    with isolated_random_state(4, subject.device):  # the same dropout each time
        value = subject.loss(model(x.clone()), y)
        return float(value.detach()), value.requires_grad


@torch.no_grad()
def _paired(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that the loss and the metric compare each output with the target of the same sample.

    Outputs of shape (n, 1) and targets of shape (n,) broadcast to all n x n pairs. Then the mean does not depend on the
    order of the outputs, which is tested with random outputs.
    """
    chosen = [subject.clients[int(i)] for i in _some(len(subject.clients), 8)]
    looked_at["pairs"] = f"outputs in two orders, {len(chosen)} of {len(subject.clients)} clients"
    model = model.to(subject.device).eval()
    for name, train, _ in chosen:
        x, y = train.take(_some(len(train), 4 * FEW))
        y = y.to(subject.device)
        outputs = model(x.to(subject.device))
        if outputs.shape == y.shape or not (y.is_floating_point() or outputs[0].numel() == 1):
            continue
        shapes = f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(y.shape)}"
        fix = "give both one shape, such as y.reshape(-1, 1), or outputs.squeeze(-1) in the model"
        made_up = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(subject.device)
        for what, value in (("loss", subject.loss), ("metric", _mean_of(subject.metric))):
            if _broadcasts(value, made_up, y):
                yield Finding(
                    "error",
                    f"{name}, {what}: {shapes} broadcast, so that outputs are compared with targets of other samples; "
                    f"{fix}",
                )
                return


def _mean_of(metric: Metric) -> Callable[[Tensor, Tensor], float]:
    return lambda outputs, y: metric.value(metric.tally(outputs, y))


def _broadcasts(value: Callable[[Tensor, Tensor], Tensor | float], outputs: Tensor, y: Tensor) -> bool:
    """Whether a mean over samples does not depend on the order of the outputs, but depends on the targets."""
    turns = range(1, min(len(y), 2 * FEW))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            first, other = float(value(outputs, y)), float(value(outputs, y.max().expand(y.shape)))
            turned = [float(value(outputs.roll(turn, 0), y)) for turn in turns]
        except Exception:  # noqa: BLE001  # the user's function may need more than outputs of the right shape
            return False
    if any("Using a target size" in str(one.message) for one in told):
        return True  # torch's own losses warn of broadcasting
    if len(y) < FEW // 2 or math.isclose(first, other, rel_tol=1e-3):
        return False  # with few samples, or similar targets, the mean may be the same by chance
    return all(math.isclose(first, one, rel_tol=1e-5) for one in turned)


@torch.no_grad()
def _measured(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that the metric of each sample is a number: a single NaN makes the score of its client NaN.

    Samples for which the model's outputs are not finite are left out: the metric is not the cause there.
    """
    if isinstance(subject.metric, Accuracy | MacroF1):
        return  # they are never NaN
    until, seen, every = time.monotonic() + SECONDS / 4, 0, 0
    model = model.to(subject.device).eval()
    for client, (name, train, test) in enumerate(subject.clients):
        own = [("validation", subject.validation[client])] if subject.validation else []
        for kind, data in (("test", test), *own, ("training", train)):
            every += len(data)
            for rows in _some(len(data), ROWS // len(subject.clients) or 1).split(64):
                if seen and time.monotonic() > until:
                    break
                seen += len(rows)
                x, y = data.take(rows)
                outputs = model(x.to(subject.device))
                values = torch.as_tensor(subject.metric.per_sample(outputs, y.to(subject.device)))
                known = torch.isfinite(outputs).reshape(len(rows), -1).all(1)
                wrong = torch.isnan(values).reshape(len(rows), -1).any(1) & known
                if wrong.any():
                    yield Finding(
                        "error",
                        f"metric: it is NaN for {name}'s {kind} sample {int(rows[wrong][0])}, which would leave the "
                        "client without a score; return a number for each sample",
                    )
                    return
    looked_at["metric values"] = f"{seen:,} of {every:,} samples"


@torch.no_grad()
def _scored(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that the metric is higher for right predictions than for wrong ones."""
    chosen = [subject.clients[int(i)] for i in _some(len(subject.clients), 8)]
    targets = [test.take(_some(len(test), 64))[1] for _, _, test in chosen]
    y = torch.cat([one for one in targets if one.shape[1:] == targets[0].shape[1:]])
    x = chosen[0][2].take(torch.arange(1))[0].to(subject.device)
    made_up = _right_and_wrong(y, model.to(subject.device).eval()(x).shape[1:])
    if made_up is None:
        looked_at["metric"] = "not checked, outputs and targets are neither classes nor of one shape"
        return
    try:
        right, wrong = (subject.metric.value(subject.metric.tally(outputs, y)) for outputs in made_up)
    except Exception as error:  # noqa: BLE001  # the user's metric may need more than outputs of the right shape
        why = f"{type(error).__name__}: {one_line(str(error))}"
        looked_at["metric"] = f"not checked, it does not accept artificial outputs ({why})"
        return
    looked_at["metric"] = f"artificial right and wrong outputs for {len(y)} targets"
    if right < wrong:
        yield Finding(
            "error",
            f"metric: it is higher for wrong predictions ({wrong:.4g}) than for right ones ({right:.4g}), but higher "
            "has to be better; give its negative, metric=lambda outputs, y: -measure(outputs, y)",
        )
    elif right == wrong:
        yield Finding(
            "warning",
            f"metric: it has the same value, {right:.4g}, for right and wrong predictions of {len(y)} targets; check "
            "that it compares outputs with targets",
        )


def _right_and_wrong(y: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor] | None:
    """Outputs that predict `y`, and outputs that predict other targets; None for targets of an unknown form."""
    wanted = (len(y), *shape)
    if not y.is_floating_point() and y.shape == wanted[:-1] and wanted[-1] > 1:
        classes = wanted[-1]
        if int(y.min()) < 0 or int(y.max()) >= classes:
            return None
        return 5.0 * one_hot(y, classes).float(), 5.0 * one_hot((y + 1) % classes, classes).float()
    if y.numel() != math.prod(wanted):
        return None
    targets = y.to(torch.float32).reshape(wanted)
    if bool(((targets == 0) | (targets == 1)).all()):  # two classes: as logits, and as probabilities
        return 2 * targets - 1, 1 - 2 * targets
    return targets, targets + max(float(targets.std(correction=0)), 1.0)


# The data.


def _finite(subject: Subject, model: nn.Module, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that no input or target is NaN or infinite, except where the loss is finite: then the model handles it.

    Tensors are checked completely. Data sets are read sample by sample, for up to half of the time.
    """
    until, seen, every = time.monotonic() + SECONDS / 2, 0, 0
    whole: dict[int, bool] = {}  # by id of a tensor, which clients may share: whether it is finite
    for client, (name, train, test) in enumerate(subject.clients):
        own = [("validation", subject.validation[client])] if subject.validation else []
        for kind, data in (("training", train), *own, ("test", test)):
            every += len(data)
            if isinstance(data, Rows) and all(
                _all_finite(tensor, whole) for part in (data.x, data.y) for tensor in tensors_of(part)
            ):
                seen += len(data)
                continue
            for rows in _some(len(data), ROWS // len(subject.clients) or 1).split(64):
                if seen and time.monotonic() > until:
                    break
                seen += len(rows)
                x, y = data.take(rows)
                for what, value in (("input", x), ("target", y)):
                    place = _first_not_finite(value)
                    if place is None or _expected(subject, model, data, int(rows[place])):
                        continue
                    yield Finding(
                        "error",
                        f"{name}: the {what} of its {kind} sample {int(rows[place])} is NaN or infinite; correct the "
                        "value, or leave the sample out",
                    )
                    return
    looked_at["finite"] = f"{seen:,} of {every:,} samples"


def _all_finite(tensor: Tensor, known: dict[int, bool]) -> bool:
    if id(tensor) not in known:
        known[id(tensor)] = not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
    return known[id(tensor)]


def _first_not_finite(value: Tensor) -> int | None:
    """The first sample of a batch that holds a NaN or an infinity."""
    for tensor in tensors_of(value):
        if tensor.is_floating_point() and not (fine := torch.isfinite(tensor).reshape(len(tensor), -1).all(1)).all():
            return int((~fine).nonzero()[0])
    return None


def _expected(subject: Subject, model: nn.Module, data: Examples, row: int) -> bool:
    """Whether the loss of the sample is finite, because the model handles such values, for example with a mask."""
    x, y = data.take(torch.tensor([row, row]))
    value, _ = _loss(
        subject, copy.deepcopy(model).to(subject.device).eval(), x.to(subject.device), y.to(subject.device)
    )
    return math.isfinite(value)


def _read_twice(subject: Subject, until: float, looked_at: dict[str, str]) -> list[Finding]:
    """Check that two reads of the same samples give the same values."""
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
                    f"{_named(changed[part])}: reading the {kind} data changes them: each read gives other values; "
                    "let the dataset change a copy",
                )
            )
    if random[1]:
        found.append(
            Finding(
                "error",
                f"{_named(random[1])}: two reads of the test data differ, so that no score on them can be repeated; "
                "switch augmentation off in test data",
            )
        )
    if random[0]:
        found.append(
            Finding(
                "warning",
                f"{_named(random[0])}: two reads of the training data differ (augmentation?), so that a validation "
                "part of them is random too, samples shared between clients cannot be found, and a --task cannot be "
                "resumed",
            )
        )
    return found


def _changes_in_place(data: Examples) -> bool:
    """Whether a second read of a sample changes the tensor that the first read returned: both use the same memory."""
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
    """The hashes of a client's samples: of all of them, or of some, evenly spaced."""

    name: str
    train: Counter[int]
    test: Counter[int]
    whole: tuple[int, int]  # samples of both parts, hashed or not

    @property
    def telling(self) -> bool:
        """Whether the training samples differ so much that two draws of them cannot be equal by chance."""
        return len(self.train) >= 20 or (len(self.train) >= 5 and self.twice < 0.2 * self.train.total())

    @property
    def same(self) -> bool:
        return self.whole[0] == self.whole[1] and self.train == self.test and self.telling

    @property
    def trained_on(self) -> int:
        return sum(count for sample, count in self.test.items() if sample in self.train)

    @property
    def twice(self) -> int:
        """The number of training samples that occur more than once in the training data."""
        return sum(count for count in self.train.values() if count > 1)


def _shared_rows(subject: Subject, until: float, looked_at: dict[str, str]) -> list[Finding]:
    """Find samples that occur in both training and test data, or at several clients.

    Some data repeat: blank pictures, tables with few different rows, a refrain in a text. If training and test samples
    are draws of the same kind, a test sample is in the training data about as often as a training sample is there
    twice. Only clearly more than that is reported.
    """
    hashed = list(_hashed(subject, until))
    every = sum(len(train) + len(test) for _, train, test in subject.clients)
    read = sum(one.train.total() + one.test.total() for one in hashed)
    early = ", then the time limit was reached" if time.monotonic() > until else ""
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
    """The hashes computed before `until`, and the first few in any case."""
    for count, sample in enumerate(hashes):
        if count >= FEW and time.monotonic() > until:
            return
        yield sample


def _own_overlap(hashed: Sequence[_Hashed], part: str = "test", other: str = "training") -> list[Finding]:
    """`hashed` has the samples of `part` as its test samples, and those of `other` as its training samples."""
    fix = f"give {part} samples that it does not train on" if other == "training" else f"give other {part} samples"
    same = [one for one in hashed if one.same]
    if same:
        others = f"{len(same) - 1} more client{'s' if len(same) > 2 else ''}"
        more = f", and so are those of {others}" if len(same) > 1 else ""
        return [
            Finding(
                "error",
                f"{same[0].name}: its {part} data are its {other} data ({same[0].whole[1]} samples){more}; {fix}",
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
                    f"{one.name}: all {tested} of its {part} samples are also among its {other} samples; {fix}",
                )
            ]
    return [
        Finding(
            "warning",
            f"{part} samples are also among the same client's {other} samples: {_counted(overlap)}; "
            "scores on them are too high",
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
                f"clients {', '.join(shown[:-1])} and {shown[-1]} have the same training samples, which count once for "
                "each of these clients",
            )


def _other_overlap(hashed: Sequence[_Hashed]) -> list[Finding]:
    """Find test samples of a client that are among the training samples of other clients, but not among its own."""
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
            f"test samples are among the training samples of another client: {_counted(overlap)}; "
            "the shared model trains on them, a model trained alone does not",
        )
    ]


def _more_than_chance(overlap: Mapping[str, tuple[int, int]], hashed: Sequence[_Hashed], twice: int) -> bool:
    """Whether more test samples are shared than expected from the training samples that occur twice (`twice`).

    A training sample can equal n - 1 training samples, a test sample n of them: the factor n / (n - 1) corrects for it.
    """
    rate = (twice + 1) / (sum(one.train.total() for one in hashed) + 1)
    sizes = [(one.train.total(), one.test.total()) for one in hashed]
    expected = sum(tested * min(1.0, rate * n / max(1, n - 1)) for n, tested in sizes)
    return sum(shared for shared, _ in overlap.values()) > expected + 3 * math.sqrt(expected)


@final
@dataclass(frozen=True)
class _Agreement:
    """How often the nearest training sample has the same label, and how often it would with shuffled labels."""

    name: str
    samples: int
    hits: float
    chance: float  # the expected number of hits with shuffled labels

    @property
    def deviation(self) -> float:
        # One sample may be the nearest of several, so that hits are not independent: the variance is doubled.
        return math.sqrt(max(1.0, 2 * self.chance * (1 - self.chance / self.samples)))


def _labels(subject: Subject, until: float, looked_at: dict[str, str]) -> Iterator[Finding]:
    """Check that labels fit the samples: the nearest other sample has the same label more often than by chance.

    Only for targets that are classes and inputs that are numbers: tokens have no distance.
    """
    found: dict[str, list[_Agreement]] = {"training": [], "test": []}
    seen, most = 0, max(NEIGHBOURS, NEIGHBOURS * FEW_CLIENTS // len(subject.clients))
    for name, train, test in subject.clients:
        if seen and time.monotonic() > until:
            break
        seen += 1
        (x, y), (u, v) = (data.take(_some(len(data), most)) for data in (train, test))
        if has_several(x) or y.is_floating_point() or y.dim() != 1 or x.dtype in (torch.int32, torch.int64):
            looked_at["labels"] = "not checked, targets are not classes or inputs have no distance"
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
    looked_at["labels"] = (
        f"{seen} of {len(subject.clients)} clients, up to {most} samples each of training and test data"
    )
    for kind, clients in found.items():
        if (finding := _by_chance(kind, clients)) is not None:
            yield finding
            return  # test labels are compared with training labels, so they would be reported too


def _by_chance(kind: str, clients: Sequence[_Agreement]) -> Finding | None:
    """Find labels, of all clients or of single ones, that agree no more often than shuffled labels would.

    There must be enough samples to notice a relation.
    """
    samples = sum(one.samples for one in clients)
    if not samples:
        return None
    every = _Agreement("", samples, sum(one.hits for one in clients), sum(one.chance for one in clients))
    above = every.hits - every.chance
    if above < 2 * every.deviation and 0.25 * (samples - every.chance) > 6 * every.deviation:
        return Finding(
            "warning",
            f"{kind} labels: the nearest training sample has the same label in {every.hits / samples:.0%} of cases; "
            f"with shuffled labels it would in {every.chance / samples:.0%}; check that samples and labels are in the "
            "same order",
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
        f"{_named(alone)}: the {kind} labels are like shuffled ones, those of other clients are not; check that "
        "samples and labels are in the same order",
    )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _some(n: int, most: int) -> Tensor:
    """Up to `most` of n rows, evenly spaced."""
    return torch.arange(n) if n <= most else torch.arange(most) * n // most


def _same(one: Tensor, other: Tensor) -> bool:
    if has_several(one):
        return all(_same(*pair) for pair in zip(tensors_of(one), tensors_of(other), strict=True))
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point():
        return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(one, other)


def _named(names: Sequence[str]) -> str:
    """The first three names, and the number of the others."""
    more = f" and {len(names) - 3} more client{'s' if len(names) > 4 else ''}" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _counted(overlap: Mapping[str, tuple[int, int]]) -> str:
    worst = sorted(overlap.items(), key=lambda one: -one[1][0])
    return _named([f"{name} ({shared:,} of {tested:,})" for name, (shared, tested) in worst])
