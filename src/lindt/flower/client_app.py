"""`app = wrap(app)`: detection and recovery by the app's own functions, as the last line of a Flower client's file.

The app's own function is called first, on w, with the message that it would get without lindt. Its records do not
change by a byte. Then the app's functions are called again with other arrays:

    P_i     the private model: the train function from w^0, at most two calls per message, while it improves, and now
            and then while w scores above it
    v_i     the adapted model, while recovery is on: the train function from v_i, pulled a quarter of the way to w
    scores  the evaluate function on w, v_i and P_i

Each of w, v_i and P_i has its own Context.state. The random generators of Python, numpy and torch are restored after
the extra calls. When an extra call fails, the client sends no report and logs the reason; the app's own reply is sent
unchanged.

Mods that change the reply (Flower's own for clipping and noise, and those named in `sharing_mods`) are not called for
v_i and P_i, which are not sent. The other mods are called: the app's functions may rely on them.

Limits: the model must be one ArrayRecord, and the reply must have the same names and shapes. State in module globals
is shared by all models and by the app's own calls. This module does not import torch.
"""

from __future__ import annotations

import copy
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from lindt.errors import UserError, one_line, require_type
from lindt.flower.dp_sgd import noticing_dp_sgd
from lindt.flower.messages import (
    REPORT,
    Instruction,
    Visit,
    copied,
    log_message,
    nameless,
    no_report,
    start_of,
    unpack_records,
    without_instruction,
)
from lindt.flower.scoring import Score, ScoreRule, compared, require_rule, score_of
from lindt.flower.vault import LocalModel, Vault, default_folder, is_in, kept_name, origin_of, unwritable
from lindt.gains import GainReport, with_noise
from lindt.seeds import seed_for

if TYPE_CHECKING:
    from lindt.flower.mod import Dual

Function = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Function], Message]
Choice = Literal["w", "v_i", "P_i"]

CALLS_A_VISIT: Final = 2  # train calls for P_i per message
MOST_CALLS: Final = 100  # train calls for P_i in all; after so many rounds, one per round
PATIENCE: Final = 4  # calls without a better score or loss, after which P_i pauses; more where no loss is known
RISES: Final = 2  # scores above the first one that show that P_i learns: a single one may be chance
BETTER: Final = 0.99  # a loss counts as better below this fraction of the best loss so far
PULL: Final = 0.25  # fraction of the way from v_i to w by which v_i moves before it trains


def wrap(
    app: ClientApp,
    *,
    score: ScoreRule = None,
    share: bool = False,
    client_id: Callable[[Context], object] | None = None,
    folder: str | Path | None = None,
    sharing_mods: Sequence[Mod] = (),
    dual: Dual | None = None,
) -> ClientApp:
    """Add gain reports and recovery to a Flower client: `app = wrap(app)`.

    Args:
        app: The ClientApp, after its functions were registered.
        score: The name of the evaluation metric that is the score ("-name" where lower is better), or a function of
            all metrics. By default the metric with "acc" in its name, else minus the metric with "loss" in its name.
        share: The score that you name is a share in [0, 1], as a hit rate is: it is treated as an accuracy.
        client_id: A function of the context that returns a permanent name of this client. By default the name is the
            partition-id, else a name that is made once and kept in `folder`.
        folder: The folder in which the client keeps its models v_i and P_i.
        sharing_mods: Your own mods that clip the reply or add noise to it. They are not called for v_i and P_i, and
            the client reports nothing unless the server asks for reports with noise.
        dual: Recovery by the paper's intertwined training, for a model that you give. Then give the other arguments to
            `Dual` (`Dual(client_id=..., folder=...)`).

    Returns:
        The app to name in pyproject.toml in place of `app`.

    Raises:
        UserError: The app is already wrapped, uses Flower's legacy API, or is not a ClientApp; or `share` is
            given without a score.

    Examples:
        >>> from flwr.clientapp import ClientApp
        >>> import lindt.flower
        >>> app = ClientApp()
        >>> @app.train()
        ... def train(message, context): ...
        >>> app = lindt.flower.wrap(app)
        >>> isinstance(app, ClientApp)
        True
    """
    require_type("app", app, ClientApp, "give the ClientApp, after its functions were registered")
    if isinstance(app, WrappedApp):
        raise UserError("app: it is already wrapped; call wrap once")
    if app._call is not None:
        raise UserError("app: ClientApp(client_fn=...) uses Flower's legacy API; register @app.train() instead")
    if dual is not None:
        if score is not None or share or client_id is not None or folder is not None or sharing_mods:
            raise UserError("dual: give score, client_id, folder and sharing_mods to Dual(...), or leave out dual")
        return _with_dual(app, dual)
    require_rule(score, share)
    return WrappedApp(app, score, share, client_id, Path(folder) if folder is not None else None, tuple(sharing_mods))


def mods_of(function: Function) -> tuple[list[Mod], Function]:
    """The mods around a registered function, from the outside in, and the function itself.

    Flower does not store them: they are read from the closures that its `make_ffn` nests.
    """
    mods: list[Mod] = []
    while getattr(function, "__qualname__", "").startswith("make_ffn.<locals>."):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        mods.append(cells["_mod"].cell_contents)
        function = cells["_ffn"].cell_contents
    return mods, function


def all_mods(app: ClientApp) -> list[Mod]:
    """The mods of the app and of each of its functions."""
    return [*app._mods, *(mod for function in app._registered_funcs.values() for mod in mods_of(function)[0])]


def with_mods(function: Function, mods: Sequence[Mod]) -> Function:
    for mod in reversed(mods):
        function = _around(function, mod)
    return function


def _around(function: Function, mod: Mod) -> Function:
    return lambda message, context: mod(message, context, function)


def _with_dual(app: ClientApp, dual: Dual) -> ClientApp:
    """Put the dual model's mod inside all mods of the app and of each function: they then see what it sends."""
    wrapped = ClientApp()
    wrapped._mods, wrapped._lifespan = app._mods, app._lifespan
    dual.adds_noise = any(isinstance(mod, LocalDpMod) for mod in all_mods(app))
    for name, function in app._registered_funcs.items():
        mods, own = mods_of(function)
        wrapped._registered_funcs[name] = with_mods(own, [*mods, dual])
    return wrapped


@final
@dataclass
class Work:
    """One message of the server, and what the extra calls for it have cost so far."""

    message: Message  # as the app received it, its records unchanged
    context: Context
    instruction: Instruction
    client: str
    w: ArrayRecord
    name: str  # of the record with the arrays
    state: RecordDict  # the app's own Context.state before its own call
    vault: Vault
    calls: int = 0
    note: str = ""  # for the server's log
    score: str = ""  # the metric that is the score, and its direction
    started: float = field(default_factory=time.monotonic)

    @property
    def visit(self) -> Visit:
        return Visit(
            self.client, self.calls, round(time.monotonic() - self.started, 3), note=self.note, score=self.score
        )


@final
class WrappedApp(ClientApp):
    def __init__(
        self,
        app: ClientApp,
        score: ScoreRule,
        share: bool,
        client_id: Callable[[Context], object] | None,
        folder: Path | None,
        sharing_mods: tuple[Mod, ...],
    ) -> None:
        super().__init__()
        self._app, self._score, self._share, self._client_id, self._folder = app, score, share, client_id, folder
        self._sharing_mods = sharing_mods
        # Shared, so that a function registered later on either app is registered on both.
        self._mods, self._registered_funcs, self._lifespan = app._mods, app._registered_funcs, app._lifespan
        self._warned: set[str] = set()

    def __call__(self, message: Message, context: Context) -> Message:
        category = message.metadata.message_type.partition(".")[0]
        try:
            instruction = Instruction.read(message) if message.has_content() else None
        except ValueError as error:
            log_message(f"the server's instruction is malformed: {error}; no report", warn=True)
            instruction = None
        if instruction is None or category not in (MessageType.TRAIN, MessageType.EVALUATE):
            return self._app(message, context)
        start = start_of(message)
        message.content = without_instruction(message.content)
        received = _message(copied(message.content), message, message.metadata.message_type)
        state = copied(context.state)
        with noticing_dp_sgd() as noticed:
            reply = self._app(message, context)
        if reply.has_error():
            return reply
        if REPORT in reply.content:
            self._warn_once(f"no report: the app's reply has a record {REPORT!r} of its own; rename that record")
            return reply
        with _generators_restored():
            reply.content[REPORT] = self._record(received, context, instruction, state, start, reply, noticed.dp_sgd)
        return reply

    def chosen(self, message: Message, context: Context) -> tuple[Choice, ArrayRecord]:
        """The model with which this client predicts ("w", "v_i" or "P_i") and its arrays, for a function of your own.

        `message` is a message of NFLDetector, as a mod sees it. While recovery is on, the model is the one that scored
        best in the last evaluation, on the evaluation's own data. Else it is w.
        """
        instruction = Instruction.read(message)
        if instruction is None:
            raise UserError("message: it has no instruction of NFLDetector, so there is no v_i; pass a message as sent")
        work = self._work(message, context, instruction, copied(context.state))
        with work.vault.locked():
            choice = work.vault.choice() if _adapts(instruction) else "w"
            versions = {"v_i": work.vault.adapted, "P_i": work.vault.private}
            for name in ("v_i", "P_i"):
                if choice == name and (model := versions[name].newest(up_to=instruction.round)) is not None:
                    return name, model.arrays
            return "w", work.w

    def _record(
        self,
        message: Message,
        context: Context,
        instruction: Instruction,
        state: RecordDict,
        start: bytes | None,
        reply: Message,
        dp_sgd: bool,
    ) -> ConfigRecord:
        """The record that lindt adds to the reply. An error is written into it: the app's own reply stays as it is."""
        work: Work | None = None
        try:
            work = self._work(message, context, instruction, state)
            with work.vault.locked():
                self._set_aside_moved(work, reply)
                work.vault.begin_session(instruction)
                if dp_sgd:
                    work.vault.keep_dp_sgd()
                if message.metadata.message_type.partition(".")[0] == MessageType.TRAIN:
                    return self._after_training(work, start)
                return self._after_evaluation(work, reply)
        except Exception as error:  # noqa: BLE001  # of lindt, or of the app's functions in an extra call
            folder = self._folder or default_folder()
            ours = isinstance(error, UserError)
            vault = isinstance(error, OSError) and is_in(folder, error)  # the run goes on without this client's report
            problem = one_line(str(error) if ours else f"{type(error).__name__}: {error}")
            problem = unwritable(folder, error) if isinstance(error, OSError) and vault else problem
            visit = work.visit if work is not None else Visit(nameless(context.node_id))
            extra = "" if ours or vault else " in an extra call of the app's own functions"
            self._warn_once(f"client {visit.client}: no report: {problem}{extra}")
            return ConfigRecord({"visit": replace(visit, problem=problem, ours=ours).pack()})

    def _work(self, message: Message, context: Context, instruction: Instruction, state: RecordDict) -> Work:
        records = message.content.array_records
        if len(records) != 1:
            raise UserError(f"the message has {len(records)} records of weights; lindt needs one that holds the model")
        ((name, w),) = records.items()
        client = self._name(message, context, instruction)
        vault = Vault(self._folder or default_folder(), instruction.experiment, client)
        return Work(message, context, instruction, client, ArrayRecord(dict(w)), name, state, vault)

    def _set_aside_moved(self, work: Work, reply: Message) -> None:
        """Set models aside that were trained on other data or are of another architecture."""
        kind, examples = work.message.metadata.message_type, None
        if kind.partition(".")[0] == MessageType.TRAIN:
            numbers = [record.get(work.instruction.weighted_by) for record in reply.content.metric_records.values()]
            examples = next((int(number) for number in numbers if isinstance(number, int | float)), None)
        origin = origin_of(work.context.node_config, work.context.run_config, work.w, examples)
        visitor = kind, f"{work.instruction.session}/{work.context.node_id}"
        work.note = work.vault.set_aside_moved(origin, visitor)
        if work.note:
            log_message(f"client {work.client}: {work.note}, in {work.vault.home / 'aside'}", warn=True)

    def _name(self, message: Message, context: Context, instruction: Instruction) -> str:
        if self._client_id is not None:
            return str(self._client_id(context))
        if "partition-id" in context.node_config:
            return str(context.node_config["partition-id"])
        visit = f"{instruction.experiment}/{instruction.session}/{instruction.round}/{message.metadata.message_type}"
        return kept_name(self._folder or default_folder(), context.node_id, visit)

    def _warn_once(self, text: str) -> None:
        """Log a warning once per process. On a SuperNode each message has a process of its own."""
        if text not in self._warned:
            self._warned.add(text)
            log_message(text, warn=True)

    def _tell_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log_message(text)

    def _after_training(self, work: Work, start: bytes | None) -> ConfigRecord:
        """Report the gain, if the server asks for it, and train v_i, while recovery is on."""
        instruction, record = work.instruction, ConfigRecord()
        silent = self._adds_noise(work) and not instruction.noise
        asks = instruction.reports and instruction.panel and not silent
        adapted = work.vault.adapted.newest(up_to=instruction.round - 1) if instruction.recovering else None
        private, wants_start, fault = None, False, None
        if asks:
            private = work.vault.private.newest(up_to=instruction.round - 1)
            first = work.w if instruction.round == 1 else self._start(start, work)
            wants_start = private is None and first is None
            if not wants_start:
                try:
                    report, private = self._report(work, private, first, adapted)
                    record["gain"] = report
                except Exception as error:  # noqa: BLE001  # v_i is trained even so
                    fault = error
                    if private is None and first is not None:  # the server sends w^0 once
                        work.vault.private.write(_untrained(first), instruction)
        if instruction.recovering:
            self._adapt(work, adapted)
        if fault is not None:
            raise fault
        finished = private is not None and bool(private.notes["finished"])
        flat = finished and private is not None and bool(private.notes.get("flat"))
        visit = replace(
            work.visit,
            recovers=instruction.recovering,
            finished=finished,
            flat=flat,
            wants_start=wants_start,
            silent=silent,
        )
        record["visit"] = visit.pack()
        return record

    def _after_evaluation(self, work: Work, reply: Message) -> ConfigRecord:
        """Compare the model with which the client predicts with w and with P_i.

        A client that adds noise to its updates sends no scores: they would have none, also where the server asks for
        gain reports with noise.
        """
        instruction = work.instruction
        others = RecordDict({k: r for k, r in work.message.content.items() if not isinstance(r, ArrayRecord)})
        work.vault.keep_evaluation(work.message.metadata.message_type, others)
        work.vault.prune(instruction)
        noisy = self._adds_noise(work)
        adapted = work.vault.adapted.newest(up_to=instruction.round) if _adapts(instruction) else None
        private = work.vault.private.newest(up_to=instruction.round) if instruction.reports else None
        silent = noisy and not instruction.noise
        if adapted is None and (noisy or private is None):
            return ConfigRecord({"visit": replace(work.visit, silent=silent).pack()})
        scores: dict[Choice, Score] = {"w": self._score_of(reply, instruction)}
        for name, model in (("v_i", adapted), ("P_i", private)):
            if model is not None:
                scores[name] = self._evaluate(work, model.arrays, model.state)  # type: ignore[index]
        scores = _in_one_scale(scores)
        chooses = instruction.recovering or adapted is not None
        choice = best_of(scores) if chooses else "w"
        if chooses and not instruction.reports:  # with reports the first training has said it
            self._tell_once(f"client {work.client}: score: {scores['w'].words}")
        work.vault.keep_choice(choice)
        visit = replace(work.visit, recovers=adapted is not None, silent=silent)
        if noisy:
            return ConfigRecord({"visit": visit.pack()})
        tally = _tally(scores["w"], scores[choice], scores.get("P_i"))
        about: dict[str, Any] = {
            "visit": visit.pack(),
            "client": work.client,
            "percent": scores["w"].share,
            "paired": False,
            "chosen": chooses,
            "tally": tally,
        }
        return ConfigRecord(about)

    def _adds_noise(self, work: Work) -> bool:
        """Whether this client's updates have noise. Without noise of its own, a report would reveal more than they."""
        how = ""
        if any(isinstance(mod, LocalDpMod) or mod in self._sharing_mods for mod in all_mods(self._app)):
            how = "it adds noise to its updates"
        elif work.vault.has_dp_sgd():
            how = "its train function adds noise (DP-SGD by opacus)"
        if how and not work.instruction.noise:
            self._warn_once(no_report(work.client, how))
        return bool(how)

    def _start(self, start: bytes | None, work: Work) -> ArrayRecord | None:
        """w^0, as the server sends it to a client that joins after round 1."""
        if start is None:
            return None
        records = unpack_records(start).array_records
        if len(records) != 1:
            raise UserError(f"the server's w^0 has {len(records)} records of arrays; lindt needs one")
        (first,) = records.values()
        _require_same(work.w, first, "the server's w^0")
        return first

    def _report(
        self, work: Work, private: LocalModel | None, first: ArrayRecord | None, adapted: LocalModel | None
    ) -> tuple[str, LocalModel]:
        """The gain report as JSON, and P_i as it is now."""
        instruction = work.instruction
        w = self._evaluate(work, work.w, work.state)
        if private is None:
            assert first is not None
            private = _untrained(first)
        work.score = w.words
        if not private.notes["scores"]:  # once: a process of its own for each message has no memory
            log_message(f"client {work.client}: score: {w.words}")
        for _ in range(CALLS_A_VISIT):
            scores, losses = private.notes["scores"], private.notes["losses"]
            if pause(scores, losses, instruction.round) and not tries_again(scores, losses, instruction.round, w):
                break
            private = self._train_alone(work, private)
        private = self._noted(work, private, w)
        if private.notes.get("written") != len(private.notes["scores"]):
            notes = private.notes | {"written": len(private.notes["scores"])}
            private = replace(private, notes=notes)
            work.vault.private.write(private, instruction)
        v = None if adapted is None else self._evaluate(work, adapted.arrays, adapted.state)
        history = private.notes["scores"]
        now = replace(w, value=history[-1])
        then = replace(w, value=history[min(instruction.round, len(history)) - 1])
        percent = w.share and max(w.value, *history, 0.0 if v is None else v.value) > 1
        w, now, then = (score.scaled(percent) for score in (w, now, then))
        v = None if v is None else v.scaled(percent)
        report = GainReport(
            samples=w.samples,
            private=compared(w, now if private.notes["finished"] else then),
            equal_age=compared(w, then),
            adapted=None if v is None else compared(v, w),
            adapted_private=None if v is None else compared(v, now),
        )
        return json.dumps(asdict(with_noise(report, instruction.noise))), private

    def _train_alone(self, work: Work, private: LocalModel) -> LocalModel:
        """One call of P_i, and its score after it."""
        trained = self._train(work, private.arrays, private.state, "alone")
        score = self._evaluate(work, trained.arrays, trained.state)
        scores = [*private.notes["scores"], score.value]
        losses = [*private.notes["losses"], score.loss]
        return replace(trained, notes=private.notes | {"scores": scores, "losses": losses})

    def _noted(self, work: Work, private: LocalModel, w: Score) -> LocalModel:
        """P_i with notes about whether it is finished in this round: it pauses, and takes no further call now."""
        scores, losses, round = private.notes["scores"], private.notes["losses"], work.instruction.round
        why = pause(scores, losses, round)
        finished = bool(why) and not (_is_flat(scores, losses) and tries_again(scores, losses, round, w))
        told = why if finished else private.notes.get("told", "") if why else ""
        if told and told != private.notes.get("told", ""):
            ends = "stopped" if why == "cap" else "paused"
            reason = "while it still improved" if why == "cap" else "as neither its score nor its loss improved"
            log_message(f"client {work.client}: its private model {ends} after {len(scores)} calls, {reason}")
        flat = why == "plateau" and _is_flat(scores, losses) and not _is_best(replace(w, value=scores[-1]))
        return replace(private, notes=private.notes | {"finished": finished, "flat": flat, "told": told})

    def _adapt(self, work: Work, adapted: LocalModel | None) -> None:
        """Train v_i: the first time from w, later from v_i pulled towards w."""
        start = work.w if adapted is None else pulled(adapted.arrays, work.w)
        trained = self._train(work, start, work.state if adapted is None else adapted.state, "adapted")
        if not _finite_as(trained.arrays, work.w):
            raise UserError("v_i has NaN or infinite values after training; the v_i before it is kept")
        work.vault.adapted.write(trained, work.instruction)

    def _train(self, work: Work, arrays: ArrayRecord, state: RecordDict, purpose: str) -> LocalModel:
        """The app's train function on these arrays instead of w."""
        kind = work.message.metadata.message_type
        content = copied(work.message.content)
        content[work.name] = ArrayRecord(dict(arrays))
        seed = seed_for(0, work.instruction.experiment, work.client, work.instruction.round, purpose, work.calls)
        work.calls += 1
        reply, after = self._run(work, kind, content, state, seed)
        records = reply.content.array_records
        if work.name not in records and len(records) != 1:
            raise UserError(f"the train function returned {len(records)} records of weights; lindt needs one")
        trained = records[work.name] if work.name in records else next(iter(records.values()))
        _require_same(arrays, trained, "the train function's reply")
        if work.instruction.replies == "updates":
            trained = added(arrays, trained)
        return LocalModel(ArrayRecord(dict(trained)), after)

    def _evaluate(self, work: Work, arrays: ArrayRecord, state: RecordDict) -> Score:
        """The app's evaluate function on these arrays. Its changes to the state are discarded."""
        last = work.vault.last_evaluation()
        kind, content = last if last is not None else (self._evaluation(), copied(work.message.content))
        names = [name for name, record in content.items() if isinstance(record, ArrayRecord)]
        for name in names:
            del content[name]
        content = RecordDict({work.name: ArrayRecord(dict(arrays)), **content})
        seed = seed_for(0, work.instruction.experiment, work.client, work.instruction.round, "evaluate")
        reply, _ = self._run(work, kind, content, state, seed)
        return self._score_of(reply, work.instruction)

    def _score_of(self, reply: Message, instruction: Instruction) -> Score:
        return score_of(reply.content, self._score, instruction.weighted_by, self._share)

    def _evaluation(self) -> str:
        """The message type of an evaluation, before the first one has come."""
        found = [name for name in self._app._registered_funcs if name.startswith("evaluate.")]
        if "evaluate.default" in found:
            return MessageType.EVALUATE
        if len(found) != 1:
            what = "no evaluate function" if not found else f"the evaluate functions {', '.join(sorted(found))}"
            raise UserError(f"the app has {what}; lindt needs @app.evaluate() to score a model")
        return found[0]

    def _run(
        self, work: Work, kind: str, content: RecordDict, state: RecordDict, seed: int
    ) -> tuple[Message, RecordDict]:
        """Call a registered function without the mods that change the reply; its reply, and the state after it."""
        category, _, action = kind.partition(".")
        function = self._app._registered_funcs.get(f"{category}.{action or 'default'}")
        if function is None:
            raise UserError(f"the app has no {category} function for messages of type {kind!r}")
        mods, own = mods_of(function)
        own = with_mods(own, [mod for mod in mods if not self._is_sharing(mod)])
        context = copy.copy(work.context)
        context.state, context.node_config = copied(state), dict(work.context.node_config)
        context.run_config = dict(work.context.run_config)
        _seed_generators(seed)
        with self._app._lifespan(context):
            reply = own(_message(content, work.message, kind), context)
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        return reply, context.state

    def _is_sharing(self, mod: Mod) -> bool:
        """Whether a mod acts on the reply as it is sent: all of Flower's own change it or log its size."""
        home = getattr(mod, "__module__", "") or type(mod).__module__
        return home.startswith("flwr.") or mod in self._sharing_mods


def _adapts(instruction: Instruction) -> bool:
    """Whether the client may predict with v_i. Under the paper's rule it may also after recovery has stopped. Where
    gains are tested, recovery stops because v_i was shown to be worse than w."""
    return instruction.recovering or not instruction.reports


def _message(content: RecordDict, like: Message, kind: str) -> Message:
    """A message of type `kind` with the sender and receiver of `like`, so that functions can reply to it."""
    metadata = copy.copy(like.metadata)
    metadata.message_type = kind
    made: Any = Message  # its overloads have no `metadata`
    found: Message = made(content=content, metadata=metadata)
    return found


def _untrained(first: ArrayRecord) -> LocalModel:
    """P_i before its first training: w^0, with an empty state."""
    return LocalModel(first, RecordDict(), {"scores": [], "losses": [], "finished": False})


def pause(scores: Sequence[float], losses: Sequence[float | None], rounds: int) -> Literal["", "plateau", "cap"]:
    """Why a private model takes no call by itself, after `rounds` rounds of w: it has stopped improving, or it has had
    the most calls.

    It has stopped improving if in the last PATIENCE calls neither its best score improved nor, if the app has a loss,
    its best loss. The loss is used because an accuracy on few samples changes in large steps. Where no loss is known,
    or the loss was never below its first value, half of all calls must be without improvement: such an accuracy can
    stand still for several calls while the model learns.
    """
    calls, known = len(scores), [loss for loss in losses if loss is not None]
    patience = PATIENCE if _falls(known) else max(PATIENCE, calls // 2)
    if calls > patience and max(scores[-patience:]) <= max(scores[:-patience]):
        earlier = [loss for loss in losses[:-patience] if loss is not None]
        recent = [loss for loss in losses[-patience:] if loss is not None]
        best = min(earlier, default=0.0)
        if not earlier or not recent or min(recent) > (best * BETTER if best > 0 else best - (1 - BETTER) * abs(best)):
            return "plateau"
    return "cap" if calls >= max(MOST_CALLS, rounds) else ""


def tries_again(scores: Sequence[float], losses: Sequence[float | None], rounds: int, w: Score) -> bool:
    """Whether a private model on a plateau takes one more call, since w scores above it.

    It does until it has had half as many calls as w has had rounds: a plateau may end, and w had the time to pass it. A
    model whose score never rose may not have begun to learn. It goes on until it is as old as w, and at equal scores.
    """
    calls, last = len(scores), scores[-1]
    if pause(scores, losses, rounds) != "plateau" or calls >= max(MOST_CALLS, rounds):
        return False
    if not _is_flat(scores, losses):
        return w.value > last and calls < rounds / 2
    return w.value >= last and calls < rounds and not _is_best(replace(w, value=last))


def _falls(losses: Sequence[float]) -> bool:
    return min(losses[1:], default=math.inf) < losses[0] if losses else False


def _is_flat(scores: Sequence[float], losses: Sequence[float | None]) -> bool:
    """Whether a private model has never improved on its first score, nor on its first loss."""
    above = sum(score > scores[0] for score in scores)
    return above < RISES and not _falls([loss for loss in losses if loss is not None])


def _is_best(score: Score) -> bool:
    """Whether no score can be better: an accuracy of 1, or of 100%."""
    return score.share and score.value in (1.0, 100.0)


def best_of(scores: dict[Choice, Score]) -> Choice:
    """The model with the best score; at equal scores w goes before v_i, and v_i before P_i."""
    order: tuple[Choice, ...] = ("w", "v_i", "P_i")
    return max((name for name in order if name in scores), key=lambda name: scores[name].value)


def _in_one_scale(scores: dict[Choice, Score]) -> dict[Choice, Score]:
    """Accuracies from 0 to 1: if one accuracy is above 1, all are read as percentages."""
    percent = any(score.share and score.value > 1 for score in scores.values())
    return {name: score.scaled(percent) for name, score in scores.items()}


def _tally(central: Score, local: Score, private: Score | None) -> str:
    """The JSON of a ClientTally: sums over samples. Wins and losses are 0: they cannot be known without the samples."""

    def sums(score: Score | None) -> list[float] | None:
        return None if score is None else [score.value * central.samples, float(central.samples)]

    counts = dict.fromkeys(("wins", "losses", "attack_chances", "attack_central", "attack_local"), 0)
    scores = {"central": sums(central), "local": sums(local), "private": sums(private)}
    return json.dumps({"samples": central.samples, **scores, **counts})


def _require_same(expected: ArrayRecord, found: ArrayRecord, what: str) -> None:
    theirs = {name: tuple(array.shape) for name, array in found.items()}
    ours = {name: tuple(array.shape) for name, array in expected.items()}
    if theirs != ours:
        odd = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        raise UserError(
            f"{what}: array {odd[0]!r} is missing, new or of another shape than in the message; v_i and P_i need the "
            "same names and shapes"
        )


def pulled(v: ArrayRecord, w: ArrayRecord) -> ArrayRecord:
    """v_i, moved towards w. Arrays that are not floats (counters, packed trees) and values that are not finite are
    taken from w."""
    _require_same(w, v, "v_i")
    moved = ArrayRecord()
    for name, array in w.items():
        theirs, ours = array.numpy(), v[name].numpy()
        if not np.issubdtype(theirs.dtype, np.floating):
            moved[name] = array
            continue
        with np.errstate(invalid="ignore"):
            mixed = ours + PULL * (theirs - ours)
        moved[name] = Array(np.where(np.isfinite(mixed), mixed, theirs).astype(theirs.dtype))
    return moved


def added(w: ArrayRecord, update: ArrayRecord) -> ArrayRecord:
    """The trained weights w + update, for an app that replies with updates."""
    found = ArrayRecord()
    for name, array in w.items():
        values = array.numpy()
        found[name] = Array(np.asarray(values + update[name].numpy(), dtype=values.dtype))
    return found


def _finite_as(arrays: ArrayRecord, w: ArrayRecord) -> bool:
    """Whether all values are finite, except where w has NaN or infinity too, as in a causal mask."""
    for name, array in arrays.items():
        values = array.numpy()
        if np.issubdtype(values.dtype, np.floating) and not (np.isfinite(values) | ~np.isfinite(w[name].numpy())).all():
            return False
    return True


@contextmanager
def _generators_restored() -> Iterator[None]:
    """Restore the random generators of Python, numpy and, if the app has imported it, torch after the block."""
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    cpu = torch.get_rng_state() if torch is not None else None
    # Not read if no accelerator was used: reading would initialise it.
    devices = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        if torch is not None:
            torch.set_rng_state(cpu)
            if devices is not None:
                torch.cuda.set_rng_state_all(devices)
        elif (imported := sys.modules.get("torch")) is not None:  # an extra call imported it: reset to the first state
            imported.set_rng_state(imported.Generator().get_state())


def _seed_generators(seed: int) -> None:
    """Seed the generators for an extra call: the same message gives the same v_i and P_i."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
