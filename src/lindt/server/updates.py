"""Validation of the clients' replies. An invalid reply is refused with its client and a reason, and ends no run.

The rules are the same on every engine, and for a Flower app of the user's own (flower/replies.py). The functions named
`..._fault` return the reason in words, None where the rule is kept:

    sender  a client that was asked, in the round that was asked, once; the first valid reply counts
    w_i     one vector of P float32, all finite, at a distance of at most LONGEST from w^{r-1}
    n_i     a whole number from 1 to MOST_SAMPLES. The server cannot verify it: only WeightedMean and
            `scoring.weighting = "size"` use it, and under these one client may outweigh all others
    buffers of the model's shapes and types, floats within LONGEST, integers within MOST_COUNT; no variance below 0,
            and no buffer larger than MOST_TIMES that of the median client
    report  a gain report is clipped to its bounds; a report with NaN is dropped, and the update still counts. The
            report of a client that was not asked for it is dropped, and so are recovery's gains while recovery is off
    scores  sums that are finite and within LONGEST, an accuracy from 0 to 1, no more wins and losses than
            predictions; a client with invalid scores is left out of the round's scores

A finite update within LONGEST is used as it is, denormals too: clipping (`environment.privacy.S`) and the aggregator
bound how far it moves w. Float buffers are not clipped; `join_buffers` in server/aggregation.py joins them. Under a
plain mean a client moves them by up to MOST_TIMES / K of the median client's size.

torch is imported in the functions that take tensors: a Flower server uses the others without it.

Besides its weights a reply is sent as JSON values: `pack_reply` and `unpack_reply`, for a worker's socket and a Flower
message. A message of another form becomes a Reply with a `fault` in words.

Legend: K clients answering, P parameters, F floats in buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from lindt.errors import in_short, one_line
from lindt.gains import LONGEST as LONGEST
from lindt.gains import MOST_SAMPLES as MOST_SAMPLES
from lindt.gains import number, whole_number
from lindt.plan.metrics import Accuracy, MacroF1, MeanOf
from lindt.protocols import PAIRS, Buffers, ClientTally, GainReport, Metric, Paired, Reply, Task, has_global

if TYPE_CHECKING:  # the test of gains needs neither numpy nor torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from lindt.plan.plan import Plan
    from lindt.plan.problem import Problem

MOST_COUNT: Final = 2**53  # the largest integer in a buffer: a client that continues to count does not overflow
# The largest ratio of a client's float buffer to the median client's. Honest clients of a skewed federation differ by
# a factor below 10; data in units 10 times as large have 100 times the variance.
MOST_TIMES: Final = 1000.0
FEWEST_COMPARED: Final = 3  # clients: if two differ, it is not known which of them is honest


MOST_NOTES: Final = 200  # the most notes of a method in one reply
MOST_NUMBER: Final = 2**31  # the largest number of a round or a client
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
    """The first `wanted` valid updates w_i - w, sorted by client id, and the refused ones with their reasons.

    `float_buffers` has the name and size of each part of the buffers' floats; without it they are not compared.


    Returns the updates, n_i, the buffers and the ids of the clients whose update is used, the refusals, and the gain
    reports by client, as far as clients report.

    Each update is written into its final place, and there is no second K x P array: such arrays take most of the
    server's memory and time.
    """
    import torch

    rows = {client: row for row, client in enumerate(sorted(asked))}
    updates_KP = w.new_empty(len(rows), len(w))  # a row without a reply is never written, so it takes no memory
    taken: dict[int, _ValidUpdates] = {}
    refused: list[Refusal] = []
    for reply in replies:
        misplaced = sender_fault(reply.client, asked, taken.keys()) or _round_fault(reply, round)
        if misplaced is None and len(taken) == wanted:
            continue  # not needed: more clients were asked than needed, in case some do not answer
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
        if rows[i] > row:  # move up into the row of a client without a valid update
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
    """The valid replies to an evaluation, by client id. A reply with NaN would make the sums over all clients NaN."""
    found: dict[int, Reply] = {}
    for reply in replies:
        fault = sender_fault(reply.client, asked, found.keys()) or _round_fault(reply, round)
        fault = fault or size_fault(reply.size, "number of samples") or notes_fault(reply.notes or {})
        if fault is None and reply.tally is not None and tally_fault(reply.tally, metric) is None:
            found[reply.client] = reply
    return {i: found[i] for i in sorted(found)}


def sender_fault(sender: Sender, asked: Set[Sender], taken: Set[Sender]) -> str | None:
    """`taken` are the senders that have a valid reply already."""
    return "it was not asked, or replied twice" if sender not in asked or sender in taken else None


def size_fault(size: object, name: str, *, whole: bool = True) -> str | None:
    """`whole`: n_i must be an integer, as on lindt's engines; a Flower app may use any number as a weight."""
    number = type(size) is int if whole else isinstance(size, int | float)
    if number and 0 < size <= MOST_SAMPLES and (size >= 1 or not whole):  # type: ignore[operator]
        return None
    wanted = "a whole number from 1" if whole else "a number above 0, up"
    return f"its {name} is {in_short(size)}, not {wanted} to {MOST_SAMPLES}"


def length_fault(vector_P: Tensor, too_long: str) -> str | None:
    """Check an update or weights: one pass finds NaN, infinity and too large a norm. `too_long` is the text that is
    returned where all values are finite."""
    import torch

    if float(torch.linalg.vector_norm(vector_P)) <= LONGEST:
        return None
    return too_long if torch.isfinite(vector_P).all() else "NaN or infinity"


def _round_fault(reply: Reply, round: int) -> str | None:
    return None if reply.round == round else f"it is a reply to round {reply.round}, not to round {round}"


def _read(reply: Reply, w: Tensor, buffers: Buffers, update_P: Tensor) -> _ValidUpdates | str:
    """Write the update into `update_P`, or return the reason why it is refused."""
    import torch

    if reply.fault is not None:
        return reply.fault
    if fault := size_fault(reply.size, "number of samples"):
        return fault
    if reply.w is None or reply.w.numel() != w.numel():
        found = "no weights" if reply.w is None else f"{reply.w.numel()} weights"
        return f"it has {found}, the model {w.numel()}"
    if reply.w.shape != w.shape or reply.w.dtype != w.dtype:
        return f"its weights are {_kind(reply.w)}, those of the model {_kind(w)}"
    torch.sub(reply.w, w, out=update_P)
    if length_fault(update_P, "too long"):
        # The difference of two finite vectors may be infinite, so the weights themselves are checked.
        finite = torch.isfinite(reply.w).all()
        return f"the norm of its update is above {LONGEST:g}" if finite else "its weights hold NaN or infinity"
    if reply.buffers is None:
        return "it has no buffers"
    report = None if reply.report is None else clipped_report(reply.report)
    return _misfit(reply.buffers, buffers) or _ValidUpdates(reply.size, reply.buffers, report)


def clipped_report(report: GainReport) -> GainReport | None:
    """A report within its bounds, or None where it holds NaN or infinity: the client's update still counts."""
    pairs = {name: getattr(report, name) for name in PAIRS}
    numbers = [value for pair in pairs.values() if pair is not None for value in (pair.mean, pair.square)]
    numbers += [] if report.first_batch is None else [report.first_batch]
    if size_fault(report.samples, "number of validation samples") or not all(map(math.isfinite, numbers)):
        return None
    first = None if report.first_batch is None else max(-1.0, min(1.0, report.first_batch))
    clipped: dict[str, Any] = {name: _clipped(pair) for name, pair in pairs.items() if pair}
    return replace(report, first_batch=first, **clipped)


def asked_reports(reports: Mapping[int, GainReport], panel: Set[int], *, recovering: bool) -> dict[int, GainReport]:
    """The reports of the clients in `panel`, with recovery's gains only while recovery is on.

    Otherwise clients could answer a question that they were not asked, and decide it alone.
    """
    taken = {i: report for i, report in reports.items() if i in panel}
    return taken if recovering else {i: replace(r, adapted=None, adapted_private=None) for i, r in taken.items()}


def _clipped(pair: Paired) -> Paired:
    """d lies in [-1, 1], so the mean square lies between the square of the mean and 1.

    One below is raised to the square of the mean. A client gains nothing by it: it could have reported that number.
    """
    mean = max(-1.0, min(1.0, pair.mean))
    return Paired(mean, max(mean * mean, min(1.0, pair.square)))


def _misfit(theirs: Buffers, mine: Buffers) -> str | None:
    import torch

    pairs = ((theirs.floats_F, mine.floats_F), (theirs.counts_I, mine.counts_I))
    if any(their.shape != my.shape or their.dtype != my.dtype for their, my in pairs):
        return "its buffers do not fit the model"
    if not torch.isfinite(theirs.floats_F).all():
        return "its buffers hold NaN or infinity"
    if (theirs.floats_F.abs() > LONGEST).any():
        return f"its buffers hold a value above {LONGEST:g}"
    if ((theirs.counts_I > MOST_COUNT) | (theirs.counts_I < -MOST_COUNT)).any():
        return f"its buffers hold an integer above {MOST_COUNT}"
    return None


def _buffer_faults(
    taken: Mapping[int, _ValidUpdates], before: Buffers, float_buffers: Sequence[tuple[str, int]]
) -> dict[int, str]:
    import torch

    if not taken or not float_buffers:
        return {}
    names, sizes = [name for name, _ in float_buffers], [size for _, size in float_buffers]
    clients = sorted(taken)
    floats_KF = torch.stack([taken[i].buffers.floats_F for i in clients])
    parts = (part_KF.numpy() for part_KF in floats_KF.split(sizes, dim=1))
    befores = (part_F.numpy() for part_F in before.floats_F.split(sizes))
    faults = buffer_faults(dict(zip(names, parts, strict=True)), dict(zip(names, befores, strict=True)))
    return {clients[row]: fault for row, fault in faults.items()}


def buffer_faults(floats: Mapping[str, NDArray[Any]], before: Mapping[str, NDArray[Any]]) -> dict[int, str]:
    """The faults in the clients' buffers, by row. `floats` has K rows of each buffer, `before` the server's buffers.

    A buffer's size is its largest absolute value. It is compared with that of the median client, or with the server's
    where that is larger, so that clients which send tiny values do not get the others refused. A running mean is
    compared with the standard deviation too, as centred data have means near 0. Where all of these are 0, nothing is
    compared.
    """
    import numpy as np

    found: dict[int, str] = {}
    rows = {name: values_KF.reshape(len(values_KF), -1) for name, values_KF in floats.items() if values_KF.size}
    sizes = {name: np.abs(values_KF).max(1) for name, values_KF in rows.items()}
    scales = {name: _scale(name, sizes_K, before) for name, sizes_K in sizes.items()}
    for name, sizes_K in sizes.items():
        if name.endswith("running_var"):
            least_K = rows[name].min(1)
            for row in np.flatnonzero(least_K < 0).tolist():
                found.setdefault(
                    row, f"its buffer {name} holds {float(least_K[row]):.3g}, but a variance is never below 0"
                )
        scale = scales[name]
        if name.endswith("running_mean"):
            scale = max(scale, math.sqrt(scales.get(name.removesuffix("mean") + "var", 0.0)))
        if len(sizes_K) < FEWEST_COMPARED or not scale:
            continue
        for row in np.flatnonzero(sizes_K.astype(np.float64) > MOST_TIMES * scale).tolist():
            reached = f"its buffer {name} holds {float(sizes_K[row]):.3g}"
            found.setdefault(row, f"{reached}, more than {MOST_TIMES:g} times the median client's {scale:.3g}")
    return found


def _scale(name: str, sizes_K: NDArray[Any], before: Mapping[str, NDArray[Any]]) -> float:
    import numpy as np

    kept = before.get(name)
    own = float(np.abs(kept).max()) if kept is not None and kept.size else 0.0
    return max(float(np.sort(sizes_K)[(len(sizes_K) - 1) // 2]), own)  # of an even K the lower of the middle two


def _kind(values: Tensor) -> str:
    return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"


def tally_fault(tally: ClientTally, metric: Metric) -> str | None:
    """The fault in a client's sums where the metric cannot give such sums, or they cannot be added to others."""
    if fault := size_fault(tally.samples, "number of test samples"):
        return fault
    parts = [part for part in (tally.central, tally.local, tally.private) if part is not None]
    if not all(float(abs(part).max()) <= LONGEST and _can_be(metric, part) for part in parts):
        return "its tally holds sums that the metric cannot give"
    most = _predictions(tally, metric)
    counts = (tally.wins, tally.losses, tally.attack_chances, tally.attack_central, tally.attack_local)
    if min(counts) < 0 or max(tally.wins + tally.losses, tally.attack_chances) > most:
        return "its tally counts more predictions than there are"
    if max(tally.attack_central, tally.attack_local) > tally.attack_chances:
        return "its tally counts more successful attacks than samples to attack"
    return None


def _can_be(metric: Metric, sums: Tensor) -> bool:
    """Whether the metric can give such sums: [1, -2] has a value, but added to another client's [1, 2] it has none."""
    if isinstance(metric, Accuracy) and not 0 <= float(sums[0]) <= float(sums[1]):
        return False
    if isinstance(metric, MacroF1) and not bool((sums >= 0).all()):
        return False
    if isinstance(metric, MeanOf) and not float(sums[1]) >= 1:
        return False
    least, most = (0.0, 1.0) if isinstance(metric, Accuracy | MacroF1) else (-LONGEST, LONGEST)
    return least <= metric.value(sums) <= most  # the user's own Metric has no other rule that is known here


def _predictions(tally: ClientTally, metric: Metric) -> float:
    """The number of predictions that wins, losses and attacks count: a sample may have several, one per character."""
    if isinstance(metric, Accuracy):
        return float(tally.local[1])
    if isinstance(metric, MacroF1):
        return float(tally.local.sum())
    return tally.samples if isinstance(metric, MeanOf) else MOST_SAMPLES


def notes_fault(notes: Mapping[str, float]) -> str | None:
    """The fault in a method's notes. NaN and infinity are allowed: the mean over clients leaves them out."""
    if len(notes) > MOST_NOTES:
        return f"it has more than {MOST_NOTES} notes"
    if not all(isinstance(name, str) and len(name) <= 100 and name.isprintable() for name in notes):
        return "a name of its notes is not printable text of at most 100 characters"
    if any(LONGEST < abs(value) < float("inf") for value in notes.values()):
        return f"a value of its notes is above {LONGEST:g}"
    return None


@final
@dataclass(frozen=True)
class ScoreFormat:
    """What the server knows in advance of a valid reply to an evaluation."""

    metric: Metric
    shape: tuple[int, ...]  # of the metric's tally
    alone: Set[int]  # the clients that have a private model
    has_global: bool = True  # whether the method has a whole global model while recovery is on

    @classmethod
    def of(cls, plan: Plan, problem: Problem, model: nn.Module | None = None) -> ScoreFormat:
        """The shape of a tally is found by scoring two samples with an untrained model: `model`, or one built here."""
        import torch

        from lindt.client.training import forward_all
        from lindt.data.examples import subset
        from lindt.plan.plan import counted_clients
        from lindt.seeds import seeded
        from lindt.weights import first_model

        metric, test = problem.metric_for(plan), problem.data[0][1]
        few = subset(test, torch.arange(min(len(test), 2)))
        with torch.no_grad(), seeded(0, torch.device("cpu")):
            model = first_model(problem, plan) if model is None else model
            outputs = forward_all(model.eval(), few, torch.device("cpu"))
            shape = tuple(metric.tally(outputs, few.labels).shape)
        alone = counted_clients(plan, range(len(problem.data))) if plan.alone.private else frozenset()
        return cls(metric, shape, alone, has_global(plan.method.adaptation))


def pack_reply(reply: Reply) -> dict[str, Any]:
    """A reply without its weights, as JSON values."""
    tally = None if reply.tally is None else pack_tally(reply.tally)
    found = {"client": reply.client, "round": reply.round, "size": reply.size, "fault": reply.fault, "tally": tally,
             "notes": reply.notes}  # fmt: skip
    return found if reply.report is None else found | {"report": asdict(reply.report)}


def unpack_reply(
    found: object, task: Task, expected: ScoreFormat, weights: Callable[[], tuple[Tensor, Buffers]]
) -> Reply:
    """The reply to `task`, with a `fault` where it is not valid. `weights` reads w_i, after training only."""
    import torch

    try:
        if not isinstance(found, dict):
            raise ValueError("it is not a table")
        if isinstance(found.get("fault"), str):
            return failed(task, f"failed: {found['fault']}")
        client, round = (whole_number(found.get(name), name, MOST_NUMBER) for name in ("client", "round"))
        size = whole_number(found.get("size"), "size", MOST_SAMPLES)
        if size < 1 or (client, round) != (task.client, task.round):
            raise ValueError(
                f"it is of client {client}, round {round}, with {size} samples, but client {task.client} was asked in "
                f"round {task.round}"
            )
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
            sums_of=partial(torch.tensor, dtype=torch.float64),
        )
        return Reply(client, round, size, tally=tally, notes=unpack_notes(found.get("notes")))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        return failed(task, f"its reply is not valid: {error}")


def failed(task: Task, reason: str) -> Reply:
    return Reply(task.client, task.round, 0, fault=one_line(reason))


def pack_tally(tally: ClientTally) -> dict[str, Any]:
    return {name: v.flatten().tolist() if name in SUMS and v is not None else v for name, v in vars(tally).items()}


def _array(values: list[float]) -> Any:
    import numpy as np

    return np.array(values)


def unpack_tally(
    found: object,
    metric: Metric,
    shape: tuple[int, ...],
    *,
    private: bool | None,
    central: bool = True,
    sums_of: Callable[[list[float]], Any] = _array,
) -> ClientTally:
    """A tally that can be added to the other clients', or ValueError. `private`: whether it must hold a private score;
    None where both will do. `central`: whether it must hold one of the global model. `sums_of` makes an array of its
    numbers: numpy's by default, or a tensor, which a user's own metric expects."""
    if not isinstance(found, dict) or found.keys() != ClientTally.__dataclass_fields__.keys():
        raise ValueError("tally is not a table with the fields of a ClientTally")
    if private is not None and private != (found["private"] is not None):
        raise ValueError("tally.private is missing, or was not asked for")
    sums = {name: None if found[name] is None else sums_of(_sums(found[name], shape)).reshape(shape) for name in SUMS}
    local = sums["local"]
    if local is None or central != (sums["central"] is not None):
        raise ValueError("tally.local or tally.central is missing, or was not asked for")
    samples = whole_number(found["samples"], "samples", MOST_SAMPLES)
    counts = {name: whole_number(found[name], name, MOST_SAMPLES) for name in COUNTS}
    tally = ClientTally(samples, sums["central"], local, sums["private"], **counts)
    if fault := tally_fault(tally, metric):
        raise ValueError(fault)
    return tally


def unpack_report(found: object) -> GainReport:
    """A gain report, or ValueError. `clipped_report` clips its numbers to their bounds."""
    if not isinstance(found, dict) or not found.keys() <= GainReport.__dataclass_fields__.keys():
        raise ValueError("report is not a table with the fields of a GainReport")
    private, equal_age = _paired(found.get("private")), _paired(found.get("equal_age"))
    if private is None or equal_age is None:
        raise ValueError("report.private or report.equal_age is missing")
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
        raise ValueError("a gain of the report is not a table of mean and square")
    return Paired(number(found["mean"], "mean"), number(found["square"], "square"))


def _report_or_none(found: object) -> GainReport | None:
    """The report, or None where it is missing or not valid: the update still counts."""
    try:
        return None if found is None else unpack_report(found)
    except ValueError:
        return None


def _sums(found: object, shape: tuple[int, ...]) -> list[float]:
    length = math.prod(shape)
    if not isinstance(found, list) or len(found) != length:
        raise ValueError(f"a score of the tally is not a list of {length} numbers")
    return [number(value, "a sum") for value in found]


def unpack_notes(found: object) -> dict[str, float]:
    """A method's notes, or ValueError. NaN and infinity are allowed: the server leaves such notes out of its means."""
    notes = {} if found is None else found
    if not isinstance(notes, dict) or not all(type(value) in (int, float) for value in notes.values()):
        raise ValueError("notes is not a table of numbers")
    if fault := notes_fault(notes):
        raise ValueError(fault)
    return {name: float(value) for name, value in notes.items()}
