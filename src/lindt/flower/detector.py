"""NFLDetector: detection (Alg. 2, s6-s11) around any Flower strategy, in one line of a ServerApp.

    strategy = NFLDetector(FedAvg(), epsilon=0.3, patience=10)
    strategy.start(grid, initial_arrays, num_rounds=50)

It copies the clients' weights before the strategy has them, sees the aggregate after, and changes neither.
Limits: Delta is no absolute (docs/choosing-epsilon.md); noise that clients add themselves is not subtracted.

Legend: K clients answering, P weights.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from lindt.errors import UserError
from lindt.flower.measure import ORDER, DetectorWarnings, ProbeStrategy, chain, log_message, measure_round, with_probes
from lindt.flower.protocol import PREFIX, Instruction, reports_of
from lindt.flower.recorder import RunFolder, RunRecorder
from lindt.flower.replies import ValidReplies, consistent_replies, float_names, validate_replies, weights_of
from lindt.protocols import Divergence, Evidence, RecoveryState, Statistic, Stop
from lindt.runs.schema import SCORES
from lindt.server.detection.rules import Counting
from lindt.server.recovery import OnDetection, Persist
from lindt.server.scores import Scores


@final
class NFLDetector(Strategy):
    """Wraps a strategy. With `folder` the run is kept there in our own format, and taken up again after a crash.

    `statistic` is what is held against epsilon: `delta` (Eq. 7), `clean` (around the aggregate before noise),
    `spread` (around the clients' own mean, which has a limit of zero under any strategy), or `median` (Delta with the
    median over clients, which one hostile client cannot move far).
    """

    def __init__(
        self,
        strategy: Strategy,
        epsilon: float = 0.1,
        patience: int = 250,
        *,
        statistic: Statistic = "delta",
        counting: Counting = "cumulative",
        stop: Stop | None = None,
        again: Literal["rearm", "once"] = "rearm",
        folder: str | Path | None = None,
        name: str = "flower",
    ) -> None:
        if not isinstance(strategy, Strategy):
            raise UserError(f"strategy: a {type(strategy).__name__}; give one of flwr.serverapp.strategy")
        links = list(chain(strategy))
        if any(isinstance(link, NFLDetector) for link in links):
            raise UserError(f"strategy: there is a detector inside it already; {ORDER}")
        self.rule = OnDetection(float(epsilon), patience, statistic, counting, stop or Persist(), again)
        self.strategy, self._probes = with_probes(strategy)
        self._warnings = DetectorWarnings(statistic, links)
        names = [type(link).__name__ for link in links if not isinstance(link, ProbeStrategy)]
        run_folder = RunFolder(Path(folder), name, self.rule, names) if folder is not None else None
        self._recorder = RunRecorder(run_folder)
        self._experiment = run_folder.run if run_folder else uuid.uuid4().hex
        keys = [str(vars(link)["weighted_by_key"]) for link in links if "weighted_by_key" in vars(link)]
        self._weighted_by = keys[0] if keys else "num-examples"
        if run_folder is not None:  # a loop of the user's own just ends: when the detector goes, or the process
            weakref.finalize(self, run_folder.close)
        self._session = ""
        self._sent: ArrayRecord | None = None  # w^{r-1}; None until the run has begun
        self._since = 0  # the round this session goes on after
        self._offset = 0  # from the rounds that Flower's start() counts to the run's own
        self._played = 0  # the last round that was aggregated
        self.state: RecoveryState = self.rule.begin()
        self.seen: Divergence | None = None  # of the last round
        self.scores: Scores | None = None  # of the last evaluation that clients reported in

    def __getattr__(self, name: str) -> Any:
        """What a user's own strategy has besides Flower's methods."""
        if name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    @property
    def negative(self) -> bool:
        """The verdict: NFL has been detected in this run."""
        return self.state.detections > 0

    def begin(self, arrays: ArrayRecord, num_rounds: int) -> tuple[int, ArrayRecord]:
        """For a loop of your own that calls the strategy's methods itself: call it once before the first round.

        Returns the last round that was played, 0 for a new run, and the w after it. The loop's first round is the
        next one:

            done, arrays = detector.begin(arrays, num_rounds)
            for r in range(done + 1, num_rounds + 1):
                replies = grid.send_and_receive(detector.configure_train(r, arrays, config, grid))
                arrays = detector.aggregate_train(r, replies)[0] or arrays
        """
        return self._begin(arrays, num_rounds, own_loop=True)

    def _begin(self, arrays: ArrayRecord, num_rounds: int, *, own_loop: bool) -> tuple[int, ArrayRecord]:
        weights_of(arrays, float_names(arrays))  # raises where there is nothing to measure
        saved = self._recorder.resume(num_rounds, self.strategy, arrays, own_loop=own_loop)
        self._session, self._sent, self._since, self.state = uuid.uuid4().hex, arrays, 0, self.rule.begin()
        self.seen, self.scores = None, None
        if saved is not None:
            self._since, self.state, arrays = saved.round, saved.recovery, saved.arrays
            flag = "on" if self.state.on else "off"
            log_message(f"goes on after round {saved.round}, count {self.state.count}, recovery {flag}")
            self._warnings.resumed()
        self._played, self._offset = self._since, 0 if own_loop else self._since
        return self._since, arrays

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As Flower's own, with true round numbers when it goes on from a checkpoint of `folder`."""
        try:
            done, arrays = self._begin(initial_arrays, num_rounds, own_loop=False)
            if done >= num_rounds:
                log_message(f"the folder holds all {num_rounds} rounds already; name another for a new run", warn=True)
                self._recorder.finish()
                return Result(arrays=arrays)
            score = (lambda r, w: evaluate_fn(r + done, w)) if evaluate_fn else None
            left = num_rounds - done
            result = super().start(grid, arrays, left, timeout, train_config, evaluate_config, score)
            self._recorder.finish()
        finally:
            self._recorder.close()
        for found in (
            result.train_metrics_clientapp, result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp
        ):  # fmt: skip
            later = {round + done: metrics for round, metrics in found.items()}
            found.clear()
            found.update(later)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._sent is None:
            raise UserError(
                f"NFLDetector was not started itself: {ORDER}, and start() is the detector's. Under a DP wrapper "
                "it would take the noise for zero. A loop of your own calls detector.begin(arrays, rounds) first"
            )
        round, self._sent = self._next(server_round), arrays
        messages = list(self.strategy.configure_train(round, arrays, config, grid))
        self._recorder.ask(round, [message.metadata.dst_node_id for message in messages], list(grid.get_node_ids()))
        return self._with_instruction(messages, round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self._sent is not None
        round, recovering, before = self._next(server_round), self.state.on, self.state.detections
        clip_norm = self._probes.clip_norm()
        clipped_here = self._probes.clips_here()
        valid = validate_replies(
            list(replies),
            self._sent,
            self._weighted_by,
            clipping=clip_norm is not None or clipped_here,
            clipped_here=clipped_here,
        )
        self._probes.watch(valid.names)
        if valid.nodes or self._probes.outer is None:
            arrays, metrics = self.strategy.aggregate_train(round, valid.passed)
        else:  # Flower's adaptive clipping divides by the number of valid answers
            log_message(f"round {round}: no valid answer; w stays as it was", warn=True)
            arrays, metrics = None, None
        self.seen = measure_round(valid, arrays, clip_norm, self._probes, self._warnings) if arrays else None
        self._probes.forget()
        answered = frozenset(self._recorder.number(node) for node in valid.nodes)
        self.state = self.rule.judge(self.state, Evidence(round, self.seen, answered, self._recorder.clients))
        self._recorder.played(round, valid, self.seen, recovering, self.state, arrays or self._sent, self.strategy)
        self._played = round
        self._tell(round, valid, detected=self.state.detections > before)
        if arrays is None or self.seen is None:
            return arrays, metrics
        return arrays, self._with_verdict(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        round = server_round + self._offset
        return self._with_instruction(list(self.strategy.configure_evaluate(round, arrays, config, grid)), round)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        round, replies = server_round + self._offset, list(replies)
        reports, faults = reports_of(replies)
        replies, odd = consistent_replies(replies, self._weighted_by)
        for node, fault in (faults | odd).items():
            log_message(f"round {round}: node {node} reported what cannot be understood: {fault}", warn=True)
        metrics = self.strategy.aggregate_evaluate(round, replies)
        self.scores = self._recorder.scored(round, reports)
        if self.scores is None:
            return metrics
        record = MetricRecord() if metrics is None else metrics
        for name in SCORES:
            value = getattr(self.scores, name)
            if value is not None:
                record[PREFIX + name.replace("_", "-")] = value
        return record

    def summary(self) -> None:
        rule = self.rule
        log_message(
            f"NFL when {rule.statistic} exceeds epsilon = {rule.epsilon:g} in more than r' = {rule.patience} rounds"
        )
        self.strategy.summary()

    def _next(self, server_round: int) -> int:
        """The run's own number of a round that is about to be played."""
        round = server_round + self._offset
        if round <= self._played:
            raise UserError(f"round {round} was played already; go on with round {self._played + 1}")
        return round

    def _with_instruction(self, messages: list[Message], round: int) -> list[Message]:
        keep = max(0, round - 2)  # a checkpoint of the round before last may still be gone back to
        instruction = Instruction(self._experiment, self._session, self._since, round, keep, self.state.on)
        for message in messages:
            instruction.put(message)
        return messages

    def _with_verdict(self, metrics: MetricRecord | None) -> MetricRecord:
        record = MetricRecord() if metrics is None else metrics
        assert self.seen is not None
        for name, value in vars(self.seen).items():
            record[PREFIX + name.replace("_", "-")] = float(value)
        record[PREFIX + "count"] = self.state.count
        record[PREFIX + "negative"] = int(self.negative)
        record[PREFIX + "recovering"] = int(self.state.on)
        return record

    def _tell(self, round: int, valid: ValidReplies, *, detected: bool) -> None:
        for node, reason in valid.refused.items():
            log_message(f"round {round}: refused node {node}: {reason}", warn=True)
        if self.seen is not None:
            watched, rule = self.seen.watched(self.rule.statistic), self.rule
            against = f"{rule.statistic} {watched:.4g} / epsilon {rule.epsilon:g}"
            log_message(f"round {round}: {against}, count {self.state.count} / r' {rule.patience}")
        if detected:
            log_message(
                f"round {round}: NFL suspected; clients train and predict with their dual model from now on", warn=True
            )
