"""NFLDetector: detection around any Flower strategy, in one line of a ServerApp.

    strategy = NFLDetector(FedAvg())                              # tests the gains that wrapped clients report
    strategy = NFLDetector(FedAvg(), recover=False)               # detection only
    strategy = NFLDetector(FedAvg(), epsilon=0.3, patience=10)    # the paper's rule (Alg. 2, s6-s11)
    strategy.start(grid, initial_arrays, num_rounds=50)

It reads the clients' weights before the strategy gets them and the strategy's aggregate, and changes neither.
Limits: without reports the test of gains says "undecided: no client reports"; it does not use Delta instead. Delta has
no absolute scale (docs/choosing-epsilon.md); noise that clients add themselves is not subtracted.

Legend: K clients answering, P weights.
"""

from __future__ import annotations

import math
import re
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from inspect import BoundArguments, Parameter, signature
from pathlib import Path
from typing import Any, Final, Literal, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from lindt.errors import PlanError, UserError, one_line
from lindt.flower.lora import LORA, ProductDivergence, factors_of, measure_products
from lindt.flower.measure import (
    ORDER,
    DetectorWarnings,
    ProbeStrategy,
    chain,
    measure_round,
    measure_statistics,
    with_probes,
)
from lindt.flower.messages import (
    PREFIX,
    START,
    Instruction,
    Visit,
    log_message,
    nameless,
    pack_records,
    settings_of,
    with_own_config,
)
from lindt.flower.protocol import detach_visit, evaluation_visits, reports_of
from lindt.flower.recorder import RunFolder, RunRecorder, Settings
from lindt.flower.replies import (
    EMPTY,
    Replies,
    ValidReplies,
    consistent_replies,
    float_names,
    may_be_updates,
    nonfinite_names,
    validate_replies,
)
from lindt.flower.vectors import record_vector
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
from lindt.server.detection.gain import Gain, too_short
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
OTHER_SETTINGS: Final = "run_config"  # in the note of a client that set models aside because of them
VERDICTS: Final = {"hurts": -1, "too early": 0, "undecided": 0, "helps": 1}  # the metric lindt-verdict


@final
class NFLDetector(Strategy):
    """Wraps a strategy, detects NFL and asks clients to recover.

    By default it tests the gains that clients report with their training (`wrap`); there is no threshold to choose.
    Recovery is switched off when the clients' adapted models are shown to be worse than w. With `epsilon` it uses the
    paper's rule, to which `patience`, `statistic`, `counting`, `stop` and `again` belong.

    Args:
        strategy: Any strategy of Flower's or of your own. Put a DP wrapper inside the detector.
        epsilon: Chooses the paper's rule: the threshold of Delta.
        patience: Of the paper's rule: NFL is detected after more than this many rounds above epsilon. Default 250.
        statistic: Of the paper's rule, what is compared with epsilon: `delta` (Eq. 7), `clean` (around the aggregate
            before noise), `spread` (around the clients' own mean, which is zero for identical clients under any
            strategy), or `median` (Delta with the median over clients, which one hostile client cannot move far).
        counting: Of the paper's rule: `cumulative`, or `consecutive` rounds above epsilon.
        stop: Of the paper's rule: when recovery ends; by default it persists.
        again: Of the paper's rule: whether recovery may start again after its end (`rearm`), or only `once`.
        detection: Another test than `lindt.flower.Gain()`: `Gain(noise=b)` has each client add Laplace noise of scale
            b to the numbers of its reports, `Gain(panel=0.5)` has half of the clients hold out data, train a private
            model and report.
        recover_at: When recovery starts: at the early "warning", or at the "verdict" that federation hurts.
        recover: False for detection only: clients are never asked to recover.
        replies: Whether the app's clients send "weights", as Flower's strategies expect, or "updates", which your own
            strategy adds to w. Without it, replies that look like updates are refused.
        folder: The folder in which the run is kept, so that it can be resumed after a crash. By default it is not kept.
        name: The run's name in reports.

    Raises:
        UserError: An argument is wrong, or cannot be combined with another.

    Examples:
        >>> from flwr.serverapp.strategy import FedAvg
        >>> from lindt.flower import NFLDetector
        >>> strategy = NFLDetector(FedAvg(fraction_train=0.5))
        >>> strategy.negative, strategy.verdict.state
        (False, 'too early')
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
            raise PlanError("replies", replies, 'give "weights" or "updates"')
        if not isinstance(strategy, Strategy):
            raise UserError(
                f"strategy: it is of type {type(strategy).__name__}; give a strategy of flwr.serverapp.strategy"
            )
        links = list(chain(strategy))
        if any(isinstance(link, NFLDetector) for link in links):
            raise UserError(f"strategy: it has a detector inside it already; {ORDER}")
        rule = paper_rule(epsilon, patience, statistic, counting, detection)
        self.rule: OnDetection | OnEvidence
        if rule is not None:
            if recover_at is not None:
                raise PlanError("recover_at", recover_at, "only the test of gains uses it: leave out epsilon, or this")
            stopping = stop or Persist(), "once" if not recover else again or "rearm"
            self.rule = OnDetection(rule.epsilon, rule.patience, rule.statistic, rule.counting, *stopping)
        else:
            for word, given in (("stop", stop), ("again", again)):
                if given is not None:
                    raise PlanError(word, given, "only the paper's rule uses it: give epsilon as well, or leave it out")
            self.rule = OnEvidence() if recover_at is None else OnEvidence(recover_at)
        self.detection: Detection = Delta() if rule is not None else _suitable(detection or Gain())
        self._noise = float(getattr(self.detection, "noise", 0.0))
        self._panel = float(getattr(self.detection, "panel", 1.0))
        self.strategy, self._probes = with_probes(strategy)
        self._warnings = DetectorWarnings(None if rule is None else rule.statistic, links)
        names = [type(link).__name__ for link in links if not isinstance(link, ProbeStrategy)]
        where = Path(folder) if folder is not None else None
        run_folder = RunFolder(where, name, self.rule, names, self.detection, recover=recover) if where else None
        self._recorder = RunRecorder(run_folder)
        self._experiment = run_folder.run if run_folder else uuid.uuid4().hex
        self._panel_start = seed_for(0, self._experiment, "panel") / 2**63  # in [0, 1]
        keys = [str(vars(link)["weighted_by_key"]) for link in links if "weighted_by_key" in vars(link)]
        self._weighted_by = keys[0] if keys else "num-examples"
        if run_folder is not None:  # a loop of the user's own does not say when it ends
            weakref.finalize(self, run_folder.close)
        self._session = ""
        self._recover, self._replies = recover, replies
        self._own = strategy  # the object that the user gave
        self._first = ArrayRecord()  # w^0
        self._fixed: frozenset[str] = frozenset()  # arrays of w^0 with NaN or infinity, such as a causal mask
        self._asked: set[int] = set()  # nodes that got a training task in this session
        self._wanting: set[int] = set()  # nodes that have no w^0
        self._unnamed: frozenset[int] = frozenset()  # nodes whose name is another node's
        self._are_weights = False  # whether a round has shown that replies are not updates
        self._wrapped = False  # whether a wrapped client has answered
        self._counted: tuple[object, ...] = ()  # the counts of wrapped clients that were logged last
        self._sent: ArrayRecord | None = None  # w^{r-1}; None until the run has begun
        self._since = 0  # the round after which this session continues
        self._offset = 0  # the run's number of a round less that of Flower's start()
        self._played = 0  # the last round that was aggregated
        self._rounds: int | None = None  # the planned rounds
        self._judged: DetectionState | None = self.detection.begin()  # the state from which the test continues
        self.found = self._judged  # its answers: the verdict, the early warning, the effect of recovery
        self._flat: set[str] = set()  # clients whose private model never improved, as was logged
        self._told: dict[str, object] = {}  # the answers that were logged last
        self.state: RecoveryState = self.rule.begin()
        self.seen: Divergence | None = None  # of the last round
        self.products: ProductDivergence | None = None  # of low-rank adapters, in the last round
        self.scores: Scores | None = None  # of the last evaluation with reports

    def __getattr__(self, name: str) -> Any:
        """Other attributes of the user's own strategy."""
        if name == "strategy":
            raise AttributeError(name)
        return getattr(self.strategy, name)

    @property
    def negative(self) -> bool:
        """Whether federation hurts, by the test of gains; under the paper's rule, whether NFL was detected."""
        if self.verdict is not None:
            return self.verdict.state == "hurts"
        return self.state.detections > 0

    @property
    def verdict(self) -> Decision | None:
        """The answer of the test of gains after the last round; None under the paper's rule."""
        return None if self.found is None else self.found.verdict

    def begin(self, arrays: ArrayRecord, num_rounds: int) -> tuple[int, ArrayRecord]:
        """Begin or resume a run in a loop of your own, which calls the strategy's methods itself.

        Returns the last round that was played, 0 for a new run, and the w after it. The loop's first round is the
        next one:

            done, arrays = detector.begin(arrays, num_rounds)
            for r in range(done + 1, num_rounds + 1):
                replies = grid.send_and_receive(detector.configure_train(r, arrays, config, grid))
                arrays = detector.aggregate_train(r, replies)[0] or arrays
        """
        return self._begin(arrays, num_rounds, {}, own_loop=True)

    def _begin(
        self, arrays: ArrayRecord, num_rounds: int, settings: Settings, *, own_loop: bool
    ) -> tuple[int, ArrayRecord]:
        self._fixed = nonfinite_names(arrays)
        if not record_vector(arrays, float_names(arrays) - self._fixed):
            raise UserError("initial_arrays: there are no floats among them; give a model's parameters")
        self._first, self._asked, self._wanting = ArrayRecord(dict(arrays)), set(), set()
        self._wrapped, self._counted, self._are_weights, self._unnamed = False, (), False, frozenset()
        saved = self._recorder.resume(num_rounds, self.strategy, arrays, settings, own_loop=own_loop)
        self._session, self._sent, self._since, self.state = uuid.uuid4().hex, arrays, 0, self.rule.begin()
        self.seen, self.products, self.scores, self._told = None, None, None, {}
        self._flat = set()
        self._rounds, self._judged = num_rounds, self.detection.begin()
        self.found = self._judged
        if saved is not None:
            self._are_weights = True  # as shown in its first rounds
            self._since, self.state, arrays = saved.round, saved.recovery, saved.arrays
            self._judged = saved.detection if self.detection.reports and saved.detection else self._judged
            self.found = _shown(self._judged)
            flag = "on" if self.state.on else "off"
            at = f"count {self.state.count}" if self._judged is None else f"verdict {self._judged.verdict.state!r}"
            log_message(f"continues after round {saved.round}, {at}, recovery {flag}")
            self._warnings.resumed()
        if self.detection.reports:
            self._warnings.reports(self._noise)
        if isinstance(self.rule, OnDetection) and num_rounds <= self.rule.patience:
            rule = f"NFL is detected in more than r' = {self.rule.patience} rounds above epsilon"
            log_message(
                f"{rule}, but the run has {num_rounds}: plan more rounds, or give a smaller patience", warn=True
            )
        if isinstance(self.detection, Gain) and (short := too_short(self.detection.start, num_rounds)):
            log_message(short, warn=True)
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
        """As Flower's own `start`; with a checkpoint in `folder` it continues with the run's own round numbers.

        If the strategy has a `start` of its own (logging, checkpoints of the best model), that one runs, with the
        detector's methods in place of the strategy's; `own` are its further arguments.
        """
        try:
            settings = run_settings(grid)
            for table, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
                settings[table] = settings_of({} if config is None else config)
            done, arrays = self._begin(initial_arrays, num_rounds, settings, own_loop=False)
            if done >= num_rounds:
                log_message(
                    f"the folder holds all {num_rounds} rounds already; give another folder for a new run", warn=True
                )
                self._recorder.finish()
                return Result(arrays=arrays)
            score = (lambda r, w: evaluate_fn(r + done, w)) if evaluate_fn else None
            given: dict[str, Any] = {
                "grid": grid,
                "initial_arrays": arrays,
                "num_rounds": num_rounds - done,
                "timeout": timeout,
                "train_config": train_config,
                "evaluate_config": evaluate_config,
                "evaluate_fn": score,
            }
            result = self._own_start(given, own) if self._has_own_start() else super().start(**given, **own)
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
        """Refuse replies that may be updates, unless the user has said whether they are."""
        assert self._sent is not None
        found = None if self._replies or self._are_weights else may_be_updates(valid, self._sent)
        if found:
            raise UserError(
                "the clients' replies are nearer to 0 than to the w that they were sent: they may be updates. Give "
                'NFLDetector(..., replies="updates") where the strategy adds them to w, or replies="weights"'
            )
        self._are_weights = self._are_weights or found is not None

    def _has_own_start(self) -> bool:
        return type(self._own).start is not Strategy.start

    def _own_start(self, given: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        """Call the start() of the user's strategy, while the methods of that object are replaced by the detector's.

        The strategy's own methods, which the detector calls, are bound before.
        """
        kept = self.strategy
        if kept is not self._own:  # a DP wrapper with a start() of its own, between two probes
            raise UserError(
                f"strategy: {type(self._own).__name__} adds noise and has a start() of its own; call "
                "detector.begin(arrays, rounds) and the detector's methods in a loop, as NFLDetector.begin shows"
            )
        taken = _taken(self._own, given, own)
        self.strategy = _BoundStrategy(self._own)
        methods = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary")
        try:
            for name in methods:
                setattr(self._own, name, getattr(self, name))
            return self._own.start(*taken.args, **taken.kwargs)
        finally:
            for name in methods:
                vars(self._own).pop(name, None)
            self.strategy = kept

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if self._sent is None:
            raise UserError(
                f"NFLDetector was not started: {ORDER}, and call its start(). Inside a DP wrapper it could not see the "
                "noise. In a loop of your own call detector.begin(arrays, rounds) first"
            )
        if self._played == self._since:  # a loop of the user's own has no Grid before
            self._recorder.require_same(run_settings(grid))
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
        """Add w^0 for clients that do not have it: those that came after the first round, and those that ask for it."""
        sent, first = 0, b""
        for message in messages:
            node = message.metadata.dst_node_id
            late = self._since == 0 and round > 1 and node not in self._asked and self._wrapped
            if self.detection.reports and self._on_panel(node) and (late or node in self._wanting):
                first = first or pack_records(RecordDict({"arrays": self._first}))
                next(iter(message.content.config_records.values()))[START] = first
                self._wanting.discard(node)
                sent += 1
            self._asked.add(node)
        if sent:
            size = sent * len(first) / 1e6
            log_message(f"round {round}: sent w^0 to {sent} clients that did not have it, {size:.3g} MB in all")

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
        if self._replies != "updates" and self._probes.restores(valid, self._sent, clip_norm):
            valid = replace(valid, w_K=[])
        self._probes.watch(valid.names)
        low_rank = any(LORA in name for name in valid.names)
        factors_K = factors_of(valid.passed, self._sent if self._replies == "updates" else None) if low_rank else []
        if valid.nodes or self._probes.outer is None:
            arrays, metrics = self.strategy.aggregate_train(round, valid.passed)
        else:  # Flower's adaptive clipping divides by the number of valid answers
            log_message(f"round {round}: no valid answer; w does not change", warn=True)
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
        noisy = self._probes.outer is not None
        self.products = measure_products(factors_K, arrays, noisy=noisy) if arrays and low_rank else None
        self._probes.forget()
        number = self._recorder.number
        answered = frozenset(number(node) for node in valid.nodes)
        # The report of a client whose update is refused does not count.
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
        panel = any(map(self._on_panel, valid.nodes))
        if self.detection.reports and round == self._since + 1 and panel and not visits and not gains:
            log_message(
                f"round {round}: no client's app is wrapped, so nothing is tested: add app = lindt.flower.wrap(app) as "
                "the last line of the client's file, and check that clientapp in pyproject.toml names that app",
                warn=True,
            )
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
        messages = list(self.strategy.configure_evaluate(round, arrays, config, grid))
        # After the last round a client keeps the newest version of its models, and no earlier one.
        return self._with_instruction(messages, round, keep=round if round == self._rounds else None)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        round, replies = server_round + self._offset, list(replies)
        self._tell_notes(round, evaluation_visits(replies))  # of clients that were not asked to train
        reports, faults = reports_of(replies)
        refused = self._recorder.settle_names(round, {node: report.client for node, report in reports.items()})
        reports = {node: report for node, report in reports.items() if node not in refused}
        replies, odd = consistent_replies(replies, self._weighted_by)
        for node, fault in (faults | odd).items():
            if fault == EMPTY:
                who = self._recorder.name(node)
                log_message(f"round {round}: {who} has no test samples; its evaluation is left out", warn=True)
            else:
                log_message(f"round {round}: node {node} sent a malformed report: {fault}", warn=True)
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
        """Take the gain reports and visits out of the replies; returns them by the identity of their reply.

        The strategies then see the user's records only.
        """
        found: dict[int, GainReport] = {}
        visits: dict[int, Visit] = {}
        claims: dict[int, str] = {}
        for reply in replies:
            if reply.has_error():
                continue
            try:
                visit, report = detach_visit(reply.content)
            except ValueError as error:
                fault = f"node {reply.metadata.src_node_id} sent a malformed gain report"
                log_message(f"round {round}: {fault}: {one_line(str(error))}", warn=True)
            else:
                node = reply.metadata.src_node_id
                if report is not None:
                    found[id(reply)] = report
                if visit is not None:
                    visits[id(reply)] = visit
                    if not visit.problem or visit.client != nameless(node):
                        claims[node] = visit.client
                    if visit.wants_start:
                        self._wanting.add(node)
        refused = self._recorder.settle_names(round, claims)
        self._unnamed = self._unnamed - claims.keys() | refused
        nodes = {id(reply): reply.metadata.src_node_id for reply in replies}
        found = {
            place: report
            for place, report in found.items()
            if self.detection.reports and nodes[place] not in refused and self._on_panel(nodes[place])
        }
        self._wrapped = self._wrapped or bool(visits)
        return found, visits

    def _next(self, server_round: int) -> int:
        """The run's own number of a round that is about to be played."""
        round = server_round + self._offset
        if round <= self._played:
            raise UserError(f"round {round} was played already; continue with round {self._played + 1}")
        return round

    def _with_instruction(self, messages: list[Message], round: int, keep: int | None = None) -> list[Message]:
        keep = (
            max(0, round - 2) if keep is None else keep
        )  # a resumed run may start from the checkpoint before the last one
        if self._recorder.folder is None and round == self._rounds:
            keep = round  # there is no checkpoint
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
            node = message.metadata.dst_node_id
            panel = self._on_panel(node) and node not in self._unnamed
            recovering = self.state.on and node not in self._unnamed
            with_own_config(message)
            own = replace(instruction, panel=panel, noise=self._noise if panel else 0.0, recovering=recovering)
            own.put(message)
        return messages

    def _on_panel(self, node: int) -> bool:
        """Whether a node holds out data, trains a P_i and reports.

        Of N nodes, in the order in which they were first seen, N times the share of them are on the panel, give or take
        one. The run's id decides which, so that it is the same in every round, and after a restart with `folder`. The
        server chooses by the node and not by the client's name, because a client chooses its own name.
        """
        number, start = self._recorder.number(node), self._panel_start
        return math.floor(self._panel * (number + 1) + start) > math.floor(self._panel * number + start)

    def _with_verdict(self, metrics: MetricRecord | None, reports: int) -> MetricRecord:
        record = MetricRecord() if metrics is None else metrics
        for name, value in vars(self.seen).items() if self.seen else ():
            if value is not None:
                record[PREFIX + name.replace("_", "-")] = float(value)
        for name, value in vars(self.products).items() if self.products else ():
            if value is not None:
                record[f"{PREFIX}{name}-product"] = value
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
            then = "clients are asked to recover from now on" if self._recover else "detection only, no client recovers"
            log_message(f"round {round}: NFL suspected; {then}", warn=True)

    def _tell_clients(self, round: int, visits: list[Visit | None], reports: int) -> None:
        """Log how many clients are wrapped, report and recover, when that has changed, and what it cost."""
        wrapped = [visit for visit in visits if visit is not None]
        recover, silent = sum(visit.recovers for visit in wrapped), sum(visit.silent for visit in wrapped)
        asked = self.state.on and bool(visits) and self._counted[:1] == (True,)
        counts = (len(wrapped), reports, recover, silent)
        counted = (self.state.on, *("all" if n == len(visits) else "some" if n else "none" for n in counts))
        if counted != self._counted and (wrapped or reports):
            calls, seconds = sum(visit.calls for visit in wrapped), math.fsum(visit.seconds for visit in wrapped)
            text = f"of {len(visits)} clients {len(wrapped)} are wrapped, {reports} report, {recover} recover"
            text += (
                f"; {silent} do not report, because their updates have noise and reports would have none"
                if silent
                else ""
            )
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
        self._tell_notes(round, wrapped)
        flat = sorted({visit.client for visit in wrapped if visit.flat} - self._flat)
        if flat:
            self._flat |= set(flat)
            more = f" and {len(flat) - 5} more" if len(flat) > 5 else ""
            log_message(
                f"round {round}: the private model of client {', '.join(flat[:5])}{more} paused without ever improving "
                "on its first score; until it does, a gain over it says little",
                warn=True,
            )
        for score in sorted({visit.score for visit in wrapped if visit.score}):
            if f"score: {score}" not in self._told:
                self._told[f"score: {score}"] = True
                log_message(f"score: {score}")
                self._recorder.note(f"score: {score}")
        self._counted = counted

    def _tell_notes(self, round: int, visits: Iterable[Visit]) -> None:
        """Log which clients have set models aside, and that earlier reports are of other settings."""
        noted = [visit for visit in visits if visit.note]
        texts = [f"client {visit.client}: {one_line(visit.note)}" for visit in noted]
        if any(OTHER_SETTINGS in visit.note for visit in noted) and OTHER_SETTINGS not in self._told:
            self._told[OTHER_SETTINGS] = True
            texts.append("the app's settings changed: the verdict mixes reports of both; give another folder")
        for text in texts:
            log_message(f"round {round}: {text}", warn=True)
            self._recorder.note(f"round {round}: {text}")

    def _tell_verdict(self, round: int, *, stopped: bool) -> None:
        """Log each answer of the test of gains, when it has changed."""
        found = self.found
        assert found is not None
        answers = {"": found.verdict, "the shared model": found.recovery, "private models": found.recovered}
        for against, decision in answers.items():
            # The numbers change in each round; only a changed answer is logged.
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
                f"round {round}: adapted models are shown to be worse than the shared model; recovery is off, clients "
                "predict with the shared model",
                warn=True,
            )


def run_settings(grid: Grid) -> Settings:
    """The `run_config` of the app, if the Grid knows it: that of pyproject.toml and of `flwr run --run-config`.

    Without it the clients alone notice that a setting has changed.
    """
    try:
        from flwr.common.config import get_fused_config

        found = get_fused_config(grid.run)
    # A Grid without a run, an app whose files are not on this machine, or a Flower without this function.
    except (ImportError, AttributeError, OSError, ValueError, KeyError, TypeError, NotImplementedError):
        return {}
    return {"run_config": settings_of(found)} if found else {}


def _require_some(valid: ValidReplies, visits: list[Visit | None]) -> None:
    """In the first round, raise an error for a mistake that all clients report; otherwise no round would train w."""
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


def _taken(strategy: Strategy, given: Mapping[str, Any], own: Mapping[str, Any]) -> BoundArguments:
    """The arguments for the strategy's own start(): without those that it does not name and the user did not give."""
    start, defaults = signature(strategy.start), signature(Strategy.start).parameters
    kinds = {parameter.kind for parameter in start.parameters.values()}
    try:
        if Parameter.VAR_POSITIONAL in kinds:
            return start.bind(*given.values(), **own)
        everything = Parameter.VAR_KEYWORD in kinds
        named = {
            name: value
            for name, value in given.items()
            if everything or name in start.parameters or value != defaults[name].default
        }
        return start.bind(**named, **own)
    except TypeError as error:
        raise UserError(
            f"strategy: the start() of {type(strategy).__name__} cannot be called ({error}); let it take the arguments "
            "of Flower's, or call detector.begin(arrays, rounds) and the detector's methods in a loop, as "
            "NFLDetector.begin shows"
        ) from None


@final
class _BoundStrategy(Strategy):
    """A strategy's own methods, bound before they are replaced on the object."""

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
    """Refuse a detection without reports; the paper's rule is chosen by epsilon."""
    if not detection.reports:
        raise UserError("detection: it needs no reports; for the paper's rule give epsilon instead")
    return detection


def _shown(state: DetectionState | None) -> DetectionState | None:
    """The state to show: undecided instead of too early where no client has reported, since reports may never come."""
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
