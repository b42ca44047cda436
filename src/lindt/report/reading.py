"""Read a run's folder for people, in any state of the run, without torch. Everything in it is checked before use.

`lindt.runs.store` reads a folder to continue the run, and refuses a damaged one. Here a damaged line is skipped,
counted and reported. The plan is read as tables, not as a Plan: a Plan is built of components, which import torch, and
a folder's plan may be of another version. A missing value is None.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, final

from lindt.errors import UserError
from lindt.plan.file import read_toml
from lindt.runs.files import BrokenError, is_held, open_file, unseal_table
from lindt.runs.schema import (
    ABOUT,
    DETECTION_ONLY,
    FROM_FLOWER,
    FROM_PYTHON,
    NODES,
    NODES_FILE,
    ROUND,
    STATISTICS,
    SUMMARY,
    TIMING,
    fits,
    parsed,
)
from lindt.server.scores import client_weights, excluded_clients, without_clients

State = Literal["running", "ended", "stopped", "crashed"]
DEEPEST = 4  # folders of runs inside folders of runs: runs/compared/lindt is two
MOST_FOLDERS = 20_000  # a search for runs looks into no more


@final
@dataclass(frozen=True)
class Run:
    """The content of a run's folder at one moment. `rounds` are the readable lines of rounds.jsonl, in order."""

    folder: Path
    state: State
    about: dict[str, Any]
    plan: dict[str, Any]
    plan_text: str
    rounds: tuple[dict[str, Any], ...]
    seconds: dict[int, float]
    summary: dict[str, Any] | None
    said: tuple[str, ...]  # notes: what could not be read, refused claims of nodes, private models that did not learn
    anew: int = 0  # how often earlier rounds changed while the run was followed
    excluded: dict[int, str] = field(default_factory=dict)  # clients left out of every gain, with the reason
    weak: str | None = None  # one of `said`: why a gain over these private models says little

    @property
    def name(self) -> str:
        return str(self.about["name"])

    @property
    def percent(self) -> bool:
        return bool(self.about["metric_in_percent"])

    @property
    def warnings(self) -> list[str]:
        """The warnings of the checks before training; empty where the checks were not made."""
        checks = self.about.get("checks") or {}
        return list(checks.get("warnings", ()))

    @property
    def planned(self) -> int | None:
        """The plan's number of rounds."""
        return whole_at(self.plan, "rounds")

    @property
    def scored(self) -> list[dict[str, Any]]:
        return [line for line in self.rounds if line.get("scores")]

    @property
    def final(self) -> dict[str, Any] | None:
        """The scored round whose models the run has: the last, or the best after an early stop; None before that."""
        stop = (self.summary or {}).get("early_stop")
        found = [line for line in self.scored if stop is None or line["round"] == stop["best_round"]]
        return found[-1] if found else None


@final
class Reader:
    """Reads one run again and again: each `read` reads only the new lines of the files that grow."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rounds = JsonLines(folder / "rounds.jsonl", ROUND)
        self.timing = JsonLines(folder / "timing.jsonl", TIMING)
        self.excluded: dict[int, str] = {}
        self.changes = 0  # how often the excluded clients changed, and with them the scores of earlier rounds

    def read(self) -> Run:
        about_text, plan_text = read_small(self.folder / "run.json"), read_small(self.folder / "plan.toml")
        if about_text is None or plan_text is None:
            raise UserError(
                f"{self.folder} is not a run: it has no readable run.json and plan.toml; name the folder of a run"
            )
        about = parsed(about_text, ABOUT)
        if about is None:
            raise UserError(f"{self.folder}: run.json is damaged, or another version of lindt wrote it")
        said: list[str] = []
        # The state first: a run that ends while it is read is then called running, not crashed.
        held = is_locked(self.folder)
        ending = read_small(self.folder / "summary.json")
        summary = None if ending is None else parsed(ending, SUMMARY)
        if ending is not None and summary is None:
            said.append("summary.json is damaged and was left out")
        plan = _plan(plan_text)
        if not plan:
            said.append("plan.toml is damaged and was left out")
        self.rounds.read()
        self.timing.read()
        state: State = "ended" if ending is not None else "running" if held else "crashed"
        if state == "crashed" and about.get("stopped"):
            state = "stopped"
        said += self._passed_over(state)
        said += refused_claims(self.folder)
        rounds = self._without_excluded(about, plan)
        weak = weak_baseline(about, plan, rounds)
        said += [] if weak is None else [weak]
        return Run(
            self.folder,
            state,
            about,
            plan,
            plan_text.decode("utf-8", "replace"),
            rounds,
            {r: line["seconds"] for r, line in self.timing.found.items()},
            summary,
            tuple(said),
            self.rounds.anew + self.changes,
            self.excluded,
            weak,
        )

    def _without_excluded(self, about: dict[str, Any], plan: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """The rounds, in order; scores without the clients that `server.scores` leaves out."""
        lines = [self.rounds.found[r] for r in sorted(self.rounds.found)]
        found = excluded_clients(lines, about["clients"])
        self.changes += found.keys() != self.excluded.keys()
        self.excluded = found
        if not found:
            return tuple(lines)
        weights = client_weights(plan, about["clients"])
        return tuple(
            line | {"scores": without_clients(line["scores"], found.keys(), weights)} if line.get("scores") else line
            for line in lines
        )

    def _passed_over(self, state: State) -> Iterator[str]:
        for lines in (self.rounds, self.timing):
            # While a round is being written its line is incomplete; it is broken only if no process writes any more.
            broken = lines.broken + (lines.half and state != "running")
            if broken:
                yield f"{broken} broken line{'s' if broken > 1 else ''} of {lines.path.name} left out"
            if lines.cut:
                yield f"{lines.path.name} is too large; the rounds after {max(lines.found, default=0)} were left out"


def refused_claims(folder: Path) -> Iterator[str]:
    """A sentence for each node of a run on Flower that claimed clients of other nodes."""
    content = read_small(folder / NODES_FILE)
    if content is None:
        return
    try:
        table = unseal_table(content)
    except BrokenError:
        table = {}
    if not fits(table, NODES) or not all(one["node"].isdecimal() for one in table["refused"]):
        yield f"{NODES_FILE} is damaged and was left out"
        return
    for one in table["refused"]:
        many = len(one["clients"]) > 1
        named = ", ".join(map(str, one["clients"]))
        others = "which other nodes hold or claim" if many else "which another node holds or claims"
        yield f"node {one['node']} claimed client{'s' if many else ''} {named}, {others}; refused"


ONE_LABEL: Final = 0.9  # from this share of one label on, a model that has learned can hardly be better


def weak_baseline(about: Mapping[str, Any], plan: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str | None:
    """A sentence where private models are not better than one constant label, by two standard errors.

    That happens if the rate is too small or too large for training alone, or with too few epochs. Only for accuracy,
    and for clients whose test samples have several labels. None where they are better, or that is not known.
    """
    scored = [line["scores"] for line in rounds if line.get("scores")]
    if not scored or word_at(plan, "scoring", "metric") != "accuracy":
        return None
    constant = {one["client"]: number_at(one, "constant") for one in about["clients"]}
    found = [
        (one["samples"], one["private"], share)
        for one in scored[-1]["clients"]
        if (share := constant.get(one["client"])) is not None and share < ONE_LABEL and one.get("private") is not None
    ]
    samples = sum(n for n, _, _ in found)
    if samples <= 0 or not all(0 <= part <= 1 for one in found for part in one[1:]):
        return None
    alone, guess = (sum(one[0] * one[place] for one in found) / samples for place in (1, 2))
    error = math.sqrt((alone * (1 - alone) + guess * (1 - guess)) / samples)
    if alone - guess > 2 * error:
        return None
    return (
        f"private models are right on {alone:.1%} of the test samples, and always naming a client's most frequent "
        f"label would be right on {guess:.1%}: they are not clearly better, and a gain over them says little; "
        "change training.rate, or train them longer (alone.epochs)"
    )


def read_run(folder: Path) -> Run:
    return Reader(folder).read()


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs at and below some folders, each once, however often it is named."""
    found = list(dict.fromkeys(run for folder in folders for run in find_runs(folder, whole=True)))
    if not found:
        raise UserError(
            f"{', '.join(map(str, folders))}: holds no run; name a run's folder, or a folder that holds runs"
        )
    return [read_run(folder) for folder in found]


def find_runs(root: Path, *, whole: bool = False) -> list[Path]:
    """The runs at and below a folder, by path. Links to folders are not followed; a run holds no other runs.

    At most `MOST_FOLDERS` folders are searched; with `whole` a UserError is raised where there are more.
    """
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; name a folder that holds runs")
    found, waiting, looked = [], [(root, 0)], 0
    while waiting and looked < MOST_FOLDERS:
        folder, depth = waiting.pop()
        looked += 1
        try:
            entries = list(os.scandir(folder))
        except OSError:  # a folder that cannot be read
            continue
        if any(entry.name == "plan.toml" for entry in entries) and any(entry.name == "run.json" for entry in entries):
            found.append(folder)
        elif depth < DEEPEST:
            waiting += [(Path(entry.path), depth + 1) for entry in entries if entry.is_dir(follow_symlinks=False)]
    if waiting and whole:
        raise UserError(f"{root}: it holds more than {MOST_FOLDERS:,} folders; name a folder that holds fewer")
    return sorted(found)


def is_locked(folder: Path) -> bool:
    """Whether a process works on the run. Takes the locks and releases them at once; `Store.locked` waits for that."""
    try:
        whole = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # a folder that may not be read
        whole = None
    return any([is_held(whole), is_held(open_file(folder / "lock"))])


def _plan(text: bytes) -> dict[str, Any]:
    try:
        return read_toml(text.decode("utf-8"), bits=1024)  # Python does not write out a number of 20,000
    except ValueError:
        return {}


def check_file(out: Path, named: str = "-o") -> None:
    """Raise a UserError where `out`, the value of the option `named`, cannot be a file, before the work is done."""
    if not out.parent.is_dir():
        raise UserError(f"{named} {out}: there is no folder {out.parent}; make it, or name another folder")
    if out.is_dir():
        raise UserError(f"{named} {out}: that is a folder; name a file")


WHOLE_FILE = 8 * 2**20  # plan.toml, run.json, summary.json: usually kilobytes
LONGEST_LINE = 8 * 2**20  # a scored round of 10,000 clients takes about 1.5 MB
LONGEST_FILE = 2**28  # 500 rounds of 100 clients, each round scored, take 7 MB


def read_small(path: Path) -> bytes | None:
    """The content of a small file; None where it is missing, not a plain file, or larger than WHOLE_FILE."""
    descriptor = open_file(path)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(WHOLE_FILE) if os.fstat(descriptor).st_size <= WHOLE_FILE else None


@final
class JsonLines:
    """A file with one JSON line a round. Each `read` continues where the last one ended and adds to `found`.

    An incomplete last line is read once it is complete. A file that was replaced or became shorter (a resumed run) is
    read again from its start; `anew` counts how often.
    """

    def __init__(self, path: Path, shape: Mapping[str, Any]) -> None:
        self.path, self.shape = path, shape
        self.anew = 0
        self._begin(-1)

    def _begin(self, inode: int) -> None:
        self.found: dict[int, dict[str, Any]] = {}  # by round; of two lines for a round the later
        self.broken = 0  # lines that cannot be read
        self.half = False  # the last line has no end yet
        self.inode, self.offset, self.passing = inode, 0, False

    @property
    def cut(self) -> bool:
        return self.offset >= LONGEST_FILE

    def read(self) -> None:
        descriptor = open_file(self.path)
        if descriptor is None:
            self._begin(-1)
            return
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if status.st_ino != self.inode or status.st_size < self.offset:
                self.anew += self.offset > 0
                self._begin(status.st_ino)
            file.seek(self.offset)
            self.half = False
            while not self.cut and (piece := file.readline(LONGEST_LINE)):
                whole = piece.endswith(b"\n")
                if not whole and len(piece) < LONGEST_LINE:
                    self.half = True
                    return
                self.offset += len(piece)
                if self.passing or not whole:  # a line longer than LONGEST_LINE, skipped piece by piece
                    self.passing = not whole
                    self.broken += whole
                else:
                    self._keep(piece)

    def _keep(self, line: bytes) -> None:
        table = parsed(line, self.shape)
        if table is None or table["round"] < 1:
            self.broken += 1
        else:
            self.found[table["round"]] = table


LEARNS = {
    "global_only": "FedAvg",
    "dual": "LINDT",
    "fine_tune": "fine-tuning",
    "fine_tune_head": "FB",
    "apfl": "APFL",
    "separate": "Separate",
}
JOINS = {"trimmed_mean": "trimmed mean", "median": "median", "weighted_mean": "weighted mean"}


@final
@dataclass(frozen=True)
class DetectionRule:
    """The paper's detection rule on Delta (Alg. 2, s8-s11)."""

    epsilon: float
    patience: int  # r'
    statistic: str
    counting: str


def at(plan: Mapping[str, Any], *path: str) -> Any:
    found: Any = plan
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def whole_at(plan: Mapping[str, Any], *path: str) -> int | None:
    value = at(plan, *path)
    return value if type(value) is int and 0 <= value < 2**53 else None


def number_at(plan: Mapping[str, Any], *path: str) -> float | None:
    value = at(plan, *path)
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


def word_at(plan: Mapping[str, Any], *path: str) -> str:
    value = at(plan, *path)
    return value if isinstance(value, str) else ""


def detection_rule(plan: Mapping[str, Any]) -> DetectionRule | None:
    """The rule on Delta; None where the plan has none."""
    where = ("method", "recovery")
    epsilon, patience = number_at(plan, *where, "epsilon"), whole_at(plan, *where, "patience")
    if word_at(plan, *where, "kind") != "on_detection" or epsilon is None or patience is None:
        return None
    statistic, counting = word_at(plan, *where, "statistic"), word_at(plan, *where, "counting")
    known = statistic if statistic in STATISTICS else "delta"  # it names a field of each round's line
    return DetectionRule(epsilon, patience, known, counting or "cumulative")


@final
@dataclass(frozen=True)
class GainTest:
    """The plan's test of the clients' reports: its kind, and its level alpha where it has one."""

    kind: str
    alpha: float | None


def gain_test(plan: Mapping[str, Any]) -> GainTest | None:
    """None where clients report nothing: detection by Delta, and runs of earlier versions."""
    kind = word_at(plan, "detection", "kind")
    return None if kind in ("", "delta") else GainTest(kind, number_at(plan, "detection", "alpha"))


def adapts(plan: Mapping[str, Any]) -> bool:
    """Whether clients train models of their own when recovery is on."""
    return word_at(plan, "method", "adaptation", "kind") not in ("", "global_only", DETECTION_ONLY)


def method_words(plan: Mapping[str, Any]) -> str:
    """`LINDT on detection`, `guarded LINDT on evidence`, `FedAvg, watched`, `LINDT, trimmed mean`."""
    learns = word_at(plan, "method", "adaptation", "kind")
    if learns == DETECTION_ONLY:
        return "detection only"
    if learns == "guarded":
        inside = word_at(plan, "method", "adaptation", "adaptation", "kind")
        name = f"guarded {LEARNS.get(inside, inside or '?')}"
    else:
        name = LEARNS.get(learns, learns or "?")
    if word_at(plan, "method", "penalty", "kind") == "proximal":
        name = "FedProx" if name == "FedAvg" else f"{name}, FedProx"
    recovery = word_at(plan, "method", "recovery", "kind")
    if recovery == "on_detection":
        name += " on detection" if adapts(plan) else ", watched"
    elif recovery == "on_evidence":
        name += " on evidence" if adapts(plan) else ""
    elif recovery == "never" and adapts(plan):
        name += ", never on"
    joins = JOINS.get(word_at(plan, "method", "aggregator", "kind"))
    return f"{name}, {joins}" if joins else name


def repeat_command(plan_file: str, task: str | None) -> str:
    """The shell command, or the Python call, that plays the same run again. The plan decides all its numbers."""
    if task == FROM_FLOWER:  # its plan.toml holds only the detector's rule
        return "start the Flower app with another folder"
    if task == FROM_PYTHON:
        return f"lindt.run({plan_file!r}, clients=..., model=..., out='runs/again')"
    words = ["lindt", "run", plan_file, "--out", "runs/again"]
    return shlex.join(words + (["--task", task] if task else []))


def group_of(plan: Mapping[str, Any], task: str | None, data: object = None) -> str:
    """An id that is the same for runs which differ only in their seed.

    `data` is the hash of the clients' samples. It counts only for runs of Python objects: a task may draw its data from
    the seed.
    """
    rest = {name: value for name, value in plan.items() if name != "seed"}
    told = [rest, task, data] if task == FROM_PYTHON else [rest, task]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:16]
