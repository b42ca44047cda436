"""The server's record of a Flower run in a run folder of lindt: clients by number, a line per round, a checkpoint.

Flower's node ids have 64 bits and no order; clients are numbered in the order in which the server first sees them. A
client that sends its name keeps its number when its node comes back under another id. A name belongs to one node: if
two nodes claim it, the node that held it first in this session keeps it while it is connected; if no node held it, both
are refused. Fields that a server on Flower does not know stay empty: labels, attackers, sizes of clients that have not
answered.

plan.toml holds the test or the rule of detection and the number of rounds. It is not a whole plan, so
`lindt run --resume` refuses such a run. To continue, start the Flower app again.
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, final
from weakref import WeakValueDictionary

import flwr
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from safetensors import SafetensorError
from safetensors.numpy import load

from lindt.errors import UserError
from lindt.flower.measure import chain, reports_privacy
from lindt.flower.messages import changed_settings, log_message
from lindt.flower.protocol import ClientReport
from lindt.flower.replies import ValidReplies
from lindt.gains import whole_number
from lindt.plan.file import to_dict
from lindt.plan.metrics import Accuracy
from lindt.protocols import Detection, DetectionState, Divergence, GainReport, Recovery, RecoveryState
from lindt.runs.files import remove, unseal_arrays
from lindt.runs.schema import BEST_OF, CHOSEN, DETECTION_ONLY, FROM_FLOWER, scores_record
from lindt.runs.store import (
    FORMAT,
    KEPT,
    LARGEST,
    Damaged,
    RoundLog,
    Store,
    detection_from,
    detection_table,
    newest_whole,
    none_is_whole,
    put_aside,
    recovery_from,
    recovery_table,
    write_about,
    write_plan,
    write_sealed,
)
from lindt.runs.summary import round_line, software_versions, summarise_rounds
from lindt.server.detection.divergence import Delta
from lindt.server.recovery import OnDetection
from lindt.server.scores import Scores, summarise
from lindt.server.state import RoundResult
from lindt.server.updates import Refusal

Settings = dict[str, dict[str, str]]  # of each table of settings, such as run_config: a hash by name
MEMORY = ("m_t", "v_t", "momentum_vector", "clipping_norm")  # the state of Flower's strategies between rounds


@final
@dataclass(frozen=True)
class Saved:
    """All that a run needs to resume. `line` is the round's line of rounds.jsonl, which may not be written yet."""

    round: int
    arrays: ArrayRecord
    memory: dict[str, np.ndarray]
    recovery: RecoveryState
    nodes: list[int]  # a node's number is its index here
    line: dict[str, Any]
    sampler: Any  # the state of Python's own generator, with which Flower draws nodes
    lines: int | None = None  # the number of lines of rounds.jsonl, this one included; None if it was not recorded
    detection: DetectionState | None = None  # of the test of gains; None if clients report nothing
    settings: Settings = field(default_factory=dict)  # of the app, as far as the server sees them


def save(folder: Path, run: str, saved: Saved) -> None:
    """Write the state after a round, or replace it if the round was saved before."""
    arrays = list(saved.arrays.items())
    tensors = {f"array-{i}": np.frombuffer(a.data, np.uint8) for i, (_, a) in enumerate(arrays)}
    tensors |= {f"memory-{name}": value for name, value in saved.memory.items()}
    about = {
        "arrays": [[name, array.dtype, list(array.shape), array.stype] for name, array in arrays],
        "recovery": recovery_table(saved.recovery),
        "nodes": [str(node) for node in saved.nodes],  # 64 bits: some JSON readers lose digits of such numbers
        "line": saved.line,
        "lines": saved.lines,
        "sampler": saved.sampler,
    }
    about |= {} if saved.detection is None else {"detection": detection_table(saved.detection)}
    about |= {"settings": saved.settings} if saved.settings else {}
    write_sealed(folder, run, saved.round, tensors, about)
    for old in _unsealed_rounds(folder):
        if old <= saved.round - KEPT:
            remove(_state(folder, old))
            _arrays(folder, old).unlink(missing_ok=True)


def load_newest(folder: Path, run: str) -> tuple[Saved | None, Damaged]:
    """The newest intact state, None before the first round; and the damaged states that are newer."""
    saved, damaged = newest_whole(folder, run, _read, unseal_arrays)
    for round in [] if saved else sorted(_unsealed_rounds(folder), reverse=True):
        try:
            return _read_unsealed(folder, round), damaged
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            damaged[_state(folder, round)] = f"{_state(folder, round)} is damaged ({error})"
    if saved is None and damaged:
        raise none_is_whole(damaged)
    return saved, damaged


def _read(values: dict[str, np.ndarray], about: dict[str, Any]) -> Saved:
    lines = None if about["lines"] is None else whole_number(about["lines"], "lines", LARGEST)
    return _saved(about["round"], values, about["arrays"], about, lines)


def _read_unsealed(folder: Path, round: int) -> Saved:
    """A state in the format of earlier versions, without a checksum."""
    state = json.loads(_state(folder, round).read_bytes())
    blob = _arrays(folder, round).read_bytes()
    head = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    return _saved(
        whole_number(state["round"], "round", LARGEST),
        load(blob),
        json.loads(head["__metadata__"]["order"]),
        state,
        None,
    )


def _saved(round: int, values: dict[str, np.ndarray], order: Any, state: dict[str, Any], lines: int | None) -> Saved:
    arrays = ArrayRecord()
    for index, (name, dtype, shape, stype) in enumerate(order):
        arrays[name] = Array(dtype, tuple(shape), stype, values[f"array-{index}"].tobytes())
    memory = {name.removeprefix("memory-"): v for name, v in values.items() if name.startswith("memory-")}
    version, position, gauss = state["sampler"]
    sampler = (version, tuple(position), gauss)
    random.Random().setstate(sampler)  # raises if it is not a generator's state
    nodes = [int(node) for node in state["nodes"]]
    recovery, line = recovery_from(state["recovery"]), dict(state["line"])
    detection = None if "detection" not in state else detection_from(state["detection"])
    settings = {str(table): dict(values) for table, values in dict(state.get("settings", {})).items()}
    return Saved(round, arrays, memory, recovery, nodes, line, sampler, lines, detection, settings)


def check_fit(saved: ArrayRecord, initial: ArrayRecord) -> None:
    """Raise UserError if a checkpoint is of another model: a strategy may drop arrays, but not change their shapes."""
    shared = saved.keys() & initial.keys()
    if not shared or any(tuple(saved[name].shape) != tuple(initial[name].shape) for name in shared):
        raise UserError("initial_arrays: the checkpoint in `folder` is of another model; give another folder")


def strategy_state(strategy: Strategy) -> dict[str, np.ndarray]:
    """Moments, momentum and clipping norm of each strategy in the chain, by its place in the chain and name."""
    found: dict[str, np.ndarray] = {}
    for place, link in enumerate(chain(strategy)):
        for name in MEMORY:
            value = vars(link).get(name)
            if isinstance(value, dict):
                found |= {f"{place}/{name}/dict/{key}": np.asarray(item) for key, item in value.items()}
            elif isinstance(value, list):
                found |= {f"{place}/{name}/list/{key:06d}": np.asarray(item) for key, item in enumerate(value)}
            elif isinstance(value, float):
                found[f"{place}/{name}/number/"] = np.asarray(value, dtype=np.float64)
    return found


def restore_strategy_state(strategy: Strategy, memory: dict[str, np.ndarray]) -> None:
    """Load the state of `strategy_state` into a new strategy."""
    links = list(chain(strategy))
    gathered: dict[tuple[int, str, str], dict[str, np.ndarray]] = {}
    for key in sorted(memory):
        at, name, kind, rest = key.split("/", 3)
        gathered.setdefault((int(at), name, kind), {})[rest] = memory[key]
    for (place, name, kind), items in gathered.items():
        if place >= len(links) or name not in vars(links[place]):
            raise UserError(f"strategy: the checkpoint has {name} of another strategy; start with the same strategies")
        value: Any = float(items[""]) if kind == "number" else items if kind == "dict" else list(items.values())
        setattr(links[place], name, value)


def _state(folder: Path, round: int) -> Path:
    return folder / f"state-{round:06d}.json"


def _arrays(folder: Path, round: int) -> Path:
    return folder / f"arrays-{round:06d}.safetensors"


def _unsealed_rounds(folder: Path) -> list[int]:
    names = [path.stem.removeprefix("state-") for path in folder.glob("state-*.json")]
    return [int(name) for name in names if name.isdecimal()]


@final
class RunRecorder:
    def __init__(self, folder: RunFolder | None) -> None:
        self.folder = folder
        self.nodes: list[int] = []  # a node's number is its index here
        self._numbers: dict[int, int] = {}  # the inverse of `nodes`: a search in the list would be O(N) a node
        self.clients = 0  # N: nodes connected when last asked
        self._asked: list[int] = []  # nodes
        self._connected: frozenset[int] = frozenset()
        self._free: list[int] = []  # unused numbers, of nodes that turned out to be clients with another number
        self._holders: dict[str, int] = {}  # the node of each name that was claimed in this session
        self._claims: dict[int, str] = {}  # the name that each node claimed last in this session
        self._warned: set[str] = set()
        self._known: dict[int, dict[str, Any]] = {}  # the table of each client in run.json, by number
        self._saved: Saved | None = None
        self._settings: Settings = {}  # as seen in this session and the ones before

    def resume(
        self, rounds: int, strategy: Strategy, arrays: ArrayRecord, settings: Settings, *, own_loop: bool
    ) -> Saved | None:
        """Load the last checkpoint, with the states of the strategy and the sampler. `close` unlocks the folder."""
        self._settings = settings
        if self.folder is None:
            return None
        self.folder.lock(own_loop=own_loop)
        try:
            return self._load(self.folder, rounds, strategy, arrays)
        except BaseException:
            self.folder.close()
            raise

    def _load(self, folder: RunFolder, rounds: int, strategy: Strategy, arrays: ArrayRecord) -> Saved | None:
        saved, damaged = load_newest(folder.checkpoint, folder.run)
        if saved:  # before anything is written: a start that is refused changes nothing
            check_fit(saved.arrays, arrays)
            now, self._settings = self._settings, saved.settings
            self.require_same(now)
            restore_strategy_state(strategy, saved.memory)
        done, count, pending = (saved.round, saved.lines, saved.line) if saved else (0, 0, None)
        folder.open(rounds, done, count, pending)
        for text in put_aside(damaged, saved.round) if saved else ():
            log_message(text, warn=True)
        self._holders, self._claims, self._warned = {}, {}, set()
        self._known = {one["client"]: one for one in folder.about["clients"]}
        if saved:
            self.nodes, self._saved = list(saved.nodes), saved
            self._numbers = {node: number for number, node in enumerate(self.nodes) if node}
            self._free = [number for number, node in enumerate(self.nodes) if not node]
            random.setstate(saved.sampler)
        return saved

    def require_same(self, settings: Settings) -> None:
        """Raise UserError if the app's settings are not those of the run's earlier rounds.

        The test would else mix reports about models of other data or of another training. A table of which nothing is
        known, before or now, is not compared.
        """
        for table, now in settings.items():
            names = changed_settings(self._settings[table], now) if table in self._settings else []
            if names:
                which = f"{', '.join(names[:10])}{f' and {len(names) - 10} more' if len(names) > 10 else ''}"
                where = "" if self.folder is None else f"folder = {self.folder.folder}: "
                raise UserError(
                    f"{where}its run was played with other settings ({table}: {which} changed); only the number of "
                    "rounds may change. Give another folder, or the earlier settings"
                )
        self._settings = self._settings | settings

    def number(self, node: int) -> int:
        """The node's number; a new node gets the next number."""
        if node not in self._numbers:
            number = self._free.pop(0) if self._free else len(self.nodes)
            self.nodes[number:] = [node, *self.nodes[number + 1 :]]
            self._numbers[node] = number
        return self._numbers[node]

    def settle_names(self, round: int, claims: Mapping[int, str]) -> frozenset[int]:
        """Decide which node has each name that is claimed in this round. Returns the nodes that are refused because
        their name is another node's; the log and run.json name them."""
        refused: set[int] = set()
        # Earlier claims count too: a node that is alone in claiming a name in this round has no better right to it.
        self._claims = {node: name for node, name in self._claims.items() if node in self._connected} | dict(claims)
        claimed = Counter(self._claims.values())
        known = {str(one["name"]): number for number, one in self._known.items() if "name" in one}
        for node, name in sorted(claims.items()):
            holder, number = self._holders.get(name), known.get(name)
            if holder is None and number is not None and self._claims.get(self.nodes[number]) == name:
                holder = self.nodes[number]  # the node that had it before the server was started again
            free = claimed[name] == 1 if holder is None else holder == node or holder not in self._connected
            if not free:
                refused.add(node)
                others = [other for other, claim in sorted(self._claims.items()) if claim == name and other != node]
                self._refuse_name(
                    round, node, name, holder if holder is not None else others[0], kept=holder is not None
                )
                continue
            self._holders[name] = node
            if number is not None and number != self.number(node):
                self._rebind(node, number)
            known[name] = self.number(node)
            self._update_client(self.number(node), name=name, node=str(node))
        return frozenset(refused)

    def name(self, node: int) -> str:
        """`client 3`: the name that the node's client sent, or `node 42`."""
        client = self._claims.get(node)
        return f"node {node}" if client is None else f"client {client}"

    def _refuse_name(self, round: int, node: int, name: str, other: int, *, kept: bool) -> None:
        whose = f"which is node {other}'s: node {node}" if kept else f"and so does node {other}: each"
        text = (
            f"node {node} calls itself {name!r}, {whose} reports nothing and does not recover; give each node a "
            "partition-id or client_id of its own, and a folder of its own (LINDT_PRIVATE)"
        )
        if text in self._warned:
            return
        self._warned.add(text)
        log_message(f"round {round}: {text}", warn=True)
        self.note(f"round {round}: {text}")

    def _rebind(self, node: int, number: int) -> None:
        """Give a known client's number to the node. The node that had it gets this node's number, if connected."""
        before, previous = self.number(node), self.nodes[number]
        self._numbers[node], self.nodes[number] = number, node
        if previous in self._connected:
            self._numbers[previous], self.nodes[before] = before, previous
            return
        self._numbers.pop(previous, None)
        self.nodes[before] = 0
        if "name" in self._known.get(before, {}):
            return  # a client of another name, which may come back
        if before in self._known:  # the client trained before it sent its name
            self._update_client(number, train=self._known.pop(before)["train"])
        self._free.append(before)
        while self.nodes and len(self.nodes) - 1 in self._free:
            self._free.remove(len(self.nodes) - 1)
            self.nodes.pop()

    def ask(self, round: int, asked: list[int], connected: list[int]) -> None:
        for node in sorted(connected):
            self.number(node)
        if self.folder is not None:
            self.folder.flush()
        self._connected = frozenset(connected)
        self.clients, self._asked = len(connected), asked

    def played(
        self,
        round: int,
        valid: ValidReplies,
        seen: Divergence | None,
        recovering: bool,
        state: RecoveryState,
        arrays: ArrayRecord,
        strategy: Strategy,
        reports: Mapping[int, GainReport] | None = None,
        detection: DetectionState | None = None,
        shown: DetectionState | None = None,
        buffer_div: float | None = None,
    ) -> None:
        """Save the round after aggregation: from here on a crash does not lose it.

        `detection` is the state from which the test resumes, `shown` the state in the round's line.
        """
        refused = {self.number(node): reason for node, reason in valid.refused.items()}
        result = RoundResult(
            round=round,
            asked=tuple(sorted(map(self.number, self._asked))),  # a name in a reply may have changed a node's number
            answered=tuple(sorted(self.number(node) for node in valid.nodes)),
            refused=tuple(Refusal(client, reason) for client, reason in sorted(refused.items())),
            seen=seen,
            recovering=recovering,
            recovery=state,
            scores=None,
            reports=reports,
            detection=shown,
            buffer_div=buffer_div,
        )
        for node, size in zip(valid.nodes, valid.sizes_K, strict=True):
            self._update_client(self.number(node), train=int(size))
        if self.folder is None:
            return
        memory = strategy_state(strategy)
        self.folder.flush()
        count, line = self.folder.lines + 1, round_line(result)
        sampler = random.getstate()
        nodes, settings = list(self.nodes), self._settings
        self._saved = Saved(round, arrays, memory, state, nodes, line, sampler, count, detection, settings)
        save(self.folder.checkpoint, self.folder.run, self._saved)
        self._write_clients(self.folder)
        self.folder.played(line)

    def scored(self, round: int, reports: dict[int, ClientReport]) -> Scores | None:
        """Complete the round's line after the evaluation."""
        tallies = {self.number(node): report.tally for node, report in reports.items()}
        scores = None
        if tallies:
            # Each report is a sum over samples and their number: any metric that is a mean is summarised like accuracy.
            counted = frozenset(tallies)
            scores = summarise(tallies, Accuracy(), counted=counted, alphas=dict.fromkeys(tallies, 1.0))
            if not all(report.paired for report in reports.values()):  # the paired test needs wins and losses
                scores = replace(scores, clearly_harmed=None, clearly_better=None)
            chosen = sum(report.chosen for report in reports.values())
            if chosen:
                scores = replace(scores, notes=scores.notes | {CHOSEN: chosen / len(reports)})
            for node, report in reports.items():
                self._update_client(self.number(node), test=report.tally.samples, name=report.client)
            self._log_gains(round, scores)
        if self.folder is None or self._saved is None or self._saved.round != round:
            return scores
        line = self._saved.line | {"scores": scores_record(scores)}
        self._write_clients(self.folder, all(report.percent for report in reports.values()) if reports else None)
        self.folder.scored(line)
        self._saved = replace(self._saved, line=line, sampler=random.getstate(), nodes=list(self.nodes))
        save(self.folder.checkpoint, self.folder.run, self._saved)
        return scores

    def note(self, text: str) -> None:
        """A sentence about the run, in run.json."""
        if self.folder is not None:
            self.folder.note(text)

    def finish(self) -> None:
        if self.folder is not None:
            self.folder.finish()

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()

    def _write_clients(self, folder: RunFolder, percent: bool | None = None) -> None:
        percent = bool(folder.about["metric_in_percent"]) if percent is None else percent
        folder.know([self._known[client] for client in sorted(self._known)], percent)

    def _update_client(self, client: int, **found: Any) -> None:
        empty = {"client": client, "train": 0, "test": 0, "attacker": False, "labels": {}}
        self._known[client] = self._known.get(client, empty | {"node": str(self.nodes[client])}) | found

    def _log_gains(self, round: int, scores: Scores) -> None:
        if scores.beta is None:
            return
        hurt = sorted((one.beta, one.client) for one in scores.clients if one.beta is not None and one.beta < 0)
        names = [f"{self._known[client]['name']} ({beta:+.3f})" for beta, client in hurt[:10]]
        more = f" and {len(hurt) - 10} more" if len(hurt) > 10 else ""
        who = f"worse off than alone: {', '.join(names)}{more}" if names else "no client is worse off than alone"
        chosen = scores.notes.get(CHOSEN, 0.0)
        if chosen and not names:  # by construction, which is no finding
            some = "clients" if chosen == 1 else "clients in recovery"
            who = f"{some} {BEST_OF.format('this', 'it')}"
        same = ", with models chosen on the same data" if chosen and names else ""
        gain = f"mean gain over training alone {scores.beta:+.3f}"
        log_message(f"round {round}: {gain}{same}; {who}", warn=scores.beta < 0)


TASK = FROM_FLOWER
MOST_NOTES: Final = 100
# The detector cannot see when a loop of the user's own ends. A new loop on the same folder ends the one before it.
_OWN_LOOPS: Final[WeakValueDictionary[Path, RunFolder]] = WeakValueDictionary()


@final
class RunFolder:
    """One run's folder, new or resumed.

    A round's line is written when the round is evaluated. Without an evaluation it is written when the next round
    begins, or on `close`. In a loop of the user's own the last round is written at once, with the summary; a later
    evaluation replaces both.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        rule: Recovery,
        strategies: list[str],
        detection: Detection | None = None,
        *,
        recover: bool = True,
    ) -> None:
        self.folder, self.rule, self.log = folder, rule, RoundLog(folder)
        self.detection: Detection = detection or Delta()
        method = {"adaptation": {"kind": "dual" if recover else DETECTION_ONLY}, "recovery": to_dict(rule)}
        self._plan = {"method": method, "detection": to_dict(self.detection)}
        self._clock = time.perf_counter()
        self._lock, self._process, self._is_open = ExitStack(), 0, False
        self._pending: dict[str, Any] | None = None  # a round's line that is not written yet
        self._rounds, self._own_loop = 0, False
        self.lines = 0  # the number of rounds played, earlier sessions included
        about = self._read()
        if about is None:
            about = {
                "format": FORMAT,
                "run": uuid.uuid4().hex,
                "name": name,
                "task": TASK,
                "data": None,
                "class_names": [],
                "metric_in_percent": True,
                "clients": [],
                "versions": software_versions() | {"flwr": flwr.__version__},
                "strategies": strategies,
            }
        elif about.get("strategies") != strategies:
            raise UserError(
                f"folder = {folder}: its run has the strategies {about.get('strategies')}; start it with the same "
                "strategies, or give another folder"
            )
        self.about: dict[str, Any] = about

    @property
    def run(self) -> str:
        return str(self.about["run"])

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def lock(self, *, own_loop: bool) -> None:
        """Lock the folder for this server, until `close`."""
        self.close()
        previous = _OWN_LOOPS.get(self.folder.absolute())
        if previous is not None:
            previous.close()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(Store(self.folder, self.about).locked())
        except OSError as error:
            raise UserError(f"folder = {self.folder}: cannot be written ({error.strerror}); give another") from None
        self._process, self._is_open, self._own_loop = os.getpid(), True, own_loop
        if own_loop:
            _OWN_LOOPS[self.folder.absolute()] = self

    def open(self, rounds: int, done: int, count: int | None, pending: dict[str, Any] | None) -> None:
        """Cut rounds.jsonl back to the checkpoint of round `done`, and write that round's line if it is missing."""
        self.log.cut_back(done, count, pending)
        self.lines = len(self.log.lines())
        try:
            write_about(self.folder, self.about)
            write_plan(self.folder, {"name": self.about["name"], "rounds": rounds, **self._plan})
        except OSError as error:
            raise UserError(f"folder = {self.folder}: cannot be written ({error.strerror}); give another") from None
        (self.folder / "summary.json").unlink(missing_ok=True)
        self._rounds, self._clock = rounds, time.perf_counter()
        if self._own_loop and done >= rounds:
            self.finish()

    def played(self, line: dict[str, Any]) -> None:
        """A round was aggregated and is in the checkpoint."""
        self.flush()
        self._pending, self.lines = line, self.lines + 1
        if self._own_loop and line["round"] >= self._rounds:
            self.finish()

    def scored(self, line: dict[str, Any]) -> None:
        """The round was evaluated."""
        written, self._pending = self._pending is None, line if self._pending is not None else None
        self.flush()
        if written and self.log.lines()[-1] != json.loads(
            json.dumps(line)
        ):  # evaluated again, or the last round of a loop of the user's own
            self.log.replace_last(line)
            if (self.folder / "summary.json").exists():
                self.finish()

    def flush(self) -> None:
        """Write the line of a round that was not evaluated."""
        if not self._is_open:
            raise UserError(f"{self.folder}: the run has ended, or another detector has resumed it; call begin() again")
        if self._pending is not None:
            now, line, self._pending = time.perf_counter(), self._pending, None
            self.log.append(line, now - self._clock)
            self._clock = now

    def know(self, clients: list[dict[str, Any]], percent: bool) -> None:
        """Write the clients that have been seen so far into run.json."""
        if clients != self.about["clients"] or percent != self.about["metric_in_percent"]:
            self.about |= {"clients": clients, "metric_in_percent": percent}
            write_about(self.folder, self.about)

    def note(self, text: str) -> None:
        """Add a sentence about the run to run.json."""
        notes = list(self.about.get("notes", []))
        if text not in notes and len(notes) < MOST_NOTES:
            self.about |= {"notes": [*notes, text]}
            write_about(self.folder, self.about)

    def finish(self) -> None:
        self.flush()
        words = "not known to lindt: if the strategy adds noise, ask the strategy"
        summary = summarise_rounds(self.log.lines(), 10, self.about["metric_in_percent"], self.about["clients"])
        if not isinstance(self.rule, OnDetection):
            summary["detected_at"] = None
        if self.detection.reports:
            noise = reports_privacy(float(getattr(self.detection, "noise", 0.0)))
            words += f"; the clients' gain reports {noise}, and are not part of its guarantee"
        summary["privacy"] = {"words": words, "epsilon": None, "delta": None}
        Store(self.folder, self.about).finish(summary)

    def close(self) -> None:
        """Write the last line if it is missing, and unlock the folder. A forked process leaves both to its parent."""
        if self._is_open and self._process == os.getpid():
            with self._lock:
                try:
                    self.flush()
                finally:
                    self._is_open = False

    def _read(self) -> dict[str, Any] | None:
        if not (self.folder / "run.json").exists():
            return None
        about = dict(Store.open(self.folder).about)
        if about.get("task") != TASK:
            raise UserError(f"folder = {self.folder}: it holds a run that is not of a Flower app; give another folder")
        return about
