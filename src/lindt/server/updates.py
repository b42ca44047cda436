"""What the server takes of what comes back: each answer is valid, or refused by name and reason. None ends a run.

The rules are the same on every engine, and for a Flower app of the user's own (flower/replies.py). The functions named
`..._fault` return the reason in words, None where the rule is kept:

    who     a client that was asked, in the round that was asked, once; the first good answer counts
    w_i     one vector of P float32, all finite, no farther than LONGEST from w^{r-1}
    n_i     a whole number from 1 to MOST_SAMPLES. It is a claim: only WeightedMean and `scoring.weighting = "size"`
            listen to it, and under these one client may outweigh all others
    buffers of the model's shapes and types, floats within LONGEST, integers within MOST_COUNT; no variance below 0,
            and no buffer that reaches more than MOST_TIMES what the median client's does
    report  a gain report is clipped to its bounds; one with NaN is dropped, and the update still counts. A client that
            was not asked for a report has none, and none tells of recovery in a round without it
    scores  sums that are finite and within LONGEST, an accuracy from 0 to 1, no more wins and losses than
            predictions; a client that sends others is missing from the round's scores

A finite update within LONGEST is taken as it is, denormals too: how far it then moves w is bounded by clipping
(`environment.privacy.S`) and by the aggregator. Float buffers are not clipped; `join_buffers` in server/aggregation.py
joins them. Under a plain mean a client moves them by up to MOST_TIMES / K of the median client's size.

A reply travels as JSON values, besides its weights: `pack_reply` and `unpack_reply`, for a worker's socket and a Flower
message. One of another form becomes a Reply with a `fault` in words.

Legend: K clients answering, P parameters, F floats in buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor, nn

from lindt.client.training import forward_all
from lindt.data.examples import subset
from lindt.errors import in_short, one_line
from lindt.gains import LONGEST as LONGEST
from lindt.gains import MOST_SAMPLES as MOST_SAMPLES
from lindt.gains import number, whole_number
from lindt.plan.plan import Plan, counted_clients
from lindt.plan.problem import Accuracy, MacroF1, MeanOf, Problem
from lindt.protocols import PAIRS, Buffers, ClientTally, GainReport, Metric, Paired, Reply, Task, has_global
from lindt.weights import first_model

MOST_COUNT: Final = 2**53  # of an integer in a buffer: a client that counts on from there does not overflow
# Of the median client's size, for a buffer of floats. Honest clients of a skewed federation differ by less than 10;
# data in units 10 times as large have 100 times the variance.
MOST_TIMES: Final = 1000.0
FEWEST_COMPARED: Final = 3  # clients: of two that differ, either may be the honest one


MOST_NOTES: Final = 200  # of a method, in one reply
MOST_NUMBER: Final = 2**31  # of a round or a client
# The sums and the counts of a tally.
SUMS: Final = ("central", "local", "private")
COUNTS: Final = ("wins", "losses", "attack_chances", "attack_central", "attack_local")


Sender = TypeVar("Sender")


@final
@dataclass(frozen=True)
class Refusal:
    """An update that the server did not take."""

    client: int
    reason: str


@final
@dataclass(frozen=True)
class _ValidUpdates:
    size: int
    buffers: Buffers
    report: GainReport | None


def collect_updates(
    replies: Iterable[Reply],
    asked: set[int],
    round: int,
    w: Tensor,
    buffers: Buffers,
    wanted: int,
    float_buffers: Sequence[tuple[str, int]] = (),
) -> tuple[Tensor, Tensor, list[Buffers], list[int], tuple[Refusal, ...], dict[int, GainReport]]:
    """The first `wanted` valid updates w_i - w, by client id and not by arrival; the others are refused by name.

    `float_buffers` has the name and size of each part of the buffers' floats; without it they are not compared.
    The third of what is returned are the buffers of each client whose update was taken, the last their gain reports,
    where they report.

    Each is written where it stays, and no K x P of weights beside them: the server's memory and time are in such
    arrays.
    """
    rows = {client: row for row, client in enumerate(sorted(asked))}
    updates_KP = w.new_empty(len(rows), len(w))  # a row that nobody answers for takes no memory
    taken: dict[int, _ValidUpdates] = {}
    refused: list[Refusal] = []
    for reply in replies:
        misplaced = sender_fault(reply.client, asked, taken.keys()) or _round_fault(reply, round)
        if misplaced is None and len(taken) == wanted:
            continue  # too late: it was asked in case others would not answer
        found = misplaced or _read(reply, w, buffers, updates_KP[rows[reply.client]])
        if isinstance(found, _ValidUpdates):
            taken[reply.client] = found
        else:
            refused.append(Refusal(reply.client, found))
    for client, fault in _buffer_faults(taken, buffers, float_buffers).items():
        del taken[client]
        refused.append(Refusal(client, fault))
    answered = sorted(taken)
    sizes_K = torch.tensor([taken[i].size for i in answered])
    for row, i in enumerate(answered):
        if rows[i] > row:  # move up, to where one was missing
            updates_KP[row].copy_(updates_KP[rows[i]])
    return (
        updates_KP[: len(answered)],
        sizes_K,
        [taken[i].buffers for i in answered],
        answered,
        tuple(sorted(refused, key=lambda refusal: refusal.client)),
        {i: report for i in answered if (report := taken[i].report) is not None},
    )


def collect_scores(replies: Iterable[Reply], asked: set[int], round: int, metric: Metric) -> dict[int, Reply]:
    """The answers to an evaluation that can be added up, by client id; one with NaN would spoil everyone's scores."""
    found: dict[int, Reply] = {}
    for reply in replies:
        fault = sender_fault(reply.client, asked, found.keys()) or _round_fault(reply, round)
        fault = fault or size_fault(reply.size, "number of samples") or notes_fault(reply.notes or {})
        if fault is None and reply.tally is not None and tally_fault(reply.tally, metric) is None:
            found[reply.client] = reply
    return {i: found[i] for i in sorted(found)}


def sender_fault(sender: Sender, asked: Set[Sender], taken: Set[Sender]) -> str | None:
    """`taken` are the senders whose answer was taken already."""
    return "was not asked, or answered twice" if sender not in asked or sender in taken else None


def size_fault(size: object, name: str, *, whole: bool = True) -> str | None:
    """`whole`: n_i must be an integer, as it is on our own engines; a Flower app may weigh by any number."""
    number = type(size) is int if whole else isinstance(size, int | float)
    if number and 0 < size <= MOST_SAMPLES and (size >= 1 or not whole):  # type: ignore[operator]
        return None
    wanted = "a whole number from 1" if whole else "a number above 0 and up"
    return f"its {name} is {in_short(size)}, not {wanted} to {MOST_SAMPLES}"


def length_fault(vector_P: Tensor, too_long: str) -> str | None:
    """Of an update, or of weights: one pass finds NaN, infinity and too much of anything. `too_long` is what to say
    where all of it is finite."""
    if float(torch.linalg.vector_norm(vector_P)) <= LONGEST:
        return None
    return too_long if torch.isfinite(vector_P).all() else "NaN or infinity"


def _round_fault(reply: Reply, round: int) -> str | None:
    return None if reply.round == round else f"answers round {reply.round}"


def _read(reply: Reply, w: Tensor, buffers: Buffers, update_P: Tensor) -> _ValidUpdates | str:
    """Writes the update, or says in words why it cannot be taken."""
    if reply.fault is not None:
        return reply.fault
    if fault := size_fault(reply.size, "number of samples"):
        return fault
    if reply.w is None or reply.w.numel() != w.numel():
        found = "no weights" if reply.w is None else f"{reply.w.numel()} weights"
        return f"{found} where the model has {w.numel()}"
    if reply.w.shape != w.shape or reply.w.dtype != w.dtype:
        return f"weights as {_kind(reply.w)} where the model has {_kind(w)}"
    torch.sub(reply.w, w, out=update_P)
    if length_fault(update_P, "too long"):
        # The difference of two finite vectors may be infinite: ask the weights themselves.
        finite = torch.isfinite(reply.w).all()
        return f"its update is longer than {LONGEST:g}" if finite else "NaN or infinity among the weights"
    if reply.buffers is None:
        return "there are no buffers"
    report = None if reply.report is None else clipped_report(reply.report)
    return _misfit(reply.buffers, buffers) or _ValidUpdates(reply.size, reply.buffers, report)


def clipped_report(report: GainReport) -> GainReport | None:
    """A report within its bounds, or None where a number of it is none: the client's update still counts."""
    pairs = {name: getattr(report, name) for name in PAIRS}
    numbers = [value for pair in pairs.values() if pair is not None for value in (pair.mean, pair.square)]
    numbers += [] if report.first_batch is None else [report.first_batch]
    if size_fault(report.samples, "number of validation samples") or not all(map(math.isfinite, numbers)):
        return None
    first = None if report.first_batch is None else max(-1.0, min(1.0, report.first_batch))
    clipped: dict[str, Any] = {name: _clipped(pair) for name, pair in pairs.items() if pair}
    return replace(report, first_batch=first, **clipped)


def asked_reports(reports: Mapping[int, GainReport], panel: Set[int], *, recovering: bool) -> dict[int, GainReport]:
    """Of the reports what was asked for: those of the panel; what clients predict with while recovery is on only.

    Else clients that nobody asked would answer a question alone, and decide it.
    """
    taken = {i: report for i, report in reports.items() if i in panel}
    return taken if recovering else {i: replace(r, adapted=None, adapted_private=None) for i, r in taken.items()}


def _clipped(pair: Paired) -> Paired:
    """d lies in [-1, 1], so the mean square lies between the square of the mean and 1."""
    mean = max(-1.0, min(1.0, pair.mean))
    return Paired(mean, max(mean * mean, min(1.0, pair.square)))


def _misfit(theirs: Buffers, mine: Buffers) -> str | None:
    pairs = ((theirs.floats_F, mine.floats_F), (theirs.counts_I, mine.counts_I))
    if any(their.shape != my.shape or their.dtype != my.dtype for their, my in pairs):
        return "its buffers do not fit the model"
    if not torch.isfinite(theirs.floats_F).all():
        return "NaN or infinity among the buffers"
    if (theirs.floats_F.abs() > LONGEST).any():
        return f"a buffer holds more than {LONGEST:g}"
    if ((theirs.counts_I > MOST_COUNT) | (theirs.counts_I < -MOST_COUNT)).any():
        return f"a buffer counts beyond {MOST_COUNT}"
    return None


def _buffer_faults(
    taken: Mapping[int, _ValidUpdates], before: Buffers, float_buffers: Sequence[tuple[str, int]]
) -> dict[int, str]:
    if not taken or not float_buffers:
        return {}
    names, sizes = [name for name, _ in float_buffers], [size for _, size in float_buffers]
    clients = sorted(taken)
    floats_KF = torch.stack([taken[i].buffers.floats_F for i in clients])
    parts, befores = floats_KF.split(sizes, dim=1), before.floats_F.split(sizes)
    faults = buffer_faults(dict(zip(names, parts, strict=True)), dict(zip(names, befores, strict=True)))
    return {clients[row]: fault for row, fault in faults.items()}


def buffer_faults(floats: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[int, str]:
    """What is wrong with the buffers of some clients, by row. `floats` has K rows of each, `before` the server's.

    A buffer's size is its largest absolute value. It is held against that of the median client, or of the server's own
    where that is larger: a client that sends tiny values makes nobody else's too large. A running mean is held against
    the standard deviation too, as centred data have means near 0. Where all of these are 0 there is no scale.
    """
    found: dict[int, str] = {}
    sizes = {name: values_KF.flatten(1).abs().amax(1) for name, values_KF in floats.items() if values_KF.numel()}
    scales = {name: _scale(name, sizes_K, before) for name, sizes_K in sizes.items()}
    for name, sizes_K in sizes.items():
        if name.endswith("running_var"):
            least_K = floats[name].flatten(1).amin(1)
            for row in (least_K < 0).nonzero().flatten().tolist():
                found.setdefault(
                    row, f"its buffer {name} holds {float(least_K[row]):.3g}, and a variance is not below 0"
                )
        scale = scales[name]
        if name.endswith("running_mean"):
            scale = max(scale, math.sqrt(scales.get(name.removesuffix("mean") + "var", 0.0)))
        if len(sizes_K) < FEWEST_COMPARED or not scale:
            continue
        for row in (sizes_K.double() > MOST_TIMES * scale).nonzero().flatten().tolist():
            reached = f"its buffer {name} reaches {float(sizes_K[row]):.3g}"
            found.setdefault(row, f"{reached}, more than {MOST_TIMES:g} times the median client's {scale:.3g}")
    return found


def _scale(name: str, sizes_K: Tensor, before: Mapping[str, Tensor]) -> float:
    kept = before.get(name)
    own = float(kept.abs().max()) if kept is not None and kept.numel() else 0.0
    return max(float(sizes_K.median()), own)  # of an even K the lower of the middle two


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def tally_fault(tally: ClientTally, metric: Metric) -> str | None:
    """Whether a client's sums can be those of such a metric, and can be added to the other clients'."""
    if fault := size_fault(tally.samples, "number of test samples"):
        return fault
    parts = [part for part in (tally.central, tally.local, tally.private) if part is not None]
    if not all(float(part.abs().max()) <= LONGEST and _can_be(metric, part) for part in parts):
        return "a tally of no value"
    most = _predictions(tally, metric)
    counts = (tally.wins, tally.losses, tally.attack_chances, tally.attack_central, tally.attack_local)
    if min(counts) < 0 or max(tally.wins + tally.losses, tally.attack_chances) > most:
        return "a tally that counts more samples than there are"
    if max(tally.attack_central, tally.attack_local) > tally.attack_chances:
        return "a tally of more successful attacks than chances"
    return None


def _can_be(metric: Metric, sums: Tensor) -> bool:
    """By itself [1, -2] has a value; with another client's [1, 2] it leaves the federation none."""
    if isinstance(metric, Accuracy) and not 0 <= float(sums[0]) <= float(sums[1]):
        return False
    if isinstance(metric, MacroF1) and not bool((sums >= 0).all()):
        return False
    if isinstance(metric, MeanOf) and not float(sums[1]) >= 1:
        return False
    least, most = (0.0, 1.0) if isinstance(metric, Accuracy | MacroF1) else (-LONGEST, LONGEST)
    return least <= metric.value(sums) <= most  # of a user's own Metric only it knows more


def _predictions(tally: ClientTally, metric: Metric) -> float:
    """How many predictions wins, losses and attacks are counted over: a sample may have several, one a character."""
    if isinstance(metric, Accuracy):
        return float(tally.local[1])
    if isinstance(metric, MacroF1):
        return float(tally.local.sum())
    return tally.samples if isinstance(metric, MeanOf) else MOST_SAMPLES


def notes_fault(notes: Mapping[str, float]) -> str | None:
    """NaN and infinity are no fault: the mean over clients leaves them out."""
    if len(notes) > MOST_NOTES:
        return f"more than {MOST_NOTES} notes"
    if not all(isinstance(name, str) and len(name) <= 100 and name.isprintable() for name in notes):
        return "a note's name is no name"
    if any(LONGEST < abs(value) < float("inf") for value in notes.values()):
        return f"a note of more than {LONGEST:g}"
    return None


@final
@dataclass(frozen=True)
class ScoreFormat:
    """What the server knows of a good answer to an evaluation beforehand."""

    metric: Metric
    shape: tuple[int, ...]  # of the metric's tally
    alone: frozenset[int]  # the clients that have a private model
    has_global: bool = True  # whether w can be used as a whole while recovery is on

    @classmethod
    def of(cls, plan: Plan, problem: Problem, model: nn.Module | None = None) -> ScoreFormat:
        """The shape of a tally is found by scoring two samples with an untrained model: `model`, or one built here."""
        metric, test = problem.metric_for(plan), problem.data[0][1]
        few = subset(test, torch.arange(min(len(test), 2)))
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model = first_model(problem, plan) if model is None else model
            outputs = forward_all(model.eval(), few, torch.device("cpu"))
            shape = tuple(metric.tally(outputs, few.labels).shape)
        alone = counted_clients(plan, range(len(problem.data))) if plan.alone.private else frozenset()
        return cls(metric, shape, alone, has_global(plan.method.adaptation))


def pack_reply(reply: Reply) -> dict[str, Any]:
    """All of a reply but its weights, as JSON values."""
    tally = None if reply.tally is None else pack_tally(reply.tally)
    found = {"client": reply.client, "round": reply.round, "size": reply.size, "fault": reply.fault, "tally": tally,
             "notes": reply.notes}  # fmt: skip
    return found if reply.report is None else found | {"report": asdict(reply.report)}


def unpack_reply(
    found: object, task: Task, expected: ScoreFormat, weights: Callable[[], tuple[Tensor, Buffers]]
) -> Reply:
    """The answer to `task`, with a `fault` where it is no valid one. `weights` reads w_i, after training only."""
    try:
        if not isinstance(found, dict):
            raise ValueError("it is no reply")
        if isinstance(found.get("fault"), str):
            return failed(task, f"failed: {found['fault']}")
        client, round = (whole_number(found.get(name), name, MOST_NUMBER) for name in ("client", "round"))
        size = whole_number(found.get("size"), "size", MOST_SAMPLES)
        if size < 1 or (client, round) != (task.client, task.round):
            raise ValueError(f"client {client}, round {round}, {size} samples")
        if task.kind == "private":
            return Reply(client, round, size, notes=unpack_notes(found.get("notes")))
        if task.kind == "train":
            return Reply(client, round, size, *weights(), report=_report_or_none(found.get("report")))
        tally = unpack_tally(
            found.get("tally"),
            expected.metric,
            expected.shape,
            private=client in expected.alone,
            central=expected.has_global or not task.recovering,
        )
        return Reply(client, round, size, tally=tally, notes=unpack_notes(found.get("notes")))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        return failed(task, f"sent what is no answer: {error}")


def failed(task: Task, reason: str) -> Reply:
    return Reply(task.client, task.round, 0, fault=one_line(reason))


def pack_tally(tally: ClientTally) -> dict[str, Any]:
    return {name: v.flatten().tolist() if isinstance(v, Tensor) else v for name, v in vars(tally).items()}


def unpack_tally(
    found: object, metric: Metric, shape: tuple[int, ...], *, private: bool | None, central: bool = True
) -> ClientTally:
    """A tally that adds up with the other clients', or ValueError. `private`: whether it must hold a private score;
    None where both will do. `central`: whether it must hold one of the global model."""
    if not isinstance(found, dict) or found.keys() != ClientTally.__dataclass_fields__.keys():
        raise ValueError("no tally")
    if private is not None and private != (found["private"] is not None):
        raise ValueError("a private score that is not there, or was not asked for")
    sums = {name: None if found[name] is None else _sums(found[name], shape) for name in SUMS}
    local = sums["local"]
    if local is None or central != (sums["central"] is not None):
        raise ValueError("a score is missing, or was not asked for")
    samples = whole_number(found["samples"], "samples", MOST_SAMPLES)
    counts = {name: whole_number(found[name], name, MOST_SAMPLES) for name in COUNTS}
    tally = ClientTally(samples, sums["central"], local, sums["private"], **counts)
    if fault := tally_fault(tally, metric):
        raise ValueError(fault)
    return tally


def unpack_report(found: object) -> GainReport:
    """A gain report, or ValueError. `clipped_report` takes its numbers to their bounds."""
    if not isinstance(found, dict) or not found.keys() <= GainReport.__dataclass_fields__.keys():
        raise ValueError("no gain report")
    private, equal_age = _paired(found.get("private")), _paired(found.get("equal_age"))
    if private is None or equal_age is None:
        raise ValueError("a gain report without a gain")
    first = found.get("first_batch")
    return GainReport(
        whole_number(found.get("samples"), "samples", MOST_SAMPLES),
        private,
        equal_age,
        _paired(found.get("adapted")),
        _paired(found.get("adapted_private")),
        None if first is None else number(first, "first_batch"),
    )


def _paired(found: object) -> Paired | None:
    if found is None:
        return None
    if not isinstance(found, dict) or found.keys() != {"mean", "square"}:
        raise ValueError("no mean and square of a difference")
    return Paired(number(found["mean"], "mean"), number(found["square"], "square"))


def _report_or_none(found: object) -> GainReport | None:
    """An update counts without its report, as it does where a client has none."""
    try:
        return None if found is None else unpack_report(found)
    except ValueError:
        return None


def _sums(found: object, shape: tuple[int, ...]) -> Tensor:
    length = torch.Size(shape).numel()
    if not isinstance(found, list) or len(found) != length:
        raise ValueError(f"a tally is {length} numbers")
    return torch.tensor([number(value, "a sum") for value in found], dtype=torch.float64).reshape(shape)


def unpack_notes(found: object) -> dict[str, float]:
    """A method's notes, or ValueError. NaN and infinity pass: the server leaves such notes out of its means."""
    notes = {} if found is None else found
    if not isinstance(notes, dict) or not all(type(value) in (int, float) for value in notes.values()):
        raise ValueError("no notes")
    if fault := notes_fault(notes):
        raise ValueError(fault)
    return {name: float(value) for name, value in notes.items()}
