"""A run on disk: the resolved plan, one JSON line a round, the summary, a checkpoint.

    plan.toml       everything that decides the numbers
    run.json        the run's id, its clients (sizes, labels, who attacks), versions of what computed it
    rounds.jsonl    one line a round, no clock times: the same bytes for the same plan
    timing.jsonl    seconds a round
    summary.json    written when the run has ended
    checkpoint/     the server's state after the last two rounds
    private/        v_i, which in a real federation stay with the clients

Every file but the two that grow is replaced whole; those two are cut back to the checkpoint on resume.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, final

import tomli_w

from lindt.client.private_store import FolderStore
from lindt.errors import UserError
from lindt.plan.file import from_dict, from_toml, to_dict
from lindt.plan.plan import Plan
from lindt.runs.checkpoint import load_checkpoint, put_aside, save_checkpoint
from lindt.runs.files import append_line, locked, write_whole
from lindt.runs.summary import round_line
from lindt.server.federation import RoundResult, RunState

FORMAT = 1  # of the folder; a newer one is refused, not guessed at


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
        self._kept: dict[int, int] = {}  # the round of each client's newest v_i
        self.said: list[str] = []  # what whoever resumes the run should hear of

    @classmethod
    def create(cls, folder: Path, plan: Plan, about: Mapping[str, Any]) -> Store:
        if (folder / "plan.toml").exists():
            raise UserError(f"{folder} holds a run already; name another --out, or continue it with --resume")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            about = {"format": FORMAT, "run": uuid.uuid4().hex, **about}
            write_about(folder, about)
            write_plan(folder, to_dict(plan))  # last: it marks a run
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror}); name another --out") from None
        return cls(folder, about)

    @classmethod
    def open(cls, folder: Path) -> Store:
        try:
            about = json.loads((folder / "run.json").read_text())
        except (OSError, ValueError, RecursionError):
            raise UserError(f"{folder} is no run: it has no readable run.json") from None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise UserError(f"{folder}: written in another format than {FORMAT}; use the lindt that wrote it")
        if not {"run", "clients", "metric_in_percent"} <= about.keys():
            raise UserError(f"{folder}: run.json is damaged; start the run anew in another folder")
        return cls(folder, about)

    @property
    def run(self) -> str:
        return str(self.about["run"])

    @property
    def private(self) -> Path:
        return self.folder / "private"

    @property
    def ended(self) -> bool:
        return (self.folder / "summary.json").exists()

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
        line = round_line(result)
        self.log.append(line, seconds)
        if result.recovering:
            versions = FolderStore(self.private, self.run)
            self._kept |= {i: state.round for i in result.answered if versions.has(i, state.round)}
        save_checkpoint(self.folder / "checkpoint", state, self._kept)
        return line

    def resume(self) -> RunState | None:
        """The last checkpoint, with later lines cut off; None where no round has ended yet.

        A damaged one is put aside under another name, and the one before it is taken.
        """
        loaded = load_checkpoint(self.folder / "checkpoint", self.run)
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
        loaded = load_checkpoint(self.folder / "checkpoint", self.run)
        if loaded is None:
            raise UserError(f"{self.folder}: no round has been played yet; resume the run first")
        return loaded.state

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_whole(self.folder / "summary.json", _json(summary, indent=2))

    def locked(self) -> AbstractContextManager[None]:
        """One process a run."""
        busy = f"{self.folder}: another process is working on this run; wait or stop it"
        # A reader that asks whether the run goes on holds the lock for an instant.
        return locked(self.folder / "lock", wait=0.35, busy=busy)


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
