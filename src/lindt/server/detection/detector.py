"""Detector: detection for a federated loop of the user's own. It takes gains or weights and returns a verdict."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, SupportsFloat, final

from lindt.errors import PlanError, UserError, in_short, naming_extras, require
from lindt.protocols import (
    NORM_STATISTICS,
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

if TYPE_CHECKING:  # imported where weights are given: the test of gains needs no torch
    from torch import Tensor

    from lindt.weights import Array, Weights

ClientName = Hashable  # the name of a client in the user's loop
# In [-1, 1]: the score of w on a client's held-out data, less that of its private model.
GainEntry = SupportsFloat | Paired | GainReport
Gains = Mapping[Any, GainEntry] | Sequence[GainEntry]
Samples = int | Mapping[Any, int] | Sequence[int]
_ROUNDING = 1e-6  # of means that were computed in single precision, relative


class GainWarning(UserWarning):
    """Gains were given in another unit, or are NaN."""


@final
@dataclass(frozen=True)
class Verdict:
    """The detector's answer after a round.

    `w_div`, `delta` and `watched` are None where no weights were given. `state` and the fields after it are the answer
    of the test of gains; under the paper's rule `state` is None, and `negative` is the rule's alarm.

    Examples:
        >>> import lindt
        >>> verdict = lindt.Detector(rounds=100, clients=2).observe(gains=[0.1, 0.2], samples=50)
        >>> verdict.round, verdict.state, verdict.clients, verdict.samples
        (1, 'too early', 2, 100)
    """

    round: int  # counted by the detector, from 1
    w_div: float | None  # Eq. 5: the mean distance of the clients' weights from the new global ones
    delta: float | None  # Eq. 7: w_div less the length of the noise
    watched: float | None  # the statistic compared with epsilon: delta, unless `statistic` was given
    count: int  # rounds above epsilon; 0 under the test of gains
    negative: bool  # "hurts", or the alarm of the paper's rule
    state: VerdictState | None = None  # too early, undecided, helps or hurts
    since: int | None = None  # the round of the decision; None without a decision
    gain: float | None = None  # the present estimate: the mean over clients of each client's last report
    error: float | None = None  # its standard error, each validation sample counted once
    clients: int = 0  # the number of clients in the estimate
    samples: int = 0  # the number of their validation samples
    needed: int | None = None  # the number of validation samples that would decide it, if `gain` does not change
    warning: int | None = None  # the round of the early warning; None without a warning


class Detector:
    """Detection for a federated loop of your own: give it the results of each round, it returns a verdict.

    By default it tests the gains that clients report, with no number to choose. A gain is the score of w on a client's
    held-out data less that of the model which the client trained alone. Neither model may train on these data, and
    they may not be used to choose anything, such as the best round.

    With `epsilon` it is the paper's rule (Alg. 2, s8-s11), which uses the weights only. Weights are tensors, numpy
    arrays, lists of either, or state dicts. Of a state dict, BatchNorm's statistics and integer entries are not weights
    and are left out.

    Tied weights, two names of a state dict for one tensor, count once. A tie is recognised where both names share
    memory in at least one state dict, of a client or the global one, and are equal in all of them. Where every state
    dict is a copy (deserialised, or arrays) the tie is lost and the weights count twice: give lists without the second
    tensor, such as `list(model.parameters())`.

    Args:
        epsilon: Chooses the paper's rule: the threshold of Delta. Without it the gains are tested.
        patience: For the paper's rule: the alarm is raised after more than this many rounds above epsilon. Default 250.
        statistic: For the paper's rule: the number to compare with epsilon: `delta`, `clean`, `spread` or `median`.
        counting: For the paper's rule: count all rounds above epsilon (`cumulative`), or `consecutive` ones.
        rounds: The number of planned rounds. The test begins after a quarter of them, in round 5 at the earliest
            (without this number in round 20), and needs two rounds. Its last look is at the last of them.
        clients: The number of all clients, of which some report in a round.
        detection: Another test of gains than `Gain()`.

    Raises:
        UserError: An argument is wrong, or cannot be combined with another.

    Examples:
        The test of gains: three clients report in each of twenty rounds.

        >>> import lindt
        >>> detector = lindt.Detector(rounds=20, clients=3)
        >>> for r in range(20):
        ...     verdict = detector.observe(gains={"ward 3": -0.3, "ward 7": -0.2, "ward 9": -0.4}, samples=200)
        >>> verdict.state, verdict.negative, round(verdict.gain, 2)
        ('hurts', True, -0.3)

        The paper's rule: Delta is above 0.1 in two rounds, which is more than `patience`.

        >>> import torch
        >>> detector = lindt.Detector(epsilon=0.1, patience=1)
        >>> for r in range(2):
        ...     verdict = detector.observe([torch.zeros(2), torch.ones(2)], torch.full((2,), 0.5))
        >>> verdict.count, verdict.negative
        (2, True)
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
        self._warned = False  # whether it has warned of gains that look like percentage points

    def observe(
        self,
        clients: Sequence[Weights] | None = None,
        new_global: Weights | None = None,
        noise: Weights | None = None,
        *,
        gains: Gains | None = None,
        samples: Samples | None = None,
    ) -> Verdict:
        """Judge one round.

        The test of gains needs `gains`, and weights are optional. The paper's rule needs weights, and takes no gains.

        Args:
            clients: The weights of each client that answered.
            new_global: The weights of the new global model.
            noise: The noise that the server added to it, in the same form, where it adds any.
            gains: By client name a float in [-1, 1], or a `Paired` of the mean and the mean square of the differences d
                of the samples: `Paired(d.mean(), d.square().mean())`. A `Paired` that no differences have is refused,
                such as a variance in place of the mean square. For a float the largest possible mean square is
                assumed, and the test needs more samples. A `GainReport` holds all that a client of `federate` reports;
                the early warning needs it. A list without names is allowed, too: then the detector does not know which
                clients report again, the estimate uses the clients of the last round only, and its error is larger. An
                empty `gains` is a round in which no client reported. A float outside [-1, 1] is clipped, and so are the
                numbers of a `GainReport`, which may come from a client that lies; an entry with NaN is left out.
            samples: The number of held-out samples behind each gain: one number for all clients, or one for each in
                the form of `gains`. Without it a gain counts as one sample. A `GainReport` has its own.

        Returns:
            The verdict after this round.

        Raises:
            UserError: An argument is wrong, and the round is not counted: the call can be repeated.
        """
        _refuse_modules(clients, new_global, noise)
        if self.rule is not None:
            return self._by_weights(self.rule, clients, new_global, noise, gains)
        if gains is None:
            raise UserError(
                "gains: they are missing, and this detector tests the clients' gains; pass gains=[...], one number in "
                "[-1, 1] for each client that reports, or choose the paper's rule: Detector(epsilon=..., patience=...)"
            )
        seen = None
        if clients is not None or new_global is not None:
            seen = _seen(clients, new_global, noise)
        named = isinstance(gains, Mapping)
        reports = self._reports(gains, samples)
        if self.state is not None and not named:
            # Without names an earlier report may be of the same client, and each sample may count only once.
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
            raise UserError("gains: with an epsilon the detector uses weights only; leave out gains or epsilon")
        seen = _seen(clients, new_global, noise)
        watched = seen.watched(rule.statistic)
        self.round += 1
        self.count = rule.count(self.count, watched)
        self.negative = self.negative or rule.exceeded(self.count)
        return Verdict(self.round, seen.w_div, seen.delta, watched, self.count, self.negative)

    def _reports(self, gains: Gains, samples: Samples | None) -> dict[int, GainReport]:
        """The reports by the client's number, clipped; an entry with NaN is left out."""
        if isinstance(gains, Mapping):
            entries = dict(gains)
            for name in entries:
                self._numbers.setdefault(name, len(self._numbers))
            numbers = self._numbers
        else:
            if isinstance(gains, str | float | int) or not isinstance(gains, Iterable):
                raise UserError(
                    f"gains: it is of type {type(gains).__name__}; give a list with one number per client, or a dict"
                )
            entries = dict(enumerate(gains))
            numbers = {place: place for place in entries}
        read = {
            name: _as_report(f"gains[{name!r}]", entry, _samples_of(name, entries, samples), noisy=self._noisy)
            for name, entry in entries.items()
        }
        self._warn_of_units(list(read.values()))
        clipped = {numbers[name]: clipped_report(report) for name, report in read.items()}
        return {number: report for number, report in clipped.items() if report is not None}

    @property
    def _noisy(self) -> bool:
        """Whether clients add noise to their numbers, which may then leave their bounds."""
        return bool(getattr(self.detection, "noise", False))

    def _warn_of_units(self, reports: Sequence[GainReport]) -> None:
        """Warn once where most gains of a round lie outside [-1, 1] or are NaN. A few may come from attackers."""
        if self._warned or self._noisy:
            return
        outside = sum(not abs(report.private.mean) <= 1 for report in reports)  # NaN too
        if 2 * outside > len(reports):
            self._warned = True
            warnings.warn(
                f"gains: {outside} of {len(reports)} are not in [-1, 1]; they are clipped, and NaN is left out. Give "
                "gains as fractions: 0.05 for five points of accuracy",
                GainWarning,
                stacklevel=4,
            )


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
                raise PlanError(name, given, "only the paper's rule uses it: give epsilon as well, or leave it out")
        return None
    if detection is not None:
        raise UserError("detection: an epsilon was given too, which chooses the paper's rule; leave out one of the two")
    return Rule(float(epsilon), 250 if patience is None else patience, statistic or "delta", counting or "cumulative")


def _as_report(where: str, entry: object, samples: int, *, noisy: bool) -> GainReport:
    """A gain as a report. For a float the largest mean square is assumed; the gain against equal age is set to 0."""
    if isinstance(entry, GainReport):
        return entry
    if isinstance(entry, Paired):
        return GainReport(samples, entry if noisy else _possible(where, entry), Paired(0.0, 0.0))
    if isinstance(entry, str | bytes) or not hasattr(entry, "__float__"):
        raise UserError(
            f"{where}: it is of type {type(entry).__name__}; give a number in [-1, 1], a Paired or a GainReport"
        )
    return GainReport(samples, Paired(float(entry), 1.0), Paired(0.0, 0.0))


def _possible(where: str, pair: Paired) -> Paired:
    """The pair, or UserError where no differences in [-1, 1] have this mean and this mean square.

    With a variance in place of the mean square the error of the gain would be too small, and the verdict too sure.
    """
    try:
        mean, square = float(pair.mean), float(pair.square)
    except (TypeError, ValueError):
        raise UserError(f"{where}: {in_short(pair)} does not hold two numbers; give those of the samples") from None
    if not (math.isfinite(mean) and math.isfinite(square)):
        return pair  # the client is left out
    if max(abs(mean), square) > 1 + _ROUNDING:
        raise UserError(
            f"{where}: Paired({mean:g}, {square:g}) is not in [-1, 1]; give the differences of the samples as "
            "fractions, 0.05 for five points of accuracy, and only the sign of each where a metric has no bounds"
        )
    if square < mean**2 * (1 - _ROUNDING) - 1e-12:
        raise UserError(
            f"{where}: Paired({mean:g}, {square:g}) has a second number below mean ** 2 = {mean**2:g}; give the mean "
            "of squares, Paired(d.mean(), d.square().mean()), which is at least that, and not the variance"
        )
    return Paired(mean, square)


def _samples_of(name: object, entries: Mapping[Any, object], samples: Samples | None) -> int:
    found: Any = samples
    if isinstance(samples, Mapping):
        found = samples.get(name)
    elif isinstance(samples, Sequence):
        found = dict(zip(entries, samples, strict=False)).get(name)
        if len(samples) != len(entries):
            raise UserError(f"samples: it has {len(samples)} numbers for {len(entries)} gains; give one for each")
    if found is None:
        if samples is not None and not isinstance(entries[name], GainReport):
            raise UserError(f"samples: client {name!r} is missing; give one number for each client")
        return 1
    whole = isinstance(found, Integral) and not isinstance(found, bool)  # numpy's integers, too
    if fault := size_fault(int(found) if whole else found, "number of held-out samples"):
        raise UserError(f"samples: client {name!r}: {fault}")
    return int(found)


def _refuse_modules(clients: object, new_global: object, noise: object) -> None:
    """Refuse modules in both kinds of detection, before other arguments are checked."""
    listed = clients if isinstance(clients, list | tuple) else [clients]
    named = [(f"clients[{index}]", one) for index, one in enumerate(listed)]
    for name, given in (*named, ("new_global", new_global), ("noise", noise)):
        if "torch" in sys.modules and isinstance(given, sys.modules["torch"].nn.Module):
            raise UserError(
                f"{name}: it is a module ({type(given).__name__}); give its weights, model.state_dict(), or test the "
                "clients' gains: observe(gains={client: gain})"
            )


def _seen(clients: Sequence[Weights] | None, new_global: Weights | None, noise: Weights | None) -> Divergence:
    """The divergence of a round (Eq. 5 to 7), from weights in any of the accepted forms."""
    if isinstance(clients, Mapping):
        raise UserError("clients: it is of type dict; give a list with the weights of each client")
    if clients is None or new_global is None:
        raise UserError("clients, new_global: give the weights of each client and those of the new global model")
    clients = list(clients)
    if len(clients) == 0:
        raise UserError("clients: the list is empty; do not call observe in a round without replies")
    with naming_extras():
        import torch

        from lindt.server.aggregation import ClippedUpdates
        from lindt.weights import flat
    tied = _tied([weights for weights in (new_global, *clients) if isinstance(weights, Mapping)])
    w_P = flat(new_global, tied)
    for index, client in enumerate(clients):
        _check_names(f"clients[{index}]", client, new_global)
    rows = [_fitting(f"clients[{index}]", client, w_P, tied) for index, client in enumerate(clients)]
    noise_P = torch.zeros_like(w_P) if noise is None else _fitting("noise", noise, w_P, tied)
    w_KP = torch.stack(rows)
    # Updates are not known here. The clients' weights have the same spread around their mean; there is no cosine.
    seen = measure(ClippedUpdates(w_KP), w_P, noise_P, clipped=0.0)
    if not math.isfinite(seen.delta):
        raise UserError("clients: a weight is NaN or infinite; drop that client's update before aggregating it")
    return seen


def _check_names(name: str, weights: Weights, new_global: Weights) -> None:
    """Check that two state dicts have the same names and shapes: otherwise different weights would be compared."""
    if isinstance(weights, Mapping) and isinstance(new_global, Mapping):
        theirs, ours = _shapes(weights), _shapes(new_global)
        odd = sorted(n for n in theirs.keys() | ours.keys() if theirs.get(n) != ours.get(n))
        if odd:
            raise UserError(
                f"{name}: {odd[0]!r} has shape {theirs.get(odd[0])}, in the global model {ours.get(odd[0])}; "
                "give state dicts of the same model"
            )


def _shapes(state: Mapping[str, Tensor | Array]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights in a state dict, by name."""
    import numpy as np
    from torch import Tensor

    named = {name: part if isinstance(part, Tensor) else np.asarray(part) for name, part in state.items()}
    return {
        name: tuple(part.shape)
        for name, part in named.items()
        if not name.endswith(NORM_STATISTICS)
        and (part.is_floating_point() if isinstance(part, Tensor) else part.dtype.kind == "f")
    }


def _fitting(name: str, weights: Weights, w_P: Tensor, tied: Set[str]) -> Tensor:
    from lindt.weights import flat

    found = flat(weights, tied)
    if found.shape != w_P.shape:
        raise UserError(
            f"{name} has {found.numel()} weights but the global model has {w_P.numel()}; give both in the same form"
        )
    return found


def _tied(states: Sequence[Mapping[str, Tensor | Array]]) -> frozenset[str]:
    """The second names of tied weights: both names share memory in one state dict, and are equal in all."""
    from torch import Tensor

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
    import torch

    from lindt.weights import as_tensor

    return name in state and twin in state and torch.equal(as_tensor(state[name]), as_tensor(state[twin]))
