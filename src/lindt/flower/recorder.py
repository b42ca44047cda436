"""The server's record of a Flower run: clients by number, a line a round, a checkpoint, in the format of our own runs.

Flower's node ids have 64 bits and no order; a client's number is its place in the order of first sight. What a server
on Flower does not know stays empty: labels, attackers, sizes of clients that have not answered.

plan.toml holds the test or the rule of detection and the number of rounds; there is no plan behind such a run, so
`lindt run --resume` refuses it. To go on, start the Flower app again.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, final
from weakref import WeakValueDictionary

import flwr
import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from safetensors import SafetensorError
from safetensors.numpy import load
from torch import Tensor

from lindt.errors import UserError
from lindt.flower.measure import chain, reports_privacy
from lindt.flower.messages import log_message
from lindt.flower.protocol import ClientReport
from lindt.flower.replies import ValidReplies
from lindt.gains import whole_number
from lindt.plan.file import to_dict
from lindt.plan.problem import Accuracy
from lindt.protocols import Detection, DetectionState, Divergence, GainReport, Recovery, RecoveryState
from lindt.runs.files import remove
from lindt.runs.schema import ROUND, record
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
from lindt.server.federation import RoundResult
from lindt.server.recovery import OnDetection
from lindt.server.scores import Scores, summarise
from lindt.server.updates import Refusal

MEMORY = ("m_t", "v_t", "momentum_vector", "clipping_norm")  # what Flower's strategies carry from round to round


@final
@dataclass(frozen=True)
class Saved:
    """All that a run needs to go on. `line` is the round's line of rounds.jsonl, which may not be written yet."""

    round: int
    arrays: ArrayRecord
    memory: dict[str, np.ndarray]
    recovery: RecoveryState
    nodes: list[int]  # a node's number is its place here
    line: dict[str, Any]
    sampler: Any  # Flower draws nodes with Python's own generator
    lines: int | None = None  # how many rounds.jsonl has with this one; None where it was not recorded
    detection: DetectionState | None = None  # of the test of gains; None where clients report nothing


def save(folder: Path, run: str, saved: Saved) -> None:
    """Write the state after a round, or replace it where the round was saved before."""
    arrays = list(saved.arrays.items())
    tensors = {f"array-{i}": _tensor(np.frombuffer(a.data, np.uint8)) for i, (_, a) in enumerate(arrays)}
    tensors |= {f"memory-{name}": _tensor(value) for name, value in saved.memory.items()}
    about = {
        "arrays": [[name, array.dtype, list(array.shape), array.stype] for name, array in arrays],
        "recovery": recovery_table(saved.recovery),
        "nodes": [str(node) for node in saved.nodes],  # 64 bits: more than JSON's numbers hold everywhere
        "line": saved.line,
        "lines": saved.lines,
        "sampler": saved.sampler,
    }
    about |= {} if saved.detection is None else {"detection": detection_table(saved.detection)}
    write_sealed(folder, run, saved.round, tensors, about)
    for old in _unsealed_rounds(folder):
        if old <= saved.round - KEPT:
            remove(_state(folder, old))
            _arrays(folder, old).unlink(missing_ok=True)


def load_newest(folder: Path, run: str) -> tuple[Saved | None, Damaged]:
    """The newest state that is whole, None before the first round, and the newer ones that are damaged."""
    saved, damaged = newest_whole(folder, run, _read)
    for round in [] if saved else sorted(_unsealed_rounds(folder), reverse=True):
        try:
            return _read_unsealed(folder, round), damaged
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            damaged[_state(folder, round)] = f"{_state(folder, round)} is damaged ({error})"
    if saved is None and damaged:
        raise none_is_whole(damaged)
    return saved, damaged


def _tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(values, order="C"))  # a copy: a message's bytes are read-only


def _read(tensors: dict[str, Tensor], about: dict[str, Any]) -> Saved:
    values = {name: tensor.numpy() for name, tensor in tensors.items()}
    lines = None if about["lines"] is None else whole_number(about["lines"], "lines", LARGEST)
    return _saved(about["round"], values, about["arrays"], about, lines)


def _read_unsealed(folder: Path, round: int) -> Saved:
    """The form of earlier versions."""
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
    random.Random().setstate(sampler)  # raises where it is none
    nodes = [int(node) for node in state["nodes"]]
    recovery, line = recovery_from(state["recovery"]), dict(state["line"])
    detection = None if "detection" not in state else detection_from(state["detection"])
    return Saved(round, arrays, memory, recovery, nodes, line, sampler, lines, detection)


def check_fit(saved: ArrayRecord, initial: ArrayRecord) -> None:
    """Whether a checkpoint is of this model: a strategy may drop arrays, but not change their shapes."""
    shared = saved.keys() & initial.keys()
    if not shared or any(tuple(saved[name].shape) != tuple(initial[name].shape) for name in shared):
        raise UserError("initial_arrays: the checkpoint in `folder` is of another model; name another folder")


def strategy_state(strategy: Strategy) -> dict[str, np.ndarray]:
    """Moments, momentum and adaptive clipping, of each strategy in the chain, by place and name."""
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
    """Give a new strategy what the one before it carried."""
    links = list(chain(strategy))
    gathered: dict[tuple[int, str, str], dict[str, np.ndarray]] = {}
    for key in sorted(memory):
        at, name, kind, rest = key.split("/", 3)
        gathered.setdefault((int(at), name, kind), {})[rest] = memory[key]
    for (place, name, kind), items in gathered.items():
        if place >= len(links) or name not in vars(links[place]):
            raise UserError(f"strategy: the checkpoint has {name} of another one; start with the same strategies")
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
        self._asked: list[int] = []
        self._known: dict[int, dict[str, Any]] = {}  # what run.json says of a client, by number
        self._saved: Saved | None = None

    def resume(self, rounds: int, strategy: Strategy, arrays: ArrayRecord, *, own_loop: bool) -> Saved | None:
        """The last checkpoint, with the strategy and the sampler as they were then. `close` gives the folder free."""
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
            restore_strategy_state(strategy, saved.memory)
        done, count, pending = (saved.round, saved.lines, saved.line) if saved else (0, 0, None)
        folder.open(rounds, done, count, pending)
        for text in put_aside(damaged, saved.round) if saved else ():
            log_message(text, warn=True)
        self._known = {one["client"]: one for one in folder.about["clients"]}
        if saved:
            self.nodes, self._saved = list(saved.nodes), saved
            self._numbers = {node: number for number, node in enumerate(self.nodes)}
            random.setstate(saved.sampler)
        return saved

    def number(self, node: int) -> int:
        """The node's number; a node that was never seen gets the next one."""
        if node not in self._numbers:
            self._numbers[node] = len(self.nodes)
            self.nodes.append(node)
        return self._numbers[node]

    def ask(self, round: int, asked: list[int], connected: list[int]) -> None:
        for node in sorted(connected):
            self.number(node)
        if self.folder is not None:
            self.folder.flush()
        self.clients, self._asked = len(connected), sorted(self.number(node) for node in asked)

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
        """After the aggregate: from here on the round is not lost.

        `detection` is what the test goes on from, `shown` what the round's line says of it.
        """
        refused = {self.number(node): reason for node, reason in valid.refused.items()}
        result = RoundResult(
            round=round,
            asked=tuple(self._asked),
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
            self._know(self.number(node), train=int(size))
        if self.folder is None:
            return
        memory = strategy_state(strategy)
        self.folder.flush()
        count, line = self.folder.lines + 1, round_line(result)
        sampler = random.getstate()
        self._saved = Saved(round, arrays, memory, state, list(self.nodes), line, sampler, count, detection)
        save(self.folder.checkpoint, self.folder.run, self._saved)
        self._tell_clients(self.folder)
        self.folder.played(line)

    def scored(self, round: int, reports: dict[int, ClientReport]) -> Scores | None:
        """After the evaluation: the round's line is whole."""
        tallies = {self.number(node): report.tally for node, report in reports.items()}
        scores = None
        if tallies:
            # Each report is a sum over samples and their number: any metric that is a mean reads like accuracy.
            counted = frozenset(tallies)
            scores = summarise(tallies, Accuracy(), counted=counted, alphas=dict.fromkeys(tallies, 1.0))
            if not all(report.paired for report in reports.values()):  # a mean over samples makes nothing clear
                scores = replace(scores, clearly_harmed=None, clearly_better=None)
            chosen = sum(report.chosen for report in reports.values())
            if chosen:
                scores = replace(scores, notes=scores.notes | {CHOSEN: chosen / len(reports)})
            names = self._names(round, reports)
            for node, report in reports.items():
                self._know(self.number(node), test=report.tally.samples, name=names[node])
            self._tell(round, scores)
        if self.folder is None or self._saved is None or self._saved.round != round:
            return scores
        line = self._saved.line | {"scores": record(scores, ROUND["scores"])}
        self._tell_clients(self.folder, all(report.percent for report in reports.values()) if reports else None)
        self.folder.scored(line)
        self._saved = replace(self._saved, line=line, sampler=random.getstate())
        save(self.folder.checkpoint, self.folder.run, self._saved)
        return scores

    def finish(self) -> None:
        if self.folder is not None:
            self.folder.finish()

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()

    def _tell_clients(self, folder: RunFolder, percent: bool | None = None) -> None:
        percent = bool(folder.about["metric_in_percent"]) if percent is None else percent
        folder.know([self._known[client] for client in sorted(self._known)], percent)

    def _know(self, client: int, **found: Any) -> None:
        nothing = {"client": client, "train": 0, "test": 0, "attacker": False, "labels": {}}
        self._known[client] = self._known.get(client, nothing | {"node": str(self.nodes[client])}) | found

    def _names(self, round: int, reports: Mapping[int, ClientReport]) -> dict[int, str]:
        """How each node is shown: by the name that it reports, with its id where the name is another node's too.

        A client counts by its node's id, whatever it calls itself.
        """
        owners = {one["name"]: client for client, one in self._known.items() if "name" in one}
        claims, names = Counter(report.client for report in reports.values()), dict[int, str]()
        for node, report in reports.items():
            client, name = self.number(node), report.client
            alone = owners[name] == client if name in owners else claims[name] == 1
            names[node] = name if alone else f"{name} (node {node})"
            if not alone and self._known.get(client, {}).get("name") != names[node]:
                log_message(f"round {round}: node {node} calls itself {name!r}, as another node does", warn=True)
        return names

    def _tell(self, round: int, scores: Scores) -> None:
        if scores.beta is None:
            return
        hurt = sorted((one.beta, one.client) for one in scores.clients if one.beta is not None and one.beta < 0)
        names = [f"{self._known[client]['name']} ({beta:+.3f})" for beta, client in hurt[:10]]
        more = f" and {len(hurt) - 10} more" if len(hurt) > 10 else ""
        who = f"worse off than alone: {', '.join(names)}{more}" if names else "nobody is worse off than alone"
        chosen = ", with models chosen on the same data" if CHOSEN in scores.notes else ""
        log_message(f"round {round}: mean gain beta {scores.beta:+.3f}{chosen}; {who}", warn=scores.beta < 0)


TASK = "a Flower app"
CHOSEN: Final = "chosen on the same data"  # a note: the share of clients whose model was chosen on their test data
# Loops of the user's own have no end that the detector sees. A new one on the same folder ends the one before.
_OWN_LOOPS: Final[WeakValueDictionary[Path, RunFolder]] = WeakValueDictionary()


@final
class RunFolder:
    """One run's folder, taken up where it was left.

    A round's line is written when the round is evaluated. Where no evaluation comes it is written when the next round
    begins, and on `close` at the latest. In a loop of the user's own the last round is written at once, with the
    summary; an evaluation that still comes replaces both.
    """

    def __init__(
        self, folder: Path, name: str, rule: Recovery, strategies: list[str], detection: Detection | None = None
    ) -> None:
        self.folder, self.rule, self.log = folder, rule, RoundLog(folder)
        self.detection: Detection = detection or Delta()
        method = {"adaptation": {"kind": "dual"}, "recovery": to_dict(rule)}
        self._plan = {"method": method, "detection": to_dict(self.detection)}
        self._clock = time.perf_counter()
        self._lock, self._process, self._is_open = ExitStack(), 0, False
        self._pending: dict[str, Any] | None = None  # a round's line that is not written yet
        self._rounds, self._own_loop = 0, False
        self.lines = 0  # how many rounds have been played, those of earlier sessions too
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
            raise UserError(f"{folder} was run with {about.get('strategies')}; start it with the same, or name another")
        self.about: dict[str, Any] = about

    @property
    def run(self) -> str:
        return str(self.about["run"])

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def lock(self, *, own_loop: bool) -> None:
        """One server a folder, until `close`."""
        self.close()
        previous = _OWN_LOOPS.get(self.folder.absolute())
        if previous is not None:
            previous.close()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.enter_context(Store(self.folder, self.about).locked())
        except OSError as error:
            raise UserError(f"folder = {self.folder}: cannot be written ({error.strerror}); name another") from None
        self._process, self._is_open, self._own_loop = os.getpid(), True, own_loop
        if own_loop:
            _OWN_LOOPS[self.folder.absolute()] = self

    def open(self, rounds: int, done: int, count: int | None, pending: dict[str, Any] | None) -> None:
        """Cut back to the checkpoint of round `done`; a round whose line was not written yet gets it now."""
        self.log.cut_back(done, count, pending)
        self.lines = len(self.log.lines())
        try:
            write_about(self.folder, self.about)
            write_plan(self.folder, {"name": self.about["name"], "rounds": rounds, **self._plan})
        except OSError as error:
            raise UserError(f"folder = {self.folder}: cannot be written ({error.strerror}); name another") from None
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
            raise UserError(f"{self.folder}: the run was ended, or begun again by another detector; call begin() anew")
        if self._pending is not None:
            now, line, self._pending = time.perf_counter(), self._pending, None
            self.log.append(line, now - self._clock)
            self._clock = now

    def know(self, clients: list[dict[str, Any]], percent: bool) -> None:
        """Who takes part, as far as it has shown."""
        if clients != self.about["clients"] or percent != self.about["metric_in_percent"]:
            self.about |= {"clients": clients, "metric_in_percent": percent}
            write_about(self.folder, self.about)

    def finish(self) -> None:
        self.flush()
        words = "not known here: ask the strategy, where it adds noise"
        summary = summarise_rounds(self.log.lines(), 10, self.about["metric_in_percent"], self.about["clients"])
        if not isinstance(self.rule, OnDetection):
            summary["detected_at"] = None
        if self.detection.reports:
            noise = reports_privacy(float(getattr(self.detection, "noise", 0.0)))
            words += f"; the clients' gain reports {noise}, and lie outside its guarantee"
        summary["privacy"] = {"words": words, "epsilon": None, "delta": None}
        Store(self.folder, self.about).finish(summary)

    def close(self) -> None:
        """Write what is not written yet and give the folder free. A forked process leaves both to its parent."""
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
            raise UserError(f"{self.folder} holds a run that is not a Flower app's; name another folder")
        return about
