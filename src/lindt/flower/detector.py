"""NFLDetector: detection around any Flower strategy, in one line of a ServerApp.

    strategy = NFLDetector(FedAvg())                              # tests the gains that wrapped clients report
    strategy = NFLDetector(FedAvg(), recover=False)               # detection only
    strategy = NFLDetector(FedAvg(), epsilon=0.3, patience=10)    # the paper's rule (Alg. 2, s6-s11)
    strategy.start(grid, initial_arrays, num_rounds=50)

It copies the clients' weights before the strategy has them, sees the aggregate after, and changes neither.
Limits: without reports the test of gains says "undecided: no client reports", and nothing by Delta. Delta is no
absolute (docs/choosing-epsilon.md); noise that clients add themselves is not subtracted.

Legend: K clients answering, P weights.
"""

from __future__ import annotations

import math
import re
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from lindt.errors import PlanError, UserError, one_line
from lindt.flower.measure import (
    ORDER,
    DetectorWarnings,
    ProbeStrategy,
    chain,
    measure_round,
    measure_statistics,
    with_probes,
)
from lindt.flower.messages import PREFIX, START, Instruction, Visit, log_message, pack_records, with_own_config
from lindt.flower.protocol import detach_visit, reports_of
from lindt.flower.recorder import RunFolder, RunRecorder
from lindt.flower.replies import (
    Replies,
    ValidReplies,
    consistent_replies,
    float_names,
    may_be_updates,
    nonfinite_names,
    validate_replies,
    weights_of,
)
from lindt.protocols import (
    Decision,
    Detection,
    DetectionState,
    Divergence,
    Evidence,
    GainReport,
    RecoveryState,
    Statistic,
    Stop,
)
from lindt.runs.schema import SCORES
from lindt.seeds import seed_for
from lindt.server.detection.detector import paper_rule
from lindt.server.detection.divergence import Counting, Delta
from lindt.server.detection.gain import Gain
from lindt.server.recovery import OnDetection, OnEvidence, Persist
from lindt.server.scores import Scores
from lindt.server.updates import asked_reports

STATES: Final = {  # of the verdict, in Flower's log
    "too early": "too early to say",
    "undecided": "undecided",
    "helps": "federation helps",
    "hurts": "federation hurts",
}
EFFECTS: Final = STATES | {"helps": "better", "hurts": "worse"}  # of recovery
VERDICTS: Final = {"hurts": -1, "too early": 0, "undecided": 0, "helps": 1}  # the metric lindt-verdict


@final
class NFLDetector(Strategy):
    """Wraps a strategy. With `folder` the run is kept there in our own format, and taken up again after a crash.

    By default it tests the gains that clients report with their training (`wrap`), with no number to choose.
    `detection` is another test than `Gain()`: `Gain(noise=b)` has each client add Laplace noise of scale b to the
    numbers of its reports, `Gain(panel=0.5)` has half of the clients hold out data, train a private model and report.
    `recover_at` says when recovery starts: at the early "warning", or at the
    "verdict" that federation hurts. It is switched off when what the clients predict with is shown worse than w.
    With `recover=False` clients are never asked to recover: detection only.

    `replies` says whether the app's clients send "weights", as Flower's strategies expect, or "updates", which a
    strategy of the user's own adds to w. Without it, replies that look like updates are refused.

    With `epsilon` it is the paper's rule, to which `patience`, `statistic`, `counting`, `stop` and `again` belong.
    `statistic` is what is held against epsilon: `delta` (Eq. 7), `clean` (around the aggregate before noise),
    `spread` (around the clients' own mean, which has a limit of zero under any strategy), or `median` (Delta with the
    median over clients, which one hostile client cannot move far).
    """

    def __init__(
        self,
        strategy: Strategy,
        epsilon: float | None = None,
        patience: int | None = None,
        *,
        statistic: Statistic | None = None,
        counting: Counting | None = None,
        stop: Stop | None = None,
        again: Literal["rearm", "once"] | None = None,
        detection: Detection | None = None,
        recover_at: Literal["warning", "verdict"] | None = None,
        recover: bool = True,
        replies: Replies | None = None,
        folder: str | Path | None = None,
        name: str = "flower",
    ) -> None:
        if replies not in (None, "weights", "updates"):
            raise PlanError("replies", replies, 'say "weights" or "updates"')
        if not isinstance(strategy, Strategy):
            raise UserError(f"strategy: a {type(strategy).__name__}; give one of flwr.serverapp.strategy")
        links = list(chain(strategy))
        if any(isinstance(link, NFLDetector) for link in links):
            raise UserError(f"strategy: there is a detector inside it already; {ORDER}")
        rule = paper_rule(epsilon, patience, statistic, counting, detection)
        self.rule: OnDetection | OnEvidence
        if rule is not None:
            if recover_at is not None:
                raise PlanError("recover_at", recover_at, "follows the test of gains: leave out epsilon, or this")
            stopping = stop or Persist(), "once" if not recover else again or "rearm"
            self.rule = OnDetection(rule.epsilon, rule.patience, rule.statistic, rule.counting, *stopping)
        else:
            for word, given in (("stop", stop), ("again", again)):
                if given is not None:
                    raise PlanError(word, given, "belongs to the paper's rule: give epsilon as well, or leave it out")
            self.rule = OnEvidence() if recover_at is None else OnEvidence(recover_at)
        self.detection: Detection = Delta() if rule is not None else _suitable(detection or Gain())
        self._noise = float(getattr(self.detection, "noise", 0.0))
        self._panel = float(getattr(self.detection, "panel", 1.0))
        self.strategy, self._probes = with_probes(strategy)
        self._warnings = DetectorWarnings(None if rule is None else rule.statistic, links)
        names = [type(link).__name__ for link in links if not isinstance(link, ProbeStrategy)]
        run_folder = RunFolder(Path(folder), name, self.rule, names, self.detection) if folder is not None else None
        self._recorder = RunRecorder(run_folder)
        self._experiment = run_folder.run if run_folder else uuid.uuid4().hex
        self._panel_start = seed_for(0, self._experiment, "panel") / 2**63  # in [0, 1]
        keys = [str(vars(link)["weighted_by_key"]) for link in links if "weighted_by_key" in vars(link)]
        self._weighted_by = keys[0] if keys else "num-examples"
        if run_folder is not None:  # a loop of the user's own just ends: when the detector goes, or the process
            weakref.finalize(self, run_folder.close)
        self._session = ""
        self._recover, self._replies = recover, replies
        self._own = strategy  # as the user gave it
        self._start: bytes = b""  # w^0, packed
        self._fixed: frozenset[str] = frozenset()  # arrays of w^0 with NaN or infinity, as a causal mask has
        self._asked: set[int] = set()  # nodes that were sent a training in this session
        self._wanting: set[int] = set()  # nodes that have no w^0
        self._are_weights = False  # whether a round has shown that replies are no updates
        self._wrapped = False  # whether any client has answered wrapped
        self._counted: tuple[object, ...] = ()  # what the log was told of wrapped clients
        self._sent: ArrayRecord | None = None  # w^{r-1}; None until the run has begun
        self._since = 0  # the round this session goes on after
        self._offset = 0  # from the rounds that Flower's start() counts to the run's own
        self._played = 0  # the last round that was aggregated
        self._rounds: int | None = None  # that are planned
        self._judged: DetectionState | None = self.detection.begin()  # what the test goes on from
        self.found = self._judged  # all its answers: the verdict, the early warning, the effect of recovery
        self._told: dict[str, object] = {}  # the last answers that the log was told
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
        """Federation hurts, by the test of gains; under the paper's rule, NFL has been detected in this run."""
        if self.verdict is not None:
            return self.verdict.state == "hurts"
        return self.state.detections > 0

    @property
    def verdict(self) -> Decision | None:
        """The answer of the test of gains after the last round; None under the paper's rule."""
        return None if self.found is None else self.found.verdict

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
        self._fixed = nonfinite_names(arrays)
        weights_of(arrays, float_names(arrays) - self._fixed)  # raises where there is nothing to measure
        self._start, self._asked, self._wanting = pack_records(RecordDict({"arrays": arrays})), set(), set()
        self._wrapped, self._counted, self._are_weights = False, (), False
        saved = self._recorder.resume(num_rounds, self.strategy, arrays, own_loop=own_loop)
        self._session, self._sent, self._since, self.state = uuid.uuid4().hex, arrays, 0, self.rule.begin()
        self.seen, self.scores, self._told = None, None, {}
        self._rounds, self._judged = num_rounds, self.detection.begin()
        self.found = self._judged
        if saved is not None:
            self._are_weights = True  # as in its first rounds
            self._since, self.state, arrays = saved.round, saved.recovery, saved.arrays
            self._judged = saved.detection if self.detection.reports and saved.detection else self._judged
            self.found = _shown(self._judged)
            flag = "on" if self.state.on else "off"
            at = f"count {self.state.count}" if self._judged is None else f"verdict {self._judged.verdict.state!r}"
            log_message(f"goes on after round {saved.round}, {at}, recovery {flag}")
            self._warnings.resumed()
        if self.detection.reports:
            self._warnings.reports(self._noise)
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
        **own: Any,
    ) -> Result:
        """As Flower's own, with true round numbers when it goes on from a checkpoint of `folder`.

        Where the strategy has a `start` of its own (logging, checkpoints of the best model), that is what runs, with
        the detector's methods in place of the strategy's; `own` are further arguments of it.
        """
        try:
            done, arrays = self._begin(initial_arrays, num_rounds, own_loop=False)
            if done >= num_rounds:
                log_message(f"the folder holds all {num_rounds} rounds already; name another for a new run", warn=True)
                self._recorder.finish()
                return Result(arrays=arrays)
            score = (lambda r, w: evaluate_fn(r + done, w)) if evaluate_fn else None
            left = num_rounds - done
            given = (grid, arrays, left, timeout, train_config, evaluate_config, score)
            result = self._own_start(given, own) if self._has_own_start() else super().start(*given, **own)
            self._recorder.finish()
        finally:
            self._recorder.close()
        if not isinstance(result, Result):
            return result
        for found in (
            result.train_metrics_clientapp, result.evaluate_metrics_clientapp, result.evaluate_metrics_serverapp
        ):  # fmt: skip
            later = {round + done: metrics for round, metrics in found.items()}
            found.clear()
            found.update(later)
        return result

    def _require_weights(self, valid: ValidReplies) -> None:
        """Replies that may be updates are refused until the user has said what they are."""
        assert self._sent is not None
        found = None if self._replies or self._are_weights else may_be_updates(valid, self._sent)
        if found:
            raise UserError(
                "the clients' replies lie nearer to 0 than to the w that they were sent: they may be updates. Say "
                'NFLDetector(..., replies="updates") where the strategy adds them to w, or replies="weights"'
            )
        self._are_weights = self._are_weights or found is not None

    def _has_own_start(self) -> bool:
        return type(self._own).start is not Strategy.start

    def _own_start(self, given: tuple[Any, ...], own: Mapping[str, Any]) -> Any:
        """The start() of the user's strategy, on the user's own object, whose methods are the detector's meanwhile.

        The strategy's own methods, which the detector calls, are bound before.
        """
        kept = self.strategy
        if kept is not self._own:  # a DP wrapper with a start() of its own, between two probes
            raise UserError(
                f"strategy: {type(self._own).__name__} adds noise and has a start() of its own; call "
                "detector.begin(arrays, rounds) and the detector's methods in a loop, as NFLDetector.begin shows"
            )
        self.strategy = _BoundStrategy(self._own)
        methods = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")
        try:
            for name in methods:
                setattr(self._own, name, getattr(self, name))
            return self._own.start(*given, **own)
        finally:
            for name in methods:
                vars(self._own).pop(name, None)
            self.strategy = kept

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
        connected = list(grid.get_node_ids())
        self._recorder.ask(round, [message.metadata.dst_node_id for message in messages], connected)
        if self.detection.reports and connected and not any(self._on_panel(node) for node in connected):
            self._warnings.no_panel(self._panel, len(connected))
        messages = self._with_instruction(messages, round)
        self._send_start(round, messages)
        return messages

    def _send_start(self, round: int, messages: list[Message]) -> None:
        """w^0 to the clients that have none: those that came after the first round, and those that ask for it."""
        sent = 0
        for message in messages:
            node = message.metadata.dst_node_id
            late = self._since == 0 and round > 1 and node not in self._asked and self._wrapped
            if self.detection.reports and self._on_panel(node) and (late or node in self._wanting):
                next(iter(message.content.config_records.values()))[START] = self._start
                self._wanting.discard(node)
                sent += 1
            self._asked.add(node)
        if sent:
            size = sent * len(self._start) / 1e6
            log_message(f"round {round}: sent w^0 to {sent} clients that have none, {size:.3g} MB in all")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        assert self._sent is not None
        round, recovering, before = self._next(server_round), self.state.on, self.state.detections
        clip_norm = self._probes.clip_norm()
        clipped_here = self._probes.clips_here()
        replies = list(replies)
        gains, visits = self._gains(round, replies)
        valid = validate_replies(
            replies,
            self._sent,
            self._weighted_by,
            clipping=clip_norm is not None or clipped_here,
            clipped_here=clipped_here,
            fixed=self._fixed,
            updates=self._replies == "updates",
        )
        if round == 1:
            _require_some(valid, [visits.get(id(reply)) for reply in valid.passed if not reply.has_error()])
        self._require_weights(valid)
        self._probes.watch(valid.names)
        if valid.nodes or self._probes.outer is None:
            arrays, metrics = self.strategy.aggregate_train(round, valid.passed)
        else:  # Flower's adaptive clipping divides by the number of valid answers
            log_message(f"round {round}: no valid answer; w stays as it was", warn=True)
            arrays, metrics = None, None
        self.seen = (
            measure_round(
                valid,
                self._sent,
                arrays,
                clip_norm,
                self._probes,
                self._warnings,
                updates=self._replies == "updates",
            )
            if arrays
            else None
        )
        self._probes.forget()
        number = self._recorder.number
        answered = frozenset(number(node) for node in valid.nodes)
        # Of the replies that were taken: a client whose update is refused has no say.
        reports = {number(r.metadata.src_node_id): gains[id(r)] for r in valid.passed if id(r) in gains}
        reports = asked_reports(reports, reports.keys(), recovering=recovering)
        evidence = Evidence(round, self.seen, answered, self._recorder.clients, self._rounds, reports)
        self._judged = self.detection.judge(self._judged, evidence)
        self.found = _shown(self._judged)
        self.state = self.rule.judge(self.state, replace(evidence, detection=self._judged))
        if not self._recover:
            self.state = replace(self.state, on=False)
        self._recorder.played(
            round,
            valid,
            self.seen,
            recovering,
            self.state,
            arrays or self._sent,
            self.strategy,
            reports if self.detection.reports else None,
            self._judged,
            self.found,
            measure_statistics(valid, arrays) if arrays else None,
        )
        self._played = round
        self._tell(round, valid, detected=self.state.detections > before)
        self._tell_clients(round, [visits.get(id(r)) for r in valid.passed if not r.has_error()], len(reports))
        if self.detection.reports:
            self._tell_verdict(round, stopped=recovering and not self.state.on)
        if arrays is None or (self.seen is None and not self.detection.reports):
            return arrays, metrics
        return arrays, self._with_verdict(metrics, len(reports))

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
        if isinstance(rule, OnDetection):
            log_message(
                f"NFL when {rule.statistic} exceeds epsilon = {rule.epsilon:g} in more than r' = {rule.patience} rounds"
            )
        else:
            then = f"recovery starts at the {rule.start}" if self._recover else "detection only"
            log_message(f"tests the gains that clients report{self._level()}; {then}")
        self.strategy.summary()

    def _level(self) -> str:
        alpha = getattr(self.detection, "alpha", None)
        return "" if alpha is None else f", at level {alpha:g}"

    def _gains(self, round: int, replies: list[Message]) -> tuple[dict[int, GainReport], dict[int, Visit]]:
        """The gain reports and what wrapped clients say of their visit, by the identity of their reply.

        They are taken out: strategies see the user's records.
        """
        found: dict[int, GainReport] = {}
        visits: dict[int, Visit] = {}
        for reply in replies:
            if reply.has_error():
                continue
            try:
                visit, report = detach_visit(reply.content)
            except ValueError as error:
                fault = f"node {reply.metadata.src_node_id} sent a gain report that cannot be understood"
                log_message(f"round {round}: {fault}: {one_line(str(error))}", warn=True)
            else:
                if report is not None and self.detection.reports and self._on_panel(reply.metadata.src_node_id):
                    found[id(reply)] = report
                if visit is not None:
                    visits[id(reply)] = visit
                    if visit.wants_start:
                        self._wanting.add(reply.metadata.src_node_id)
        self._wrapped = self._wrapped or bool(visits)
        return found, visits

    def _next(self, server_round: int) -> int:
        """The run's own number of a round that is about to be played."""
        round = server_round + self._offset
        if round <= self._played:
            raise UserError(f"round {round} was played already; go on with round {self._played + 1}")
        return round

    def _with_instruction(self, messages: list[Message], round: int) -> list[Message]:
        keep = max(0, round - 2)  # a checkpoint of the round before last may still be gone back to
        instruction = Instruction(
            self._experiment,
            self._session,
            self._since,
            round,
            keep,
            self.state.on,
            self.detection.reports,
            weighted_by=self._weighted_by,
            replies=self._replies or "weights",
        )
        for message in messages:
            panel = self._on_panel(message.metadata.dst_node_id)
            with_own_config(message)
            replace(instruction, panel=panel, noise=self._noise if panel else 0.0).put(message)
        return messages

    def _on_panel(self, node: int) -> bool:
        """Whether a node holds out data, trains a P_i and reports.

        Of every N nodes, in the order in which they were first seen, N times the share of them, give or take one;
        which, follows from the run's id. So it is the same in every round, and after a restart with `folder`. The
        server chooses, and by the node: a client that was chosen by its name could choose its name.
        """
        number, start = self._recorder.number(node), self._panel_start
        return math.floor(self._panel * (number + 1) + start) > math.floor(self._panel * number + start)

    def _with_verdict(self, metrics: MetricRecord | None, reports: int) -> MetricRecord:
        record = MetricRecord() if metrics is None else metrics
        for name, value in vars(self.seen).items() if self.seen else ():
            if value is not None:
                record[PREFIX + name.replace("_", "-")] = float(value)
        if self.found is None:
            record[PREFIX + "count"] = self.state.count
        else:
            record.update(_metrics_of(self.found, reports))
        record[PREFIX + "negative"] = int(self.negative)
        record[PREFIX + "recovering"] = int(self.state.on)
        return record

    def _tell(self, round: int, valid: ValidReplies, *, detected: bool) -> None:
        for node, reason in valid.refused.items():
            log_message(f"round {round}: refused node {node}: {reason}", warn=True)
        if self.seen is not None and isinstance(self.rule, OnDetection):
            watched, rule = self.seen.watched(self.rule.statistic), self.rule
            against = f"{rule.statistic} {watched:.4g} / epsilon {rule.epsilon:g}"
            log_message(f"round {round}: {against}, count {self.state.count} / r' {rule.patience}")
        if detected:
            then = "clients are asked to recover from now on" if self._recover else "detection only, nobody recovers"
            log_message(f"round {round}: NFL suspected; {then}", warn=True)

    def _tell_clients(self, round: int, visits: list[Visit | None], reports: int) -> None:
        """How many clients answered wrapped, report and recover, when that has changed; and what it cost."""
        wrapped = [visit for visit in visits if visit is not None]
        recover, silent = sum(visit.recovers for visit in wrapped), sum(visit.silent for visit in wrapped)
        asked = self.state.on and bool(visits) and self._counted[:1] == (True,)
        counts = (len(wrapped), reports, recover, silent)
        counted = (self.state.on, *("all" if n == len(visits) else "some" if n else "none" for n in counts))
        if counted != self._counted and (wrapped or reports):
            calls, seconds = sum(visit.calls for visit in wrapped), math.fsum(visit.seconds for visit in wrapped)
            text = f"of {len(visits)} clients {len(wrapped)} answered wrapped, {reports} report, {recover} recover"
            text += f"; {silent} report nothing, as they add noise to what they send" if silent else ""
            cost = f"extra calls of their train functions: {calls}; all extra work took {seconds:.1f} s"
            log_message(f"round {round}: {text}; {cost}")
        if asked and not recover and "nobody" not in self._told:
            self._told["nobody"] = True
            log_message(
                f"round {round}: no client recovers: the last line of the client's file must be "
                "app = lindt.flower.wrap(app)",
                warn=True,
            )
        for problem in sorted({visit.problem for visit in wrapped if visit.problem} - self._told.keys()):
            clients = sorted(visit.client for visit in wrapped if visit.problem == problem)
            self._told[problem] = True
            more = f" and {len(clients) - 5} more" if len(clients) > 5 else ""
            log_message(
                f"round {round}: client {', '.join(clients[:5])}{more}: no report: {one_line(problem)}", warn=True
            )
        self._counted = counted

    def _tell_verdict(self, round: int, *, stopped: bool) -> None:
        """Each answer of the test of gains, when it has changed."""
        found = self.found
        assert found is not None
        answers = {"": found.verdict, "the shared model": found.recovery, "private models": found.recovered}
        for against, decision in answers.items():
            # The numbers change in each round, the answer does not.
            kept = None if decision is None else (decision.state, decision.since, decision.clients > 0)
            if decision is not None and kept != self._told.get(against):
                text = _words(decision, STATES, self._level())
                if against:
                    text = f"what clients predict with, against {against}: {_words(decision, EFFECTS, self._level())}"
                log_message(f"round {round}: {text}", warn=decision.state == "hurts")
                self._told[against] = kept
        if found.warning == round:
            log_message(
                f"round {round}: early warning: the shared model seems worse than private models of its age", warn=True
            )
        if stopped:
            log_message(
                f"round {round}: adapted models were shown worse than the shared model; recovery is off, and clients "
                "predict with the shared model",
                warn=True,
            )


def _require_some(valid: ValidReplies, visits: list[Visit | None]) -> None:
    """In the first round: a mistake that every client meets is an error, not a run to the end with an empty model."""
    if valid.refused and not valid.nodes:
        reasons = {re.sub(r"[0-9]+", "#", reason) for reason in valid.refused.values()}
        first = next(iter(valid.refused.values()))
        failed = [reason for reason in valid.refused.values() if reason.startswith("failed: ")]
        ours = not failed or all("lindt" in reason or "UserError" in reason for reason in failed)
        if len(reasons) == 1 and ours:
            raise UserError(f"round 1: every client's reply is refused for the same reason: {first}")
    problems = [visit.problem for visit in visits if visit is not None and visit.ours]
    if problems and len(problems) == len(visits) and len({re.sub(r"[0-9]+", "#", one) for one in problems}) == 1:
        raise UserError(f"round 1: no client can report, all for the same reason: {problems[0]}")


@final
class _BoundStrategy(Strategy):
    """A strategy's own methods, bound before others take their place on the object."""

    def __init__(self, strategy: Strategy) -> None:
        self.inner = strategy
        self.methods = {
            name: getattr(strategy, name)
            for name in ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")
        }

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        found: Iterable[Message] = self.methods["configure_train"](server_round, arrays, config, grid)
        return found

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found: tuple[ArrayRecord | None, MetricRecord | None] = self.methods["aggregate_train"](server_round, replies)
        return found

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        found: Iterable[Message] = self.methods["configure_evaluate"](server_round, arrays, config, grid)
        return found

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        found: MetricRecord | None = self.methods["aggregate_evaluate"](server_round, replies)
        return found

    def summary(self) -> None:
        self.methods["summary"]()


def _suitable(detection: Detection) -> Detection:
    """A test of reports; the paper's rule is chosen by epsilon."""
    if not detection.reports:
        raise UserError("detection: it needs no reports; for the paper's rule give epsilon instead")
    return detection


def _shown(state: DetectionState | None) -> DetectionState | None:
    """Where no client has reported yet, it is not too early: nothing will be decided."""
    if state is None or state.reports or state.verdict.clients or any(state.numbers.values()):
        return state
    return replace(state, verdict=replace(state.verdict, state="undecided"))


def _words(decision: Decision, states: Mapping[str, str], level: str) -> str:
    """`undecided: gain -0.012 +- 0.020, ...`: an answer of the test in the words of Flower's log."""
    if not decision.clients:
        return f"{states[decision.state]}: no client reports"
    gain = "" if decision.gain is None else f"gain {decision.gain:+.3f}"
    gain += "" if decision.error is None else f" +- {decision.error:.3f}"
    basis = f"{gain}, {decision.clients} clients, {decision.samples} validation samples"
    if decision.needed is not None:
        basis += f"; about {decision.needed} would decide it"
    since = "" if decision.since is None else f", since round {decision.since}{level}"
    return f"{states[decision.state]}{since}: {basis}"


def _metrics_of(found: DetectionState, reports: int) -> Mapping[str, float | int]:
    """The numbers of the test of gains for Flower's metrics."""
    verdict = found.verdict
    numbers: dict[str, float | int | None] = {
        "verdict": VERDICTS[verdict.state],
        "too-early": int(verdict.state == "too early"),
        "gain": verdict.gain,
        "gain-error": verdict.error,
        "reports": reports,
        "validation-samples": verdict.samples,
        "warning": int(found.warning is not None),
        "recovery-verdict": None if found.recovery is None else VERDICTS[found.recovery.state],
        "recovery-gain": None if found.recovery is None else found.recovery.gain,
        "recovered-verdict": None if found.recovered is None else VERDICTS[found.recovered.state],
        "recovered-gain": None if found.recovered is None else found.recovered.gain,
    }
    return {PREFIX + name: value for name, value in numbers.items() if value is not None}
