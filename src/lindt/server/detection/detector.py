"""Detector: detection for a federated loop that exists already. Feed it gains or weights, it answers with a verdict."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat, final

import numpy as np
import torch
from torch import Tensor

from lindt.errors import PlanError, UserError, require
from lindt.protocols import (
    Detection,
    DetectionState,
    Divergence,
    Evidence,
    GainReport,
    Paired,
    Statistic,
    VerdictState,
)
from lindt.server.detection.divergence import Counting, Delta, Rule, measure
from lindt.server.detection.gain import Gain
from lindt.server.updates import clipped_report, size_fault
from lindt.weights import NORM_STATISTICS, Array, Weights, as_tensor, flat

ClientName = Hashable  # of a client in a loop of one's own
# In [-1, 1]: the score of w on a client's held-out data, less that of its private model.
GainEntry = SupportsFloat | Paired | GainReport
Gains = Mapping[Any, GainEntry] | Sequence[GainEntry]
Samples = int | Mapping[Any, int] | Sequence[int]


@final
@dataclass(frozen=True)
class Verdict:
    """The detector's answer after a round.

    `w_div`, `delta` and `watched` are None where no weights were given. `state` and the fields after it are the answer
    of the test of gains; under the paper's rule `state` is None, and `negative` is the rule's alarm.
    """

    round: int
    w_div: float | None
    delta: float | None
    watched: float | None  # the statistic held against epsilon: delta, unless the detector was told otherwise
    count: int
    negative: bool  # "hurts", or the alarm of the paper's rule
    state: VerdictState | None = None
    since: int | None = None  # the round of the decision, where there is one
    gain: float | None = None  # the estimate now: the mean over clients of what each reported last
    error: float | None = None  # its standard error, each validation sample counted once
    clients: int = 0  # that the estimate rests on
    samples: int = 0  # of theirs, for validation
    needed: int | None = None  # validation samples that would decide it, if `gain` stays as it is
    warning: int | None = None  # the round of the early warning, where there is one


class Detector:
    """Detection for a loop that exists already: feed it each round's results, it answers with a verdict.

    By default it tests the gains that clients report, with no number to choose:

    >>> detector = Detector(rounds=100, clients=20)
    >>> verdict = detector.observe(gains={"ward 3": -0.04, "ward 7": 0.01}, samples=50)   # after every round
    >>> if verdict.negative: ...                                      # "hurts": tell the clients to recover

    A gain is the score of w on a client's held-out data less that of the model which the client trained alone. Neither
    model may train on these data, and nothing may be chosen by them.

    - `gains` maps a client's name to a float in [-1, 1], or to a `Paired` of the mean and the mean square of the
      differences d of the samples: `Paired(d.mean(), d.square().mean())`. For a float the largest possible mean square
      is assumed, and the test needs more samples. A `GainReport` says all that a client of `federate` reports.
    - `gains` may be a list without names. Then the detector cannot know that a client reports again: the estimate rests
      on the clients of the last round alone, and its error is larger.
    - `samples` is the number of held-out samples behind each gain: one number for all clients, or one for each in the
      form of `gains`. Without it a gain counts as one sample. A `GainReport` has its own.
    - Only a `GainReport` says how w does against a private model of equal age. Without it there is no early warning.
    - A number outside its bounds is clipped. An entry with NaN counts for nothing.

    `rounds` is the number of planned rounds: with it the test knows when to begin and when it looks for the last time.
    `clients` is the number of all clients, of which some report in a round. `detection` is another test of gains than
    `Gain()`. Weights may be given as well; then the verdict has w_div and Delta.

    With `epsilon` it is the paper's rule (Alg. 2, s8-s11), by the weights alone:

    >>> detector = Detector(epsilon=0.1, patience=250)
    >>> verdict = detector.observe([w_1, w_2, w_3], new_global)       # after every aggregation

    Weights are tensors, numpy arrays, lists of either, or state dicts; of a state dict BatchNorm's statistics
    and integer entries are no weights and are left out. Give `noise` in the same form where the server adds any.

    Tied weights, two names of a state dict for one tensor, count once. The tie has to show: in one state dict at
    least, of a client or the global one, both names are the same memory, and in all of them they are equal. Where
    every state dict is a copy (deserialised, or arrays) the tie is lost and the weights count twice: give lists
    without the second tensor, such as `list(model.parameters())`.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        patience: int | None = None,
        *,
        statistic: Statistic | None = None,
        counting: Counting | None = None,
        rounds: int | None = None,
        clients: int | None = None,
        detection: Detection | None = None,
    ) -> None:
        self.rule = paper_rule(epsilon, patience, statistic, counting, detection)
        self.detection: Detection = Delta() if self.rule else detection or Gain()
        require(rounds is None or rounds >= 1, "rounds", rounds, "the number of planned rounds is 1 or more")
        require(clients is None or clients >= 1, "clients", clients, "the number of all clients is 1 or more")
        self.rounds, self.clients = rounds, clients
        self.state: DetectionState | None = self.detection.begin()
        self.round = 0
        self.count = 0
        self.negative = False
        self._numbers: dict[ClientName, int] = {}  # of the clients that have reported

    def observe(
        self,
        clients: Sequence[Weights] | None = None,
        new_global: Weights | None = None,
        noise: Weights | None = None,
        *,
        gains: Gains | None = None,
        samples: Samples | None = None,
    ) -> Verdict:
        """One round. Under the test of gains `gains` is required and weights are optional, under the paper's rule the
        other way round. An empty `gains` is a round in which no client reported."""
        if self.rule is not None:
            return self._by_weights(self.rule, clients, new_global, noise, gains)
        if gains is None:
            raise UserError(
                "gains: none were given, and this detector tests the clients' gains; pass gains=[...], one number in "
                "[-1, 1] for each client that reports, or choose the paper's rule: Detector(epsilon=..., patience=...)"
            )
        seen = None
        if clients is not None or new_global is not None:
            seen = _seen(clients, new_global, noise)
        named = isinstance(gains, Mapping)
        reports = self._reports(gains, samples)
        if self.state is not None and not named:
            # Without names an earlier report may be of the same client: each sample counts once.
            self.state = replace(self.state, reports={})
        self.round += 1
        N = max(self.clients or 0, len(self._numbers), len(reports))
        evidence = Evidence(self.round, seen, frozenset(reports), N, self.rounds, reports)
        self.state = self.detection.judge(self.state, evidence)
        found = self.state or DetectionState()
        self.negative = found.verdict.state == "hurts"
        delta = None if seen is None else seen.delta
        return Verdict(
            self.round,
            None if seen is None else seen.w_div,
            delta,
            delta,
            0,
            self.negative,
            **vars(found.verdict),
            warning=found.warning,
        )

    def _by_weights(
        self,
        rule: Rule,
        clients: Sequence[Weights] | None,
        new_global: Weights | None,
        noise: Weights | None,
        gains: Gains | None,
    ) -> Verdict:
        if gains is not None:
            raise UserError("gains: the detector has an epsilon, by which weights decide; leave out one of the two")
        seen = _seen(clients, new_global, noise)
        watched = seen.watched(rule.statistic)
        self.round += 1
        self.count = rule.count(self.count, watched)
        self.negative = self.negative or rule.exceeded(self.count)
        return Verdict(self.round, seen.w_div, seen.delta, watched, self.count, self.negative)

    def _reports(self, gains: Gains, samples: Samples | None) -> dict[int, GainReport]:
        """By the client's number, clipped; an entry with NaN is left out."""
        if isinstance(gains, Mapping):
            entries = dict(gains)
            for name in entries:
                self._numbers.setdefault(name, len(self._numbers))
            numbers = self._numbers
        else:
            if isinstance(gains, str | float | int) or not isinstance(gains, Iterable):
                raise UserError(
                    f"gains: of type {type(gains).__name__}; give a list with one number for each client, or a dict"
                )
            entries = dict(enumerate(gains))
            numbers = {place: place for place in entries}
        found: dict[int, GainReport] = {}
        for name, entry in entries.items():
            report = clipped_report(_as_report(f"gains[{name!r}]", entry, _samples_of(name, entries, samples)))
            if report is not None:
                found[numbers[name]] = report
        return found


def paper_rule(
    epsilon: float | None,
    patience: int | None,
    statistic: Statistic | None,
    counting: Counting | None,
    detection: Detection | None,
) -> Rule | None:
    """The paper's rule where `epsilon` is given, else None: then the gains are tested."""
    if epsilon is None:
        for name, given in (("patience", patience), ("statistic", statistic), ("counting", counting)):
            if given is not None:
                raise PlanError(name, given, "belongs to the paper's rule: give epsilon as well, or leave it out")
        return None
    if detection is not None:
        raise UserError("detection: an epsilon was given too, which chooses the paper's rule; leave out one of the two")
    return Rule(float(epsilon), 250 if patience is None else patience, statistic or "delta", counting or "cumulative")


def _as_report(where: str, entry: object, samples: int) -> GainReport:
    """A gain as a report. Of a float the largest mean square is assumed; a difference of 0 stands for equal age."""
    if isinstance(entry, GainReport):
        return entry
    if isinstance(entry, Paired):
        return GainReport(samples, entry, Paired(0.0, 0.0))
    if isinstance(entry, str | bytes) or not hasattr(entry, "__float__"):
        raise UserError(f"{where}: of type {type(entry).__name__}; give a number in [-1, 1], a Paired or a GainReport")
    return GainReport(samples, Paired(float(entry), 1.0), Paired(0.0, 0.0))


def _samples_of(name: object, entries: Mapping[Any, object], samples: Samples | None) -> int:
    found: Any = samples
    if isinstance(samples, Mapping):
        found = samples.get(name)
    elif isinstance(samples, Sequence):
        found = dict(zip(entries, samples, strict=False)).get(name)
        if len(samples) != len(entries):
            raise UserError(f"samples: {len(samples)} given for {len(entries)} gains; give one for each")
    if found is None:
        if samples is not None and not isinstance(entries[name], GainReport):
            raise UserError(f"samples: there is none for client {name!r}; give one for each")
        return 1
    if fault := size_fault(int(found) if isinstance(found, np.integer) else found, "number of held-out samples"):
        raise UserError(f"samples: client {name!r}: {fault}")
    return int(found)


def _seen(clients: Sequence[Weights] | None, new_global: Weights | None, noise: Weights | None) -> Divergence:
    """The divergence of a round (Eq. 5 to 7) from whatever a framework calls weights."""
    if isinstance(clients, Mapping):
        raise UserError("clients: it is of type dict; give a list with the weights of each client")
    if clients is None or new_global is None:
        raise UserError("clients, new_global: give the weights of each client and those of the new global model")
    clients = list(clients)
    if len(clients) == 0:
        raise UserError("clients: no weights were given; skip the detector in a round without answers")
    tied = _tied([weights for weights in (new_global, *clients) if isinstance(weights, Mapping)])
    w_P = flat(new_global, tied)
    for index, client in enumerate(clients):
        _check_names(f"clients[{index}]", client, new_global)
    rows = [_fitting(f"clients[{index}]", client, w_P, tied) for index, client in enumerate(clients)]
    noise_P = torch.zeros_like(w_P) if noise is None else _fitting("noise", noise, w_P, tied)
    w_KP = torch.stack(rows)
    # Updates are not known here; the clients' own weights have the same spread around their mean, and no cosine.
    seen = measure(w_KP, w_P, noise_P, w_KP, clipped=0.0)
    if not math.isfinite(seen.delta):
        raise UserError("clients: a weight is NaN or infinite; drop that client's update before aggregating it")
    return seen


def _check_names(name: str, weights: Weights, new_global: Weights) -> None:
    """Two state dicts are the same weights only under the same names: with others the sums would match in length."""
    if isinstance(weights, Mapping) and isinstance(new_global, Mapping):
        theirs, ours = _shapes(weights), _shapes(new_global)
        odd = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        if odd:
            raise UserError(
                f"{name}: its {odd[0]!r} has shape {theirs.get(odd[0])}, in the global model {ours.get(odd[0])}; "
                "give state dicts of the same model"
            )


def _shapes(state: Mapping[str, Tensor | Array]) -> dict[str, tuple[int, ...]]:
    """Of what counts as weights in a state dict."""
    named = {name: part if isinstance(part, Tensor) else np.asarray(part) for name, part in state.items()}
    return {
        name: tuple(part.shape)
        for name, part in named.items()
        if not name.endswith(NORM_STATISTICS)
        and (part.is_floating_point() if isinstance(part, Tensor) else part.dtype.kind == "f")
    }


def _fitting(name: str, weights: Weights, w_P: Tensor, tied: Set[str]) -> Tensor:
    found = flat(weights, tied)
    if found.shape != w_P.shape:
        raise UserError(
            f"{name} has {found.numel()} weights but the global model has {w_P.numel()}; give both in the same form"
        )
    return found


def _tied(states: Sequence[Mapping[str, Tensor | Array]]) -> frozenset[str]:
    """The second names of tied weights: the same memory in one state dict, and equal in all."""
    pairs: dict[str, str] = {}
    for state in states:
        first: dict[object, str] = {}
        for name in sorted(state):
            tensor = state[name]
            if isinstance(tensor, Tensor) and tensor.numel() and not tensor.is_meta:
                place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                if first.setdefault(place, name) != name:
                    pairs.setdefault(name, first[place])
    return frozenset(name for name, twin in pairs.items() if all(_equal(state, name, twin) for state in states))


def _equal(state: Mapping[str, Tensor | Array], name: str, twin: str) -> bool:
    return name in state and twin in state and torch.equal(as_tensor(state[name]), as_tensor(state[twin]))
