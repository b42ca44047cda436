"""A run on disk: the resolved plan, one JSON line a round, the summary, a checkpoint.

    plan.toml       everything that decides the numbers
    run.json        the run's id, its clients (sizes, labels, attackers), software versions
    clients.jsonl   of lazy clients (data/clients.py): one line for each, from the round of its first visit
    rounds.jsonl    one line a round, no clock times: the same bytes for the same plan
    timing.jsonl    seconds a round
    summary.json    written when the run has ended
    checkpoint/     the server's state after the last two rounds
    kept/           the state after the rounds of --keep-checkpoint, for runs that branch (runs/branch.py)
    private/        v_i, which in a real federation stay with the clients

Every file but the two that grow is replaced whole; those two are cut back to the checkpoint on resume.

A checkpoint is sealed with a checksum, and reading it executes nothing. Where the checksum of the newest checkpoint is
wrong, it is renamed and the one before it is used; one round is then played again, with the same numbers.
`write_sealed` and `newest_whole` write and read any state, `save_checkpoint` and `load_checkpoint` a RunState. The
Flower detector uses the first two for its own state (flower/recorder.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import tomli_w

from lindt.client.private_store import FolderStore, ShardStore, private_store
from lindt.errors import UserError, in_short, one_line
from lindt.gains import number, whole_number
from lindt.plan.file import from_run, from_toml, to_dict
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
from lindt.runs.schema import DETECTION, FROM_FLOWER, FROM_PYTHON, NODES_FILE, MapOf, fits
from lindt.runs.summary import round_line, withheld_line
from lindt.server.state import BestRound, RoundResult, RunState
from lindt.server.updates import unpack_report

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from lindt.plan.plan import Plan
    from lindt.plan.problem import Problem
    from lindt.server.checks import Part

FORMAT: Final = 1  # of the folder; any other format is refused
KEPT: Final = 2  # checkpoints
DECISIONS: Final = ("verdict", "recovery", "recovered")  # of a DetectionState
CHECKPOINT_FORMAT: Final = 2  # 1 had no checksum
# The files that a run writes in its folder; engines/flower/launch.py writes flower.log and failure.txt.
NAMES: Final = (
    "plan.toml", "run.json", "clients.jsonl", "rounds.jsonl", "timing.jsonl", "summary.json", "lock", "checkpoint",
    "kept", "private", "export", "flower.log", "failure.txt", NODES_FILE,
)  # fmt: skip
IN_PLACE: Final = (
    "clients.jsonl",
    "rounds.jsonl",
    "timing.jsonl",
    "lock",
    "flower.log",
)  # of these; the others are replaced whole
LARGEST: Final = 2**64 - 1  # number in a checkpoint: Flower names its nodes by 64 bits
T = TypeVar("T")
PrivateRounds = dict[int, int]  # the round of each client's newest v_i


@final
@dataclass(frozen=True)
class PrivateSum:
    """The rounds of many clients' newest v_i, as their number and a sum: a checkpoint then does not grow with N."""

    clients: int
    sum: int

    def __bool__(self) -> bool:
        return self.clients > 0


def private_sum(rounds: Mapping[int, int]) -> int:
    """The sum of a hash of each client and round, modulo 2^64: one more client costs one more term."""
    hashes = (hashlib.blake2b(f"{i} {r}".encode(), digest_size=8).digest() for i, r in rounds.items())
    return sum(int.from_bytes(one, "big") for one in hashes) % 2**64


@final
class RoundLog:
    """The two files of a run that grow, rounds.jsonl and timing.jsonl: one line a round, in order.

    Runs of this package and runs of the Flower detector both write them through this class.
    """

    def __init__(self, folder: Path) -> None:
        self.rounds, self.timing = folder / "rounds.jsonl", folder / "timing.jsonl"

    def lines(self) -> list[dict[str, Any]]:
        return list(read_lines(self.rounds))

    def append(self, line: Mapping[str, Any], seconds: float) -> None:
        """Write a round's line and its duration; both are durable once this returns."""
        append_line(self.rounds, _json(line) + b"\n")
        append_line(self.timing, _json({"round": line["round"], "seconds": round(seconds, 4)}) + b"\n")

    def replace_last(self, line: Mapping[str, Any]) -> None:
        """Replace the last round's line. The file is written whole."""
        rewrite(self.rounds, [*self.lines()[:-1], line])

    def cut_back(self, done: int, count: int | None, pending: Mapping[str, Any] | None = None) -> None:
        """Drop the lines after round `done`, and an incomplete last line.

        `count` is how many lines must be left, None where that is not known. `pending` is the line of round `done`
        where the process may have ended before it was written; its duration is then unknown and not written.
        """
        kept: list[Mapping[str, Any]] = [line for line in self.lines() if line["round"] <= done]
        if pending is not None and (not kept or kept[-1]["round"] < done):
            kept.append(pending)
        timing = [line for line in read_lines(self.timing) if line["round"] <= done]
        found = {self.rounds: kept} | ({self.timing: timing} if pending is None else {})
        for path, lines in found.items():
            if count is not None and len(lines) != count:
                raise UserError(
                    f"{path} has {len(lines)} of the {count} rounds of its checkpoint; start the run again in another "
                    "folder"
                )
        rewrite(self.rounds, kept)
        rewrite(self.timing, timing)


@final
class Store:
    """One run's folder. `create` makes a new one, `open` opens an existing one."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.log = RoundLog(folder)
        self.origin: Origin | None = None  # of the plan and problem in use; where set, checkpoints must come from it
        self._kept: dict[int, int] = {}  # the round of each client's newest v_i
        self._sum = 0  # `private_sum` of these
        self.said: list[str] = []  # warnings for the user who resumes the run

    @classmethod
    def create(cls, folder: Path, plan: Plan, about: Mapping[str, Any]) -> Store:
        if (folder / "plan.toml").exists():
            raise UserError(f"{folder} holds a run already; name another --out, or continue it with --resume")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            require_plain(folder, NAMES, IN_PLACE)
            for left in ("clients.jsonl", "rounds.jsonl", "timing.jsonl", "summary.json", "checkpoint"):
                if (folder / left).exists():  # its rounds would count as this run's
                    raise UserError(f"{folder} holds {left} of a run whose plan.toml is gone; name another folder")
            about = {"format": FORMAT, "run": uuid.uuid4().hex, **about}
            write_about(folder, about)
            write_plan(folder, to_dict(plan))  # last: it marks a run
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); name another folder") from None
        return cls(folder, about)

    @classmethod
    def open(cls, folder: Path) -> Store:
        require_plain(folder, NAMES)
        try:
            about = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{folder} is not a run: it has no readable run.json; name the folder of a run") from None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(f"{folder}: run.json has another format than {FORMAT}; use the lindt that wrote it")
        if not {"run", "clients", "metric_in_percent"} <= about.keys():
            raise UserError(f"{folder}: run.json is damaged; start the run again in another folder")
        if not isinstance(about["run"], str) or not re.fullmatch(r"[0-9a-f]{32}", about["run"]):  # it names a folder
            raise UserError(
                f"{folder}/run.json: run = {in_short(about['run'])} is not an id of a run (32 digits from 0 to f); "
                "start the run again in another folder"
            )
        return cls(folder, about)

    def record_checks(self, checks: Mapping[str, Any]) -> None:
        """Write the findings of the checks before training, for a run that was begun without these checks."""
        self.about = {**self.about, "checks": dict(checks)}
        write_about(self.folder, self.about)

    @property
    def run(self) -> str:
        return str(self.about["run"])

    @property
    def private(self) -> Path:
        return self.folder / "private"

    @property
    def clients(self) -> int:
        """N. run.json has an entry for each client, or of lazy clients for the panel only."""
        return int(self.about.get("population") or len(self.about["clients"]))

    @cached_property
    def versions(self) -> FolderStore | ShardStore:
        """The v_i of this folder."""
        return private_store(self.private, self.run, self.clients)

    @property
    def visited(self) -> Path:
        return self.folder / "clients.jsonl"

    @property
    def private_rounds(self) -> PrivateRounds:
        """The round of each client's newest v_i in this folder; empty until a state is loaded."""
        return dict(self._kept)

    @property
    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()

    def require_task(self, task: str | None, why: str) -> None:
        """Refuse a task other than the run's; `why` is what the user wants to do with the run, such as "resume"."""
        begun = self.about.get("task")
        if begun == task:
            return
        if begun == FROM_PYTHON:
            raise UserError(
                f"{self.folder} was played with data and a model given in Python; to {why} it, use "
                f"lindt.open({str(self.folder)!r}, clients=..., model=...)"
            )
        if begun == FROM_FLOWER:
            raise UserError(
                f"{self.folder} was played by a Flower app, which keeps its data and models; {why} it there"
            )
        if begun is None:
            raise UserError(
                f"{self.folder} was played with the data and model that its plan names; to {why} it, give no task and "
                "no data"
            )
        raise UserError(
            f"{self.folder} was run with the task {begun}; to {why} it, give the same task (--task, or task= in Python)"
        )

    def require_data(self, problem: Problem) -> None:
        """Refuse data other than the run's."""
        from lindt.plan.problem import fingerprint

        if self.about.get("data") == fingerprint(problem):
            return
        task = self.about.get("task")
        given = "the given clients have" if task == FROM_PYTHON else f"task {task} returns"
        raise UserError(f"{given} other data than the run in {self.folder}; draw the data from a fixed seed")

    def plan(self) -> Plan:
        return from_run(self.plan_table())

    def plan_table(self) -> dict[str, Any]:
        path = self.folder / "plan.toml"
        try:
            return from_toml(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError):
            raise UserError(f"{path} cannot be read; start the run again in another folder") from None

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

    def append(
        self, state: RunState, result: RoundResult, seconds: float, visited: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """Write a finished round, durable once this returns: first its line, then the checkpoint that includes it.

        `visited` are the entries of lazy clients that were visited for the first time. Returns the line.
        """
        if visited and not self.about.get("withheld"):
            append_line(self.visited, b"".join(_json({"round": state.round, **one}) + b"\n" for one in visited))
        line = withheld_line(round_line(result)) if self.about.get("withheld") else round_line(result)
        self.log.append(line, seconds)
        if result.recovering:
            found = {i: state.round for i in result.answered if self.versions.has(i, state.round)}
            before = {i: self._kept[i] for i in found if i in self._kept}
            self._sum = (self._sum + private_sum(found) - private_sum(before)) % 2**64
            self._kept |= found
        if state.model_round < state.round:  # an early stop went back to an earlier round: later v_i are deleted
            newest = self.versions.newest_rounds(state.model_round)
            self._kept = {i: newest[i] for i in self._kept if i in newest}
            self._sum = private_sum(self._kept)
        kept = PrivateSum(len(self._kept), self._sum) if isinstance(self.versions, ShardStore) else self._kept
        save_checkpoint(self.folder / "checkpoint", state, kept, self.origin)
        self._keep(state.round)
        return line

    def _keep(self, round: int) -> None:
        """Copy the checkpoint of a round that run.json says is kept."""
        if round in (self.about.get("keeps") or ()) and round not in kept_in(self.folder):
            (self.folder / "kept").mkdir(exist_ok=True)
            checkpoint = path_of(self.folder / "checkpoint", round).read_bytes()
            write_whole(path_of(self.folder / "kept", round), checkpoint)

    def keep_checkpoints(self, rounds: Sequence[int], planned: int) -> None:
        """Write to run.json that the states after these rounds are kept; refuse rounds that were played before."""
        played = max(rounds_in(self.folder / "checkpoint"), default=0)
        for round in rounds:
            if not 1 <= round <= planned:
                raise UserError(f"--keep-checkpoint {round}: the run has rounds 1 to {planned}; choose one of them")
            if round < played and round not in kept_in(self.folder):
                raise UserError(
                    f"--keep-checkpoint {round}: {self.folder} has played round {played}, and did not keep that "
                    "checkpoint; choose a later round"
                )
        keeps = sorted({*(self.about.get("keeps") or ()), *rounds})
        if keeps != (self.about.get("keeps") or []):
            self.about = {**self.about, "keeps": keeps}
            write_about(self.folder, self.about)

    def resume(self) -> RunState | None:
        """The state of the last checkpoint, None where no round has ended yet. Lines of later rounds are deleted.

        A damaged checkpoint is renamed, and the one before it is used.
        """
        loaded = self._loaded()
        done = loaded.state.round if loaded else 0
        self._kept = self._private(loaded) if loaded else {}
        self._sum = private_sum(self._kept)
        for client, round in self._kept.items() if loaded and isinstance(loaded.private, dict) else ():
            if not self.versions.has(client, round):
                raise UserError(
                    f"{self.private}: client {client}'s v_i of round {round} is missing; start the run again in "
                    "another folder"
                )
        self.log.cut_back(done, count=done)
        self._keep(done)
        if self.visited.exists():
            rewrite(self.visited, [line for line in read_lines(self.visited) if line["round"] <= done])
        self.said += put_aside(loaded.damaged, done) if loaded else []
        return loaded.state if loaded else None

    def state(self) -> RunState:
        """The server's state after the last round played."""
        loaded = self._loaded()
        if loaded is None:
            raise UserError(f"{self.folder}: no round has been played yet; resume the run first")
        self._kept = self._private(loaded)
        return loaded.state

    def _private(self, loaded: LoadedCheckpoint) -> PrivateRounds:
        """The round of each client's newest v_i. Of many clients the checkpoint has only their number and sum."""
        if isinstance(loaded.private, dict):
            return loaded.private
        found = self.versions.newest_rounds(loaded.state.model_round)
        if PrivateSum(len(found), private_sum(found)) != loaded.private:
            raise UserError(
                f"{self.private}: it has the v_i of {len(found):,} clients, the checkpoint those of "
                f"{loaded.private.clients:,}, or of other rounds; start the run again in another folder"
            )
        return found

    def _loaded(self) -> LoadedCheckpoint | None:
        """The newest undamaged checkpoint. Another plan, model or loss is refused; other versions give a warning."""
        loaded = load_checkpoint(self.folder / "checkpoint", self.run)
        if loaded is None or self.origin is None:
            return loaded
        if loaded.origin is None:
            self.said.append(
                f"{self.folder}: an earlier lindt wrote its checkpoint, without the plan, model and loss: they are not "
                "compared with yours"
            )
        else:
            self.origin.require_same(loaded.origin, self.folder)
            self.said += [f"{self.folder}: {said}" for said in self.origin.doubts(loaded.origin)]
        return loaded

    def forget_participants(self, state: RunState) -> None:
        """After the last round of a run with --withhold: keep one checkpoint, without the clients and their seed."""
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
        """Let only one process work on a run, even if the file `lock` is deleted meanwhile."""
        require_plain(self.folder, NAMES, IN_PLACE)
        busy = f"{self.folder}: another process is working on this run; wait or stop it"
        # A reader that checks whether the run is running holds the lock for an instant.
        with (
            locked_folder(self.folder, wait=0.35, busy=busy),
            locked(self.folder / "lock", wait=0.35, busy=busy),
        ):
            yield


def require_free(folder: Path, named: str) -> None:
    """Refuse a folder that holds other files: nobody could tell which files are the run's.

    The files of a run that was killed before its plan was written are allowed. `named` is the option that names the
    folder, such as "--out".
    """
    if not folder.is_dir():
        if folder.exists():
            raise UserError(f"{named} {folder}: that is a file; name a folder")
        return
    aside = tuple(f".{name}." for name in NAMES)  # how a file is called while it is written
    names = (entry.name for entry in folder.iterdir())
    others = sorted(name for name in names if name not in NAMES and not name.startswith(aside))
    if others:
        raise UserError(f"{named} {folder}: it is not empty and not a run (it holds {others[0]}); name another folder")


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    write_whole(folder / "run.json", _json(about, indent=2))


def write_plan(folder: Path, table: Mapping[str, Any]) -> None:
    write_whole(folder / "plan.toml", tomli_w.dumps(table).encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file that may still grow; an incomplete last line is left out."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            raise UserError(f"{path}: a damaged line, {line[:60]!r}; start the run again in another folder") from None
        wanted = {"round", "scores", "flag", "answered"} if path.name == "rounds.jsonl" else {"round"}
        if not isinstance(found, dict) or not wanted <= found.keys() or type(found["round"]) is not int:
            raise UserError(f"{path}: a damaged line, {line[:60]!r}; start the run again in another folder")
        yield found


def rewrite(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Replace a file of lines as a whole."""
    write_whole(path, b"".join(_json(line) + b"\n" for line in lines))


def _json(value: Mapping[str, Any], indent: int | None = None) -> bytes:
    return json.dumps(value, sort_keys=indent is None, indent=indent, allow_nan=False).encode()


@final
@dataclass(frozen=True)
class Origin:
    """What a state was computed with: the plan as tables, `server.checks.probe` of model, loss and metric, versions.

    The model's outputs are compared in evaluation mode and in training mode. Different outputs in training mode only
    give a warning: another kind of machine draws another dropout.
    """

    plan: dict[str, Any]
    parts: dict[str, Part]
    versions: dict[str, str]

    def text(self) -> str:
        """As JSON that may contain NaN and infinity, which the JSON of a sealed file may not."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: Any) -> Origin:
        """The inverse of `text`. Raises ValueError, TypeError or KeyError where the text is damaged."""
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
            # Fields that a newer version has added get the values at which they have no effect.
            changed = difference(plan, json.loads(json.dumps(to_dict(from_run(before.plan)))))
            if changed is not None:
                raise UserError(
                    f"{folder}/plan.toml: {changed} in the rounds played; change it back, or start the run again in "
                    "another folder"
                )
        for name in ("model", "loss", "metric", "optimizer"):
            if not self._same(before, name):
                raise UserError(
                    f"{folder}: the {name} differs from that of the rounds played; give the task as it was, or start "
                    "the run again in another folder"
                )

    def doubts(self, before: Origin) -> Iterator[str]:
        for name in sorted(self.versions.keys() & before.versions.keys()):
            if self.versions[name] != before.versions[name]:
                yield (
                    f"{name} is {self.versions[name]}, and was {one_line(before.versions[name], 60)} in the rounds "
                    "played; the numbers may differ from those of an uninterrupted run"
                )
        if not self._same(before, "training"):
            yield (
                "in training mode the model's outputs differ from those in the rounds played; its dropout was changed, "
                "or this is another kind of machine"
            )

    def _same(self, before: Origin, name: str) -> bool:
        none = ("", list[float]())  # plain SGD has no optimizer
        (words, numbers), (old_words, old_numbers) = self.parts.get(name, none), before.parts.get(name, none)
        if words != old_words or len(numbers) != len(old_numbers):
            return False
        return all(
            math.isclose(new, old, rel_tol=1e-3, abs_tol=1e-4) or (math.isnan(new) and math.isnan(old))
            for new, old in zip(numbers, old_numbers, strict=True)
        )


def difference(plan: Any, before: Any, name: str = "") -> str | None:
    """The first field in which two plans' tables differ, in words."""
    if isinstance(plan, dict) and isinstance(before, dict):
        names = sorted(plan.keys() | before.keys())
        inner = (difference(plan.get(n), before.get(n), f"{name}.{n}" if name else n) for n in names)
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
                f"{folder}: its checkpoint has {there.numel()} {name} ({there.dtype}), the model has {model.numel()} "
                f"({model.dtype}); give the model of the run, or start the run again in another folder"
            )


def save_checkpoint(
    folder: Path, state: RunState, private: PrivateRounds | PrivateSum | None = None, origin: Origin | None = None
) -> None:
    """Write the state, the rounds of the v_i that belong to it and its origin; keep only the last two checkpoints."""
    about: dict[str, Any] = {"recovery": recovery_table(state.recovery)}
    about["private"] = asdict(private) if isinstance(private, PrivateSum) else sorted((private or {}).items())
    about |= {} if state.secret is None else {"secret": state.secret}
    about |= {} if state.detection is None else {"detection": detection_table(state.detection)}
    about |= {} if origin is None else {"origin": origin.text()}
    tensors = {"w": state.w, "floats": state.buffers.floats_F, "counts": state.buffers.counts_I}
    if (best := state.best) is not None:
        numbers = {name: getattr(best, name) for name in ("round", "score", "since", "restored")}
        about["best"] = numbers | {"recovery": recovery_table(best.recovery)}
        tensors |= {"best_w": best.w, "best_floats": best.buffers.floats_F, "best_counts": best.buffers.counts_I}
    write_sealed(folder, state.run, state.round, tensors, about)


def write_sealed(
    folder: Path, run: str, round: int, tensors: Mapping[str, Tensor | NDArray[Any]], about: Mapping[str, Any]
) -> None:
    """Write the state after `round`, of `tensors` or arrays and JSON values, sealed; keep only the last two states."""
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
    """A checkpoint, the rounds of its v_i, and the newer checkpoints that are damaged, each with the reason."""

    state: RunState
    private: PrivateRounds | PrivateSum
    origin: Origin | None  # None: written by a version that did not keep it
    damaged: dict[Path, str]


class UnreadableError(UserError):
    """An undamaged checkpoint of another format or run. Older checkpoints are not tried: they would be the same."""


def load_checkpoint(folder: Path, run: str) -> LoadedCheckpoint | None:
    """The newest undamaged checkpoint; None before the first round has ended. UserError where all are damaged."""
    newest, damaged = newest_whole(folder, run, _run_state)
    if newest is None:
        if damaged:
            raise none_is_whole(damaged)
        return None
    return LoadedCheckpoint(*newest, damaged)


def kept_in(folder: Path) -> list[int]:
    """The rounds of --keep-checkpoint that a run's folder has kept, in order."""
    return rounds_in(folder / "kept")


def load_kept(folder: Path, run: str, round: int) -> LoadedCheckpoint:
    """The kept checkpoint of one round."""
    path = path_of(folder / "kept", round)
    loaded, damaged = newest_whole(path.parent, run, _run_state, rounds=[round])
    if loaded is None:
        raise UserError(f"{damaged[path]}; keep another round, or play the run again in another folder")
    return LoadedCheckpoint(*loaded, damaged)


Damaged = dict[Path, str]  # checkpoints that cannot be used, each with the reason


def newest_whole(
    folder: Path,
    run: str,
    read: Callable[[dict[str, Any], dict[str, Any]], T],
    unsealed: Callable[[bytes], tuple[dict[str, Any], dict[str, str]]] = unseal,
    rounds: Sequence[int] | None = None,
) -> tuple[T | None, Damaged]:
    """The newest undamaged checkpoint as `read` returns it, None where there is none; and the newer, damaged ones.

    `read` is called with the tensors, or with the arrays of `unseal_arrays`, and the JSON values. Where it raises
    ValueError, TypeError or KeyError, the checkpoint counts as damaged. `rounds`: by default all of the folder.
    """
    damaged: Damaged = {}
    for round in reversed(rounds_in(folder) if rounds is None else rounds):
        path = path_of(folder, round)
        try:
            tensors, words = unsealed(path.read_bytes())
            about = json.loads(words["about"])
            if about["format"] != CHECKPOINT_FORMAT:
                raise UnreadableError(
                    f"{path}: its format is {about['format']}, not {CHECKPOINT_FORMAT}; use the lindt that wrote it"
                )
            if about["run"] != run or about["round"] != round:
                raise UnreadableError(f"{path} belongs to another run or round; start the run again in another folder")
            return read(tensors, about), damaged
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
            damaged[path] = f"{path} is damaged ({error})"
    return None, damaged


def none_is_whole(damaged: Damaged) -> UserError:
    return UserError(
        f"{next(iter(damaged.values()))}, and every older checkpoint is damaged too; start the run again in another "
        "folder"
    )


def put_aside(damaged: Damaged, round: int) -> list[str]:
    """Rename damaged checkpoints so that they are not read again; returns warnings. `round` is the round in use."""
    said = []
    for path, wrong in damaged.items():
        path.rename(path.with_suffix(".damaged"))
        said.append(f"{wrong}; it was renamed to .damaged, and the run continues from round {round}")
    return said


def _run_state(
    tensors: dict[str, Tensor], about: dict[str, Any]
) -> tuple[RunState, PrivateRounds | PrivateSum, Origin | None]:
    w, floats, counts = (tensors[name] for name in ("w", "floats", "counts"))
    recovery = recovery_from(about["recovery"])
    private = _private_from(about["private"])
    secret = None if "secret" not in about else whole_number(about["secret"], "secret", LARGEST)
    detection = None if "detection" not in about else detection_from(about["detection"])
    origin = None if "origin" not in about else Origin.read(about["origin"])
    best = None if "best" not in about else _best_from(about["best"], tensors)
    state = RunState(about["run"], about["round"], w, Buffers(floats, counts), recovery, secret, detection, best)
    return state, private, origin


def _private_from(found: Any) -> PrivateRounds | PrivateSum:
    if isinstance(found, dict):
        return PrivateSum(*(whole_number(found[name], name, LARGEST) for name in ("clients", "sum")))
    return {whole_number(i, "client", LARGEST): whole_number(r, "round", LARGEST) for i, r in found}


def _best_from(found: dict[str, Any], tensors: dict[str, Tensor]) -> BestRound:
    w, floats, counts = (tensors[f"best_{name}"] for name in ("w", "floats", "counts"))
    for name, tensor in (("w", w), ("floats", floats), ("counts", counts)):
        if tensor.shape != tensors[name].shape or tensor.dtype != tensors[name].dtype:
            raise ValueError(f"best_{name} is of another shape or type than {name}")
    if type(found["restored"]) is not bool:
        raise ValueError("best.restored is not a boolean")
    return BestRound(
        whole_number(found["round"], "round", LARGEST),
        number(found["score"], "score"),
        w,
        Buffers(floats, counts),
        recovery_from(found["recovery"]),
        whole_number(found["since"], "since", LARGEST),
        found["restored"],
    )


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
    """A DetectionState as JSON values. `detection_from` gives back exactly the same numbers."""
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
