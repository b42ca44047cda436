"""`app = wrap(app)`: detection and recovery by the app's own functions, as the last line of a Flower client's file.

The app's own call comes first, on w, with the message that it would have without us; its records do not change by a
byte. Then its functions are called again with other arrays:

    P_i     the private model: the train function from w^0, at most two calls a visit, until it stops improving
    v_i     the adapted model, while recovery is on: the train function from v_i, pulled half way towards w
    scores  the evaluate function on w, v_i and P_i

Each of w, v_i and P_i has its own Context.state. Python's, numpy's and torch's random generators are put back after
the extra calls. An error in them means "no report", with a sentence in the log; the app's own reply goes out as it is.

Mods that act on what is sent (Flower's own for clipping and noise, and those named in `sharing_mods`) are not called
for v_i and P_i, which are not sent. Others are: the app's functions may rely on them.

Limits: one model in one ArrayRecord, whose names and shapes come back. State in module globals is shared by all
models, and by the app's own calls. torch is not imported here.
"""

from __future__ import annotations

import copy
import json
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
from lindt.flower.messages import (
    REPORT,
    Instruction,
    Visit,
    copied,
    log_message,
    start_of,
    unpack_records,
    without_instruction,
)
from lindt.flower.scoring import Score, ScoreRule, compared, score_of
from lindt.flower.vault import LocalModel, Vault, default_folder
from lindt.gains import GainReport, with_noise
from lindt.seeds import seed_for

if TYPE_CHECKING:
    from lindt.flower.mod import Dual

Function = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Function], Message]
Choice = Literal["w", "v_i", "P_i"]

CALLS_A_VISIT: Final = 2  # of P_i
MOST_CALLS: Final = 100  # of P_i
PATIENCE: Final = 4  # calls without a better score or loss, after which P_i is finished
BETTER: Final = 0.99  # of the best loss so far: what counts as a better loss
PULL: Final = 0.5  # of the way from v_i to w, before v_i trains on


def wrap(
    app: ClientApp,
    *,
    score: ScoreRule = None,
    client_id: Callable[[Context], object] | None = None,
    folder: str | Path | None = None,
    sharing_mods: Sequence[Mod] = (),
    dual: Dual | None = None,
) -> ClientApp:
    """The same app, which also reports its gain and recovers: `app = wrap(app)`.

    `score` names the metric of the evaluation that is the score ("-name" where lower is better), or is a function of
    all metrics; without it the one with "acc" in its name, else the one with "loss". `client_id(context)` names this
    client for good; the partition-id by default, else the node's id. `folder` is where v_i and P_i lie.
    `sharing_mods` are mods of your own that clip or add noise to what is sent: they are not called for v_i and P_i,
    and the client reports nothing unless the server has it add noise.

    With `dual` recovery is the paper's intertwined training of a model that you name; then the other arguments are
    its own (`Dual(client_id=..., folder=...)`).
    """
    require_type("app", app, ClientApp, "give the ClientApp, after its functions were registered")
    if isinstance(app, WrappedApp):
        raise UserError("app: it is wrapped already; call wrap once")
    if app._call is not None:
        raise UserError("app: a ClientApp(client_fn=...) is on Flower's legacy API; register @app.train() instead")
    if dual is not None:
        if score is not None or client_id is not None or folder is not None or sharing_mods:
            raise UserError("dual: give score, client_id, folder and sharing_mods to Dual(...), or leave out dual")
        return _with_dual(app, dual)
    return WrappedApp(app, score, client_id, Path(folder) if folder is not None else None, tuple(sharing_mods))


def mods_of(function: Function) -> tuple[list[Mod], Function]:
    """The mods around a registered function, from the outside in, and the function itself.

    Flower keeps neither: they are read from the closures that its `make_ffn` nests.
    """
    mods: list[Mod] = []
    while getattr(function, "__qualname__", "").startswith("make_ffn.<locals>."):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        mods.append(cells["_mod"].cell_contents)
        function = cells["_ffn"].cell_contents
    return mods, function


def with_mods(function: Function, mods: Sequence[Mod]) -> Function:
    for mod in reversed(mods):
        function = _around(function, mod)
    return function


def _around(function: Function, mod: Mod) -> Function:
    return lambda message, context: mod(message, context, function)


def _with_dual(app: ClientApp, dual: Dual) -> ClientApp:
    """The dual model's mod inside all others, of the app and of each function: they then see what it sends."""
    wrapped = ClientApp()
    wrapped._mods, wrapped._lifespan = app._mods, app._lifespan
    for name, function in app._registered_funcs.items():
        mods, own = mods_of(function)
        wrapped._registered_funcs[name] = with_mods(own, [*mods, dual])
    return wrapped


@final
@dataclass
class Work:
    """One visit of the server: what came, and what the extra calls have cost so far."""

    message: Message  # as the app was given it, its records untouched
    context: Context
    instruction: Instruction
    client: str
    w: ArrayRecord
    name: str  # of the record with the arrays
    state: RecordDict  # the app's own, as it was before its own call
    vault: Vault
    calls: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def visit(self) -> Visit:
        return Visit(self.client, self.calls, round(time.monotonic() - self.started, 3))


@final
class WrappedApp(ClientApp):
    def __init__(
        self,
        app: ClientApp,
        score: ScoreRule,
        client_id: Callable[[Context], object] | None,
        folder: Path | None,
        sharing_mods: tuple[Mod, ...],
    ) -> None:
        super().__init__()
        self._app, self._score, self._client_id, self._folder = app, score, client_id, folder
        self._sharing_mods = sharing_mods
        # What is registered later, on this app or on the other, is found by both.
        self._mods, self._registered_funcs, self._lifespan = app._mods, app._registered_funcs, app._lifespan
        self._said: set[str] = set()

    def __call__(self, message: Message, context: Context) -> Message:
        category = message.metadata.message_type.partition(".")[0]
        try:
            instruction = Instruction.read(message) if message.has_content() else None
        except ValueError as error:
            log_message(f"the server's order cannot be understood: {error}; there is no report", warn=True)
            instruction = None
        if instruction is None or category not in (MessageType.TRAIN, MessageType.EVALUATE):
            return self._app(message, context)
        start = start_of(message)
        message.content = without_instruction(message.content)
        given = _message(copied(message.content), message, message.metadata.message_type)
        state = copied(context.state)
        reply = self._app(message, context)
        if reply.has_error():
            return reply
        if REPORT in reply.content:
            self._say(f"the app's reply has a record {REPORT!r} of its own; rename it, or there is no report")
            return reply
        with _generators_put_back():
            reply.content[REPORT] = self._record(given, context, instruction, state, start, reply)
        return reply

    def chosen(self, message: Message, context: Context) -> tuple[Choice, ArrayRecord]:
        """What this client predicts with: "w", "v_i" or "P_i", and its arrays. For a function of your own.

        `message` is one that NFLDetector sent, as a mod sees it. While recovery is on the model is the one that
        scored best in the last evaluation, on the evaluation's own data; else it is w.
        """
        instruction = Instruction.read(message)
        if instruction is None:
            raise UserError("the message carries no order of NFLDetector's, so there is no v_i to predict with")
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
    ) -> ConfigRecord:
        """Our record in the reply. Whatever goes wrong here is said in it: the app's own reply is not touched."""
        work: Work | None = None
        try:
            work = self._work(message, context, instruction, state)
            with work.vault.locked():
                work.vault.begin_session(instruction)
                if message.metadata.message_type.partition(".")[0] == MessageType.TRAIN:
                    return self._after_training(work, start)
                return self._after_evaluation(work, reply)
        except Exception as error:  # noqa: BLE001  # an error of ours, or of the app's functions in an extra call
            ours = isinstance(error, UserError)
            problem = one_line(str(error) if ours else f"{type(error).__name__}: {error}")
            visit = work.visit if work is not None else Visit(f"node-{context.node_id}")
            extra = "" if ours else " in an extra call of the app's own functions"
            self._say(f"client {visit.client}: no report: {problem}{extra}")
            return ConfigRecord({"visit": replace(visit, problem=problem, ours=ours).pack()})

    def _work(self, message: Message, context: Context, instruction: Instruction, state: RecordDict) -> Work:
        records = message.content.array_records
        if len(records) != 1:
            raise UserError(f"the message has {len(records)} records of weights; lindt needs one that holds the model")
        ((name, w),) = records.items()
        client = self._name(context)
        vault = Vault(self._folder or default_folder(), instruction.experiment, client)
        return Work(message, context, instruction, client, ArrayRecord(dict(w)), name, state, vault)

    def _name(self, context: Context) -> str:
        if self._client_id is not None:
            return str(self._client_id(context))
        if "partition-id" in context.node_config:
            return str(context.node_config["partition-id"])
        return f"node-{context.node_id}"

    def _say(self, text: str) -> None:
        """Once in a process: on a SuperNode each message has a process of its own."""
        if text not in self._said:
            self._said.add(text)
            log_message(text, warn=True)

    def _after_training(self, work: Work, start: bytes | None) -> ConfigRecord:
        """The gain report, where the server asks for it, and v_i, while recovery is on."""
        instruction, record = work.instruction, ConfigRecord()
        silent = self._is_silent(work)
        asks = instruction.reports and instruction.panel and not silent
        adapted = work.vault.adapted.newest(up_to=instruction.round - 1) if instruction.recovering else None
        private, wants, fault = None, False, None
        if asks:
            private = work.vault.private.newest(up_to=instruction.round - 1)
            first = work.w if instruction.round == 1 else self._start(start, work)
            wants = private is None and first is None
            if not wants:
                try:
                    report, private = self._report(work, private, first, adapted)
                    record["gain"] = report
                except Exception as error:  # noqa: BLE001  # v_i trains all the same
                    fault = error
                    if private is None and first is not None:  # w^0 comes once
                        work.vault.private.write(_untrained(first), instruction)
        if instruction.recovering:
            self._adapt(work, adapted)
        if fault is not None:
            raise fault
        finished = private is not None and bool(private.notes["finished"])
        visit = replace(
            work.visit, recovers=instruction.recovering, finished=finished, wants_start=wants, silent=silent
        )
        record["visit"] = visit.pack()
        return record

    def _after_evaluation(self, work: Work, reply: Message) -> ConfigRecord:
        """How the client fares with what it predicts with, beside w and P_i."""
        instruction = work.instruction
        others = RecordDict({k: r for k, r in work.message.content.items() if not isinstance(r, ArrayRecord)})
        work.vault.keep_evaluation(work.message.metadata.message_type, others)
        silent = self._is_silent(work)
        record = ConfigRecord({"visit": replace(work.visit, silent=silent).pack()})
        adapted = work.vault.adapted.newest(up_to=instruction.round) if _adapts(instruction) else None
        private = work.vault.private.newest(up_to=instruction.round) if instruction.reports else None
        if silent or (adapted is None and private is None):
            return record
        scores: dict[Choice, Score] = {"w": score_of(reply.content, self._score, instruction.weighted_by)}
        for name, model in (("v_i", adapted), ("P_i", private)):
            if model is not None:
                scores[name] = self._evaluate(work, model.arrays, model.state)  # type: ignore[index]
        scores = _in_one_scale(scores)
        chooses = instruction.recovering or adapted is not None
        choice = best_of(scores) if chooses else "w"
        work.vault.keep_choice(choice)
        tally = _tally(scores["w"], scores[choice], scores.get("P_i"))
        about: dict[str, Any] = {
            "visit": replace(work.visit, recovers=adapted is not None).pack(),
            "client": work.client,
            "percent": scores["w"].share,
            "paired": False,
            "chosen": chooses,
            "tally": tally,
        }
        return ConfigRecord(about)

    def _is_silent(self, work: Work) -> bool:
        """Whether this client adds noise to what it sends, and is not told to add noise to its reports."""
        mods = [*self._app._mods]
        for function in self._app._registered_funcs.values():
            mods += mods_of(function)[0]
        noisy = any(isinstance(mod, LocalDpMod) or mod in self._sharing_mods for mod in mods)
        if noisy and not work.instruction.noise:
            self._say(
                f"client {work.client}: it adds noise to what it sends, so it reports nothing; the server can ask for "
                "reports with noise: NFLDetector(..., detection=Gain(noise=0.1))"
            )
        return noisy and not work.instruction.noise

    def _start(self, start: bytes | None, work: Work) -> ArrayRecord | None:
        """w^0, as the server sent it to a client that came later."""
        if start is None:
            return None
        records = unpack_records(start).array_records
        if len(records) != 1:
            raise UserError("the server sent a w^0 that is not one record of arrays")
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
        for _ in range(CALLS_A_VISIT):
            if private.notes["finished"]:
                break
            private = self._train_alone(work, private)
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
        notes = {"scores": scores, "losses": losses, "finished": is_finished(scores, losses)}
        if notes["finished"]:
            log_message(f"client {work.client}: its private model is finished after {len(scores)} calls")
        return replace(trained, notes=notes)

    def _adapt(self, work: Work, adapted: LocalModel | None) -> None:
        """v_i trains on: from w at first, then from where it is, pulled towards w."""
        start = work.w if adapted is None else pulled(adapted.arrays, work.w)
        trained = self._train(work, start, work.state if adapted is None else adapted.state, "adapted")
        if not _finite_as(trained.arrays, work.w):
            raise UserError("v_i has trained to NaN or infinity; the one before is kept")
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
        """The app's evaluate function on these arrays. What it changes in the state is forgotten."""
        last = work.vault.last_evaluation()
        kind, content = last if last is not None else (self._evaluation(), copied(work.message.content))
        names = [name for name, record in content.items() if isinstance(record, ArrayRecord)]
        for name in names:
            del content[name]
        content = RecordDict({work.name: ArrayRecord(dict(arrays)), **content})
        seed = seed_for(0, work.instruction.experiment, work.client, work.instruction.round, "evaluate")
        reply, _ = self._run(work, kind, content, state, seed)
        return score_of(reply.content, self._score, work.instruction.weighted_by)

    def _evaluation(self) -> str:
        """The type of an evaluation's message, where none was seen yet."""
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
        """A registered function, without the mods that act on what is sent; its reply, and the state after it."""
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
        """Whether a mod acts on what is sent: all of Flower's own do, or log its size."""
        home = getattr(mod, "__module__", "") or type(mod).__module__
        return home.startswith("flwr.") or mod in self._sharing_mods


def _adapts(instruction: Instruction) -> bool:
    """Whether a v_i predicts. Under the paper's rule it does so after recovery has stopped, too; where gains are
    tested, recovery stops because v_i was shown worse than w."""
    return instruction.recovering or not instruction.reports


def _message(content: RecordDict, like: Message, kind: str) -> Message:
    """A message of that type with the sender and receiver of another: functions reply to it."""
    metadata = copy.copy(like.metadata)
    metadata.message_type = kind
    made: Any = Message  # its overloads leave `metadata` out
    found: Message = made(content=content, metadata=metadata)
    return found


def _untrained(first: ArrayRecord) -> LocalModel:
    """P_i as it begins: w^0, in an empty state."""
    return LocalModel(first, RecordDict(), {"scores": [], "losses": [], "finished": False})


def is_finished(scores: Sequence[float], losses: Sequence[float | None]) -> bool:
    """Whether a private model has stopped improving: in the last PATIENCE calls neither its best score nor, where
    there is one, its best loss got better. An accuracy of few samples stands still while the loss still falls."""
    calls = len(scores)
    if calls >= MOST_CALLS:
        return True
    if calls <= PATIENCE:
        return False
    if max(scores[-PATIENCE:]) > max(scores[:-PATIENCE]):
        return False
    known = [loss for loss in losses[:-PATIENCE] if loss is not None]
    recent = [loss for loss in losses[-PATIENCE:] if loss is not None]
    if not known or not recent:
        return True
    best = min(known)
    return min(recent) > (best * BETTER if best > 0 else best - (1 - BETTER) * abs(best))


def best_of(scores: dict[Choice, Score]) -> Choice:
    """The model that scores best; of equals w first, then v_i."""
    order: tuple[Choice, ...] = ("w", "v_i", "P_i")
    return max((name for name in order if name in scores), key=lambda name: scores[name].value)


def _in_one_scale(scores: dict[Choice, Score]) -> dict[Choice, Score]:
    """Accuracies as shares: where one is above 1, all are percentages."""
    percent = any(score.share and score.value > 1 for score in scores.values())
    return {name: score.scaled(percent) for name, score in scores.items()}


def _tally(central: Score, local: Score, private: Score | None) -> str:
    """The JSON of a ClientTally: sums over samples. Wins and losses are not known without the samples."""

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
            f"{what} has other arrays than the message (first {odd[0]}); v_i and P_i need the same names and shapes"
        )


def pulled(v: ArrayRecord, w: ArrayRecord) -> ArrayRecord:
    """v_i, pulled towards w. Arrays without floats (counters, packed trees), and NaN or infinity, are w's."""
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
    """What a client that replies with an update has trained."""
    found = ArrayRecord()
    for name, array in w.items():
        values = array.numpy()
        found[name] = Array(np.asarray(values + update[name].numpy(), dtype=values.dtype))
    return found


def _finite_as(arrays: ArrayRecord, w: ArrayRecord) -> bool:
    """No NaN or infinity but where w has one, as in a causal mask."""
    for name, array in arrays.items():
        values = array.numpy()
        if np.issubdtype(values.dtype, np.floating) and not (np.isfinite(values) | ~np.isfinite(w[name].numpy())).all():
            return False
    return True


@contextmanager
def _generators_put_back() -> Iterator[None]:
    """Python's, numpy's and, where the app has imported it, torch's generators."""
    python, numpy, torch = random.getstate(), np.random.get_state(), sys.modules.get("torch")
    cpu = torch.get_rng_state() if torch is not None else None
    # Not asked where no accelerator was used: asking would initialise it.
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
        elif (imported := sys.modules.get("torch")) is not None:  # by an extra call: as it is after an import
            imported.set_rng_state(imported.Generator().get_state())


def _seed_generators(seed: int) -> None:
    """Extra calls draw from seeds of their own: the same visit gives the same v_i and P_i."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
