"""What the parts of the package are to each other: the protocols that components implement, and the values that pass
between server and clients. Everything here stands below what implements or uses it.

Legend: P trainable parameters, F floats and I integers in buffers, n samples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from lindt.gains import PAIRS as PAIRS
from lindt.gains import GainReport as GainReport
from lindt.gains import Paired as Paired
from lindt.registry import components_in

Batch = tuple[Tensor, Tensor]


class Digest(Protocol):
    """A hash from hashlib."""

    def update(self, data: bytes, /) -> None: ...


class Examples(Protocol):
    """n samples with their labels, taken a batch at a time."""

    def __len__(self) -> int: ...
    def take(self, rows_B: Tensor) -> Batch: ...
    @property
    def labels(self) -> Tensor: ...


@final
@dataclass(frozen=True)
class Buffers:
    """What a model keeps besides its trainable weights."""

    floats_F: Tensor
    counts_I: Tensor

    @property
    def nbytes(self) -> int:
        return self.floats_F.nbytes + self.counts_I.nbytes


@components_in("lindt.plan.problem")
@runtime_checkable
class Metric(Protocol):
    """A performance V (Sec. 3.2): higher is better."""

    @property
    def percent(self) -> bool:
        """Whether people read it times 100."""
        ...

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor: ...
    def value(self, tally: Tensor) -> float: ...
    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        """One number a sample, for the paired test."""
        ...


@final
@dataclass(frozen=True)
class ClientTally:
    """What a client answers when it is asked how it fares: sums, no samples."""

    samples: int
    central: Tensor | None  # of the global model on this client's test data; None where there is no whole one
    local: Tensor  # of what the client predicts with
    private: Tensor | None  # of the model it trained alone
    wins: int = 0  # samples on which it is better off than alone
    losses: int = 0
    attack_chances: int = 0  # samples on which the backdoor wants another label
    attack_central: int = 0  # ... and gets it from the global model
    attack_local: int = 0


Statistic = Literal["delta", "clean", "spread", "median"]


@final
@dataclass(frozen=True)
class Divergence:
    """All that the server measures in a round; which of them is watched is the detector's `statistic`."""

    w_div: float  # Eq. 5
    delta: float  # Eq. 7
    clean: float  # Eq. 5 around the aggregate before noise: free of the noise's compression
    spread: float  # Eq. 5 of the clipped updates around their plain mean: zero for identical clients
    clipped: float  # the share of updates longer than S; above a tenth Delta has no limit of zero
    noise_norm: float
    median: float  # Delta with the median over clients in place of Eq. 5's mean: one far client does not move it
    # The mean over pairs of clients of the cosine of their clipped updates of the last layer (`weights.last_layer`).
    # Low is suspicious. None where fewer than two clients have an update of it that is not zero, or it is not known.
    cosine: float | None = None

    def watched(self, statistic: Statistic) -> float:
        value: float = getattr(self, statistic)
        return value


ClientId = int


@final
@dataclass(frozen=True)
class RecoveryState:
    """The flag and what decides it: `count` rounds above epsilon, `quiet` ones below, who was `treated`."""

    on: bool = False
    count: int = 0
    quiet: int = 0
    treated: frozenset[ClientId] = frozenset()
    detections: int = 0


VerdictState = Literal["too early", "undecided", "helps", "hurts"]


@final
@dataclass(frozen=True)
class Decision:
    """What one question is answered with, at the run's level alpha: does a first predictor beat a second one?"""

    state: VerdictState = "too early"
    since: int | None = None  # the round of the decision, where there is one
    gain: float | None = None  # the estimate now: the mean over clients of what each reported last
    error: float | None = None  # the standard error of `gain`, from the validation samples, each counted once
    clients: int = 0  # that the estimate rests on
    samples: int = 0  # of theirs, for validation
    needed: int | None = None  # validation samples that would decide it, if `gain` stays as it is


@final
@dataclass(frozen=True)
class DetectionState:
    """The answers of a test so far, and its own numbers, from which it goes on after a resume.

    `numbers` and `reports` are the test's memory: plain values, kept in the checkpoint.
    """

    verdict: Decision = field(default_factory=Decision)  # does federation help: w against P_i
    warning: int | None = None  # the round of the early warning, where there is one
    recovery: Decision | None = None  # what the clients predict with, against w; None before recovery
    recovered: Decision | None = None  # ... against P_i
    numbers: dict[str, float] = field(default_factory=dict)
    reports: dict[ClientId, tuple[int, GainReport]] = field(default_factory=dict)  # a client's last, with its round


@final
@dataclass(frozen=True)
class Evidence:
    """What a round showed. `seen` is None when no valid update came back."""

    round: int
    seen: Divergence | None
    answered: frozenset[ClientId]
    clients: int  # N
    rounds: int | None = None  # that are planned
    reports: Mapping[ClientId, GainReport] = field(default_factory=dict)  # of this round
    detection: DetectionState | None = None  # as judged after it


@components_in("lindt.server.detection")
class Detection(Protocol):
    """A test of whether the federation is negative, by what clients report of their gains."""

    @property
    def reports(self) -> bool:
        """Whether clients keep a validation part and report."""
        ...

    def begin(self) -> DetectionState | None: ...
    def judge(self, state: DetectionState | None, evidence: Evidence) -> DetectionState | None: ...


@components_in("lindt.server.recovery")
class Recovery(Protocol):
    """A policy for the flag."""

    def begin(self) -> RecoveryState: ...
    def judge(self, state: RecoveryState, evidence: Evidence) -> RecoveryState: ...


@components_in("lindt.server.recovery")
class Stop(Protocol):
    """A stopping rule (Sec. 5.3 and the last appendix), asked after every round of recovery."""

    def __call__(self, state: RecoveryState, clients: int) -> bool: ...


@components_in("lindt.server.aggregation")
class Aggregator(Protocol):
    def __call__(self, updates_KP: Tensor, sizes_K: Tensor) -> Tensor: ...


@runtime_checkable
class BoundedSensitivity(Protocol):
    """An aggregator whose L2 sensitivity under replace-one is known."""

    def sensitivity(self, clip: float, active: int) -> float: ...


@components_in("lindt.client.training")
class Penalty(Protocol):
    def __call__(self, shared: nn.Module, received_P: Tensor) -> Tensor | None:
        """A term of the loss of w_i, given the w^{r-1} it started from; None for none."""
        ...


Step = Callable[[Batch], None]
Predictor = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@final
@dataclass(frozen=True, eq=False)
class Context:
    """What a client has at hand in one round, whatever the method.

    It is frozen, since recorded steps keep its loss and penalty: `dataclasses.replace` makes one with others.
    """

    client: int
    round: int
    rate: float  # eta, decayed to this round
    max_norm: float  # of a gradient
    batch: int  # B
    train: Examples  # D_i
    loss: Loss
    penalty: Penalty
    received_P: Tensor  # w^{r-1}
    generator: torch.Generator
    device: torch.device
    notes: dict[str, float] = field(default_factory=dict)  # what the method wants logged of this client
    optimizer: Optimizer | None = None  # the user's own; it has a rate of its own, and does not clip
    validation: Examples | None = None  # V_i, on which nothing trains; None where the client holds nothing out
    metric: Metric | None = None
    private_model: Callable[[], nn.Module | None] | None = None  # P_i in evaluation mode; None where there is none

    def shared_loss(self, shared: nn.Module, output: Tensor, y: Tensor) -> Tensor:
        """The loss of w_i on a batch, with the method's penalty."""
        loss, penalty = self.loss(output, y), self.penalty(shared, self.received_P)
        return loss if penalty is None else loss + penalty


@components_in("lindt.client.adaptations")
class Adaptation(Protocol):
    """What a client does besides averaging."""

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        """v_i's first value, given the w just received; None where the method keeps nothing."""
        ...

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        """Called once a round in which the flag is on; what it returns is called once a batch."""
        ...

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        """How the client predicts; `private` is None where it has no v_i yet."""
        ...


@runtime_checkable
class ChecksModel(Protocol):
    """An adaptation that not every model suits."""

    def fits(self, model: nn.Module, x: Tensor) -> None:
        """Raise a PlanError before anything trains if this model will not do."""
        ...


@runtime_checkable
class ChoosesOnValidation(Protocol):
    """An adaptation whose predictor is chosen on V_i, so that it cannot be tested on V_i as it is."""

    def held_out_outputs(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Tensor:
        """What the client predicts for V_i, each sample by a choice that did not see it."""
        ...


@runtime_checkable
class SharesPart(Protocol):
    """An adaptation under which clients share a part of w while recovery is on, and keep the rest to themselves."""

    @property
    def has_global(self) -> bool:
        """Whether w is still a model that can be used as a whole."""
        ...

    @property
    def part_in_words(self) -> str:
        """What clients send; empty where it is all of w."""
        ...

    def private_names(self, names: Sequence[str]) -> frozenset[str]:
        """Of the names of w's parameters those that stay with the client."""
        ...


def private_names(adaptation: Adaptation, names: Sequence[str]) -> frozenset[str]:
    """Those of w's parameters that stay with the client while recovery is on; most adaptations have none."""
    return adaptation.private_names(names) if isinstance(adaptation, SharesPart) else frozenset()


def has_global(adaptation: Adaptation) -> bool:
    """Whether w is a model that can be used as a whole while recovery is on."""
    return adaptation.has_global if isinstance(adaptation, SharesPart) else True


Kind = Literal["train", "evaluate", "private"]


@final
@dataclass(frozen=True)
class Task:
    """What the server asks of one client. There is no field for v_i: it never travels.

    `run` keeps the v_i of different runs apart; `keep` is the round of the oldest checkpoint, up to which a
    client may forget what newer versions of v_i replace.
    """

    kind: Kind
    run: str
    client: int
    round: int
    w: Tensor
    buffers: Buffers
    recovering: bool  # Alg. 2, `flag`
    keep: int = 0


@final
@dataclass(frozen=True)
class Reply:
    """What comes back: w_i, n_i and a gain report from training, a tally and the method's notes from evaluating."""

    client: int
    round: int
    size: int
    w: Tensor | None = None
    buffers: Buffers | None = None
    tally: ClientTally | None = None
    notes: dict[str, float] | None = None
    report: GainReport | None = None
    fault: str | None = None  # why there is nothing to take, where a client failed or could not be understood


class Engine(Protocol):
    def available(self) -> Sequence[int]: ...
    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        """Replies, as they come or in the order asked. Where clients are far away, one that fails sends none."""
        ...

    def forget_after(self, round: int) -> None:
        """Before a resumed run goes on: drop every v_i written after `round`."""
        ...
