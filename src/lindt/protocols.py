"""The protocols that components implement, and the values that server and clients exchange. This module imports none of
the modules that implement or use them.

Legend: P trainable parameters, F floats and I integers in buffers, n samples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, TypeAlias, final, runtime_checkable

from lindt.errors import UserError
from lindt.gains import PAIRS as PAIRS
from lindt.gains import GainReport as GainReport
from lindt.gains import Paired as Paired
from lindt.registry import components_in

if TYPE_CHECKING:  # a Flower server and the readers of runs work without torch
    import torch
    from torch import Tensor, nn

# Statistics of BatchNorm: measured on data, not trained, so not a part of w.
NORM_STATISTICS: Final = ("running_mean", "running_var")


@final
class Inputs:
    """Several inputs of each of n samples: by name, or by position where names are 0, 1, ..."""

    def __init__(self, values: Mapping[str | int, Tensor]) -> None:
        sizes = {len(value) for value in values.values()}
        if len(sizes) != 1:
            raise UserError(f"the inputs {list(values)} have {sorted(sizes)} samples; give the same number of each")
        self.values = dict(values)

    @property
    def args(self) -> tuple[Tensor, ...]:
        return tuple(value for name, value in self.values.items() if isinstance(name, int))

    @property
    def kwargs(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.values.items() if isinstance(name, str)}

    def __len__(self) -> int:
        return len(next(iter(self.values.values())))

    def __getitem__(self, rows: Any) -> Self:
        return self._each(lambda value: value[rows])

    def __iter__(self) -> Iterator[Self]:
        return (self[row] for row in range(len(self)))

    def index_select(self, dim: int, rows: Tensor) -> Self:
        return self._each(lambda value: value.index_select(dim, rows))

    def split(self, sizes: Any) -> list[Self]:
        pieces = {name: value.split(sizes) for name, value in self.values.items()}
        count = len(next(iter(pieces.values())))
        return [type(self)({name: found[i] for name, found in pieces.items()}) for i in range(count)]

    def to(self, device: torch.device) -> Self:
        return self._each(lambda value: value.to(device))

    def clone(self) -> Self:
        return self._each(lambda value: value.clone())

    @property
    def device(self) -> torch.device:
        return next(iter(self.values.values())).device

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.values.values())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        return type(self)({name: change(value) for name, value in self.values.items()})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch.cat joins batches; no other function of torch is defined for several inputs."""
        import torch

        if func is not torch.cat:
            raise UserError(f"torch.{func.__name__} takes one tensor, and samples have several inputs here")
        pieces: Sequence[Inputs] = args[0]
        return cls({name: torch.cat([piece.values[name] for piece in pieces]) for name in pieces[0].values})


def has_several(x: object) -> bool:
    """Whether samples have several inputs."""
    return isinstance(x, Inputs)


def tensors_of(part: Tensor) -> list[Tensor]:
    """The tensors of a part of a batch: one, or one for each input."""
    return list(part.values.values()) if isinstance(part, Inputs) else [part]  # type: ignore[unreachable]


Batch: TypeAlias = "tuple[Tensor, Tensor]"  # x and y; x may be `Inputs` in place of a tensor


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
    """The buffers of a model, such as BatchNorm's statistics."""

    floats_F: Tensor
    counts_I: Tensor

    @property
    def nbytes(self) -> int:
        return self.floats_F.nbytes + self.counts_I.nbytes


@components_in("lindt.plan.metrics")
@runtime_checkable
class Metric(Protocol):
    """A performance V (Sec. 3.2): higher is better."""

    @property
    def percent(self) -> bool:
        """Whether it is shown in percent."""
        ...

    def tally(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor: ...
    def value(self, tally: Tensor) -> float: ...
    def per_sample(self, outputs_nC: Tensor, y_n: Tensor) -> Tensor:
        """One number per sample, for the paired test."""
        ...


@final
@dataclass(frozen=True)
class ClientTally:
    """A client's scores on its test data, as sums over samples."""

    samples: int
    central: Tensor | None  # of the global model; None where there is no whole global model
    local: Tensor  # of the model that the client predicts with
    private: Tensor | None  # of the model that it trained alone
    wins: int = 0  # samples on which `local` is better than `private`
    losses: int = 0
    attack_chances: int = 0  # samples for which the backdoor wants another label
    attack_central: int = 0  # samples of these for which the global model predicts that label
    attack_local: int = 0


Statistic = Literal["delta", "clean", "spread", "median"]


@final
@dataclass(frozen=True)
class Divergence:
    """All that the server measures in a round. The rule's `statistic` chooses the number to compare with epsilon."""

    w_div: float  # Eq. 5
    delta: float  # Eq. 7
    clean: float  # Eq. 5 around the aggregate before noise: the noise does not change it
    spread: float  # Eq. 5 of the clipped updates around their plain mean: zero for identical clients
    clipped: float  # the share of updates with a norm above S; above a tenth Delta does not fall to zero
    noise_norm: float
    median: float  # Delta with the median over clients in place of the mean of Eq. 5
    # The mean over pairs of clients of the cosine of their clipped updates of the last layer (`weights.last_layer`).
    # Low values indicate NFL. None where it is not known, or fewer than two of these updates are not zero.
    cosine: float | None = None

    def watched(self, statistic: Statistic) -> float:
        value: float = getattr(self, statistic)
        return value


ClientId = int
MANY: Final = 100_000  # clients; in a larger federation nothing lists all of them, and v_i are stored in shards


@final
@dataclass(frozen=True)
class RecoveryState:
    """The flag, and what decides it: `count` rounds above epsilon, `quiet` rounds below, the clients `treated`."""

    on: bool = False
    count: int = 0
    quiet: int = 0
    treated: frozenset[ClientId] = frozenset()
    detections: int = 0


VerdictState = Literal["too early", "undecided", "helps", "hurts"]


@final
@dataclass(frozen=True)
class Decision:
    """The answer to one question, at the run's level alpha: whether a first predictor is better than a second one."""

    state: VerdictState = "too early"
    since: int | None = None  # the round of the decision; None without a decision
    gain: float | None = None  # the present estimate: the mean over clients of each client's last report
    error: float | None = None  # the standard error of `gain`, from the validation samples, each counted once
    clients: int = 0  # the number of clients in the estimate
    samples: int = 0  # the number of their validation samples
    needed: int | None = None  # the number of validation samples that would decide it, if `gain` does not change


@final
@dataclass(frozen=True)
class DetectionState:
    """The answers of a test so far, and the numbers that it needs to continue.

    `numbers` and `reports` are plain values, stored in the checkpoint.
    """

    verdict: Decision = field(default_factory=Decision)  # w against P_i: whether federation helps
    warning: int | None = None  # the round of the early warning; None without a warning
    recovery: Decision | None = None  # the models that clients predict with, against w; None before recovery
    recovered: Decision | None = None  # the models that clients predict with, against P_i; None before recovery
    numbers: dict[str, float] = field(default_factory=dict)
    reports: dict[ClientId, tuple[int, GainReport]] = field(
        default_factory=dict
    )  # each client's last report, with its round


@final
@dataclass(frozen=True)
class Evidence:
    """The measurements of a round. `seen` is None when no valid update came back."""

    round: int
    seen: Divergence | None
    answered: frozenset[ClientId]
    clients: int  # N
    rounds: int | None = None  # the number of planned rounds
    reports: Mapping[ClientId, GainReport] = field(default_factory=dict)  # the reports of this round
    detection: DetectionState | None = None  # the state of the test after this round


@components_in("lindt.server.detection")
class Detection(Protocol):
    """A test of whether the federation is negative, from the gains that clients report."""

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
    """A stopping rule (Sec. 5.3 and the last appendix), called after every round of recovery."""

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
        """A term of the loss of w_i, given the received w^{r-1}; None for no term."""
        ...


Step: TypeAlias = "Callable[[Batch], None]"
Predictor: TypeAlias = "Callable[[Tensor], Tensor]"
Loss: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
Optimizer: TypeAlias = "Callable[[list[nn.Parameter]], torch.optim.Optimizer]"
Schedule: TypeAlias = "Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]"


@components_in("lindt.client.training")
class LocalOptimizer(Protocol):
    """The optimizer of the clients' steps in a plan, with its settings. The rate is the plan's training.rate."""

    @property
    def plain(self) -> bool:
        """Whether it is SGD without momentum and decay: such steps need no optimizer of torch, and can be recorded."""
        ...

    def build(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer: ...


class OptimizerMemory(Protocol):
    """The state of the optimizers of v_i between rounds."""

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Restore the state of a new optimizer, for those of its parameters that belong to v_i."""
        ...


@final
@dataclass(frozen=True, eq=False)
class Context:
    """The values that a method may use on a client in one round.

    It is frozen, since recorded steps keep its loss and penalty: `dataclasses.replace` makes a changed copy.
    """

    client: int
    round: int
    rate: float  # eta of this round, after the decay
    max_norm: float  # the largest norm of a gradient
    batch: int  # B
    train: Examples  # D_i
    loss: Loss
    penalty: Penalty
    received_P: Tensor  # w^{r-1}
    generator: torch.Generator
    device: torch.device
    notes: dict[str, float] = field(default_factory=dict)  # numbers that the method logs for this client
    optimizer: Optimizer | None = None  # None is plain SGD at `rate`; an optimizer has a rate of its own
    schedule: Schedule | None = None  # changes the optimizer's rate after each of its steps
    accumulate: int = 1  # the number of batches per step of the optimizer
    memory: OptimizerMemory | None = None  # None where the optimizers of v_i are new in each round
    validation: Examples | None = None  # V_i, which is not trained on; None where the client has no V_i
    metric: Metric | None = None
    private_model: Callable[[], nn.Module | None] | None = None  # P_i in evaluation mode; None without a P_i
    # All of the client's data, and the P_i that has trained on them, for a method that predicts after it has chosen on
    # V_i. None where no V_i was held out of the client's data (`alone.with_validation`).
    whole: Examples | None = None
    private_on_whole: Callable[[], nn.Module | None] | None = None

    @property
    def samples_a_step(self) -> int:
        """The number of samples per step of `gradient_step`."""
        return self.batch * self.accumulate

    def shared_loss(self, shared: nn.Module, output: Tensor, y: Tensor) -> Tensor:
        """The loss of w_i on a batch, with the method's penalty."""
        loss, penalty = self.loss(output, y), self.penalty(shared, self.received_P)
        return loss if penalty is None else loss + penalty


@components_in("lindt.client.adaptations")
class Adaptation(Protocol):
    """How a client trains and predicts while recovery is on."""

    def begin(self, ctx: Context, shared: nn.Module) -> nn.Module | None:
        """The first value of v_i, given the received w; None where the method has no v_i."""
        ...

    def step(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Step:
        """The training step of a round with recovery. It is called once per round, the returned step once per batch."""
        ...

    def predictor(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Predictor:
        """The function with which the client predicts; `private` is None where it has no v_i yet."""
        ...


@runtime_checkable
class ChecksModel(Protocol):
    """An adaptation that does not work with every model."""

    def fits(self, model: nn.Module, x: Tensor) -> None:
        """Raise a PlanError, before training, if the adaptation does not work with this model."""
        ...


@runtime_checkable
class ChoosesOnValidation(Protocol):
    """An adaptation whose predictor is chosen on V_i, so that the same samples must not test it."""

    def held_out_outputs(self, ctx: Context, shared: nn.Module, private: nn.Module | None) -> Tensor:
        """The client's predictions for V_i, each sample by a predictor that was chosen without that sample."""
        ...


@runtime_checkable
class SharesPart(Protocol):
    """An adaptation under which clients share only a part of w while recovery is on, and keep the rest private."""

    @property
    def has_global(self) -> bool:
        """Whether there is a whole global model while recovery is on."""
        ...

    @property
    def part_in_words(self) -> str:
        """The part of w that clients send, as text; empty where it is all of w."""
        ...

    def private_names(self, names: Sequence[str]) -> frozenset[str]:
        """The names of the parameters of w that stay with the client."""
        ...


def private_names(adaptation: Adaptation, names: Sequence[str]) -> frozenset[str]:
    """The parameters of w that stay with the client while recovery is on; empty for most adaptations."""
    return adaptation.private_names(names) if isinstance(adaptation, SharesPart) else frozenset()


def has_global(adaptation: Adaptation) -> bool:
    """Whether there is a whole global model while recovery is on."""
    return adaptation.has_global if isinstance(adaptation, SharesPart) else True


VALIDATION = "validation score"  # the name of a client's note in a plan that stops early

Kind = Literal["train", "evaluate", "private"]


@final
@dataclass(frozen=True)
class Task:
    """A task of the server for one client. There is no field for v_i, which never leaves the client.

    `run` separates the v_i of different runs; `keep` is the round of the oldest checkpoint: of the versions of v_i up
    to that round the client may delete all but the newest.
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
    """A client's reply: w_i, n_i and a gain report from training, a tally and the method's notes from evaluating."""

    client: int
    round: int
    size: int
    w: Tensor | None = None
    buffers: Buffers | None = None
    tally: ClientTally | None = None
    notes: dict[str, float] | None = None
    report: GainReport | None = None
    fault: str | None = None  # the reason, where a client failed or its reply is not valid


class Engine(Protocol):
    def available(self) -> Sequence[int]: ...
    def dispatch(self, tasks: Sequence[Task]) -> Iterable[Reply]:
        """The replies, as they arrive or in the order of the tasks. A failed client on another machine sends none."""
        ...

    def forget_after(self, round: int) -> None:
        """Delete every v_i written after `round`, before a run is resumed."""
        ...
