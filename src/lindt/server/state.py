"""What a federation's server holds after a round (RunState), and what a round showed (RoundResult).

torch is imported for annotations only: a Flower server without torch writes its rounds as RoundResults, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from lindt.protocols import Buffers, DetectionState, Divergence, GainReport, RecoveryState
from lindt.server.scores import Scores
from lindt.server.updates import Refusal

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True)
class BestRound:
    """The round with the highest validation score so far, in a plan that stops early."""

    round: int
    score: float
    w: Tensor
    buffers: Buffers
    recovery: RecoveryState  # in force when the round was scored
    since: int = 0  # scored rounds after it, none of which had a higher score
    restored: bool = False  # the run has ended, and its models are those of this round


@final
@dataclass(frozen=True)
class RunState:
    """The server's state after a round. This and the clients' v_i are all that a resumed run needs.

    Only the last two states of a run can be resumed: clients delete the v_i of older rounds.

    Examples:
        >>> import lindt, torch
        >>> x_KnD = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0))
        >>> pairs = [(x, (x[:, 0] > 0).long()) for x in x_KnD]
        >>> clients = [((x[:30], y[:30]), (x[30:], y[30:])) for x, y in pairs]
        >>> plan = lindt.resolve("own-task", ["method=fedavg", "alone.epochs=1"], rounds=1)
        >>> [(state, result)] = lindt.federate(plan, clients=clients, model=lambda: torch.nn.Linear(2, 2))
        >>> state.round, len(state.w), state.recovery.on
        (1, 6, False)
    """

    run: str  # an id of the run
    round: int  # the last finished round
    w: Tensor  # the global model's trainable weights, as one vector
    buffers: Buffers  # the model's buffers, such as BatchNorm's statistics
    recovery: RecoveryState  # the flag, and the counts that decide it
    # In a deployment clients know the plan. There this is the seed of the draw of clients, which only the server knows;
    # it is never printed. The privacy noise of a deployment is drawn without a seed.
    secret: int | None = field(default=None, repr=False)
    detection: DetectionState | None = None  # the state of the plan's test; None where clients report no gains
    best: BestRound | None = None  # None where the plan does not stop early, or no round was scored yet

    @property
    def model_round(self) -> int:
        """The round that w and the v_i of this state come from: the best round, once a run has stopped early."""
        return self.best.round if self.best is not None and self.best.restored else self.round


@final
@dataclass(frozen=True)
class RoundResult:
    """The result of one round: the clients that answered, the server's measurements, and the scores if it was scored.

    Examples:
        >>> import lindt, torch
        >>> x_KnD = torch.randn(3, 40, 2, generator=torch.Generator().manual_seed(0))
        >>> pairs = [(x, (x[:, 0] > 0).long()) for x in x_KnD]
        >>> clients = [((x[:30], y[:30]), (x[30:], y[30:])) for x, y in pairs]
        >>> plan = lindt.resolve("own-task", ["method=fedavg", "alone.epochs=1"], rounds=1)
        >>> [(state, result)] = lindt.federate(plan, clients=clients, model=lambda: torch.nn.Linear(2, 2))
        >>> result.round, result.answered, result.refused, result.detection.verdict.state
        (1, (0, 1, 2), (), 'too early')
        >>> round(result.scores.beta, 4) == round(result.scores.local - result.scores.private, 4)
        True
    """

    round: int  # from 1
    asked: tuple[int, ...]  # the clients that were asked to train
    answered: tuple[int, ...]  # the clients whose update was used
    refused: tuple[Refusal, ...]  # the clients whose update was refused, with the reason
    seen: Divergence | None  # None when no valid update came back: then w does not change
    recovering: bool  # whether clients recovered in this round
    recovery: RecoveryState  # after the round
    scores: Scores | None  # on test data, in a scored round
    reports: Mapping[int, GainReport] | None = None  # None where the plan's detection does not ask for gain reports
    detection: DetectionState | None = None  # after the round
    buffer_div: float | None = None  # the mean distance of the clients' float buffers from the joined ones, if any
    reachable: int | None = None  # how many clients could have been asked; None where all N could
