"""When clients recover (Alg. 2, `flag`): never, always, or once the server has detected NFL; and when they stop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, final

from lindt.errors import require
from lindt.protocols import Evidence, Recovery, RecoveryState, Statistic, Stop
from lindt.registry import register, register_method
from lindt.server.detection.divergence import Counting, Rule


@register(Stop)
@final
@dataclass(frozen=True)
class Persist:
    """The second strategy: recovery, once on, never stops."""

    def __call__(self, state: RecoveryState, clients: int) -> bool:
        return False


@register(Stop)
@final
@dataclass(frozen=True)
class EveryoneTreated:
    """The first strategy: stop after every client has had at least one round of recovery."""

    def __call__(self, state: RecoveryState, clients: int) -> bool:
        return len(state.treated) >= clients


@register(Stop)
@final
@dataclass(frozen=True)
class QuietRounds:
    """The third strategy: stop after Delta < epsilon in `rounds` consecutive rounds."""

    rounds: int = 10

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", self.rounds, "ask for at least 1 quiet round")

    def __call__(self, state: RecoveryState, clients: int) -> bool:
        return state.quiet >= self.rounds


@register(Recovery)
@final
@dataclass(frozen=True)
class Never:
    """The flag stays off: plain federated learning."""

    def begin(self) -> RecoveryState:
        return RecoveryState(on=False)

    def judge(self, state: RecoveryState, evidence: Evidence) -> RecoveryState:
        return state


@register(Recovery)
@final
@dataclass(frozen=True)
class Always:
    """The flag is on from the first round: the paper's all-time mode (Appendix B.2)."""

    def begin(self) -> RecoveryState:
        return RecoveryState(on=True)

    def judge(self, state: RecoveryState, evidence: Evidence) -> RecoveryState:
        return state


@register(Recovery)
@final
@dataclass(frozen=True)
class OnDetection:
    """Detection and recovery (Alg. 2): the flag is set when the statistic was above epsilon in more than r' rounds.

    After a stop, count, quiet and treated are set to 0 and NFL may be detected again: in Alg. 2 `count > r'`
    would still hold and restart recovery at once. With `once` recovery stays off after the first stop.
    """

    epsilon: float = 0.1
    patience: int = 250
    statistic: Statistic = "delta"
    counting: Counting = "cumulative"
    stop: Stop = field(default_factory=Persist)
    again: Literal["rearm", "once"] = "rearm"

    def __post_init__(self) -> None:
        _ = self.rule  # building the rule checks the fields

    @cached_property
    def rule(self) -> Rule:
        return Rule(self.epsilon, self.patience, self.statistic, self.counting)

    def begin(self) -> RecoveryState:
        return RecoveryState(on=False)

    def judge(self, state: RecoveryState, evidence: Evidence) -> RecoveryState:
        if evidence.seen is None:
            return state
        value = evidence.seen.watched(self.statistic)
        state = replace(
            state,
            count=self.rule.count(state.count, value),
            quiet=state.quiet + 1 if value < self.epsilon else 0,
        )
        if state.on:
            state = replace(state, treated=state.treated | evidence.answered)
            if self.stop(state, evidence.clients):
                return RecoveryState(detections=state.detections)
            return state
        if self.rule.exceeded(state.count) and not (self.again == "once" and state.detections):
            return replace(state, on=True, quiet=0, treated=frozenset(), detections=state.detections + 1)
        return state


@register(Recovery)
@final
@dataclass(frozen=True)
class OnEvidence:
    """Recovery that follows the plan's test of the reported gains (`detection`), with no threshold to choose.

    It starts at the early warning, or at the verdict "hurts". It stops for good once the test has shown that the model
    which clients predict with is worse than w. It stays on while the test is undecided, and when w helps on average.
    """

    start: Literal["warning", "verdict"] = "warning"

    needs_reports = True

    def begin(self) -> RecoveryState:
        return RecoveryState(on=False)

    def judge(self, state: RecoveryState, evidence: Evidence) -> RecoveryState:
        found = evidence.detection
        if found is None:
            return state
        if state.on:
            state = replace(state, treated=state.treated | evidence.answered)
            worse = found.recovery is not None and found.recovery.state == "hurts"
            return replace(state, on=False) if worse else state
        warned = self.start == "warning" and found.warning is not None
        if (warned or found.verdict.state == "hurts") and not state.detections:
            return replace(state, on=True, detections=1)
        return state


# Detection only: FedAvg, with an alarm when Delta stays above epsilon.
register_method("watch", recovery={"kind": "on_detection", "epsilon": 0.1, "patience": 250})
