"""A run on disk: the resolved plan, one JSON line a round, the summary, a checkpoint.

    plan.toml       everything that decides the numbers
    run.json        the run's id, its clients (sizes, labels, who attacks), versions of what computed it
    rounds.jsonl    one line a round, no clock times: the same bytes for the same plan
    timing.jsonl    seconds a round
    summary.json    written when the run has ended
    checkpoint/     the server's state after the last two rounds
    private/        v_i, which in a real federation stay with the clients

Every file but the two that grow is replaced whole; those two are cut back to the checkpoint on resume.

A checkpoint is sealed with a checksum, and nothing in it executes. One that does not add up is put aside and the one
before is used: it costs a round that is played again to the same numbers. `write_sealed` and `newest_whole` keep any
state; `save_checkpoint` and `load_checkpoint` keep a RunState. The Flower detector keeps its own state with the first
two (flower/recorder.py).
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, final

import tomli_w
from torch import Tensor

from lindt.client.private_store import FolderStore
from lindt.errors import UserError, in_short, one_line
from lindt.gains import whole_number
from lindt.plan.file import from_dict, from_toml, to_dict
from lindt.plan.plan import Plan
from lindt.plan.problem import Problem, fingerprint
from lindt.protocols import Buffers, Decision, DetectionState, RecoveryState
from lindt.runs.files import (
    append_line,
    locked,
    locked_folder,
    remove,
    require_plain,
    seal,
    unseal,
    write_whole,
)
from lindt.runs.schema import DETECTION, NODES_FILE, MapOf, fits
from lindt.runs.summary import round_line, withheld_line
from lindt.server.checks import Part
from lindt.server.federation import RoundResult, RunState
from lindt.server.updates import unpack_report

FORMAT: Final = 1  # of the folder; a newer one is refused, not guessed at
KEPT: Final = 2  # checkpoints
DECISIONS: Final = ("verdict", "recovery", "recovered")  # of a DetectionState
CHECKPOINT_FORMAT: Final = 2  # 1 had no checksum
# What a run writes in its folder; Flower's log and its failure are those of engines/flower/launch.py.
NAMES: Final = (
    "plan.toml", "run.json", "rounds.jsonl", "timing.jsonl", "summary.json", "lock", "checkpoint", "private",
    "export", "flower.log", "failure.txt", NODES_FILE,
)  # fmt: skip
IN_PLACE: Final = ("rounds.jsonl", "timing.jsonl", "lock", "flower.log")  # of these; the others are replaced whole
LARGEST: Final = 2**64 - 1  # number in a checkpoint: Flower names its nodes by 64 bits
T = TypeVar("T")
PrivateRounds = dict[int, int]  # the round of each client's newest v_i


@final
class RoundLog:
    """The two files of a run that grow, rounds.jsonl and timing.jsonl: one line a round, in order.

    The core's runs and the Flower detector's write them through this class.
    """

    def __init__(self, folder: Path) -> None:
        self.rounds, self.timing = folder / "rounds.jsonl", folder / "timing.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        return list(read_lines(self.rounds))

    def append(self, line: Mapping[str, Any], seconds: float) -> None:
        """A round's line and its duration, durable once this returns."""
        append_line(self.rounds, _json(line) + b"\n")
        append_line(self.timing, _json({"round": line["round"], "seconds": round(seconds, 4)}) + b"\n")

    def replace_last(self, line: Mapping[str, Any]) -> None:
        """Write the last round's line anew, with more in it. The file is replaced whole."""
        _rewrite(self.rounds, [*self.lines()[:-1], line])

    def cut_back(self, done: int, count: int | None, pending: Mapping[str, Any] | None = None) -> None:
        """Drop the lines after round `done`, and a torn last line.

        `count` is how many lines must be left, None where that is not known. `pending` is the line of round `done`
        where the process may have ended before it was written; its duration is then unknown and stays out.
        """
        kept: list[Mapping[str, Any]] = [line for line in self.lines() if line["round"] <= done]
        if pending is not None and (not kept or kept[-1]["round"] < done):
            kept.append(pending)
        timing = [line for line in read_lines(self.timing) if line["round"] <= done]
        found = {self.rounds: kept} | ({self.timing: timing} if pending is None else {})
        for path, lines in found.items():
            if count is not None and len(lines) != count:
                raise UserError(f"{path} has {len(lines)} of the {count} rounds of its checkpoint; start the run anew")
        _rewrite(self.rounds, kept)
        _rewrite(self.timing, timing)


@final
class Store:
    """One run's folder. `create` starts one, `open` takes up one that exists."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.log = RoundLog(folder)
        self.origin: Origin | None = None  # what this session plays; checkpoints are compared with it where it is set
        self._kept: dict[int, int] = {}  # the round of each client's newest v_i
        self.said: list[str] = []  # what whoever resumes the run should hear of

    @classmethod
    def create(cls, folder: Path, plan: Plan, about: Mapping[str, Any]) -> Store:
        if (folder / "plan.toml").exists():
            raise UserError(f"{folder} holds a run already; name another --out, or continue it with --resume")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            require_plain(folder, NAMES, IN_PLACE)
            for left in ("rounds.jsonl", "timing.jsonl", "summary.json", "checkpoint"):
                if (folder / left).exists():  # its rounds would count as this run's
                    raise UserError(f"{folder} holds {left} of a run whose plan.toml is gone; name another --out")
            about = {"format": FORMAT, "run": uuid.uuid4().hex, **about}
            write_about(folder, about)
            write_plan(folder, to_dict(plan))  # last: it marks a run
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); name another --out") from None
        return cls(folder, about)

    @classmethod
    def open(cls, folder: Path) -> Store:
        require_plain(folder, NAMES)
        try:
            about = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{folder} is no run: it has no readable run.json") from None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(f"{folder}: written in another format than {FORMAT}; use the lindt that wrote it")
        if not {"run", "clients", "metric_in_percent"} <= about.keys():
            raise UserError(f"{folder}: run.json is damaged; start the run anew in another folder")
        if not isinstance(about["run"], str) or not re.fullmatch(r"[0-9a-f]{32}", about["run"]):  # it names a folder
            raise UserError(
                f"{folder}/run.json: run = {in_short(about['run'])} is no id of a run, 32 digits from 0 to f; "
                "start the run anew in another folder"
            )
        return cls(folder, about)

    def record_checks(self, checks: Mapping[str, Any]) -> None:
        """Keep what the checks before training found, in a run that was begun without a word of them."""
        self.about = {**self.about, "checks": dict(checks)}
        write_about(self.folder, self.about)

    @property
    def run(self) -> str:
        return str(self.about["run"])

    @property
    def private(self) -> Path:
        return self.folder / "private"

    @property
    def private_rounds(self) -> PrivateRounds:
        """The round of each client's newest v_i, as far as they were in this folder; known once a state is loaded."""
        return dict(self._kept)

    @property
    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()

    def require_data(self, task: str, problem: Problem) -> None:
        """Refuse a task that gives other data than the run was begun with."""
        if self.about.get("data") != fingerprint(problem):
            raise UserError(
                f"--task {task} gives other data than {self.folder} was begun with; draw them from a fixed seed"
            )

    def plan(self) -> Plan:
        return from_dict(self.plan_table())

    def plan_table(self) -> dict[str, Any]:
        path = self.folder / "plan.toml"
        try:
            return from_toml(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{path} cannot be read; start the run anew in another folder") from None

    def rounds(self) -> list[dict[str, Any]]:
        return self.log.lines()

    def summary(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or "detected_at" not in found:
            raise UserError(f"{self.folder}: summary.json is damaged; delete it and resume the run")
        return found

    def append(self, state: RunState, result: RoundResult, seconds: float) -> dict[str, Any]:
        """A finished round, durable once this returns: its line first, then the checkpoint that counts it.

        Returns the line, for everyone who shows or tracks the round.
        """
        line = withheld_line(round_line(result)) if self.about.get("withheld") else round_line(result)
        self.log.append(line, seconds)
        if result.recovering:
            versions = FolderStore(self.private, self.run)
            self._kept |= {i: state.round for i in result.answered if versions.has(i, state.round)}
        save_checkpoint(self.folder / "checkpoint", state, self._kept, self.origin)
        return line

    def resume(self) -> RunState | None:
        """The last checkpoint, with later lines cut off; None where no round has ended yet.

        A damaged one is put aside under another name, and the one before it is taken.
        """
        loaded = self._loaded()
        done = loaded.state.round if loaded else 0
        self._kept = loaded.private if loaded else {}
        for client, round in self._kept.items():
            if not FolderStore(self.private, self.run).has(client, round):
                raise UserError(f"{self.private}: client {client}'s v_i of round {round} is gone; start the run anew")
        self.log.cut_back(done, count=done)
        self.said += put_aside(loaded.damaged, done) if loaded else []
        return loaded.state if loaded else None

    def state(self) -> RunState:
        """The server's state after the last round played."""
        loaded = self._loaded()
        if loaded is None:
            raise UserError(f"{self.folder}: no round has been played yet; resume the run first")
        self._kept = loaded.private
        return loaded.state

    def _loaded(self) -> LoadedCheckpoint | None:
        """The newest whole checkpoint. One of another plan, model or loss is refused; other versions are said."""
        loaded = load_checkpoint(self.folder / "checkpoint", self.run)
        if loaded is None or self.origin is None:
            return loaded
        if loaded.origin is None:
            self.said.append(
                f"{self.folder}: its checkpoint is of an earlier lindt, which did not keep the plan, model and loss: "
                "they are not compared"
            )
        else:
            self.origin.require_same(loaded.origin, self.folder)
            self.said += [f"{self.folder}: {said}" for said in self.origin.doubts(loaded.origin)]
        return loaded

    def forget_participants(self, state: RunState) -> None:
        """After the last round of a run that withholds them: one checkpoint, without who took part and their seed."""
        recovery = replace(state.recovery, treated=frozenset())
        detection = None if state.detection is None else replace(state.detection, reports={})
        folder = self.folder / "checkpoint"
        after = replace(state, secret=None, recovery=recovery, detection=detection)
        save_checkpoint(folder, after, origin=self.origin)
        for old in rounds_in(folder)[:-1]:
            remove(path_of(folder, old))

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_whole(self.folder / "summary.json", _json(summary, indent=2))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One process a run, also where somebody deletes the lock's file meanwhile."""
        require_plain(self.folder, NAMES, IN_PLACE)
        busy = f"{self.folder}: another process is working on this run; wait or stop it"
        # A reader that asks whether the run goes on holds the lock for an instant.
        with (
            locked_folder(self.folder, wait=0.35, busy=busy),
            locked(self.folder / "lock", wait=0.35, busy=busy),
        ):
            yield


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    write_whole(folder / "run.json", _json(about, indent=2))


def write_plan(folder: Path, table: Mapping[str, Any]) -> None:
    write_whole(folder / "plan.toml", tomli_w.dumps(table).encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file that may still grow; a half-written last one is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}: a damaged line, {line[:60]!r}; start the run anew in another folder") from None
        wanted = {"round", "scores", "flag", "answered"} if path.name == "rounds.jsonl" else {"round"}
        if not isinstance(found, dict) or not wanted <= found.keys() or type(found["round"]) is not int:
            raise UserError(f"{path}: a damaged line, {line[:60]!r}; start the run anew in another folder")
        yield found


def _rewrite(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    write_whole(path, b"".join(_json(line) + b"\n" for line in lines))


def _json(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(value, sort_keys=indent is None, indent=indent, allow_nan=False).encode()


@final
@dataclass(frozen=True)
class Origin:
    """What a state comes from: the plan as tables, what `server.checks.probe` says of model, loss and metric, versions.

    The model's numbers are compared in either mode. In training mode other ones are no proof: another kind of machine
    draws another dropout.
    """

    plan: dict[str, Any]
    parts: dict[str, Part]
    versions: dict[str, str]

    def text(self) -> str:
        """As JSON; NaN and infinity in it, which a sealed file's own JSON has not."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: Any) -> Origin:
        """Raises ValueError, TypeError or KeyError where it is not what `text` gave."""
        found = json.loads(text)
        parts = {name: (words, numbers) for name, (words, numbers) in dict(found["parts"]).items()}
        plain = type(found["plan"]) is dict and fits(found["versions"], MapOf(str))
        if not plain or not {"model", "loss", "metric", "training"} <= parts.keys():
            raise ValueError("its origin has fields of another type")
        for words, numbers in parts.values():
            if type(words) is not str or not all(type(number) is float for number in numbers):
                raise ValueError("its origin has fields of another type")
        return cls(found["plan"], parts, found["versions"])

    def require_same(self, before: Origin, folder: Path) -> None:
        plan = json.loads(self.text())["plan"]
        if plan != before.plan:
            # Fields that a newer version has added get their defaults.
            changed = _difference(plan, json.loads(json.dumps(to_dict(from_dict(before.plan)))))
            if changed is not None:
                raise UserError(
                    f"{folder}/plan.toml: {changed} in the rounds played; put it back, or start the run anew in "
                    "another folder"
                )
        for name in ("model", "loss", "metric"):
            if not self._same(before, name):
                raise UserError(
                    f"{folder}: the {name} is another than in the rounds played; give the task as it was, or start the "
                    "run anew in another folder"
                )

    def doubts(self, before: Origin) -> Iterator[str]:
        for name in sorted(self.versions.keys() & before.versions.keys()):
            if self.versions[name] != before.versions[name]:
                yield (
                    f"{name} is {self.versions[name]}, and was {one_line(before.versions[name], 60)} in the rounds "
                    "played; the numbers may differ from an uninterrupted run's"
                )
        if not self._same(before, "training"):
            yield (
                "in training mode the model computes otherwise than in the rounds played; its dropout was changed, or "
                "this is another kind of machine"
            )

    def _same(self, before: Origin, name: str) -> bool:
        (words, numbers), (old_words, old_numbers) = self.parts[name], before.parts[name]
        if words != old_words or len(numbers) != len(old_numbers):
            return False
        return all(
            math.isclose(new, old, rel_tol=1e-3, abs_tol=1e-4) or (math.isnan(new) and math.isnan(old))
            for new, old in zip(numbers, old_numbers, strict=True)
        )


def _difference(plan: Any, before: Any, name: str = "") -> str | None:
    """The first field in which two plans' tables differ, in words."""
    if isinstance(plan, dict) and isinstance(before, dict):
        names = sorted(plan.keys() | before.keys())
        inner = (_difference(plan.get(n), before.get(n), f"{name}.{n}" if name else n) for n in names)
        return next((found for found in inner if found is not None), None)
    return None if plan == before else f"{name} is {in_short(plan)}, and was {in_short(before)}"


def require_fitting(folder: Path, saved: RunState, first: RunState) -> None:
    """Refuse a saved state whose weights or buffers do not fit the model; `first` is the model's initial state."""
    for name, there, model in (
        ("weights", saved.w, first.w),
        ("floats in buffers", saved.buffers.floats_F, first.buffers.floats_F),
        ("integers in buffers", saved.buffers.counts_I, first.buffers.counts_I),
    ):
        if there.shape != model.shape or there.dtype != model.dtype:
            raise UserError(
                f"{folder}: its checkpoint has {there.numel()} {name} ({there.dtype}), the model {model.numel()} "
                f"({model.dtype}); give the model of the run, or start anew in another folder"
            )


def save_checkpoint(
    folder: Path, state: RunState, private: PrivateRounds | None = None, origin: Origin | None = None
) -> None:
    """Write the state, the names of the v_i it goes with and what it comes from; drop all but the last two."""
    about: dict[str, Any] = {"recovery": recovery_table(state.recovery), "private": sorted((private or {}).items())}
    about |= {} if state.secret is None else {"secret": state.secret}
    about |= {} if state.detection is None else {"detection": detection_table(state.detection)}
    about |= {} if origin is None else {"origin": origin.text()}
    tensors = {"w": state.w, "floats": state.buffers.floats_F, "counts": state.buffers.counts_I}
    write_sealed(folder, state.run, state.round, tensors, about)


def write_sealed(folder: Path, run: str, round: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write a state of `tensors` and of JSON values, sealed, as the one after `round`; drop all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    words = json.dumps(
        {"format": CHECKPOINT_FORMAT, "run": run, "round": round, **about}, sort_keys=True, allow_nan=False
    )
    write_whole(path_of(folder, round), seal(tensors, {"about": words}))
    for old in rounds_in(folder)[:-KEPT]:
        remove(path_of(folder, old))


@final
@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint, the v_i it goes with, and the newer ones that are damaged, each with what is wrong."""

    state: RunState
    private: PrivateRounds
    origin: Origin | None  # None: of a version that did not keep it
    damaged: dict[Path, str]


class UnreadableError(UserError):
    """A checkpoint that is whole but not ours to read: an older one would be no better."""


def load_checkpoint(folder: Path, run: str) -> LoadedCheckpoint | None:
    """The newest that is whole; None before the first round has ended. Where none is whole, it says so."""
    newest, damaged = newest_whole(folder, run, _run_state)
    if newest is None:
        if damaged:
            raise none_is_whole(damaged)
        return None
    return LoadedCheckpoint(*newest, damaged)


Damaged = dict[Path, str]  # checkpoints that cannot be used, each with what is wrong


def newest_whole(
    folder: Path, run: str, read: Callable[[dict[str, Tensor], dict[str, Any]], T]
) -> tuple[T | None, Damaged]:
    """What `read` makes of the newest checkpoint that is whole, if there is one, and the newer ones that are damaged.

    `read` is given the tensors and the JSON values. Where it raises ValueError, TypeError or KeyError, that
    checkpoint counts as damaged.
    """
    damaged: Damaged = {}
    for round in reversed(rounds_in(folder)):
        path = path_of(folder, round)
        try:
            tensors, words = unseal(path.read_bytes())
            about = json.loads(words["about"])
            if about["format"] != CHECKPOINT_FORMAT:
                raise UnreadableError(
                    f"{path}: written in format {about['format']}, not {CHECKPOINT_FORMAT}; use the lindt that wrote it"
                )
            if about["run"] != run or about["round"] != round:
                raise UnreadableError(f"{path} belongs to another run or round; start the run anew in another folder")
            return read(tensors, about), damaged
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
            damaged[path] = f"{path} is damaged ({error})"
    return None, damaged


def none_is_whole(damaged: Damaged) -> UserError:
    return UserError(f"{next(iter(damaged.values()))}, and no older one is whole; start the run anew")


def put_aside(damaged: Damaged, round: int) -> list[str]:
    """Rename damaged checkpoints so that no later run reads them; what to tell the user. `round` is the one used."""
    said = []
    for path, wrong in damaged.items():
        path.rename(path.with_suffix(".damaged"))
        said.append(f"{wrong}; it is put aside, and the run goes on from round {round}")
    return said


def _run_state(tensors: dict[str, Tensor], about: dict[str, Any]) -> tuple[RunState, PrivateRounds, Origin | None]:
    w, floats, counts = (tensors[name] for name in ("w", "floats", "counts"))
    recovery = recovery_from(about["recovery"])
    private = {whole_number(i, "client", LARGEST): whole_number(r, "round", LARGEST) for i, r in about["private"]}
    secret = None if "secret" not in about else whole_number(about["secret"], "secret", LARGEST)
    detection = None if "detection" not in about else detection_from(about["detection"])
    origin = None if "origin" not in about else Origin.read(about["origin"])
    state = RunState(about["run"], about["round"], w, Buffers(floats, counts), recovery, secret, detection)
    return state, private, origin


def recovery_table(state: RecoveryState) -> dict[str, Any]:
    """A RecoveryState as JSON values."""
    return asdict(state) | {"treated": sorted(state.treated)}


def recovery_from(found: dict[str, Any]) -> RecoveryState:
    counts = {name: whole_number(found[name], name, LARGEST) for name in ("count", "quiet", "detections")}
    if type(found["on"]) is not bool:
        raise ValueError("recovery.on is not a boolean")
    treated = frozenset(whole_number(i, "client", LARGEST) for i in found["treated"])
    return RecoveryState(on=found["on"], treated=treated, **counts)


def detection_table(state: DetectionState) -> dict[str, Any]:
    """A DetectionState as JSON values. Numbers come back bit by bit."""
    reports = [[client, round, asdict(report)] for client, (round, report) in sorted(state.reports.items())]
    return asdict(state) | {"reports": reports}


def detection_from(found: dict[str, Any]) -> DetectionState:
    """Raises ValueError, TypeError or KeyError where `found` is not what `detection_table` gives."""
    if not fits(found, DETECTION) or not fits(found["numbers"], MapOf(float)):
        raise ValueError("the detection's state has fields of another type")
    reports = {}
    for client, round, report in found["reports"]:
        reports[whole_number(client, "client", LARGEST)] = (
            whole_number(round, "round", LARGEST),
            unpack_report(report),
        )
    decisions = {name: Decision(**found[name]) for name in DECISIONS if found[name] is not None}
    return DetectionState(
        warning=found["warning"],
        numbers={str(name): float(value) for name, value in found["numbers"].items()},
        reports=reports,
        **decisions,
    )


def rounds_in(folder: Path) -> list[int]:
    """The rounds that have a checkpoint, in order."""
    names = [path.stem.removeprefix("round-") for path in folder.glob("round-*.safetensors")]
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(folder: Path, round: int) -> Path:
    return folder / f"round-{round:06d}.safetensors"
